#!/usr/bin/env bash
# test.sh: sets up, builds and runs the tests of a machine without a GPU, and ends with one line
# "N passed, N failed, N skipped" over all suites. A suite that cannot run counts as one failure.
#
#   style     clang-format over all sources
#   build     release preset; the CUDA part too where nvcc is found (compile and link)
#   cpu       every test with the label cpu or multi_rank, the guides' examples among them
#   demo      the main job on MINI, offline; the tutorial's commands as they stand
#   sanitize  address and undefined sanitizers over the rooms that read hostile bytes (base, tensor,
#             compare, the ledger), each of their fuzzers for a few seconds
#
# test.sh --sanitize runs the last alone, the gates' fuzzers added. test.sh --slow runs the label
# `slow`, whose dated results are in docs/results/.
set -uo pipefail
cd "$(dirname "$0")/.."
passed=0 failed=0 skipped=0
note() { printf '\n== %s (%ds)\n' "$1" "$SECONDS"; }
finish() {
  echo
  echo "$passed passed, $failed failed, $skipped skipped"
  [ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
  exit $?
}

# run_ctest DIR ARGS...: adds the counts of a ctest run. No test at all is a failure.
run_ctest() {
  local dir=$1 xml
  shift
  xml=$PWD/$dir/junit.xml
  rm -f "$xml"
  ctest --test-dir "$dir" -j2 --output-on-failure --output-junit "$xml" "$@" |
    grep -vE '^ *(Start +|[0-9]+/[0-9]+ .*Passed)' || true
  local t f s
  read -r t f s < <(sed -n '/<testsuite/,/>/p' "$xml" 2>/dev/null | tr '\n\t' '  ' |
    sed -E 's/.* tests="([0-9]+)".* failures="([0-9]+)".* skipped="([0-9]+)".*/\1 \2 \3/')
  if ! [[ "${t:-}" =~ ^[0-9]+$ ]] || [ "$t" -eq 0 ]; then
    echo "no test ran in $dir"
    failed=$((failed + 1))
    return
  fi
  passed=$((passed + t - f - s)) failed=$((failed + f)) skipped=$((skipped + s))
}

# run_gtest BINARY ARGS...: the same for one GoogleTest binary.
run_gtest() {
  local log p f s
  log=$(mktemp)
  "$@" --gtest_brief=1 >"$log" 2>&1
  local status=$?
  grep -vE '^Running main' "$log" | tail -n 60
  p=$(sed -nE 's/^\[  PASSED  \] ([0-9]+) tests?.*/\1/p' "$log" | tail -n 1)
  f=$(sed -nE 's/^\[  FAILED  \] ([0-9]+) tests?,.*/\1/p' "$log" | tail -n 1)
  s=$(sed -nE 's/^\[  SKIPPED \] ([0-9]+) tests?,.*/\1/p' "$log" | tail -n 1)
  rm -f "$log"
  passed=$((passed + ${p:-0})) failed=$((failed + ${f:-0})) skipped=$((skipped + ${s:-0}))
  # A crash, a leak report at the end, or no test at all is one failure.
  if { [ $status -ne 0 ] && [ "${f:-0}" -eq 0 ]; } || [ "${p:-0}" -eq 0 ]; then failed=$((failed + 1)); fi
}

# run_check NAME COMMAND...: one check, passed or failed.
run_check() {
  local name=$1
  shift
  if "$@"; then passed=$((passed + 1)); else
    echo "FAILED: $name"
    failed=$((failed + 1))
  fi
}

if [ "${1:-}" = --slow ]; then
  scripts/build.sh release || { failed=1; finish; }
  run_ctest build/release -L slow
  finish
fi

# sanitize FOLDER...: the tests below, and the fuzzers of these folders.
sanitize() {
  note "sanitizers: build"
  # The rooms whose input comes from outside. Fuzzers of the rooms above them need the operators under
  # a sanitizer, which takes longer than all the rest: `cmake --build build/asan --target fuzzers`.
  local fuzzers
  mapfile -t fuzzers < <(find "$@" -maxdepth 1 -name '*_fuzz.cc' -exec basename {} .cc ';' | sort)
  if scripts/build.sh asan "${fuzzers[@]}" base_test tensor_test compare_test workflow_test; then
    note "sanitizers: tests"
    export ASAN_OPTIONS=detect_leaks=1 UBSAN_OPTIONS=print_stacktrace=1
    for t in base tensor compare workflow; do
      run_gtest "build/asan/tests/${t}_test" '--gtest_filter=-*Slow*:*MultiRank*:*Cuda*'
    done
    note "fuzzers, 3 s each"
    for name in "${fuzzers[@]}"; do
      fresh=$(mktemp -d)
      run_check "$name" "build/asan/fuzz/$name" -max_total_time=3 -rss_limit_mb=2000 -verbosity=0 "$fresh" "tests/corpus/$name"
      rm -rf "$fresh"
    done
  else
    failed=$((failed + 1))
  fi
}

if [ "${1:-}" = --sanitize ]; then
  sanitize src/base src/tensor src/compare src/workflow src/workflow/gates
  finish
fi

note "build"
scripts/build.sh release || { failed=1; finish; }

note "style"
run_check clang-format scripts/lint.sh --format

note "cpu tests"
# With this the test that reads our sidecars by the in-toto package runs; it is skipped without network.
if python=$(scripts/test_python.sh); then export TARE_TEST_PYTHON=$python; fi
run_ctest build/release -L 'cpu|multi_rank'

note "main job on MINI"
fresh=$(mktemp -d)
run_check "tare demo --model mini" build/release/tare demo --model mini --out "$fresh/demo"
rm -rf "$fresh"
run_check "docs/tutorial.md" tools/run_guide.py --tare build/release/tare docs/tutorial.md

sanitize src/base src/tensor src/compare src/workflow

note "done"
finish
