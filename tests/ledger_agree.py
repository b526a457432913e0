"""Runs tools/verify_min.py over tamper cases, for the test that compares it with `tare verify`.

  ledger_agree.py VERIFY_MIN flips DIR MASK STRIDE   one digit (exit status) per flipped byte, files
                                                    in sorted order
  ledger_agree.py VERIFY_MIN cuts DIR PATH STRIDE    one digit per cut of PATH (below DIR)
  ledger_agree.py VERIFY_MIN dirs DIR...             one digit per directory
"""
import importlib.util
import os
import sys

spec = importlib.util.spec_from_file_location("verify_min", sys.argv[1])
verify_min = importlib.util.module_from_spec(spec)
spec.loader.exec_module(verify_min)


def status(directory, checkpoint=None):
    try:
        return str(verify_min.verify(directory, checkpoint)[0])
    except Exception as error:  # an outsider's script that stops has not passed anything
        print(type(error).__name__, error, file=sys.stderr)
        return "1"


if sys.argv[2] == "dirs":
    for directory in sys.argv[3:]:
        kept = directory + ".checkpoint"
        text = open(kept, encoding="utf-8").read() if os.path.exists(kept) else None
        sys.stdout.write(status(directory, text))
elif sys.argv[2] == "cuts":
    root, path, stride = sys.argv[3], os.path.join(sys.argv[3], sys.argv[4]), int(sys.argv[5])
    data = open(path, "rb").read()
    for cut in range(0, len(data), stride):
        open(path, "wb").write(data[:cut])
        sys.stdout.write(status(root))
    open(path, "wb").write(data)
else:
    root, mask, stride = sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
    paths = sorted(os.path.join(at, name) for at, _, names in os.walk(root) for name in names)
    number = 0
    for path in paths:
        data = open(path, "rb").read()
        with open(path, "r+b") as file:
            for i, byte in enumerate(data):
                number += 1
                if number % stride:
                    continue
                file.seek(i)
                file.write(bytes([byte ^ mask]))
                file.flush()
                sys.stdout.write(status(root))
                file.seek(i)
                file.write(bytes([byte]))
            file.flush()
