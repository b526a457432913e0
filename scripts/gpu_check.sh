#!/usr/bin/env bash
# Runs every CUDA test and bench of a build on this machine's GPU, in parts of a few minutes, and
# writes what came out to DIR/<device>-<date>.md with the benches' JSON beside it.
#
#   scripts/gpu_check.sh [--build build/cuda] [--out docs/results] [--only PART,...]
#
# A part is a test binary (its *Cuda* tests, quick and slow apart), a memory checker over a bench's
# `bits`, a bench's `table`, or a bench beside a peer that lives in Python. The report is rewritten
# after every part, so that a run that is cut keeps what it has; a part that is already in DIR/.parts
# for the same commit is not run again.
# Card settings are read, never changed. Exit 0 when every part passed, 1 when one failed, 69 without
# a device.
set -uo pipefail
build=build/cuda
out=docs/results
only=""
while [ $# -gt 0 ]; do
  case "$1" in
    --build) build=${2:?--build needs a folder}; shift 2 ;;
    --out) out=${2:?--out needs a folder}; shift 2 ;;
    --only) only=${2:?--only needs part names}; shift 2 ;;
    *) echo "unknown argument $1; see the head of this script" >&2; exit 64 ;;
  esac
done
nvidia-smi -L >/dev/null 2>&1 || { echo "no NVIDIA device here" >&2; exit 69; }
query() { nvidia-smi --query-gpu="$1" --format=csv,noheader | head -1; }
device=$(query name | tr 'A-Z ' 'a-z-')
commit=${TARE_COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || echo unknown)}
date=$(date -u +%F)
mkdir -p "$out/.parts"
report=$out/$device-$date.md
failed=0

# write_report: the head, then every part's text in the order of running.
write_report() {
  {
    echo "# $(query name), $date"
    echo
    echo "Commit $commit. Driver $(query driver_version); clocks at the start: $clocks_at_start; now:" \
      "SM $(query clocks.sm), memory $(query clocks.mem), limit $(query clocks.max.sm), $(query power.draw) of" \
      "$(query power.limit), $(query temperature.gpu) C. Made by \`scripts/gpu_check.sh\`."
    for part in "${parts[@]}"; do
      [ -f "$out/.parts/$part.$commit.txt" ] || continue
      echo
      echo "## $part: $(cat "$out/.parts/$part.$commit.status")"
      echo
      cat "$out/.parts/$part.$commit.txt"
    done
  } >"$report.new" && mv "$report.new" "$report"
}

# part NAME SECONDS FILTER COMMAND...: one timed part; FILTER is the pattern of lines for the report.
part() {
  local name=$1 limit=$2 filter=$3
  shift 3
  parts+=("$name")
  if [ -n "$only" ] && [[ ",$only," != *",$name,"* ]]; then return; fi
  local base=$out/.parts/$name.$commit
  if [ -f "$base.status" ] && grep -q '^pass' "$base.status"; then
    echo "[$name] already passed for $commit"
    return
  fi
  echo "[$name] ..."
  local begin=$SECONDS
  timeout "$limit" "$@" >"$base.log" 2>&1
  local rc=$?
  local verdict=pass
  [ $rc -eq 0 ] || { verdict="fail (exit $rc)"; failed=1; }
  [ $rc -eq 124 ] && verdict="fail (cut at $limit s)"
  grep -E "$filter" "$base.log" >"$base.txt"
  # What explains a failure: the end of the log, as it is.
  [ $rc -eq 0 ] || { echo '```'; tail -20 "$base.log"; echo '```'; } >>"$base.txt"
  echo "$verdict, $((SECONDS - begin)) s" >"$base.status"
  echo "[$name] $(cat "$base.status")"
  write_report
}

clocks_at_start="SM $(query clocks.sm), memory $(query clocks.mem)"
parts=()
for test in "$build"/tests/*_test; do
  [ -x "$test" ] || continue
  name=$(basename "$test" _test)
  "$test" --gtest_list_tests --gtest_filter='*Cuda*' 2>/dev/null | grep -q '^  ' || continue
  part "test-$name" 300 '^\[  (     OK|FAILED|PASSED|SKIPPED)|Failure|golden' "$test" --gtest_filter='*Cuda*-*Slow*'
  "$test" --gtest_list_tests --gtest_filter='*Cuda*Slow*' 2>/dev/null | grep -q '^  ' || continue
  part "test-$name-slow" 400 '^\[  (     OK|FAILED|PASSED|SKIPPED)|Failure' "$test" --gtest_filter='*Cuda*Slow*'
done
for bench in "$build"/bench/*_cuda_bench; do
  [ -x "$bench" ] || continue
  name=$(basename "$bench" _cuda_bench)
  if command -v compute-sanitizer >/dev/null; then
    for tool in memcheck racecheck initcheck; do
      part "$tool-$name" 240 'SUMMARY|comparisons|Error|Race|hazard' \
        compute-sanitizer --tool $tool --error-exitcode 9 "$bench" bits-small
    done
  fi
  part "bench-$name" 400 '^\||geometric|copy|cuBLAS' "$bench" table "$out/$device-$date.$name.json"
done
# Peers that live in Python, where it has them.
if [ -x "$build/bench/attention_cuda_bench" ] && python3 -c 'import torch' 2>/dev/null; then
  part "peer-attention" 400 '^\||PyTorch' python3 "$(dirname "$0")/attention_peer.py" \
    "$build/bench/attention_cuda_bench" "$out/$device-$date.attention-peer.json"
fi
write_report
echo "report: $report"
exit $failed
