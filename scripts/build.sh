#!/usr/bin/env bash
# build.sh [PRESET] [TARGET...]: sets up, configures and builds. The program is build/PRESET/tare.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
preset=${1:-release}
shift || true
[ -f "build/$preset/build.ninja" ] || cmake --preset "$preset"
args=()
for t in "$@"; do args+=(--target "$t"); done
cmake --build "build/$preset" "${args[@]}"
