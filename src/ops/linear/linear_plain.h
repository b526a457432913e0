#pragma once

// The linear contract as plain scalar loops: what the fast kernels are held to, and the place where
// the planted faults of the operator live (a fault run is not meant to be fast).

#include <vector>

#include "ops/linear/gemm.h"
#include "ops/linear/linear.h"

namespace tare::ops::linear {

// True when a fault of this operator is planted on the side.
bool AnyFault(fault::Side side);

// The sm90-mma step is used: the profile says so and no operand is f32.
bool ForwardUsesSm90(Profile profile, const Params& params);
bool BackwardUsesSm90(Profile profile, const Params& params);

// K of the forward and n of dx, cut into the contract's segments.
std::vector<gemm::Group> ForwardGroups(const Params& params);
std::vector<gemm::Group> DxGroups(const Params& params);

// The whole call by scalar loops. Arguments are checked by the caller.
Status PlainForward(const Ctx& ctx, const Params& params, const Args& args);
Status PlainBackward(const Ctx& ctx, const Params& params, const BackwardArgs& args);

// dbias, the same for plain and fast: lanes(32) over each unit's tokens.
void AddBiasGradient(const Ctx& ctx, const Params& params, const BackwardArgs& args);

}  // namespace tare::ops::linear
