#!/usr/bin/env bash
# clients.sh [BUILD]: the slow tests against programs that others wrote: the `openai` Python package and
# vLLM's bench client `vllm-rs bench serve` at concurrency 1 to 64. Makes build/clients (a Python
# environment, and the one file vllm-rs out of the wheel of vllm 0.33.0), fetches SmolLM2, and runs the
# tests of tests/clients_test.cc from BUILD (default build/release).
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:-build/release}
[ -x "$build/tests/clients_test" ] || { echo "build first: cmake --build $build --target clients_test tare" >&2; exit 69; }
TARE=$PWD/$build/tare scripts/get_model.sh
home=$PWD/build/clients
if [ ! -x "$home/venv/bin/python" ] || ! "$home/venv/bin/python" -c 'import openai' 2>/dev/null; then
  python3 -m venv "$home/venv"
  "$home/venv/bin/pip" install --quiet --disable-pip-version-check openai
fi
if [ ! -x "$home/vllm-rs" ]; then
  fresh=$(mktemp -d "$home/fetch.XXXXXX")
  trap 'rm -rf "$fresh"' EXIT
  "$home/venv/bin/pip" download --quiet --disable-pip-version-check --no-deps --dest "$fresh" vllm==0.33.0
  python3 - "$fresh" "$home/vllm-rs" <<'PY'
import os, pathlib, shutil, sys, zipfile
(wheel,) = pathlib.Path(sys.argv[1]).glob("*.whl")
with zipfile.ZipFile(wheel) as z, z.open("vllm/vllm-rs") as source, open(sys.argv[2] + ".new", "wb") as target:
    shutil.copyfileobj(source, target)
os.chmod(sys.argv[2] + ".new", 0o755)
os.rename(sys.argv[2] + ".new", sys.argv[2])
PY
fi
cd "$build"
TARE_TEST_PYTHON=$home/venv/bin/python TARE_VLLM_RS=$home/vllm-rs TARE_SMOLLM2=$(cd ../../models/smollm2 && pwd) \
  tests/clients_test --gtest_filter='Clients.*'
