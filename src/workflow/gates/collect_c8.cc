// Acts for C8: one two-step loop in real processes, its receipt and logprobs as evidence.

#include "workflow/gates/collect_loop.h"
#include "workflow/gates/loop_check.h"

namespace tare::workflow {

Result<Json> CollectC8(Collecting* c) {
  TARE_ASSIGN_OR_RETURN(const Json subject, c->SubjectOf());
  TARE_ASSIGN_OR_RETURN(const LoopRun run, RecordLoop(c));
  TARE_ASSIGN_OR_RETURN(Json loop, LoopFromReceipt(run.receipt, run.files, run.runtime));
  return Json{
      {"schema", "tare.gate.C8/v1"}, {"subject", subject},        {"kind", "E8"},
      {"task_scope", "loop"},        {"plan", {"two-step loop"}}, {"loop", std::move(loop)}};
}

}  // namespace tare::workflow
