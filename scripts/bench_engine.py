#!/usr/bin/env python3
"""Speed of the serving engine beside its peers, interleaved in one run.

Two tare servers (the invariant arm and the native arm) and, where given, llama.cpp (through
llama-cpp-python, in a process of its own) and a real vLLM server take turns on the same machine, round
after round, so that whatever loads the machine loads all of them. Only one computes at a time. Each
figure is the best round of each arm; a ratio is best against best, and beside it stands the median of
the ratios of the single rounds.

  decode     tokens/s after the first token, at batch 1 and 8 (prompts of 16 tokens)
  prefill    tokens/s of one prompt of 512 tokens
  context    time of a decode step at contexts of 256 to 8,192 tokens
  first      time to the first token of a 10-token prompt, in decode steps
  load       time from the start of the process to the open port, and resident memory
  serve      output tokens/s of `vllm-rs bench serve` at a concurrency of 16 (needs --vllm-rs)

tare is timed through its HTTP server (what a user sees: HTTP, JSON, sampling and logprobs included),
llama.cpp through llama_decode in its own process with a greedy choice. Makes a Markdown page and the
JSON beside it. Exit status 0 when everything was measured; it judges nothing.
"""

import argparse
import datetime
import http.client
import json
import os
import pathlib
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time

WORKER = r"""
import ctypes, json, sys, time
import numpy as np
import llama_cpp as L
path, threads = sys.argv[1], int(sys.argv[2])
L.llama_backend_init()
mp = L.llama_model_default_params()
mp.use_mmap = True
model = L.llama_model_load_from_file(path.encode(), mp)
cp = L.llama_context_default_params()
cp.n_ctx, cp.n_batch, cp.n_ubatch, cp.n_seq_max = 9216, 2048, 512, 8
cp.n_threads = cp.n_threads_batch = threads
cp.kv_unified = True
ctx = L.llama_init_from_model(model, cp)
vocab = L.llama_vocab_n_tokens(L.llama_model_get_vocab(model))
memory = L.llama_get_memory(ctx)
batch = L.llama_batch_init(2048, 0, 8)

def run(rows):  # (token, position, sequence, wants logits)
    batch.n_tokens = len(rows)
    for i, (t, p, s, w) in enumerate(rows):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = t, p, 1, w
        batch.seq_id[i][0] = s
    if L.llama_decode(ctx, batch) != 0:
        raise RuntimeError("llama_decode failed")

def best(i):
    row = np.ctypeslib.as_array(L.llama_get_logits_ith(ctx, i), shape=(vocab,))
    return int(row.argmax())

def prompt(tokens, seq):
    for at in range(0, len(tokens), 2048):
        part = tokens[at:at + 2048]
        run([(t, at + i, seq, at + i + 1 == len(tokens)) for i, t in enumerate(part)])
    return best(len(part) - 1)

print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    job = json.loads(line)
    L.llama_memory_clear(memory, True)
    begin = time.perf_counter()
    tokens = [prompt(p, s) for s, p in enumerate(job["prompts"])]
    first = time.perf_counter()
    at = [len(p) for p in job["prompts"]]
    for _ in range(job["steps"]):
        run([(t, at[s], s, 1) for s, t in enumerate(tokens)])
        at = [a + 1 for a in at]
        tokens = [best(s) for s in range(len(tokens))]
    end = time.perf_counter()
    print(json.dumps({"first": first - begin, "rest": end - first}), flush=True)
"""


def ids(seed, count, span=20000):
    """Token ids from a fixed sequence; no two seeds share a beginning."""
    out, x = [], (seed * 2654435761 + 1) & 0xFFFFFFFF
    for _ in range(count):
        x = (x * 1664525 + 1013904223) & 0xFFFFFFFF
        out.append((x >> 8) % span)
    return out


