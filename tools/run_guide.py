#!/usr/bin/env python3
"""run_guide.py --tare PROGRAM [--data DIR] GUIDE.md...: runs the examples of guides, so that they stay true.

A fenced block marked `sh` is run by bash in a fresh folder (one per guide; its blocks share it), with the
folder of PROGRAM first in PATH and TARE_DATA naming tests/data. Every command must succeed; a line that ends
in `# exit N` must exit with N. A fenced block marked `text` right after it lists lines that must occur in its
output in this order; `...` in a line stands for anything. Other blocks are not run. A guide without one `sh`
block is an error. Standard library only."""
import argparse, os, re, subprocess, sys, tempfile

EXIT = re.compile(r"^(?P<command>.*\S)\s+# exit (?P<status>\d+)$")


def blocks(text):
    """(marker, content, line number) of each fenced block."""
    out, inside, begin, lines = [], None, 0, []
    for number, line in enumerate(text.split("\n"), 1):
        if line.startswith("```"):
            if inside is None:
                inside, begin, lines = line[3:].strip(), number, []
            else:
                out.append((inside, lines, begin))
                inside = None
        elif inside is not None:
            lines.append(line)
    if inside is not None:
        raise SystemExit(f"line {begin}: the block is not closed")
    return out


def script(lines):
    out = ["set -e -u -o pipefail"]
    for line in lines:
        m = EXIT.match(line)
        if not m:
            out.append(line)
            continue
        out += ["set +e", m["command"], "tare_status=$?", "set -e",
                f'[ "$tare_status" -eq {m["status"]} ] || {{ echo "guide: exit $tare_status, expected '
                f'{m["status"]}" >&2; exit 97; }}']
    return "\n".join(out) + "\n"


def missing(expected, output):
    """The first expected line that does not follow, or None."""
    at = 0
    for line in expected:
        if not line.strip():
            continue
        pattern = re.compile(".*?".join(re.escape(part) for part in line.strip().split("...")))
        m = pattern.search(output, at)
        if not m:
            return line
        at = m.end()
    return None


def run(path, tare, data):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "TARE_"))}
    env["PATH"] = os.path.dirname(os.path.abspath(tare)) + ":" + env["PATH"]
    env["TARE_DATA"] = os.path.abspath(data)
    ran, output = 0, ""
    with tempfile.TemporaryDirectory(prefix="tare-guide-") as folder:
        found = blocks(open(path, encoding="utf-8").read())
        for i, (marker, lines, number) in enumerate(found):
            if marker == "sh":
                p = subprocess.run(["bash", "-c", script(lines)], cwd=folder, env=env, text=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=600)
                output, ran = p.stdout, ran + 1
                if p.returncode != 0:
                    return f"{path}:{number}: exit {p.returncode}\n{output}"
            elif marker == "text" and i > 0 and found[i - 1][0] == "sh":
                line = missing(lines, output)
                if line is not None:
                    return f"{path}:{number}: not in the output, in this order: {line}\n{output}"
    return None if ran else f"{path}: no example"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tare", required=True)
    parser.add_argument("--data", default=os.path.join(os.path.dirname(__file__), "..", "tests", "data"))
    parser.add_argument("guides", nargs="+")
    a = parser.parse_args()
    wrong = 0
    for guide in a.guides:
        problem = run(guide, a.tare, a.data)
        print(f"{'FAILED' if problem else 'ok    '} {guide}", flush=True)
        if problem:
            print(problem)
            wrong += 1
    print(f"{len(a.guides) - wrong} of {len(a.guides)} guides run")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
