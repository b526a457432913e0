#!/usr/bin/env python3
"""Runs the two-step loop on MINI once for every planted fault, on one side, and prints a Markdown table.

    python3 tests/loop_faults.py build/release/tare > docs/results/loop-faults.md

Forward faults are planted on the rollout's side, those of backward, loss and optimizer on the trainer's.
A fault that flips no bit on these tokens is reported as `not exercised`."""

import json
import pathlib
import subprocess
import sys
import tempfile

BACKWARD = {"C7", "C7,C8", "C6,C7"}


def main():
    tare = str(pathlib.Path(sys.argv[1]).resolve())
    listed = json.loads(subprocess.run([tare, "fault", "list", "--json"], capture_output=True, check=True).stdout)
    faults = listed["faults"] if isinstance(listed, dict) else listed
    print("# Planted faults in the two-step loop on MINI\n")
    print("Made by `python3 tests/loop_faults.py build/release/tare`. A fault of backward, loss or optimizer")
    print("leaves every compare at 0 diff: the gradient audit against float64 is what catches it.\n")
    print("| fault | side | verdict | reason | logprob pairs that differ | what the loop says |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as root:
        mini = root + "/mini"
        subprocess.run([tare, "model", "mini", mini], check=True, stdout=subprocess.DEVNULL)
        for index, fault in enumerate(faults):
            name, gates = fault["name"], fault["gates"]
            side = "trainer" if gates in BACKWARD or name.startswith("rl.") else "rollout"
            out = f"{root}/{index}"
            run = subprocess.run(
                [tare, "rl", "run", mini, "--out", out, "--prompts", "2", "--group", "3", "--max-tokens", "8", "--fault", f"{name}@{side}"],
                capture_output=True)
            try:
                verdict = json.loads(pathlib.Path(out, "verdict.json").read_text())
            except OSError:
                print(f"| `{name}` | {side} | exit {run.returncode} | | | |")
                continue
            differ = sum(c["mismatches"] for c in verdict["comparisons"])
            pairs = sum(c["compared"] for c in verdict["comparisons"])
            says = "caught" if verdict["verdict"] != "pass" else "0 diff" if side == "trainer" else "not exercised"
            print(f"| `{name}` | {side} | {verdict['verdict']} | {verdict['reason']} | {differ} of {pairs} | {says} |", flush=True)


if __name__ == "__main__":
    main()
