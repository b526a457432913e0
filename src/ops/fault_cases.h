#pragma once

// Test support: every planted fault of the row operators with data that exposes it. Read by the
// fault tests of the CPU and by those that plant the fault on a device.

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "ops/generic_case.h"

namespace tare::ops {

struct FaultCase {
  const char* fault;
  const char* op;
  // Picks the key: dtype, out dtype and variant.
  DType dtype;
  DType out_dtype;
  const char* variant;
  // What must change: an operand's name, of outputs or of input gradients.
  const char* operand;
  bool backward = false;
  std::function<void(Case&)> prepare = nullptr;
};

inline void EqualLogits(Case& c) {
  for (int64_t i = 0; i < c.in[0].elements(); ++i) Put(c.in[0], i, i % 7 == 0 ? 1.0 : 0.5);
}
inline void Gaps(Case& c) { c.units = {{0, 20}, {23, 14}}; }
inline void NanInMaskedSlots(Case& c) {
  for (int64_t t = 0; t < c.rows; ++t) {
    if (Get(c.in[5], t) == 0) Put(c.in[0], t, std::nan(""));
  }
}
inline void TinyMoments(Case& c) {
  for (int64_t i = 0; i < c.rows; ++i) {
    Put(c.in[2], i, 1e-10);
    Put(c.in[3], i, 1e-6);
  }
}
// Halfway between two codes at the block's own scale: amax 448 makes the scale 1.
inline void HalfwayCodes(Case& c) {
  const int64_t width = c.in[0].elements() / c.rows;
  for (int64_t i = 0; i < c.in[0].elements(); ++i)
    Put(c.in[0], i, i % width % 128 == 0 ? 448.0 : 17.0);
}

inline std::vector<FaultCase> FaultCases() {
  const DType b = DType::kBF16, f = DType::kF32;
  return {
      {"rmsnorm.unrounded_sum", "rmsnorm", b, b, "residual", "y"},
      {"rmsnorm.cast_before_residual_add", "rmsnorm", b, f, "residual", "residual_out"},
      {"rmsnorm.epsilon", "rmsnorm", f, f, "", "y"},
      {"rmsnorm.late_cast", "rmsnorm", b, b, "residual", "y"},
      {"rmsnorm.order_reversed", "rmsnorm", f, f, "", "y"},
      {"rmsnorm.fma_split", "rmsnorm", f, f, "", "y"},
      {"rmsnorm.sum_over_padded_rows", "rmsnorm", b, b, "residual", "w", true, Gaps},
      {"rope.positions_bf16", "rope", b, b, "half", "y"},
      {"rope.other_scaling", "rope", b, b, "half-llama3", "y"},
      {"rope.cast_before_rotate", "rope", b, b, "half", "y"},
      {"rope.gradient_not_rotated_back", "rope", b, b, "half", "x", true},
      {"gate.approximate_exp", "gate", b, b, "silu", "y"},
      {"gate.cast_before_multiply", "gate", b, b, "silu", "y"},
      {"gate.detached_forward", "gate", b, b, "silu", "gate", true},
      {"logprob.logits_bf16", "logprob", f, b, "", "logprob"},
      {"logprob.temperature_after_cast", "logprob", f, b, "", "logprob"},
      {"logprob.temperature_missing", "logprob", f, b, "", "logprob"},
      {"logprob.approximate_exp", "logprob", f, b, "", "logprob"},
      {"logprob.one_leaf", "logprob", f, b, "", "logprob"},
      {"logprob.padded_vocabulary", "logprob", f, b, "", "logprob"},
      {"router.ties_highest_index", "router", b, b, "", "ids", false, EqualLogits},
      {"router.order_sorted", "router", f, f, "", "ids"},
      {"router.renormalise_flipped", "router", f, f, "", "weights"},
      {"router.decision_recomputed", "router", f, f, "", "logits", true},
      {"combine.order_by_arrival", "combine", f, f, "turned", "out"},
      {"combine.last_slot_dropped", "combine", f, f, "", "out"},
      {"sampling.top_k_ties_highest", "sampling", f, f, "", "candidates", false, EqualLogits},
      {"sampling.seed_by_batch_row", "sampling", f, f, "", "token"},
      {"policy_loss.mask_by_multiply", "policy_loss", f, f, "k3-token", "token_loss", false,
       NanInMaskedSlots},
      {"policy_loss.mask_by_multiply", "policy_loss", f, f, "k3-token", "logprob", true,
       NanInMaskedSlots},
      {"policy_loss.detached_forward", "policy_loss", f, f, "k3-token", "logprob", true},
      {"policy_loss.count_of_the_shard", "policy_loss", f, f, "k3-token", "token_loss"},
      {"grad_norm.clip_by_shard", "grad_norm", f, f, "", "factor"},
      {"adamw.no_bias_correction", "adamw", f, b, "", "master"},
      {"adamw.coupled_decay", "adamw", f, b, "", "master"},
      {"adamw.eps_inside_root", "adamw", f, b, "", "master", false, TinyMoments},
      {"fp8_linear.one_chain", "fp8_linear", DType::kE4M3, f, "bias", "y"},
      {"fp8_linear.scales_in_turn", "fp8_linear", DType::kE4M3, f, "bias", "y"},
      {"quantize.per_tensor_scale", "quantize", b, DType::kE4M3, "", "scale"},
      {"quantize.round_half_away", "quantize", b, DType::kE4M3, "", "q", false, HalfwayCodes},
  };
}

inline const OpKey& KeyOf(const OpInfo& op, const FaultCase& c) {
  for (const OpKey& key : op.keys) {
    if (key.dtype == c.dtype && key.out_dtype == c.out_dtype && key.variant == c.variant)
      return key;
  }
  ADD_FAILURE() << "no key of " << op.name << " is like that";
  return op.keys[0];
}

inline int64_t Differences(const Tensor& a, const Tensor& b) {
  int64_t count = 0;
  const int64_t size = SizeOf(a.dtype());
  for (int64_t i = 0; i < a.elements(); ++i) {
    count +=
        std::memcmp(static_cast<const char*>(a.data()) + i * size,
                    static_cast<const char*>(b.data()) + i * size, static_cast<size_t>(size)) != 0;
  }
  return count;
}

}  // namespace tare::ops
