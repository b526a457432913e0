#!/usr/bin/env python3
"""Makes the golden files of this folder with the packages of the field.

    python3 -m venv /path/to/venv && /path/to/venv/bin/pip install gguf safetensors ml_dtypes numpy
    /path/to/venv/bin/python tests/data/formats/make.py tests/data/formats

Run again it gives the same bytes: all values come from a fixed integer recurrence.
"""
import json
import struct
import sys
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType as Q
from safetensors.numpy import save_file
import safetensors


def noise(n, seed):
    """n bytes of a 64-bit LCG: no library's generator, so no version of one can change them."""
    out = bytearray()
    x = seed
    for _ in range(n):
        x = (x * 6364136223846793005 + 1442695040888963407) & 0xFFFFFFFFFFFFFFFF
        out.append(x >> 56)
    return np.frombuffer(bytes(out), dtype=np.uint8).copy()


def all_dtypes(path):
    """One small tensor of every dtype, a scalar, an empty tensor and names that need escapes."""
    raw = {}
    for i, (name, numpy_dtype) in enumerate([
            ("bool", np.bool_), ("u8", np.uint8), ("i8", np.int8), ("f8_e5m2", ml_dtypes.float8_e5m2),
            ("f8_e4m3", ml_dtypes.float8_e4m3fn), ("i16", np.int16), ("f16", np.float16),
            ("bf16", ml_dtypes.bfloat16), ("i32", np.int32), ("f32", np.float32), ("f64", np.float64),
            ("i64", np.int64)]):
        size = np.dtype(numpy_dtype).itemsize
        bits = noise(6 * size, 100 + i)
        if numpy_dtype is np.bool_:
            bits &= 1
        raw[name] = bits.view(numpy_dtype).reshape(2, 3)
    raw["scalar"] = np.array(1.5, np.float32)
    raw["empty"] = np.zeros((0, 4), np.float32)
    raw["na\u00efve \"quoted\"\n"] = np.arange(3, dtype=np.float32)
    save_file(raw, path, metadata={"format": "pt"})


