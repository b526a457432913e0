"""MINI in float64, written from the formulas alone: weights, logprobs, entropies and gradients.

  python3 make_reference.py OUT_DIR [MINI_DIR]      (pip install torch numpy safetensors)

Nothing here is taken from the C++ sources: the weights are generated again from docs/formats/mini.md,
and with MINI_DIR (a directory that `tare model mini` wrote) they are compared byte for byte. Gradients
come from torch's autograd in float64. Writes one safetensors file per variant:
  tokens, lengths, targets (-1: none), temperature per sequence; dlogprob, dentropy: the loss is their
  sum of products with logprob and entropy; logprob, entropy; router_ids per MoE layer;
  grad_norm [n], grad_sample [n, 64] for the n tensors sorted by name (element i * max(1, count // 64)).
"""
import hashlib, sys
import numpy as np, torch
from safetensors.numpy import save_file
from safetensors.torch import load_file

SEED = 0x6d696e692d310000
M32 = np.uint64(0xffffffff)

def philox(c0, c1, c2):
    c = [c0.astype(np.uint64), np.full_like(c0, c1, np.uint64), np.full_like(c0, c2, np.uint64), np.zeros_like(c0, np.uint64)]
    k0, k1 = SEED & 0xffffffff, SEED >> 32
    for _ in range(10):
        a, b = np.uint64(0xd2511f53) * c[0], np.uint64(0xcd9e8d57) * c[2]
        c = [((b >> np.uint64(32)) ^ c[1] ^ np.uint64(k0)) & M32, b & M32,
             ((a >> np.uint64(32)) ^ c[3] ^ np.uint64(k1)) & M32, a & M32]
        k0, k1 = (k0 + 0x9e3779b9) & 0xffffffff, (k1 + 0xbb67ae85) & 0xffffffff
    return c

def scale_of(name, tied):  # multiplier, exponent, offset in sixteenths
    if "embed_tokens" in name: return (7, -20, 0) if tied else (1, -15, 0)
    if "lm_head" in name: return 7, -20, 0
    if "q_norm" in name or "k_norm" in name: return 2, -20, 24
    if "norm.weight" in name or "layernorm" in name: return 3, -20, 16
    if "sinks" in name: return 1, -15, 0
    if "mlp.gate.weight" in name: return 3, -19, 0
    if ".bias" in name or "down_proj" in name or "o_proj" in name: return 3, -20, 0
    return 5, -21, 0

def to_bf16_bits(x):  # float64 exact values to bf16, nearest even
    f = x.astype(np.float32)
    assert np.array_equal(f.astype(np.float64), x)  # 24 bits hold every value
    u = f.view(np.uint32).astype(np.uint64)
    return ((u + 0x7fff + ((u >> 16) & 1)) >> 16).astype(np.uint16)

