#!/usr/bin/env bash
# lint.sh [--format | --tidy [FILE...]]: clang-format over all sources (changes nothing), or clang-tidy
# over FILEs (default: all of src, tests and tools; the better part of an hour on two cores). Tests and
# fuzz targets run under the sanitizers instead of clang-tidy's analyser and its performance checks.
# CLANG_TIDY names another clang-tidy than the one found; it is held to the checks that version 14 has,
# which are those of .clang-tidy, and what a newer compiler calls deprecated in Debian's headers is let be.
set -euo pipefail
cd "$(dirname "$0")/.."
mode=${1:---format}
shift || true
if [ "$mode" = --format ]; then
  git ls-files '*.h' '*.cc' '*.cu' '*.cuh' | xargs -r clang-format --dry-run --Werror
  exit
fi
[ -f build/clang/compile_commands.json ] || cmake --preset clang >/dev/null
# What the build generates and a source includes.
generated=tools/source_scan.inc
if [ ! -f build/clang/$generated ]; then
  [ -f build/release/$generated ] || { echo "no build/release/$generated: run scripts/build.sh first" >&2; exit 66; }
  cp build/release/$generated build/clang/$generated
fi
checks=-*,$(clang-tidy --list-checks 2>/dev/null | sed 1d | tr -d ' ' |
  grep -e . | grep -vx performance-faster-string-find | paste -sd,)
if [ $# -gt 0 ]; then files=("$@"); else mapfile -t files < <(git ls-files 'src/*.cc' 'tests/*.cc' 'tools/*.cc'); fi
status=0
read_all() {  # EXTRA FILE...: clang-tidy over FILEs
  local extra=$1
  shift
  [ $# -gt 0 ] || return 0
  printf '%s\n' "$@" | xargs -P 2 -n 4 "${CLANG_TIDY:-clang-tidy}" -p build/clang --quiet \
    --extra-arg=-Wno-deprecated-declarations --checks="$checks$extra" || status=1
}
sources=() tests=()
for f in "${files[@]}"; do
  case $f in *_test.cc | *_fuzz.cc | tests/*) tests+=("$f") ;; *) sources+=("$f") ;; esac
done
read_all "" "${sources[@]}"
read_all ",-clang-analyzer-*,-performance-*" "${tests[@]}"
exit $status
