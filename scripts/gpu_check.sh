#!/usr/bin/env bash
# Runs every CUDA test, memory checker, audit and bench of a build on this machine's GPU, in parts of a
# few minutes each, and writes what came out to DIR/<device>-<date>.md and .json, the benches' own JSON
# beside them.
#
#   scripts/gpu_check.sh [--build build/cuda] [--out docs/results] [--model models/smollm2]
#                        [--only PATTERN,...] [--list]
#
# A part is the quick *Cuda* tests of one binary, one slow test, a memory checker over a bench's `bits-small`,
# `tare audit` of one model and profile, a bench's `table`, or a bench beside a peer that lives in Python.
# --list prints their names; --only takes names or shell patterns of them ('test-*,audit-*').
# Progress is one line a part. Both reports are rewritten after every part, so that a run that is cut keeps what it
# has: run it again, and parts that passed for the same commit (DIR/.parts) are not run again.
# Card settings are read, never changed. Exit 0 when every part asked for passed, 1 when one failed, 69
# without a device.
set -uo pipefail
build=build/cuda
out=docs/results
model=models/smollm2
only=""
list=0
while [ $# -gt 0 ]; do
  case "$1" in
    --build) build=${2:?--build needs a folder}; shift 2 ;;
    --out) out=${2:?--out needs a folder}; shift 2 ;;
    --model) model=${2:?--model needs a checkpoint}; shift 2 ;;
    --only) only=${2:?--only needs part names}; shift 2 ;;
    --list) list=1; shift ;;
    *) echo "unknown argument $1; see the head of this script" >&2; exit 64 ;;
  esac
done
[ -d "$build" ] || { echo "no build at $build; cmake --preset cuda && cmake --build build/cuda" >&2; exit 66; }
build=$(realpath "$build")
scripts=$(realpath "$(dirname "$0")")
[ ! -e "$model" ] || model=$(realpath "$model")
if [ $list = 0 ]; then
  nvidia-smi -L >/dev/null 2>&1 || { echo "no NVIDIA device here" >&2; exit 69; }
fi
query() { nvidia-smi --query-gpu="$1" --format=csv,noheader 2>/dev/null | head -1; }
device=$(query name | tr 'A-Z ' 'a-z-')
commit=${TARE_COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || echo unknown)}
date=$(date -u +%F)
mkdir -p "$out/.parts"
out=$(realpath "$out")
report=$out/$device-$date.md
json=$out/$device-$date.json
parts=()
failed=0
clocks_at_start="SM $(query clocks.sm), memory $(query clocks.mem)"

quoted() { printf '"%s"' "$(printf '%s' "$1" | tr '\n\t' '  ' | sed 's/[\\"]/\\&/g')"; }

# write_reports: the head, then every part that has run, in the order of running.
write_reports() {
  local now
  now="SM $(query clocks.sm), memory $(query clocks.mem), limit $(query clocks.max.sm), $(query power.draw) of"
  now="$now $(query power.limit), $(query temperature.gpu) C"
  {
    echo "# $(query name), $date"
    echo
    echo "Commit $commit. Driver $(query driver_version); clocks at the start: $clocks_at_start; now: $now." \
      "Made by \`scripts/gpu_check.sh\`."
    for part in "${parts[@]}"; do
      [ -f "$out/.parts/$part.$commit.status" ] || continue
      echo
      echo "## $part: $(cat "$out/.parts/$part.$commit.status")"
      echo
      cat "$out/.parts/$part.$commit.txt"
    done
  } >"$report.new" && mv "$report.new" "$report"
  {
    echo "{\"schema\": \"tare.gpu_check.1\", \"device\": $(quoted "$(query name)"),"
    echo " \"driver\": $(quoted "$(query driver_version)"), \"commit\": $(quoted "$commit"), \"date\": \"$date\","
    echo " \"clocks_at_start\": $(quoted "$clocks_at_start"), \"clocks_now\": $(quoted "$now"),"
    echo " \"parts\": ["
    local first=1
    for part in "${parts[@]}"; do
      [ -f "$out/.parts/$part.$commit.status" ] || continue
      [ $first = 1 ] || echo ","
      first=0
      local status
      status=$(cat "$out/.parts/$part.$commit.status")
      printf '  {"name": %s, "passed": %s, "outcome": %s}' "$(quoted "$part")" \
        "$(case $status in pass*) echo true ;; *) echo false ;; esac)" "$(quoted "$status")"
    done
    echo
    echo " ]}"
  } >"$json.new" && mv "$json.new" "$json"
}