def write_bf16_gguf(source, target):
    """The same weights in bf16: every quantised matrix of `source` dequantised and rounded once."""
    import gguf
    import numpy as np

    reader = gguf.GGUFReader(source)
    arch = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, arch)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for t in reader.tensors:
        values = gguf.dequantize(t.data, t.tensor_type).reshape([int(n) for n in reversed(t.shape)])
        if values.ndim == 1:
            writer.add_tensor(t.name, values.astype(np.float32))
        else:
            data = gguf.quantize(values.astype(np.float32), gguf.GGMLQuantizationType.BF16)
            writer.add_tensor(t.name, data, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Tare:
    """A tare server of one arm."""

    def __init__(self, binary, model, arm, threads, kv_mib=512):
        self.dir = tempfile.TemporaryDirectory()
        port_file = os.path.join(self.dir.name, "port")
        env = dict(os.environ, VLLM_BATCH_INVARIANT="1" if arm == "invariant" else "0")
        log = open(os.path.join(self.dir.name, "log"), "w")
        begin = time.perf_counter()
        self.process = subprocess.Popen(
            [binary, "serve", model, "--port", "0", "--port-file", port_file, "--threads", str(threads),
             "--no-enable-prefix-caching", "--kv-cache-mib", str(kv_mib)],
            env=env, stdout=log, stderr=log)
        while not os.path.exists(port_file):
            if self.process.poll() is not None:
                raise RuntimeError(open(log.name).read())
            time.sleep(0.002)
        self.load_seconds = time.perf_counter() - begin
        self.port = int(open(port_file).read())
        self.loaded_kib = self.memory()

    def memory(self):
        status = open(f"/proc/{self.process.pid}/status").read()
        return {k: int(re.search(rf"{k}:\s+(\d+)", status).group(1)) for k in ("VmRSS", "VmHWM")}

    def ask(self, prompts, tokens):
        body = json.dumps({"prompt": prompts, "max_tokens": tokens, "temperature": 0, "ignore_eos": True})
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        begin = time.perf_counter()
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
        seconds = time.perf_counter() - begin
        connection.close()
        if answer.status != 200:
            raise RuntimeError(f"{answer.status} {text[:400]}")
        usage = json.loads(text)["usage"]
        if usage["completion_tokens"] != tokens * len(prompts):
            raise RuntimeError(f"{usage} for {len(prompts)} prompts of {tokens} tokens")
        return seconds

    def stream(self, prompt, tokens):
        """Seconds to the first event and from it to the last token's."""
        body = json.dumps({"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
                           "stream": True, "return_token_ids": True})
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        begin = time.perf_counter()
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        times = []
        for line in answer:
            if line.startswith(b"data: {"):
                times.append((time.perf_counter(), len(json.loads(line[6:])["choices"][0]["token_ids"])))
        connection.close()
        if sum(n for _, n in times) != tokens:
            raise RuntimeError(f"{times} for {tokens} tokens")
        # An event may carry several tokens: the rate is over those after the first event.
        after = tokens - times[0][1]
        return {"first": times[0][0] - begin, "rest": (times[-1][0] - times[0][0]) * (tokens - 1) / after}

    def job(self, prompts, steps):
        if len(prompts) == 1 and steps and len(prompts[0]) > 128:
            return self.stream(prompts[0], steps + 1)
        first = self.ask(prompts, 1)
        rest = self.ask(prompts, steps + 1) - first if steps else 0.0
        return {"first": first, "rest": rest}

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)


