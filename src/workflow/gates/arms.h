#pragma once

// Arms of systems that are not ours: the same tokens, scored twice, compared pair by pair. One pair
// is no gate: it can show that a gate fails, and never opens one.

#include "workflow/gates/judge.h"

namespace tare::workflow {

// Evidence of schema "tare.gate.arms/v1" (docs/formats/gate_evidence.md): two arms, counts per
// sequence, and optionally a control in which the sequences are known to be isolated. The
// judgement's gate is "arms".
GateJudgement JudgeArms(const Json& evidence);

}  // namespace tare::workflow
