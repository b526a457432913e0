#!/usr/bin/env python3
"""Every planted fault in the two-step loop on MINI, and what the loop and the gradient audit say of it.

    python3 tests/loop_faults.py build/release/tare > docs/results/loop-faults.md
    python3 tests/loop_faults.py build/release/tare rl.raw_logprobs linear.split_fma    # these alone

Forward faults are planted on one side: first the rollout's, then the trainer's; when neither flips a bit on
the plain data, on data that is made to expose them, which passes without a fault (a temperature, a truncation,
prompts longer than a tile, a window and a KV split, the Hopper profile). Faults of backward, loss and optimizer are planted on the trainer's side and
shown to `tare train-audit` too. The exit status is 1 when a fault is neither caught nor explained below."""

import json
import pathlib
import subprocess
import sys
import tempfile

BACKWARD = {"C7", "C7,C8", "C6,C7"}
DATA = {
    "plain": ["--prompts", "2", "--max-tokens", "8"],
    "temperature 0.7": ["--prompts", "2", "--max-tokens", "8", "--temperature", "0.7"],
    "top-p 0.9": ["--prompts", "2", "--max-tokens", "8", "--temperature", "1.5", "--top-p", "0.9"],
    "600 tokens": ["--prompts", "2", "--max-tokens", "8", "--prompt-tokens", "600"],
    "Hopper profile": ["--prompts", "2", "--max-tokens", "6", "--profile", "sm90-mma"],
}
# What MINI in this loop cannot show, and where it is shown instead.
ELSEWHERE = {
    "attention.softcap_missing": "MINI has no soft cap: attention's own tests",
    "attention.tile_by_rows": "moves bits of the f32 profile's other tile only: attention's own tests",
    "linear.bias_after_cast": "MINI has no biases: linear's own tests",
    "combine.order_by_arrival": "MINI's tokens go to two experts, and two summands have no order: combine's own tests",
    "fp8_linear.one_chain": "MINI has no quantised layer: fp8_linear's own tests",
    "fp8_linear.scales_in_turn": "MINI has no quantised layer: fp8_linear's own tests",
    "rmsnorm.cast_before_residual_add": "MINI's streams are bf16 already: rmsnorm's own tests",
    "rmsnorm.fma_split": "MINI's 128 columns are one summand for each of 128 lanes: rmsnorm's own tests",
    "rmsnorm.order_reversed": "MINI's 128 columns are one summand for each of 128 lanes: rmsnorm's own tests",
    "router.order_sorted": "MINI's tokens go to two experts, and two summands have no order: the router's own tests",
    "quantize.per_tensor_scale": "MINI has no quantised layer: quantize's own tests",
    "quantize.round_half_away": "MINI has no quantised layer: quantize's own tests",
    "engine.default_seed_42": "the loop always sends seeds: the server's tests (H16)",
    "engine.dirty_prompt_logprobs": "the loop asks for no prompt logprobs: the engine's tests (H06)",
    "engine.partial_block_hit": "acts in the engine's cache: the invariance matrix",
    "sampling.seed_by_batch_row": "moves which token is sampled, not its logprob: the invariance matrix",
    "sampling.top_k_ties_highest": "moves which token is sampled, not its logprob: sampling's own tests",
}


def main():
    tare = str(pathlib.Path(sys.argv[1]).resolve())
    listed = json.loads(subprocess.run([tare, "fault", "list", "--json"], capture_output=True, check=True).stdout)
    faults = listed["faults"] if isinstance(listed, dict) else listed
    faults = [f for f in faults if not sys.argv[2:] or f["name"] in sys.argv[2:]]
    print("# Planted faults in the two-step loop on MINI\n")
    print("Made by `python3 tests/loop_faults.py build/release/tare`, which says what data there is. A fault of backward,")
    print("loss or optimizer leaves every compare at 0 diff; the audit is `tare train-audit`: gradients of every parameter")
    print("and two updates against float64, and equal bits for every cut into micro-batches.\n")
    print("| fault | side | data | verdict of the loop | reason | logprob pairs that differ | audit | |")
    print("|---|---|---|---|---|---|---|---|")
    missed = 0
    with tempfile.TemporaryDirectory() as root:
        mini = root + "/mini"
        subprocess.run([tare, "model", "mini", mini], check=True, stdout=subprocess.DEVNULL)
        count = 0

        def loop(name, side, data):
            nonlocal count
            count += 1
            out = f"{root}/{count}"
            arguments = ["--group", "3"] + DATA[data]
            planted = ["--fault", f"{name}@{side}"] if name else []
            run = subprocess.run([tare, "rl", "run", mini, "--out", out] + planted + arguments, capture_output=True)
            path = pathlib.Path(out, "verdict.json")
            if not path.exists():
                sys.exit(f"{name}@{side}, {data}: no verdict, status {run.returncode}: {run.stderr.decode()[-500:]}")
            return json.loads(path.read_text())

        for data in DATA:
            verdict = loop(None, None, data)
            if verdict["verdict"] != "pass":
                sys.exit(f"{data}: {verdict['verdict']} {verdict['reason']} without a fault, so it can show none")
        for fault in faults:
            name, gates = fault["name"], fault["gates"]
            backward = gates in BACKWARD
            if backward:
                attempts = [("trainer", "plain")]
            elif name.startswith("rl."):
                attempts = [("trainer", data) for data in ("plain", "temperature 0.7", "top-p 0.9")]
            elif name.startswith("engine."):
                attempts = [("rollout", "plain")]
            else:
                attempts = [(side, data) for data in DATA for side in ("rollout", "trainer")]
            if name in ELSEWHERE:
                attempts = attempts[:1]
            for side, data in attempts:
                verdict = loop(name, side, data)
                if verdict["verdict"] != "pass":
                    break
            audit = ""
            if backward:
                run = subprocess.run([tare, "train-audit", "--json", "--fault", f"{name}@trainer"], capture_output=True)
                text = run.stdout.decode()
                found = [r["finding"] for r in json.loads(text)["reports"] if r["finding"]] if run.returncode in (0, 1) else []
                audit = found[0] if found else "pass"
            caught = verdict["verdict"] != "pass" or (audit not in ("", "pass"))
            says = "caught" if caught else ELSEWHERE.get(name, "NOT CAUGHT")
            missed += says == "NOT CAUGHT"
            differ = sum(c["mismatches"] for c in verdict["comparisons"])
            pairs = sum(c["compared"] for c in verdict["comparisons"])
            print(f"| `{name}` | {side} | {data} | {verdict['verdict']} | {verdict['reason']} | {differ} of {pairs} | "
                  f"{audit.replace('|', '/')} | {says} |", flush=True)
    print(f"\n{len(faults)} faults; not caught and not explained: {missed}.")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
