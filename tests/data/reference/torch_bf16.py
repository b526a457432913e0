"""What PyTorch in bf16 gives on the reference tokens: the yardstick of the logprob test.

  python3 torch_bf16.py MODEL_DIR OUT.safetensors     (pip install torch transformers safetensors)
"""
import os, sys, torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

here = os.path.dirname(os.path.abspath(__file__))
ref = load_file(here + "/smollm2_f64.safetensors")
out = {}
for attention in ("sdpa", "eager"):
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16, attn_implementation=attention)
    worst = total = count = 0
    for i in range(8):
        tokens = torch.tensor(ref[f"{i}.tokens"].astype("int64"))
        with torch.no_grad():
            logits = model(tokens[None, :-1]).logits[0].float()
        lp = torch.log_softmax(logits, -1)[torch.arange(len(tokens) - 1), tokens[1:]].numpy()
        out[f"{attention}.{i}.logprob"] = lp
        d = abs(lp.astype("float64") - ref[f"{i}.logprob_f64"])
        worst, total, count = max(worst, d.max()), total + d.sum(), count + len(d)
    print(attention, "mean", total / count, "max", worst, "tokens", count)
save_file(out, sys.argv[2], {"made_by": f"torch {torch.__version__}, bfloat16, CPU"})
