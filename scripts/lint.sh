#!/usr/bin/env bash
# lint.sh [--format | --tidy [FILE...]]: clang-format over all sources (changes nothing), or clang-tidy
# over FILEs (default: all of src and tools; many minutes on two cores).
set -euo pipefail
cd "$(dirname "$0")/.."
mode=${1:---format}
shift || true
if [ "$mode" = --format ]; then
  git ls-files '*.h' '*.cc' '*.cu' '*.cuh' | xargs -r clang-format --dry-run --Werror
else
  [ -f build/clang/compile_commands.json ] || cmake --preset clang >/dev/null
  if [ $# -gt 0 ]; then files=("$@"); else mapfile -t files < <(git ls-files 'src/*.cc' 'tools/*.cc'); fi
  printf '%s\n' "${files[@]}" | xargs -P 2 -n 4 clang-tidy -p build/clang --quiet
fi
