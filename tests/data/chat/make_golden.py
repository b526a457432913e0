"""Renders chat templates with Jinja2 as transformers does: what src/models/chat_template.cc must give.

  python3 make_golden.py TEMPLATE_DIR OUT.json     (pip install jinja2)

TEMPLATE_DIR holds NAME.jinja files, the text of `chat_template` of a model. The templates themselves are
not kept: the output names each by the SHA-256 of its bytes.
"""
import glob, hashlib, json, os, sys
from jinja2.sandbox import ImmutableSandboxedEnvironment

M = lambda *pairs: [{"role": r, "content": c} for r, c in pairs]
CHATS = [
    M(("user", "Hi")),
    M(("system", "Be brief."), ("user", "What is 1+1?")),
    M(("user", "A"), ("assistant", "B"), ("user", "C")),
    M(("system", "  padded \n"), ("user", "\n  x  \n"), ("assistant", " y "), ("user", "z\n")),
    M(("user", "q"), ("assistant", "<think>\nhm\n\n</think>\n\nsix"), ("user", "and 7?")),
    M(("user", "q"), ("assistant", "<think>\nhm\n</think>\n\nsix")),
    M(("user", "q"), ("assistant", "plain end")),
    M(("user", "q"), ("assistant", "one"), ("assistant", "two</think>\nthree")),
    M(("user", ""), ("assistant", ""), ("user", "<|im_end|> \u00e9 \U0001f600")),
    M(("user", "a"), ("system", "later"), ("user", "b")),
    M(("assistant", "first"), ("user", "second")),
    M(("user", "<tool_response>x</tool_response>"), ("assistant", "<think>a</think>b")),
]

def main():
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    out = []
    for path in sorted(glob.glob(sys.argv[1] + "/*.jinja")):
        text = open(path, newline="").read()
        template = env.from_string(text)
        for chat in CHATS:
            for generate in (True, False):
                for extra in ({}, {"enable_thinking": False}, {"date_string": "01 Feb 2030"}):
                    if not all(key in text for key in extra): continue
                    bos = "<|begin_of_text|>" if "bos_token" in text else ""
                    rendered = template.render(messages=chat, add_generation_prompt=generate, bos_token=bos, **extra)
                    out.append({"template": os.path.basename(path)[:-6], "sha256": hashlib.sha256(text.encode()).hexdigest(),
                                "messages": chat, "add_generation_prompt": generate, **extra, "rendered": rendered})
    with open(sys.argv[2], "w") as f:
        f.write("[\n" + ",\n".join(json.dumps(o, ensure_ascii=False, separators=(",", ":")) for o in out) + "\n]\n")
    print(len(out), "renderings")

main()
