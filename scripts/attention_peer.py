#!/usr/bin/env python3
"""Attention on CUDA against PyTorch's cuDNN and flash backends and, where the Python package
nvidia-cudnn-frontend is there, cuDNN's deterministic backward, taking turns on one device.

  scripts/attention_peer.py BENCH [OUT.json] [--points prefill,decode,backward]

BENCH is the program attention_cuda_bench. bf16, head 128, 32 query and 8 KV heads, causal. Prefill and
backward: one sequence. Decode: one token a sequence, cold L2 (256 MiB are read before each call); ours
reads keys from shuffled pages of 16, the peer from one tensor. Every arm runs from a CUDA graph but the
backward of PyTorch's backends, which is launched call after call; each point takes three turns an arm
and the median of the medians counts.
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


class DeterministicBackward:
    """cuDNN's backward with its option for equal bits, which PyTorch does not reach."""

    def __init__(self, n):
        import cudnn
        self.calls = int(min(40, max(2, 4000 / (10 * n * n * HEADS * D * 0.5 / 3e8 + 5))))
        make = lambda heads: torch.randn(1, heads, n, D, device="cuda", dtype=torch.bfloat16)
        data = {"q": make(HEADS), "k": make(KV_HEADS), "v": make(KV_HEADS), "o": make(HEADS),
                "dO": make(HEADS), "stats": torch.empty(1, HEADS, n, 1, device="cuda")}
        self.grads = [torch.empty_like(data[name]) for name in ("q", "k", "v")]
        self.handle = cudnn.create_handle()
        options = {"attn_scale": D ** -0.5, "use_causal_mask": True}

        def build(inputs, outputs, add):
            graph = cudnn.pygraph(io_data_type=cudnn.data_type.BFLOAT16,
                                  intermediate_data_type=cudnn.data_type.FLOAT,
                                  compute_data_type=cudnn.data_type.FLOAT, handle=self.handle)
            tensors = {name: graph.tensor_like(data[name]) for name in inputs}
            pack = {tensors[name]: data[name] for name in inputs}
            for tensor, to in zip(add(graph, tensors), outputs):
                tensor.set_output(True).set_dim(to.size()).set_stride(to.stride())
                if to.dtype == torch.float32:
                    tensor.set_data_type(cudnn.data_type.FLOAT)
                pack[tensor] = to
            graph.validate()
            graph.build_operation_graph()
            graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
            graph.check_support()
            graph.build_plans()
            space = torch.empty(max(1, graph.get_workspace_size()), device="cuda",
                                dtype=torch.uint8)

            def call():
                cudnn.set_stream(handle=self.handle,
                                 stream=torch.cuda.current_stream().cuda_stream)
                graph.execute(pack, space, handle=self.handle)
            return call, space

        forward, _ = build(("q", "k", "v"), (data["o"], data["stats"]), lambda graph, x: graph.sdpa(
            q=x["q"], k=x["k"], v=x["v"], is_inference=False, **options))
        forward()
        torch.cuda.synchronize()
        self.call, space = build(
            ("q", "k", "v", "o", "dO", "stats"), self.grads,
            lambda graph, x: graph.sdpa_backward(**x, **options, use_deterministic_algorithm=True))
        self.workspace = space.numel()
        self.check(data)
        self.play = graph_of(self.call, self.calls, None).replay

    def check(self, data):
        """Equal bits twice, and the gradients of PyTorch's default backward within bf16's reach."""
        self.call()
        first = [grad.clone() for grad in self.grads]
        self.call()
        if not all(torch.equal(a, b) for a, b in zip(first, self.grads)):
            sys.exit("cuDNN's deterministic backward gave other bits the second time")
        inputs = [data[name].detach().requires_grad_(True) for name in ("q", "k", "v")]
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(
                *inputs, is_causal=True, enable_gqa=True)
            wanted = torch.autograd.grad(out, inputs, data["dO"])
        for a, b in zip(first, wanted):
            error = (a.float() - b.float()).norm() / b.float().norm()
            if not error < 0.02:
                sys.exit(f"cuDNN's deterministic backward is off by {error:.3f} of the default's")

    def us(self):
        times = [run_us(self.play) / self.calls for _ in range(8)]
        return statistics.median(times[1:])


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
    print("| point | ours, us | cuDNN, us | ratio | deterministic cuDNN, us | ratio | flash, us | ours |")
    print("|---|---|---|---|---|---|---|---|")
    for kind, batch, n in points(args.points.split(",")):
        peers = {}
        for name in BACKENDS:
            try:
                peers[name] = Peer(kind, batch, n, name)
            except RuntimeError as error:
                print(f"{name} {kind} {batch} {n}: {str(error).splitlines()[0]}", file=sys.stderr)
        if kind == "backward":
            try:
                peers["deterministic"] = DeterministicBackward(n)
            except Exception as error:  # the package is missing, or cudnn.cudnnGraphNotSupportedError
                print(f"deterministic {n}: {error!r:.300}", file=sys.stderr)
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
        over = lambda name: median["ours"] / median[name] if name in median else None
        times_over = lambda name: f"{over(name):.2f}" if name in median else "-"
        rate = (f"{answer['bytes'] / median['ours'] / 1e6:.2f} TB/s" if kind == "decode" else
                f"{answer['flops'] / median['ours'] / 1e6:.0f} TFLOP/s")
        title = f"decode B={batch} N={n}" if kind == "decode" else f"{kind} N={n}"
        print(f"| {title} | {show('ours')} | {show('cudnn')} | {times_over('cudnn')} "
              f"| {show('deterministic')} | {times_over('deterministic')} | {show('flash')} | {rate} |",
              flush=True)
        row = {"kind": kind, "batch": batch, "n": n, "us": times, "flops": answer["flops"],
               "bytes": answer["bytes"], "ratio_cudnn": over("cudnn")}
        if "deterministic" in peers:
            row["ratio_cudnn_deterministic"] = over("deterministic")
            row["deterministic_workspace_bytes"] = peers["deterministic"].workspace
        rows.append(row)
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
