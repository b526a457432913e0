#pragma once

// Between adamw.cc and adamw.cu: what the entries call for a device, after their checks.

#include "ops/adamw/adamw.h"

namespace tare::ops::adamw {

Status StepCuda(const Ctx& ctx, const Params& params, const StepConstants& constants,
                const Args& args, bool coupled, bool inside);

}  // namespace tare::ops::adamw
