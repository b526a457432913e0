#pragma once

// AdamW with f32 master weights, decoupled decay and an optional bf16 copy for serving:
//   g = grad * grad_scale
//   m = fma(beta1, m, (1 - beta1) * g);  v = fma(beta2, v, ((1 - beta2) * g) * g)
//   d = (m * c1) / (sqrt(v * c2) + eps)
//   master = fma(-lr, d, master * decay);  copy = bf16(master), nearest even
// c1 = 1 / (1 - beta1^t), c2 = 1 / (1 - beta2^t), decay = 1 - lr * weight_decay: f64, rounded once.
// Elementwise: no order can move a bit. Not promised: equality with another library's bits.

#include <cstdint>

#include "ops/contract.h"
#include "ops/op.h"

namespace tare::ops::adamw {

TARE_FAULT(kNoBiasCorrection, "adamw.no_bias_correction", "adamw", "C7,C8",
           "the moments are used without bias correction");
TARE_FAULT(kCoupledDecay, "adamw.coupled_decay", "adamw", "C7,C8",
           "weight decay is added to the gradient");
TARE_FAULT(kEpsInsideRoot, "adamw.eps_inside_root", "adamw", "C7,C8",
           "epsilon is added under the square root");

struct Params {
  float beta1 = 0.9f;
  float beta2 = 0.999f;
  float eps = 1e-8f;
  float weight_decay = 0.0f;
  bool bias_correction = true;
};

struct Args {
  int64_t count = 0;            // elements
  float* master = nullptr;      // [count], updated
  float* m = nullptr;           // [count], updated
  float* v = nullptr;           // [count], updated
  const float* grad = nullptr;  // [count]
  uint16_t* copy = nullptr;     // [count] bf16; may be null
  float lr = 0.0f;
  int64_t step = 0;         // t, 1 at the first update
  float grad_scale = 1.0f;  // clip factor
};

// What t decides, the same on every device.
struct StepConstants {
  float c1 = 1, c2 = 1, decay = 1;
};
StepConstants ConstantsOf(const Params& params, float lr, int64_t step);

Contract ContractOf(const Params& params);
Status Step(const Ctx& ctx, const Params& params, const Args& args);

}  // namespace tare::ops::adamw
