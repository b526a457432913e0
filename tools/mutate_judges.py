#!/usr/bin/env python3
"""Takes each check of the judges away in turn and asks whether a test notices.

    tools/mutate_judges.py WORK [--only TEXT]

Clones the committed tree into WORK (an empty or missing folder), lets every call of Judging::Require, Find and
NotCovered know its place, builds the tests of the gates and of the claims, and runs them once for each place with the
call there made to hold (Require) or to say nothing (Find, NotCovered). Prints the places that no test sees refuse and
those that no test misses; exits with 1 if there are any. The tests that change bundles at random are left out: what they
see is luck. About 15 minutes on one core.
"""

import argparse
import collections
import os
import pathlib
import subprocess
import sys

TESTS = {
    "workflow_gates_test": "-*Slow*:BundleTest*:CollectTest*:FindTest*:JudgeTest.NoKeyMayBeMissingOrMistyped",
    "workflow_claims_test": "-*Slow*",
}
WHERE = "std::source_location where = std::source_location::current()"
HOOK = """
namespace {
// MUTATE_SITE names the place to take away; MUTATE_LOG gets how often each place held and did not.
class Places {
 public:
  ~Places() {
    const char* log = getenv("MUTATE_LOG");
    if (log == nullptr) return;
    FILE* out = fopen(fmt::format("{}.{}", log, getpid()).c_str(), "a");
    for (const auto& [place, n] : seen_) fprintf(out, "%s %ld %ld\\n", place.c_str(), n.first, n.second);
    fclose(out);
  }
  bool Taken(const std::source_location& at, char kind, bool holds) {
    std::string file = at.file_name();
    const std::string place = fmt::format("{}:{}:{}", file.substr(file.find("workflow/")), at.line(), kind);
    (holds ? seen_[place].first : seen_[place].second)++;
    const char* site = getenv("MUTATE_SITE");
    return site != nullptr && place == site;
  }

 private:
  std::map<std::string, std::pair<long, long>> seen_;
};
bool Taken(const std::source_location& at, char kind, bool holds) {
  static Places places;
  return places.Taken(at, kind, holds);
}
}  // namespace

"""


def edit(path, pairs):
    text = path.read_text()
    for old, new in pairs:
        if text.count(old) != 1:
            sys.exit(f"mutate_judges: {path} has {text.count(old)} times instead of once:\n{old}")
        text = text.replace(old, new)
    path.write_text(text)


def instrument(root):
    gates = root / "src/workflow/gates"
    edit(gates / "judge.h", [
        ("#include <set>\n", "#include <set>\n#include <source_location>\n"),
        ("               std::string next = {});\n", f"               std::string next = {{}}, {WHERE});\n"),
        ("            std::string next = {});\n  void Pass", f"            std::string next = {{}}, {WHERE});\n  void Pass"),
        ("void NotCovered(std::string_view row, std::string what, std::string next);",
         f"void NotCovered(std::string_view row, std::string what, std::string next, {WHERE});"),
    ])
    edit(gates / "judge.cc", [
        ('#include "workflow/gates/judge.h"\n', '#include "workflow/gates/judge.h"\n\n#include <unistd.h>\n'),
        ("bool Judging::Require(", HOOK + "bool Judging::Require("),
        ("                      std::string next) {\n  if (holds) {",
         "                      std::string next, std::source_location where) {\n"
         "  if (Taken(where, 'R', holds)) holds = true;\n  if (holds) {"),
        ("  Find(known->verdict, row, reason, std::move(detail), std::move(next));\n  return false;",
         "  if (next.empty()) next = known->next;\n"
         "  findings_.push_back({known->verdict, std::string(reason), std::string(row), std::move(detail),\n"
         "                       std::move(next)});\n  return false;"),
        ("                   std::string detail, std::string next) {\n",
         "                   std::string detail, std::string next, std::source_location where) {\n"
         "  if (Taken(where, 'F', false)) return;\n"),
        ("void Judging::NotCovered(std::string_view row, std::string what, std::string next) {\n",
         "void Judging::NotCovered(std::string_view row, std::string what, std::string next,\n"
         "                         std::source_location where) {\n  if (Taken(where, 'N', false)) return;\n"),
    ])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=pathlib.Path)
    parser.add_argument("--only", default="", help="places with this text alone, as gates/c5.cc")
    args = parser.parse_args()
    source = pathlib.Path(__file__).resolve().parent.parent
    root = args.work.resolve()
    subprocess.run(["git", "clone", "-q", source, root], check=True)
    instrument(root)
    subprocess.run(["cmake", "--preset", "dev"], cwd=root, check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", "build/dev", "--target", *TESTS], cwd=root, check=True)

    def run(test, **env):
        return subprocess.run([f"build/dev/tests/{test}", f"--gtest_filter={TESTS[test]}", "--gtest_brief=1"], cwd=root,
                              env=dict(os.environ, **env), stdout=subprocess.DEVNULL,
                              stderr=subprocess.DEVNULL).returncode

    seen = collections.defaultdict(lambda: [0, 0])
    tests_of = collections.defaultdict(set)
    for test in TESTS:
        log = root / f"places.{test}"
        if run(test, MUTATE_LOG=str(log)) != 0:
            sys.exit(f"mutate_judges: {test} fails as it is")
        for part in root.glob(f"places.{test}.*"):
            for line in part.read_text().splitlines():
                place, held, refused = line.split()
                seen[place][0] += int(held)
                seen[place][1] += int(refused)
                tests_of[place].add(test)
    places = sorted(p for p in seen if args.only in p)
    bad = 0
    for place in places:
        if seen[place][1] == 0:
            print(f"{place}: no test sees it refuse", flush=True)
            bad += 1
        elif all(run(test, MUTATE_SITE=place) == 0 for test in sorted(tests_of[place])):
            print(f"{place}: no test notices that it is gone", flush=True)
            bad += 1
    print(f"{len(places)} places, {len(places) - bad} noticed, {bad} not")
    return 1 if bad or not places else 0


if __name__ == "__main__":
    sys.exit(main())
