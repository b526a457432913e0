#!/usr/bin/env python3
"""Which requirement rows the tests name.

  coverage.py            writes docs/coverage.md
  coverage.py --check    writes nothing; fails when a test names a row that does not exist

Reads docs/spec/requirements.md and every test source (*_test.cc, *_test.py, *_fuzz.cc) for row IDs,
"GEN-24", lists "GEN-01, GEN-02" and ranges "FIND-01 to FIND-18"; and the table of docs/guides/README.md,
whose guides are run as they stand by the tests `Guide.*`. That a test names a row says where
to look; it does not say that the row's whole acceptance test is met.
"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
GROUPS = ("GEN C0 C1 C2 C3 C4 C5 C6 C7 C8 C9 C10 CHEAP RL TRACK STOP FIND NUM DISC SHAPE BWD BASE "
          "DOC SYS").split()
ROW = re.compile(r"(?<![\w-])(%s)-(\d\d)(?![\w-])" % "|".join(sorted(GROUPS, key=len, reverse=True)))
RANGE = re.compile(ROW.pattern + r"(?:\s+to\s+|–)" + r"(?:\1-)?(\d\d)\b")
MARK = re.compile(r"\[(C|G|G2|X|H)\]")


def read_rows(text):
    """[(id, statement, marks)] in the order of the matrix."""
    rows, seen = [], set()
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) < 5 or not ROW.fullmatch(cells[1]):
            continue
        if cells[1] in seen:
            raise SystemExit(f"requirements.md: row {cells[1]} stands there twice")
        seen.add(cells[1])
        rows.append((cells[1], cells[2], MARK.findall(line)))
    return rows


def ids_in(line):
    for group, first, last in RANGE.findall(line):
        for n in range(int(first), int(last) + 1):
            yield f"{group}-{n:02d}"
    for group, number in ROW.findall(line):
        yield f"{group}-{number}"


def read_tests():
    """{row id: {file: first line}}"""
    named = {}
    files = []
    for pattern in ("src/**/*_test.cc", "src/**/*_fuzz.cc", "tests/**/*_test.cc", "tests/**/*_test.py"):
        files += ROOT.glob(pattern)
    for path in sorted(set(files)):
        name = path.relative_to(ROOT).as_posix()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            for row in ids_in(line):
                named.setdefault(row, {}).setdefault(name, number)
    # `| [file.md](file.md) | what it answers | DOC-01 to DOC-06 |`
    for line in (ROOT / "docs/guides/README.md").read_text(encoding="utf-8").splitlines():
        guide = re.match(r"\| \[(\w[\w-]*\.md)\]\(\1\) \|", line)
        if not guide:
            continue
        if not (ROOT / "docs/guides" / guide[1]).is_file():
            raise SystemExit(f"docs/guides/README.md names {guide[1]}, which is not there")
        for row in ids_in(line.rsplit("|", 2)[1]):
            named.setdefault(row, {})[f"docs/guides/{guide[1]}"] = 1
    return named


def page(rows, named):
    met = [row for row in rows if row[0] in named]
    out = ["# Requirement rows and the tests that name them", "",
           "Written by `tools/coverage.py` from `docs/spec/requirements.md` and the test sources. A test",
           "that names a row says where to look, not that the row's whole acceptance test is met.",
           "Marks: C on a CPU, G a GPU, G2 several, X an outside system, H a person.", "",
           f"Rows: {len(rows)}. Named by a test: {len(met)}. Open: {len(rows) - len(met)}.", "",
           "| group | rows | named | open |", "|---|---|---|---|"]
    for group in GROUPS:
        ids = [row[0] for row in rows if row[0].rsplit("-", 1)[0] == group]
        some = sum(1 for row in ids if row in named)
        out.append(f"| {group} | {len(ids)} | {some} | {len(ids) - some} |")
    out += ["", "## Named", "", "| row | statement | marks | tests |", "|---|---|---|---|"]
    for row, statement, marks in met:
        tests = ", ".join(f"`{name}`" for name in sorted(named[row]))
        out.append(f"| {row} | {statement} | {' '.join(marks)} | {tests} |")
    out += ["", "## Open: no test names the row", "", "| row | statement | marks |", "|---|---|---|"]
    for row, statement, marks in rows:
        if row not in named:
            out.append(f"| {row} | {statement} | {' '.join(marks)} |")
    return "\n".join(out) + "\n"


def main():
    if sys.argv[1:] not in ([], ["--check"]):
        raise SystemExit(__doc__)
    rows = read_rows((ROOT / "docs/spec/requirements.md").read_text(encoding="utf-8"))
    if not rows:
        raise SystemExit("docs/spec/requirements.md: no row found")
    named = read_tests()
    known = {row[0] for row in rows}
    unknown = sorted(set(named) - known)
    for row in unknown:
        where = ", ".join(f"{name}:{line}" for name, line in sorted(named[row].items()))
        print(f"{where}: no row {row} in docs/spec/requirements.md", file=sys.stderr)
    if unknown:
        return 1
    if sys.argv[1:] == ["--check"]:
        print(f"{len(named)} of {len(rows)} rows are named by a test; no unknown row")
    else:
        (ROOT / "docs/coverage.md").write_text(page(rows, named), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