class Llama:
    def __init__(self, python, gguf_path, threads):
        self.process = subprocess.Popen([python, "-c", WORKER, gguf_path, str(threads)], text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=subprocess.DEVNULL)
        if not json.loads(self.process.stdout.readline())["ready"]:
            raise RuntimeError("no llama.cpp")

    def job(self, prompts, steps):
        self.process.stdin.write(json.dumps({"prompts": prompts, "steps": steps}) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def stop(self):
        self.process.stdin.close()
        self.process.wait(60)


class Vllm:
    """A real vLLM server; its time is measured by vllm-rs alone."""

    def __init__(self, python, model, threads):
        self.port = 18761
        self.log = tempfile.NamedTemporaryFile("w+", suffix=".vllm.log", delete=False)
        env = dict(os.environ, OMP_NUM_THREADS=str(threads), VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1",
                   VLLM_NO_USAGE_STATS="1", VLLM_CPU_NUM_OF_RESERVED_CPU="0",
                   VLLM_CPU_OMP_THREADS_BIND=",".join(map(str, sorted(os.sched_getaffinity(0))[:threads])))
        env.pop("VLLM_BATCH_INVARIANT", None)
        self.process = subprocess.Popen(
            [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name",
             "smollm2", "--dtype", "bfloat16", "--max-model-len", "1024", "--port", str(self.port), "--host",
             "127.0.0.1", "--no-enable-prefix-caching", "--enforce-eager"],
            env=env, stdout=self.log, stderr=self.log, start_new_session=True)
        for _ in range(3000):
            if self.process.poll() is not None:
                raise RuntimeError(open(self.log.name).read()[-3000:])
            try:
                c = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2)
                c.request("GET", "/health")
                if c.getresponse().status == 200:
                    return
            except OSError:
                pass
            time.sleep(0.2)
        raise RuntimeError("vLLM did not come up")

    def stop(self):
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)


def bench_serve(vllm_rs, port, model_name, tokenizer, concurrency, prompts, seed, input_len=64, output_len=32):
    with tempfile.TemporaryDirectory() as d:
        run = subprocess.run(
            [vllm_rs, "bench", "serve", "--port", str(port), "--model", model_name, "--tokenizer", tokenizer,
             "--dataset-name", "random", "--random-input-len", str(input_len), "--random-output-len",
             str(output_len), "--num-prompts", str(prompts), "--max-concurrency", str(concurrency),
             "--prompt-token-ids", "--ignore-eos", "--seed", str(seed), "--save-result", "--save-detailed",
             "--result-dir", d, "--result-filename", "r.json", "--disable-tqdm"],
            capture_output=True, text=True, timeout=900)
        path = os.path.join(d, "r.json")
        if run.returncode != 0 or not os.path.exists(path):
            raise RuntimeError(run.stdout[-1500:] + run.stderr[-1500:])
        r = json.load(open(path))
    if r["completed"] != prompts or r["total_output_tokens"] != prompts * output_len:
        raise RuntimeError(f"{r['completed']} of {prompts} completed, {r['total_output_tokens']} tokens")
    return r


def load_average():
    return open("/proc/loadavg").read().split()[0]


def summary(rounds, arm, value):
    return max(value(r[arm]) for r in rounds)


