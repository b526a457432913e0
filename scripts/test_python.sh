#!/usr/bin/env bash
# test_python.sh: prints the path of a Python that has in-toto-attestation, for TARE_TEST_PYTHON; the
# test that a standard tool reads our sidecars is skipped without it. Makes build/test-venv at the
# first call. Prints nothing and ends with 1 when no package can be fetched.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$PWD/build/test-venv
has() { "$1" -c 'import in_toto_attestation' 2>/dev/null; }
if has python3; then
  command -v python3
  exit 0
fi
if ! has "$venv/bin/python"; then
  mkdir -p build
  python3 -m venv "$venv" >&2
  timeout 120 "$venv/bin/pip" install --quiet --disable-pip-version-check in-toto-attestation >&2
  has "$venv/bin/python"
fi
echo "$venv/bin/python"
