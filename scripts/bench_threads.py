#!/usr/bin/env python3
"""What a second thread gains: linear and attention beside a plain FMA loop, in one run.

    python3 scripts/bench_threads.py [--tare build/release/tare] [--rounds 3] [--filter TEXT]

Runs `tare bench contractions` with one thread and with two in turn; the best of each counts. A virtual core
may share its arithmetic with the other one, so an operator's gain is judged by the FMA loop's gain in the same
run: `of FMA` is the ratio of the two (goal 0.9). The bits are those of any thread count (the generic suite's
thread test). Rows bound by memory (M of 8 and less, decode) gain what the memory gives and are left out.
"""
import argparse
import json
import os
import subprocess


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tare", default="build/release/tare")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--filter", default="")
    options = parser.parse_args()
    best = {}
    for _ in range(options.rounds):
        for threads in (1, 2):
            run = subprocess.run([options.tare, "bench", "contractions", "--threads", str(threads), "--rounds", "2",
                                  "--filter", options.filter, "--json"], capture_output=True, check=True)
            out = json.loads(run.stdout)
            speeds = {"FMA loop": float(out["fma_g_s"])}
            for row in out["rows"]:
                number, unit = row["value"].split(" ", 1)
                name = row["name"]
                if unit.startswith("GB/s") or name.endswith("decode"):
                    continue
                speeds[name] = float(number) if "products" in unit else 1 / float(number)
            for name, speed in speeds.items():
                key = (name, threads)
                best[key] = max(best.get(key, 0), speed)
    gain = {name: best[name, 2] / best[name, 1] for name, threads in best if threads == 1}
    fma = gain.pop("FMA loop")
    print(f"FMA loop: {fma:.2f} (load average {os.getloadavg()[0]:.1f})\n")
    print("| | gain of the second thread | of FMA |\n|---|---|---|")
    for name, g in gain.items():
        print(f"| {name} | {g:.2f} | {g / fma:.2f} |")
    print(f"\n{sum(g / fma >= 0.9 for g in gain.values())} of {len(gain)} at 0.9 or more")


if __name__ == "__main__":
    main()