def ratio(rounds, a, b, value):
    best = summary(rounds, a, value) / summary(rounds, b, value)
    return best, statistics.median(value(r[a]) / value(r[b]) for r in rounds)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tare", required=True, help="the tare program")
    parser.add_argument("--model", required=True, help="SmolLM2 as a Hugging Face directory")
    parser.add_argument("--gguf", help="the quantised GGUF it came from (for llama.cpp)")
    parser.add_argument("--llama-python", help="a Python with llama-cpp-python and numpy")
    parser.add_argument("--vllm-python", help="a Python with vllm-cpu")
    parser.add_argument("--vllm-rs", help="the program vllm-rs")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", default="decode,prefill,context,first,load,serve")
    parser.add_argument("--out", help="PATH.md; the JSON goes to PATH.json")
    args = parser.parse_args()
    only = set(args.only.split(","))
    started = datetime.datetime.now(datetime.timezone.utc)
    result = {"schema": "tare.bench_engine/1", "date": started.isoformat(timespec="seconds"),
              "threads": args.threads, "rounds": args.rounds, "load_at_start": load_average(),
              "machine": platform.machine(), "figures": {}}
    for line in open("/proc/cpuinfo"):
        if line.startswith("model name"):
            result["cpu"] = line.split(":", 1)[1].strip()
            break
    figures = result["figures"]
    lines = []

    def say(text):
        print(text, flush=True)

    arms = {"invariant": Tare(args.tare, args.model, "invariant", args.threads),
            "native": Tare(args.tare, args.model, "native", args.threads)}
    if args.llama_python and args.gguf and only & {"decode", "prefill", "context"}:
        bf16 = os.path.join(tempfile.gettempdir(), "smollm2-bf16.gguf")
        if not os.path.exists(bf16):
            write_bf16_gguf(args.gguf, bf16 + ".part")
            os.rename(bf16 + ".part", bf16)
        arms["llama.cpp"] = Llama(args.llama_python, bf16, args.threads)
    for name, arm in arms.items():  # everything touched once
        arm.job([ids(1, 16)], 4)

    def rounds_of(name, prompts, steps, rounds=None, which=None):
        out = []
        for r in range(rounds or args.rounds):
            order = [a for a in arms if which is None or a in which]
            if r % 2:
                order.reverse()
            out.append({a: arms[a].job(prompts, steps) for a in order})
            say(f"{name} round {r}: " + "  ".join(f"{a} {v['first']:.3f}+{v['rest']:.3f}" for a, v in out[-1].items()))
        figures[name] = out
        return out

    def table(name, rounds, value, unit, goals):
        lines.append(f"| {name} | " + " | ".join(
            f"{summary(rounds, a, value):.1f}" if a in rounds[0] else "-" for a in ("invariant", "native", "llama.cpp"))
            + " | " + " | ".join(
            "{:.2f} ({:.2f})".format(*ratio(rounds, a, b, value)) if a in rounds[0] and b in rounds[0] else "-"
            for a, b in (("invariant", "llama.cpp"), ("native", "llama.cpp"), ("invariant", "native")))
            + f" | {goals} |")

    if only & {"decode", "prefill"}:
        lines += ["", "## Decode and prefill", "",
                  "Tokens per second, best of the rounds. A ratio is best against best; in brackets the median of the"
                  " rounds' own ratios.", "",
                  "| | invariant | native | llama.cpp | invariant / llama.cpp | native / llama.cpp |"
                  " invariant / native | goal |", "|---|---|---|---|---|---|---|---|"]
    if "decode" in only:
        for width, steps in ((1, 64), (8, 32)):
            rounds = rounds_of(f"decode_b{width}", [ids(10 + i, 16) for i in range(width)], steps)
            table(f"decode, batch {width}", rounds, lambda v: width * steps / v["rest"], "tok/s",
                  ">= 1.0 of llama.cpp, >= 0.95 of native")
    if "prefill" in only:
        rounds = rounds_of("prefill_512", [ids(40, 512)], 0)
        table("prefill, 512 tokens", rounds, lambda v: 512 / v["first"], "tok/s", ">= 0.5 of llama.cpp")
    if "first" in only:
        first = rounds_of("first_token_10", [ids(50, 10)], 16, which=("invariant",))
        step = min(v["invariant"]["rest"] / 16 for v in first)
        token = min(v["invariant"]["first"] for v in first)
        figures["first_token_in_steps"] = token / step
        lines += ["", "## First token", "",
                  f"First token of a 10-token prompt: {token * 1e3:.1f} ms, one decode step {step * 1e3:.2f} ms:"
                  f" {token / step:.2f} steps (goal: at most 5)."]
    if "context" in only:
        lengths, steps = (256, 1024, 4096, 8192 - 34), 32
        per = {a: {} for a in arms if a != "native"}
        for n in lengths:
            rounds = rounds_of(f"context_{n}", [ids(60, n)], steps, rounds=args.rounds if n < 2000 else max(1, args.rounds // 3), which=tuple(per))
            for a in per:
                per[a][n] = min(v[a]["rest"] / steps for v in rounds)
        figures["context_ms"] = {a: {n: t * 1e3 for n, t in v.items()} for a, v in per.items()}
        # Multiply-adds of a step: every matrix once, and attention's two products over the context.
        dense = 134.5e6
        def work(n):
            return dense + 2 * 9 * 64 * 30 * n
        lines += ["", "## Cost of a token over its context", "",
                  "Milliseconds of a decode step at batch 1, and how it grows from 256; the last column is the growth"
                  " of the multiply-adds (134.5 M in matrices, 34,560 per position in attention).", "",
                  "| context | " + " | ".join(f"{a}, ms | growth" for a in per) + " | arithmetic |",
                  "|---|" + "---|---|" * len(per) + "---|"]
        for n in lengths:
            lines.append(f"| {n} | " + " | ".join(f"{per[a][n] * 1e3:.2f} | {per[a][n] / per[a][lengths[0]]:.2f}"
                                                   for a in per) + f" | {work(n) / work(lengths[0]):.2f} |")
    if "load" in only:
        weights = sum(p.stat().st_size for p in pathlib.Path(args.model).glob("*.safetensors"))
        loads = []
        for _ in range(3):
            t = Tare(args.tare, args.model, "invariant", args.threads, kv_mib=32)
            loads.append((t.load_seconds, t.loaded_kib))
            t.stop()
        seconds = min(l[0] for l in loads)
        rss = min(l[1]["VmRSS"] for l in loads) * 1024
        peak = min(l[1]["VmHWM"] for l in loads) * 1024
        figures["load"] = {"seconds": seconds, "resident_bytes": rss, "peak_bytes": peak, "weight_bytes": weights}
        lines += ["", "## Load", "",
                  f"From the start of the process to the open port: {seconds:.2f} s (both weight hashes included)."
                  f" Weights on disk {weights / 1e6:.0f} MB; resident when it serves {rss / 1e6:.0f} MB,"
                  f" {rss / weights:.2f} of them (KV cache of 32 MiB, untouched); peak {peak / 1e6:.0f} MB."]
    if "serve" in only and args.vllm_rs:
        servers = {"invariant": (arms["invariant"].port, os.path.basename(args.model.rstrip("/"))),
                   "native": (arms["native"].port, os.path.basename(args.model.rstrip("/")))}
        vllm = None
        if args.vllm_python:
            vllm = Vllm(args.vllm_python, args.model, args.threads)
            servers["vllm-cpu"] = (vllm.port, "smollm2")
        rounds = []
        for port, name in servers.values():
            bench_serve(args.vllm_rs, port, name, args.model, 4, 8, 99)
        for r in range(max(2, args.rounds // 2)):
            order = list(servers)
            if r % 2:
                order.reverse()
            got = {}
            for a in order:
                port, name = servers[a]
                got[a] = bench_serve(args.vllm_rs, port, name, args.model, 16, 48, 100 + r)["output_throughput"]
            rounds.append(got)
            say(f"serve c=16 round {r}: {got}")
        figures["serve_c16"] = rounds
        same = lambda v: v
        lines += ["", "## Throughput at concurrency 16", "",
                  "`vllm-rs bench serve`, 48 random prompts of 64 tokens, 32 tokens each, output tokens per second,"
                  " best of the rounds; lengths exact, no error, no cache.", "",
                  "| arm | tok/s | of vllm-cpu |", "|---|---|---|"]
        for a in servers:
            against = "{:.2f} ({:.2f})".format(*ratio(rounds, a, "vllm-cpu", same)) if "vllm-cpu" in servers else "-"
            lines.append(f"| {a} | {summary(rounds, a, same):.1f} | {against} |")
        lines.append("")
        lines.append("Invariant / native: {:.2f} ({:.2f}).".format(*ratio(rounds, "invariant", "native", same)))
        if vllm:
            vllm.stop()
    for arm in arms.values():
        arm.stop()
    result["load_at_end"] = load_average()
    head = [f"# Engine speed, {started.date()}", "",
            f"{result.get('cpu', '?')}, {args.threads} threads, {args.rounds} rounds, SmolLM2-135M in bf16. Load average"
            f" {result['load_at_start']} at the start, {result['load_at_end']} at the end (the bench itself is 2). Made by"
            " `scripts/bench_engine.sh`; every round is in the JSON beside this page."]
    text = "\n".join(head + lines) + "\n"
    print(text)
    if args.out:
        pathlib.Path(args.out).write_text(text)
        pathlib.Path(args.out).with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