def weight_bits(name, shape, tied):
    count = int(np.prod(shape))
    stream = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    i = np.arange(count, dtype=np.uint64)
    v = philox(i // 2, 1, stream)
    odd = (i % 2).astype(bool)
    a, b = np.where(odd, v[2], v[0]).astype(np.int64), np.where(odd, v[3], v[1]).astype(np.int64)
    total = (a & 0xffff) + (a >> 16) + (b & 0xffff) + (b >> 16) - 2 * 65535
    m, e, off = scale_of(name, tied)
    bits = to_bf16_bits(total * m * 2.0 ** e + off / 16).reshape(shape)
    if name.endswith("mlp.gate.weight") and shape[0] > 5: bits[5] = bits[2]
    return bits

BASE = dict(vocab=512, hidden=128, inter=256, layers=6, heads=4, kv=2, dim=32, window={1: 16, 3: 16}, sink={1, 3},
            moe={2, 4}, experts=8, top_k=2, expert_inter=64, eps=1e-6, theta=10000.0, qk_norm=True, tied=False,
            qkv_bias=False, o_bias=False)
VARIANTS = {
    "mini": {},
    "tied_bias": dict(qk_norm=False, tied=True, qkv_bias=True, o_bias=True, window={}, sink=set(), moe=set(), layers=3),
}

def shapes(c):
    h, out = c["hidden"], {"model.embed_tokens.weight": (c["vocab"], c["hidden"]), "model.norm.weight": (c["hidden"],)}
    if not c["tied"]: out["lm_head.weight"] = (c["vocab"], h)
    for l in range(c["layers"]):
        p, a = f"model.layers.{l}.", f"model.layers.{l}.self_attn."
        for n in ("input_layernorm", "post_attention_layernorm"): out[p + n + ".weight"] = (h,)
        for n, w in (("q", c["heads"]), ("k", c["kv"]), ("v", c["kv"])):
            out[a + n + "_proj.weight"] = (w * c["dim"], h)
            if c["qkv_bias"]: out[a + n + "_proj.bias"] = (w * c["dim"],)
        out[a + "o_proj.weight"] = (h, c["heads"] * c["dim"])
        if c["o_bias"]: out[a + "o_proj.bias"] = (h,)
        if c["qk_norm"]: out[a + "q_norm.weight"] = out[a + "k_norm.weight"] = (c["dim"],)
        if l in c["sink"]: out[a + "sinks"] = (c["heads"],)
        if l in c["moe"]:
            out[p + "mlp.gate.weight"] = (c["experts"], h)
            for e in range(c["experts"]):
                x = p + f"mlp.experts.{e}."
                out[x + "gate_proj.weight"] = out[x + "up_proj.weight"] = (c["expert_inter"], h)
                out[x + "down_proj.weight"] = (h, c["expert_inter"])
        else:
            out[p + "mlp.gate_proj.weight"] = out[p + "mlp.up_proj.weight"] = (c["inter"], h)
            out[p + "mlp.down_proj.weight"] = (h, c["inter"])
    return out

def norm(x, w, eps): return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * w
def silu(x): return x / (1 + torch.exp(-x))

def rope(x, theta):  # [T, heads, D], half-split
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[0], dtype=torch.float64)[:, None] * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    cos, sin = torch.cos(angle)[:, None], torch.sin(angle)[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

def attention(c, l, w, x):
    a, T, D = f"model.layers.{l}.self_attn.", x.shape[0], c["dim"]
    def proj(n, heads):
        y = x @ w[a + n + "_proj.weight"].T
        if c["qkv_bias"]: y = y + w[a + n + "_proj.bias"]
        return y.reshape(T, heads, D)
    q, k, v = proj("q", c["heads"]), proj("k", c["kv"]), proj("v", c["kv"])
    if c["qk_norm"]: q, k = norm(q, w[a + "q_norm.weight"], c["eps"]), norm(k, w[a + "k_norm.weight"], c["eps"])
    q, k = rope(q, c["theta"]), rope(k, c["theta"])
    i, j = torch.arange(T)[:, None], torch.arange(T)[None]
    seen = (j <= i) & (j > i - c["window"].get(l, 1 << 30))
    group, out = c["heads"] // c["kv"], []
    for h in range(c["heads"]):
        s = (q[:, h] @ k[:, h // group].T / D ** 0.5).masked_fill(~seen, float("-inf"))
        if l in c["sink"]: s = torch.cat([s, w[a + "sinks"][h].expand(T, 1)], 1)
        out.append(torch.softmax(s, 1)[:, :T] @ v[:, h // group])
    y = torch.cat(out, 1) @ w[a + "o_proj.weight"].T
    return y + w[a + "o_proj.bias"] if c["o_bias"] else y

def mlp(w, p, x): return (silu(x @ w[p + "gate_proj.weight"].T) * (x @ w[p + "up_proj.weight"].T)) @ w[p + "down_proj.weight"].T

def experts(c, l, w, x, ids_out):
    p = f"model.layers.{l}.mlp."
    logits = x @ w[p + "gate.weight"].T
    order = sorted_ids = np.stack([np.lexsort((np.arange(c["experts"]), -row)) for row in logits.detach().numpy()])[:, : c["top_k"]]
    ids_out.append(sorted_ids.astype(np.int32))
    prob = torch.softmax(logits, -1)
    chosen = torch.gather(prob, 1, torch.tensor(order))
    chosen = chosen / chosen.sum(1, keepdim=True)
    ys = torch.stack([mlp(w, p + f"experts.{e}.", x) for e in range(c["experts"])], 1)
    return (chosen[..., None] * torch.gather(ys, 1, torch.tensor(order)[..., None].expand(-1, -1, x.shape[1]))).sum(1)

def forward(c, w, tokens, ids_out):
    x = w["model.embed_tokens.weight"][tokens]
    for l in range(c["layers"]):
        p = f"model.layers.{l}."
        x = x + attention(c, l, w, norm(x, w[p + "input_layernorm.weight"], c["eps"]))
        y = norm(x, w[p + "post_attention_layernorm.weight"], c["eps"])
        x = x + (experts(c, l, w, y, ids_out) if l in c["moe"] else mlp(w, p + "mlp.", y))
    return norm(x, w["model.norm.weight"], c["eps"]) @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T

def main():
    out = sys.argv[1]
    real = load_file(sys.argv[2] + "/model.safetensors") if len(sys.argv) > 2 else None
    for variant, change in VARIANTS.items():
        c = {**BASE, **change}
        bits = {n: weight_bits(n, s, c["tied"]) for n, s in sorted(shapes(c).items())}
        if variant == "mini" and real is not None:
            assert sorted(real) == sorted(bits)
            for n, t in real.items(): assert np.array_equal(t.view(torch.int16).numpy().view(np.uint16), bits[n]), n
            print("weights equal the files of MINI_DIR")
        w = {n: torch.tensor((b.astype(np.uint32) << 16).view(np.float32).astype(np.float64), requires_grad=True) for n, b in bits.items()}
        lengths, temperatures = [37, 5, 70, 1], [1.0, 0.75, 1.0, 1.5]
        state, tokens = 12345, []
        for _ in range(sum(lengths)):
            state = (state * 6364136223846793005 + 1442695040888963407) & (1 << 64) - 1
            tokens.append((state >> 33) % c["vocab"])
        rows, targets, logprob, entropy, loss, dl, de, ids, start = [], [], [], [], 0, [], [], [], 0
        for n, temp in zip(lengths, temperatures):
            seq = tokens[start : start + n]
            start += n
            per_layer = []
            lsm = torch.log_softmax(forward(c, w, torch.tensor(seq), per_layer) / temp, -1)
            ids.append(per_layer)
            for i in range(n):
                # Targets: the next token, or for the last a fixed one; every fifth row of the third has none.
                target = seq[i + 1] if i + 1 < n else 7
                if n == 70 and (i < 20 or i % 5 == 0): target = -1
                targets.append(target)
                if target < 0: continue
                t = len(logprob)
                lp, en = lsm[i, target], -(lsm[i].exp() * lsm[i]).sum()
                dl.append(((t * 37) % 11 - 5) / 8)
                de.append(((t * 13) % 7 - 3) / 16)
                loss = loss + lp * dl[-1] + en * de[-1]
                logprob.append(lp.item())
                entropy.append(en.item())
        loss.backward()
        names = sorted(w)
        grads = [w[n].grad.numpy().reshape(-1) for n in names]
        sample = np.zeros((len(names), 64))
        for r, g in enumerate(grads):
            step = max(1, len(g) // 64)
            picked = g[::step][:64]
            sample[r, : len(picked)] = picked
        tensors = {"tokens": np.array(tokens, np.int32), "lengths": np.array(lengths, np.int32),
                   "targets": np.array(targets, np.int32), "temperature": np.array(temperatures, np.float32),
                   "dlogprob": np.array(dl, np.float32), "dentropy": np.array(de, np.float32),
                   "logprob": np.array(logprob), "entropy": np.array(entropy),
                   "grad_norm": np.array([np.sqrt((g * g).sum()) for g in grads]), "grad_sample": sample}
        for k in range(len(ids[0])): tensors[f"router_ids.{k}"] = np.concatenate([s[k] for s in ids])
        save_file(tensors, f"{out}/{variant}_f64.safetensors")
        print(variant, "logprob mean", np.mean(logprob), "entropy mean", np.mean(entropy), "min", min(entropy), "max", max(entropy))

main()
