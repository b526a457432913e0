#!/usr/bin/env python3
"""Row operators and attention beside PyTorch's CPU kernels, in turn in one run.

usage: scripts/bench_torch.py [--tare build/release/tare] [--threads 2 | --cpu-time] [--rounds 5]

For every case `tare bench ops --json` (attention: `tare bench contractions --json`) and the PyTorch form of the same operator, dtype and shape run
one after the other, `rounds` times; the best of each is compared. ratio = PyTorch time / our time, so
0.9 and above means at least 0.9 of PyTorch's speed. --cpu-time compares the CPU time of one thread,
which other load on the machine disturbs less than the clock on the wall. Needs torch.
"""
import argparse
import json
import subprocess
import time

import torch
import torch.nn.functional as F


clock = time.perf_counter


def best(body, rounds=5, least=0.02):
    body()
    times = []
    for _ in range(rounds):
        count, begin = 0, clock()
        while clock() - begin < least or count == 0:
            body()
            count += 1
        times.append((clock() - begin) / count)
    return min(times) * 1e6


def rmsnorm(rows, width, dtype):
    x = torch.randn(rows, width, dtype=dtype)
    residual = torch.randn(rows, width, dtype=dtype)
    w = torch.randn(width, dtype=dtype)
    forward = lambda: F.rms_norm(x + residual, (width,), w, 1e-5)
    xg = x.clone().requires_grad_()
    wg = w.clone().requires_grad_()
    y = F.rms_norm(xg, (width,), wg, 1e-5)
    dy = torch.randn_like(y)
    backward = lambda: torch.autograd.grad(y, (xg, wg), dy, retain_graph=True)
    return {"forward+residual": forward, "backward": backward}


def logprob(rows, vocab, dtype):
    z = torch.randn(rows, vocab, dtype=dtype)
    target = torch.zeros(rows, 1, dtype=torch.long)
    forward = lambda: torch.log_softmax(z.float(), -1).gather(1, target)
    zg = z.clone().requires_grad_()
    y = torch.log_softmax(zg.float(), -1).gather(1, target)
    dy = torch.ones_like(y)
    backward = lambda: torch.autograd.grad(y, zg, dy, retain_graph=True)
    return {"forward": forward, "backward": backward}


def gate(rows, width, dtype):
    gu = torch.randn(rows, 2 * width, dtype=dtype)
    forward = lambda: F.silu(gu[:, :width]) * gu[:, width:]
    g = gu.clone().requires_grad_()
    y = F.silu(g[:, :width]) * g[:, width:]
    dy = torch.randn_like(y)
    backward = lambda: torch.autograd.grad(y, g, dy, retain_graph=True)
    return {"forward": forward, "backward": backward}


def adamw(count):
    w = torch.nn.Parameter(torch.full((count,), 0.1))
    w.grad = torch.full((count,), 0.02)
    results = {}
    for name, options in (("step", {"fused": True}),):
        optimizer = torch.optim.AdamW([w], lr=1e-5, weight_decay=0.01, **options)
        results[name] = optimizer.step
    return results


def attention(heads, kv_heads, d, n, dtype):
    q = torch.randn(1, heads, n, d, dtype=dtype)
    k, v = (torch.randn(1, kv_heads, n, d, dtype=dtype) for _ in range(2))
    forward = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    qg, kg, vg = (t.clone().requires_grad_() for t in (q, k, v))
    y = F.scaled_dot_product_attention(qg, kg, vg, is_causal=True, enable_gqa=True)
    dy = torch.randn_like(y)
    backward = lambda: torch.autograd.grad(y, (qg, kg, vg), dy, retain_graph=True)
    return {"forward": forward, "backward": backward}


def ours_us(options, op, shape):
    """Our time of each part of a case, in microseconds."""
    common = ["--json", "--rounds", "3", "--threads", str(options.threads), "--filter", shape]
    common += ["--cpu-time"] if options.cpu_time else []
    name = "contractions" if op == "attention" else "ops"
    report = json.loads(subprocess.run([options.tare, "bench", name] + common, check=True, capture_output=True,
                                       text=True).stdout)
    if op != "attention":
        return {b["what"]: b["ours_us"] for b in report["benches"] if b["op"] == op and b["shape"] == shape}
    times = {}
    for row in report["rows"]:  # "attention f32 9/3 d=64 n=256 forward", "1.23 ms"
        value, unit = row["value"].split()[:2]
        if row["name"].startswith(f"attention {shape} ") and unit == "ms":
            times[row["name"].split()[-1]] = float(value) * 1e3
    return times


F32, BF16 = torch.float32, torch.bfloat16
CASES = [("rmsnorm", f"T=2048 H={h} {n}", lambda h=h, d=d: rmsnorm(2048, h, d))
         for h in (576, 1024, 4096) for n, d in (("f32", F32), ("bf16", BF16))]
CASES += [("logprob", f"T={t} V={v} {n}", lambda t=t, v=v, d=d: logprob(t, v, d))
          for t, v, n, d in ((256, 49152, "f32", F32), (256, 49152, "bf16", BF16), (64, 151936, "f32", F32))]
CASES += [("gate", f"T={t} I={i} {n}", lambda t=t, i=i, d=d: gate(t, i, d))
          for t, i, n, d in ((2048, 1536, "f32", F32), (2048, 1536, "bf16", BF16), (1024, 12288, "bf16", BF16))]
CASES += [("attention", f"{n} {h}/{g} d={d} n={t}", lambda h=h, g=g, d=d, t=t, f=f: attention(h, g, d, t, f))
          for h, g, d in ((9, 3, 64), (16, 8, 128), (32, 8, 128)) for n, f in (("f32", F32), ("bf16", BF16)) for t in (256, 1024, 2048)]
CASES += [("adamw", "N=16777216", lambda: adamw(1 << 24))]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tare", default="build/release/tare")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--filter", default="")
    options = parser.parse_args()
    global clock
    if options.cpu_time:
        clock, options.threads = time.process_time, 1
    torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {options.threads} threads, {'CPU' if options.cpu_time else 'wall'} time, best of {options.rounds} rounds in turn")
    print(f"{'op':<9} {'what':<17} {'shape':<24} {'ours us':>10} {'torch us':>10} {'ratio':>6}")
    for op, shape, make in CASES:
        if options.filter not in f"{op}/{shape}":
            continue
        bodies = make()
        ours = {what: float("inf") for what in bodies}
        theirs = dict(ours)
        for _ in range(options.rounds):
            for what, us in ours_us(options, op, shape).items():
                if what in ours:
                    ours[what] = min(ours[what], us)
            for what, body in bodies.items():
                theirs[what] = min(theirs[what], best(body, rounds=3))
        for what in bodies:
            print(f"{op:<9} {what:<17} {shape:<24} {ours[what]:>10.1f} {theirs[what]:>10.1f} "
                  f"{theirs[what] / ours[what]:>6.2f}", flush=True)


if __name__ == "__main__":
    main()
