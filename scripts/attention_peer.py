#!/usr/bin/env python3
"""Attention on CUDA against PyTorch's cuDNN and flash backends, taking turns on one device.

  scripts/attention_peer.py BENCH [OUT.json] [--points prefill,decode,backward]

BENCH is the program attention_cuda_bench. bf16, head 128, 32 query and 8 KV heads, causal. Prefill and
backward: one sequence. Decode: one token a sequence, cold L2 (256 MiB are read before each call); ours
reads keys from shuffled pages of 16, the peer from one tensor. Every arm runs from a CUDA graph but the
peer's backward, which is launched call after call; each point takes three turns an arm and the median
of the medians counts.
"""

import argparse
import json
import statistics
import subprocess
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

HEADS, KV_HEADS, D = 32, 8, 128
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def graph_of(call, calls, flush):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            if flush is not None:
                flush()
            call()
    return graph


def run_us(play):
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    play()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1000


class Peer:
    """One backend at one point: us() gives the time of a call, median of seven replays."""

    def __init__(self, kind, batch, n, backend):
        rows = 1 if kind == "decode" else n
        make = lambda heads, length: torch.randn(
            batch, heads, length, D, device="cuda", dtype=torch.bfloat16)
        q, k, v = make(HEADS, rows), make(KV_HEADS, n), make(KV_HEADS, n)
        self.grouped = True
        attend = lambda: torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=kind != "decode", enable_gqa=self.grouped)
        call = attend
        self.backend = BACKENDS[backend]
        with sdpa_kernel(self.backend):
            try:
                attend()
            except RuntimeError:  # no grouped heads: the same keys, repeated beforehand
                self.grouped = False
                k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
            if kind == "backward":
                for x in (q, k, v):
                    x.requires_grad_(True)
                out = attend()
                dout = torch.randn_like(out)
                call = lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
            flops = 4 * batch * rows * n * HEADS * D * (0.5 if kind != "decode" else 1)
            work = flops / 5e8 + batch * n * KV_HEADS * D * 4 / 3e6
            self.calls = int(min(40, max(2, 4000 / (work + 5))))
            flush = None
            if kind == "decode":
                data = torch.ones(64 << 20, device="cuda", dtype=torch.float32)
                flush = lambda: data.sum()
                self.empty = graph_of(lambda: None, self.calls, flush).replay
            if kind == "backward":  # autograd cannot be captured here: launched from Python
                self.play = lambda: [call() for _ in range(self.calls)]
            else:
                self.play = graph_of(call, self.calls, flush).replay
        self.keep = (q, k, v, call)
        self.kind = kind

    def us(self):
        times = []
        for turn in range(8):
            t = run_us(self.play)
            if self.kind == "decode":
                t -= run_us(self.empty)
            if turn > 0:
                times.append(t / self.calls)
        return statistics.median(times)


def points(kinds):
    if "prefill" in kinds:
        for n in (1024, 2048, 4096, 8192, 16384):
            yield "prefill", 1, n
    if "decode" in kinds:
        for batch in (1, 8, 64):
            for n in (1024, 4096, 32768):
                yield "decode", batch, n
    if "backward" in kinds:
        for n in (1024, 4096, 8192, 16384):
            yield "backward", 1, n


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("bench")
    parser.add_argument("out", nargs="?")
    parser.add_argument("--points", default="prefill,decode,backward")
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    ours = subprocess.Popen([args.bench, "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                            text=True)
    rows = []
    print(f"PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}")
    print("| point | ours, us | cuDNN, us | ratio | flash, us | ours |")
    print("|---|---|---|---|---|---|")
    for kind, batch, n in points(args.points.split(",")):
        peers = {}
        for name in BACKENDS:
            try:
                peers[name] = Peer(kind, batch, n, name)
            except RuntimeError as error:
                print(f"{name} {kind} {batch} {n}: {str(error).splitlines()[0]}", file=sys.stderr)
        times = {name: [] for name in ["ours", *peers]}
        answer = {}
        for _ in range(args.turns):
            line = f"{kind} {batch} {n}" if kind == "decode" else f"{kind} {n}"
            ours.stdin.write(line + "\n")
            ours.stdin.flush()
            answer = json.loads(ours.stdout.readline() or sys.exit("the bench ended"))
            times["ours"].append(answer["us"][1])
            for name, peer in peers.items():
                times[name].append(peer.us())
        median = {name: statistics.median(t) for name, t in times.items()}
        show = lambda name: f"{median[name]:.1f}" if name in median else "-"
        ratio = median["ours"] / median["cudnn"] if "cudnn" in median else float("nan")
        rate = (f"{answer['bytes'] / median['ours'] / 1e6:.2f} TB/s" if kind == "decode" else
                f"{answer['flops'] / median['ours'] / 1e6:.0f} TFLOP/s")
        title = f"decode B={batch} N={n}" if kind == "decode" else f"{kind} N={n}"
        print(f"| {title} | {show('ours')} | {show('cudnn')} | {ratio:.2f} | {show('flash')} | {rate} |",
              flush=True)
        rows.append({"kind": kind, "batch": batch, "n": n, "us": times, "flops": answer["flops"],
                     "bytes": answer["bytes"], "ratio_cudnn": ratio})
        del peers
        torch.cuda.empty_cache()
    ours.stdin.close()
    ours.wait()
    if args.out:
        with open(args.out, "w", encoding="utf-8") as file:
            json.dump({"schema": "tare.attention_peer.1", "torch": torch.__version__,
                       "cudnn": torch.backends.cudnn.version(),
                       "device": torch.cuda.get_device_name(), "rows": rows}, file, indent=0)


if __name__ == "__main__":
    main()
