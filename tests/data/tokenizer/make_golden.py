"""Makes small.json, golden.bin and smollm2_golden.bin: what the `tokenizers` package says of 10,000 strings.

  python3 make_golden.py OUT_DIR [SMOLLM2.gguf]     (pip install tokenizers gguf)

The strings follow from a generator that src/models/tokenizer_golden_test.cc repeats step by step.
golden.bin: magic "TKGOLD01", uint32 count, 32 bytes SHA-256 over all strings (each with a newline),
then for each of the four variants `count` little-endian uint32: the first four bytes of SHA-256 over the
token ids as little-endian int32. smollm2_golden.bin: the same with one variant, the real vocabulary.
"""
import hashlib, json, struct, sys, glob
import tokenizers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers, decoders, normalizers

COUNT = 10000
RANGES = [(0x20, 0x7e), (0xa1, 0x17f), (0x300, 0x36f), (0x391, 0x3a1), (0x410, 0x44f), (0x5d0, 0x5ea),
          (0x621, 0x64a), (0x660, 0x669), (0x905, 0x939), (0x966, 0x96f), (0xe01, 0xe3a), (0x1100, 0x1112),
          (0x2160, 0x2188), (0x2460, 0x249b), (0x3041, 0x3096), (0x4e00, 0x9fa5), (0xac00, 0xd7a3),
          (0xff10, 0xff19), (0x1d7ce, 0x1d7ff), (0x1f300, 0x1f5ff), (0x1f600, 0x1f64f), (0x20000, 0x2a6d6)]
SPACES = [0x9, 0xa, 0xb, 0xc, 0xd, 0x1c, 0x20, 0x85, 0xa0, 0x1680, 0x180e, 0x2000, 0x200a, 0x200b, 0x2028,
          0x2029, 0x202f, 0x205f, 0x3000, 0xfeff]
PIECES = ["'s", "'S", "'T", "'re", "'VE", "'ll", "'Ll", "'d", "'m", "'", "''", "don't", "it's", "I'M", "you're",
          "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|im_", "\r\n", "\n\n", "\n ", " \n", "\t", "  ", "   ",
          "0", "12", "123", "1234", "3.14", "1e-9", "0x1F", "def f(x):\n    return x\n", "http://a.b/c?d=e&f", "...",
          "---", "!!!", "$%&", " the", " and", "The", "tion", "e\u0301", "\u00e9", "a\u0308\u0323", "\u1112\u1161\u11ab",
          "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\U0001f1e9\U0001f1ea", "\ufb01", "\u017f", "\u212a", "\u2126",
          "\u0130", "\u00df", "\u1e9e", "'\u017f", "\u0344", "\u2adc"]

MASK = (1 << 64) - 1
class SplitMix:
    def __init__(self, seed): self.s = seed
    def next(self):
        self.s = (self.s + 0x9E3779B97F4A7C15) & MASK
        z = self.s
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)
    def below(self, n): return (self.next() >> 33) % n

def make_string(index):
    r = SplitMix(index)
    out = []
    for _ in range(r.below(12)):
        kind = r.below(8)
        if kind == 0: out.append(PIECES[r.below(len(PIECES))])
        elif kind == 1: out.append(chr(SPACES[r.below(len(SPACES))]) * (1 + r.below(3)))
        elif kind == 2: out.append("".join(chr(48 + r.below(10)) for _ in range(1 + r.below(7))))
        elif kind in (3, 4):
            out.append(" " * r.below(2) + "".join(chr(97 + r.below(26)) for _ in range(1 + r.below(9))))
        elif kind == 5:
            lo, hi = RANGES[r.below(len(RANGES))]
            out.append("".join(chr(lo + r.below(hi - lo + 1)) for _ in range(1 + r.below(5))))
        elif kind == 6: out.append(chr(33 + r.below(15)) * (1 + r.below(3)))
        else: out.append(PIECES[r.below(len(PIECES))] + " " + PIECES[r.below(len(PIECES))])
    return "".join(out)

LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
def split(regex): return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
VARIANTS = [
    ("gpt2", {}, dict(BYTE_LEVEL, use_regex=True), None),
    ("smollm", {}, {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True},
                                                           dict(BYTE_LEVEL, use_regex=True)]}, None),
    ("llama3", {"ignore_merges": True}, {"type": "Sequence", "pretokenizers": [split(LLAMA3), BYTE_LEVEL]}, None),
    ("qwen2", {}, {"type": "Sequence", "pretokenizers": [split(QWEN2), BYTE_LEVEL]}, {"type": "NFC"}),
]

def train_small():
    corpus = [open(f, encoding="utf-8", errors="ignore").read() for f in sorted(glob.glob("/usr/lib/python3*/[a-f]*.py"))]
    tk = Tokenizer(models.BPE())
    tk.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tk.decoder = decoders.ByteLevel()
    tk.train_from_iterator(corpus + [make_string(i) for i in range(20000, 24000)], trainers.BpeTrainer(
        vocab_size=1500, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tk.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    return json.loads(tk.to_str())

def hashes(tk, strings):
    for s in strings:
        ids = tk.encode(s, add_special_tokens=False).ids
        yield hashlib.sha256(struct.pack(f"<{len(ids)}i", *ids)).digest()[:4]

def write(path, tks, strings):
    with open(path, "wb") as f:
        f.write(b"TKGOLD01" + struct.pack("<I", len(strings)))
        f.write(hashlib.sha256("".join(s + "\n" for s in strings).encode()).digest())
        for tk in tks:
            f.write(b"".join(hashes(tk, strings)))

def from_gguf(path):
    from gguf import GGUFReader
    r = GGUFReader(path)
    text = lambda key: [bytes(r.fields[key].parts[i]).decode() for i in r.fields[key].data]
    types = [int(r.fields["tokenizer.ggml.token_type"].parts[i][0]) for i in r.fields["tokenizer.ggml.token_type"].data]
    tokens = text("tokenizer.ggml.tokens")
    root = {"version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
            "pre_tokenizer": VARIANTS[1][2], "decoder": BYTE_LEVEL,
            "added_tokens": [{"id": i, "content": t, "single_word": False, "lstrip": False, "rstrip": False,
                              "normalized": False, "special": True} for i, t in enumerate(tokens) if types[i] == 3],
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                      "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                      "vocab": {t: i for i, t in enumerate(tokens)}, "merges": text("tokenizer.ggml.merges")}}
    return Tokenizer.from_str(json.dumps(root))

def main():
    out = sys.argv[1]
    strings = [make_string(i) for i in range(COUNT)]
    small = train_small()
    small["model"]["merges"] = [" ".join(m) if isinstance(m, list) else m for m in small["model"]["merges"]]
    with open(out + "/small.json", "w") as f:
        json.dump(small, f, ensure_ascii=False, separators=(",", ":"))
        f.write("\n")
    tks = []
    for _, model, pre, norm in VARIANTS:
        root = json.loads(json.dumps(small))
        root["model"].update(model)
        root["pre_tokenizer"], root["normalizer"], root["post_processor"] = pre, norm, None
        tks.append(Tokenizer.from_str(json.dumps(root)))
    write(out + "/golden.bin", tks, strings)
    if len(sys.argv) > 2:
        write(out + "/smollm2_golden.bin", [from_gguf(sys.argv[2])], strings)
    print("tokenizers", tokenizers.__version__, "strings", len(strings), "bytes", sum(len(s.encode()) for s in strings))

main()