wanted() {
  [ -n "$only" ] || return 0
  local pattern
  for pattern in ${only//,/ }; do
    # shellcheck disable=SC2053  # a pattern is meant
    [[ $1 == $pattern ]] && return 0
  done
  return 1
}

# part NAME SECONDS FILTER COMMAND...: one timed part, run from the build folder as ctest does; FILTER is the
# pattern of lines for the report.
part() {
  local name=$1 limit=$2 filter=$3
  shift 3
  parts+=("$name")
  if [ $list = 1 ]; then
    echo "$name"
    return
  fi
  local base=$out/.parts/$name.$commit
  if [ -f "$base.status" ] && grep -q '^pass' "$base.status"; then
    echo "[$name] already passed for $commit"
    return
  fi
  wanted "$name" || return
  echo "[$name] ..."
  local begin=$SECONDS
  (cd "$build" && timeout "$limit" "$@") >"$base.log" 2>&1
  local rc=$? verdict=pass
  [ $rc -eq 0 ] || verdict="fail (exit $rc)"
  [ $rc -ne 124 ] || verdict="fail (cut at $limit s)"
  # A test binary that skipped everything has shown nothing.
  if [ $rc -eq 0 ] && grep -q '^\[  SKIPPED' "$base.log" && ! grep -q '^\[       OK' "$base.log"; then
    verdict="fail (every test was skipped)"
  fi
  [[ $verdict == pass ]] || failed=1
  grep -E "$filter" "$base.log" >"$base.txt"
  # What explains a failure: the end of the log, as it is.
  [[ $verdict == pass ]] || { echo '```'; tail -20 "$base.log"; echo '```'; } >>"$base.txt"
  echo "$verdict, $((SECONDS - begin)) s" >"$base.status"
  echo "[$name] $(cat "$base.status")"
  write_reports
}

# Names of a test binary's tests under a filter, suite and test joined, parameters' comments left out.
tests_of() {
  (cd "$build" && "$1" --gtest_list_tests --gtest_filter="$2" 2>/dev/null) |
    sed 's/ *#.*//' | awk '/^[^ ]/ {suite = $1; next} /^  / {print suite $1}'
}

results='^\[  (     OK|FAILED|PASSED|SKIPPED)|Failure|golden|calls equal|digest|^launch '
for test in "$build"/tests/*_test; do
  [ -x "$test" ] || continue
  name=$(basename "$test" _test)
  [ -n "$(tests_of "$test" '*Cuda*-*Slow*')" ] || continue
  part "test-$name" 300 "$results" "$test" --gtest_filter='*Cuda*-*Slow*'
  for slow in $(tests_of "$test" '*Cuda*Slow*'); do
    part "test-$name-$(tr '/' '.' <<<"$slow")" 400 "$results" "$test" --gtest_filter="$slow"
  done
done
for bench in "$build"/bench/*_cuda_bench; do
  [ -x "$bench" ] || continue
  name=$(basename "$bench" _cuda_bench)
  if command -v compute-sanitizer >/dev/null || [ $list = 1 ]; then
    for tool in memcheck racecheck initcheck; do
      part "$tool-$name" 300 'SUMMARY|comparisons|ran$|Error|Race|hazard' \
        compute-sanitizer --tool $tool --error-exitcode 9 "$bench" bits-small
    done
  fi
done
if [ -x "$build/tare" ]; then
  part audit-qwen3-8b-layer 300 'differ|tokens' "$build/tare" audit qwen3-8b-layer
  if [ -e "$model" ] || [ $list = 1 ]; then
    for profile in sm90-mma ieee-f32; do
      part "audit-model-$profile" 300 'differ|tokens' "$build/tare" audit "$model" --profile $profile
    done
  fi
fi
for bench in "$build"/bench/*_cuda_bench; do
  [ -x "$bench" ] || continue
  name=$(basename "$bench" _cuda_bench)
  part "bench-$name" 400 '^\||geometric|copy|cuBLAS' "$bench" table "$out/$device-$date.$name.json"
done
# Peers that live in Python, where it has them.
if [ -x "$build/bench/attention_cuda_bench" ] && python3 -c 'import torch' 2>/dev/null; then
  part "peer-attention" 400 '^\||PyTorch' python3 "$scripts/attention_peer.py" \
    "$build/bench/attention_cuda_bench" "$out/$device-$date.attention-peer.json"
fi
[ $list = 1 ] && exit 0
write_reports
echo "report: $report"
exit $failed
