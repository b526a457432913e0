#!/usr/bin/env python3
"""Training forward and backward of SmolLM2 beside PyTorch f32, and what a step of the loop costs.

usage: scripts/bench_trainer.py MODEL [--tare build/release/tare] [--threads 2] [--rounds 3]
                                [--without-torch] [--receipt DIR/receipt.json] [--json OUT]

A batch of 4 sequences of 256 tokens. In each round, one after the other: `tare train` with the
production arm, with the native arm, and PyTorch (f32 weights, SDPA, cross entropy over all 49,152
logits, loss.backward()) on the same weights and tokens; the best round of each counts. Every other
round goes the other way, so that no arm always has the same neighbour.
  production / torch   PyTorch's time over ours: 1.0 is as fast
  production / native  the native arm's time over the invariant arm's
With --receipt, of a run of the loop: the share of a step's wall time, from one rollout's start to the next,
that is not model arithmetic (waiting, hashing, files; the optimizer is arithmetic), by step and its median;
and the rate of publishing against a plain copy of as many bytes on the same disk. Needs torch, safetensors, tokenizers, numpy; prints the load average.
"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import tempfile
import time

SENTENCE = ("The sum of the numbers depends on the order in which they are added, and the same order "
            "gives the same value every time that it is asked for. ")


def torch_round(model, tokens, threads):
    import torch
    import torch.nn.functional as F
    from safetensors.torch import load_file
    torch.set_num_threads(threads)
    config = json.loads((model / "config.json").read_text())
    weights = {k: v.float().requires_grad_() for k, v in load_file(model / "model.safetensors").items()}
    heads, kv, hidden = config["num_attention_heads"], config["num_key_value_heads"], config["hidden_size"]
    d, eps = config.get("head_dim") or hidden // heads, config["rms_norm_eps"]
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    ids = torch.tensor(tokens)
    x, y = ids[:, :-1], ids[:, 1:]
    length = x.shape[1]
    angle = torch.outer(torch.arange(length).float(), theta ** (-torch.arange(0, d, 2).float() / d))
    cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)
    turn = lambda t: t * cos + torch.cat([-t[..., d // 2:], t[..., :d // 2]], -1) * sin
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])

    def step():
        h = F.embedding(x, weights["model.embed_tokens.weight"])
        for layer in range(config["num_hidden_layers"]):
            w = lambda name: weights[f"model.layers.{layer}.{name}.weight"]
            n = F.rms_norm(h, (hidden,), w("input_layernorm"), eps)
            q, k, v = (F.linear(n, w(f"self_attn.{p}_proj")).view(*x.shape, -1, d).transpose(1, 2) for p in "qkv")
            a = F.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True, enable_gqa=True)
            h = h + F.linear(a.transpose(1, 2).reshape(*x.shape, -1), w("self_attn.o_proj"))
            n = F.rms_norm(h, (hidden,), w("post_attention_layernorm"), eps)
            h = h + F.linear(F.silu(F.linear(n, w("mlp.gate_proj"))) * F.linear(n, w("mlp.up_proj")), w("mlp.down_proj"))
        logits = F.linear(F.rms_norm(h, (hidden,), weights["model.norm.weight"], eps), head)
        loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), y.reshape(-1))
        loss.backward()
        for p in weights.values():
            p.grad = None
        return loss.item()

    step()
    begin = time.perf_counter()
    loss = step()
    return time.perf_counter() - begin, loss


def tare_round(tare, model, text, arm, threads):
    with tempfile.TemporaryDirectory() as out:
        subprocess.run([tare, "train", model, text, "--arm", arm, "--steps", "2", "--batch", "4", "--max-tokens", "257",
                        "--threads", str(threads), "--out", out + "/o"], check=True, stdout=subprocess.DEVNULL)
        record = json.loads(pathlib.Path(out, "o", "train.json").read_text())
    times = [(s["forward_ns"] + s["loss_ns"] + s["backward_ns"]) * 1e-9 for s in record["steps"]]
    return min(times), record["steps"][0]["loss"]


def copy_rate(folder, size):
    """Bytes a second of writing a file and syncing it, then reading it back."""
    block, path = os.urandom(1 << 20), pathlib.Path(folder, "copy.tmp")
    begin = time.perf_counter()
    with open(path, "wb") as f:
        for _ in range(max(1, size >> 20)):
            f.write(block)
        f.flush()
        os.fsync(f.fileno())
    with open(path, "rb") as f:
        while f.read(1 << 22):
            pass
    seconds = time.perf_counter() - begin
    path.unlink()
    return size / seconds


def loop_figures(path, model):
    receipt = json.loads(path.read_text())
    events, rounds = receipt["events"], receipt["rounds"]
    span = lambda p: (p["ended_ns"] - p["started_ns"]) * 1e-9
    begun = {e["version"]: e["monotonic_ns"] * 1e-9 for e in events if e["event"] == "rollout"}
    shares = []
    for version, (r, u) in enumerate(zip(rounds, receipt["updates"])):
        arithmetic = span(r["rollout"]) + span(r["paths"]["score"])
        arithmetic += (u["forward_backward_ns"] + u["optimizer_ns"]) * 1e-9
        shares.append(1 - arithmetic / (begun[version + 1] - begun[version]))
    size = sum(f.stat().st_size for f in pathlib.Path(model).glob("*.safetensors"))
    seconds = [(u["publish"]["write_ns"] + u["publish"]["update_ns"]) * 1e-9 for u in receipt["updates"]]
    return {"answers_a_step": receipt["config"]["prompts"] * receipt["config"]["group"],
            "loop_seconds": (events[-1]["monotonic_ns"] - events[0]["monotonic_ns"]) * 1e-9,
            "not_arithmetic_by_step": shares, "not_arithmetic": statistics.median(shares),
            "publish_seconds": seconds, "publish_bytes_per_second": size / min(seconds),
            "copy_bytes_per_second": copy_rate(path.parent, size)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--tare", default="build/release/tare")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--without-torch", action="store_true", help="only our two arms")
    parser.add_argument("--receipt")
    parser.add_argument("--json")
    options = parser.parse_args()
    from tokenizers import Tokenizer
    model = pathlib.Path(options.model)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    lines = [f"{i}. " + SENTENCE * 12 for i in range(1, 7)]
    tokens = [tokenizer.encode(line, add_special_tokens=False).ids[:257] for line in lines[:4]]
    assert all(len(t) == 257 for t in tokens)
    times, losses = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        text = folder + "/text"
        pathlib.Path(text).write_text("\n".join(lines) + "\n")
        for number in range(options.rounds):
            arms = ("production", "native") + (() if options.without_torch else ("torch",))
            for name in arms[::-1 if number % 2 else 1]:
                seconds, loss = (torch_round(model, tokens, options.threads) if name == "torch" else
                                 tare_round(options.tare, str(model), text, name, options.threads))
                times.setdefault(name, []).append(seconds)
                losses[name] = loss
    best = {name: min(t) for name, t in times.items()}
    middle = {name: statistics.median(t) for name, t in times.items()}
    result = {"tokens": 4 * 256, "threads": options.threads, "seconds": best, "rounds": times,
              "losses": losses, "native_over_production": best["native"] / best["production"],
              "native_over_production_medians": middle["native"] / middle["production"],
              "load": os.getloadavg()}
    for arm in ("production", "native") if "torch" in best else ():
        result["torch_over_" + arm] = best["torch"] / best[arm]
    if options.receipt:
        result.update(loop_figures(pathlib.Path(options.receipt), options.model))
    print(json.dumps(result, indent=1))
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