def gguf_types(path, out):
    """Every block type that is read, from random block bytes, and its dequantised f32 by `gguf`."""
    w = gguf.GGUFWriter(path, "llama")
    w.add_uint32("test.u32", 7)
    w.add_int64("test.i64", -(1 << 40))
    w.add_float32("test.f32", 0.1)
    w.add_bool("test.bool", True)
    w.add_string("test.string", "na\u00efve")
    w.add_array("test.array", ["a", "b", "c"])
    w.add_array("test.ints", [1, 2, 3])
    expect = {}
    types = [Q.F32, Q.F16, Q.BF16, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0, Q.Q4_K, Q.Q5_K, Q.Q6_K]
    for i, t in enumerate(types):
        block, size = gguf.GGML_QUANT_SIZES[t]
        rows, cols = 3, 512
        data = noise(rows * cols // block * size, 200 + i).reshape(rows, cols // block * size)
        if t == Q.F32:
            data = data.reshape(-1).view(np.float32).reshape(rows, cols)
        elif t == Q.F16:
            data = data.reshape(-1).view(np.float16).reshape(rows, cols)
        with np.errstate(all="ignore"):
            value = gguf.quants.dequantize(data, t).astype(np.float32)
        name = f"{t.name.lower()}.weight"
        if t in (Q.F32, Q.F16):
            w.add_tensor(name, data)
        else:
            w.add_tensor(name, data, raw_dtype=t)
        expect[name] = value.reshape(rows, cols).view(np.int32)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    save_file(expect, out)


def tiny_llama(folder):
    """A two-layer Llama in three forms (directory with shards, single file, GGUF with permuted q, k)."""
    H, HEADS, KV, D, I, V, L = 32, 4, 2, 8, 48, 40, 2
    shapes = {"model.embed_tokens.weight": (V, H), "model.norm.weight": (H,)}
    for n in range(L):
        p = f"model.layers.{n}."
        shapes |= {p + "self_attn.q_proj.weight": (HEADS * D, H), p + "self_attn.k_proj.weight": (KV * D, H),
                   p + "self_attn.v_proj.weight": (KV * D, H), p + "self_attn.o_proj.weight": (H, HEADS * D),
                   p + "mlp.gate_proj.weight": (I, H), p + "mlp.up_proj.weight": (I, H),
                   p + "mlp.down_proj.weight": (H, I), p + "input_layernorm.weight": (H,),
                   p + "post_attention_layernorm.weight": (H,)}
    tensors = {}
    for i, (name, shape) in enumerate(sorted(shapes.items())):
        n = int(np.prod(shape))
        small = (noise(n, 300 + i).astype(np.float32) - 128) / 256
        tensors[name] = small.astype(ml_dtypes.bfloat16).reshape(shape)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": H,
        "num_hidden_layers": L, "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": D,
        "intermediate_size": I, "vocab_size": V, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "rope_scaling": None, "tie_word_embeddings": True, "hidden_act": "silu",
        "attention_bias": False, "mlp_bias": False, "torch_dtype": "bfloat16", "bos_token_id": 1,
        "eos_token_id": 2}
    sharded = folder / "tiny_sharded"
    sharded.mkdir(exist_ok=True)
    (sharded / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (sharded / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3]}) + "\n")
    names = sorted(tensors)
    parts = [names[:7], names[7:]]
    weight_map = {}
    for i, part in enumerate(parts):
        file = f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors"
        save_file({n: tensors[n] for n in part}, sharded / file, metadata={"format": "pt"})
        weight_map |= {n: file for n in part}
    total = sum(t.nbytes for t in tensors.values())
    (sharded / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1) + "\n")
    save_file(tensors, folder / "tiny.safetensors", metadata={"format": "pt"})

    w = gguf.GGUFWriter(folder / "tiny.gguf", "llama")
    w.add_block_count(L)
    w.add_context_length(64)
    w.add_embedding_length(H)
    w.add_feed_forward_length(I)
    w.add_head_count(HEADS)
    w.add_head_count_kv(KV)
    w.add_rope_dimension_count(D)
    w.add_rope_freq_base(10000.0)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_vocab_size(V)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("smollm")
    tokens = ["<|a|>", "<s>", "</s>"] + [chr(ord("!") + i) for i in range(V - 4)] + ['!"']
    w.add_token_list(tokens)
    w.add_token_types([3, 3, 3] + [1] * (V - 3))
    w.add_token_merges(["! \""])
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    w.add_chat_template("{{ messages }}")

    def permute(x, heads):
        return x.reshape(heads, 2, x.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(x.shape)

    short = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
             "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
             "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
             "post_attention_layernorm": "ffn_norm"}
    for name in names:
        t = tensors[name]
        if name == "model.embed_tokens.weight":
            g = "token_embd.weight"
        elif name == "model.norm.weight":
            g = "output_norm.weight"
        else:
            _, _, n, rest = name.split(".", 3)
            g = f"blk.{n}.{short[rest.removesuffix('.weight')]}.weight"
            if rest.startswith("self_attn.q_proj"):
                t = permute(t, HEADS)
            if rest.startswith("self_attn.k_proj"):
                t = permute(t, KV)
        if t.ndim == 1:
            w.add_tensor(g, t.astype(np.float32))
        else:
            w.add_tensor(g, np.ascontiguousarray(t).view(np.uint8), raw_dtype=Q.BF16)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    all_dtypes(folder / "all_dtypes.safetensors")
    gguf_types(folder / "types.gguf", folder / "types_f32_bits.safetensors")
    tiny_llama(folder)
    print("gguf", getattr(gguf, "__version__", "?"), "safetensors", safetensors.__version__,
          "ml_dtypes", ml_dtypes.__version__, "numpy", np.__version__)
