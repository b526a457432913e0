// C8: the two-step loop on the proxy. loop_check.h asks the questions of the loop itself; here is
// what the task asked for.

#include <fmt/format.h>

#include "workflow/gates/loop_check.h"

namespace tare::workflow {

GateJudgement JudgeC8(const Json& evidence) {
  Judging judging("C8", evidence);
  const Field root = judging.root();
  const Subject subject = ReadSubject(root);
  const std::string kind = root.At("kind").Str();
  const std::string scope = root.At("task_scope").OneOf({"loop", "logprob-only", "forward-only"});
  const std::vector<std::string> plan = root.At("plan").Strings();
  const Field at = root.At("loop");
  const bool has_loop = !at.IsNull();
  Loop loop;
  if (has_loop) loop = ReadLoop(at);
  if (!judging.WellFormed()) return judging.Finish();

  judging.Require("C8-08", kind == "E8", reason::kWrongEvidenceKind,
                  fmt::format("evidence of kind {} was handed in; the loop is E8", kind));
  // C8-09: what comes next is fixed by what the task asked for.
  const std::vector<std::string> want =
      scope == "forward-only"
          ? std::vector<std::string>{"full-model zero-update compare", "C6", "C7", "C8"}
      : scope == "logprob-only" ? std::vector<std::string>{"none"}
                                : std::vector<std::string>{"two-step loop"};
  judging.Require("C8-09", plan == want, reason::kOrderOfWork,
                  fmt::format("for {} the plan is {}; {} is wanted", scope, fmt::join(plan, ", "),
                              fmt::join(want, ", ")));
  if (scope != "loop") {
    judging.Require("C8-08", false, reason::kLoopNotVerified,
                    fmt::format("loop not verified: the task is limited to {}", scope),
                    scope == "forward-only"
                        ? "compare the full model without an update, then pass the training gates"
                        : "");
    judging.Require("C8-08", !has_loop, reason::kOrderOfWork,
                    "a loop was run although the task does not hold one");
    return judging.Finish();
  }
  if (judging.Require("C8-11", has_loop, reason::kLoopIncomplete, "no loop was run")) {
    CheckLoop(&judging, subject, loop);
  }
  return judging.Finish();
}

}  // namespace tare::workflow
