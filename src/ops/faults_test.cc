// Planted faults of the row operators: each test first shows that two runs agree bit by bit, then
// that the fault flips bits on data chosen to expose it, on its own side alone.

#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "ops/generic_case.h"

namespace tare::ops {
namespace {

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

void EqualLogits(Case& c) {
  for (int64_t i = 0; i < c.in[0].elements(); ++i) Put(c.in[0], i, i % 7 == 0 ? 1.0 : 0.5);
}
void Gaps(Case& c) { c.units = {{0, 20}, {23, 14}}; }
void NanInMaskedSlots(Case& c) {
  for (int64_t t = 0; t < c.rows; ++t) {
    if (Get(c.in[5], t) == 0) Put(c.in[0], t, std::nan(""));
  }
}
void TinyMoments(Case& c) {
  for (int64_t i = 0; i < c.rows; ++i) {
    Put(c.in[2], i, 1e-10);
    Put(c.in[3], i, 1e-6);
  }
}
// Halfway between two codes at the block's own scale: amax 448 makes the scale 1.
void HalfwayCodes(Case& c) {
  const int64_t width = c.in[0].elements() / c.rows;
  for (int64_t i = 0; i < c.in[0].elements(); ++i)
    Put(c.in[0], i, i % width % 128 == 0 ? 448.0 : 17.0);
}

std::vector<FaultCase> Cases() {
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

const OpKey& KeyOf(const OpInfo& op, const FaultCase& c) {
  for (const OpKey& key : op.keys) {
    if (key.dtype == c.dtype && key.out_dtype == c.out_dtype && key.variant == c.variant)
      return key;
  }
  ADD_FAILURE() << "no key of " << op.name << " is like that";
  return op.keys[0];
}

int64_t Differences(const Tensor& a, const Tensor& b) {
  int64_t count = 0;
  const int64_t size = SizeOf(a.dtype());
  for (int64_t i = 0; i < a.elements(); ++i) {
    count +=
        std::memcmp(static_cast<const char*>(a.data()) + i * size,
                    static_cast<const char*>(b.data()) + i * size, static_cast<size_t>(size)) != 0;
  }
  return count;
}

TEST(Faults, EachFlipsBitsOnlyWhereItIsActive) {
  for (const FaultCase& f : Cases()) {
    SCOPED_TRACE(f.fault);
    const OpInfo* op = FindOp(f.op);
    ASSERT_NE(op, nullptr);
    const OpKey& key = KeyOf(*op, f);
    const auto run = [&](fault::Side side, const std::string& spec) {
      const fault::Scoped scoped(spec);
      Case c(op, key, kRows, 3);
      c.side = side;
      if (f.prepare) f.prepare(c);
      c.Forward();
      if (f.backward) c.Backward();
      const std::vector<Operand>& operands = f.backward ? c.sig.inputs : c.sig.outputs;
      for (size_t i = 0; i < operands.size(); ++i) {
        if (operands[i].name == f.operand) return f.backward ? c.din[i] : c.out[i];
      }
      ADD_FAILURE() << "no operand " << f.operand;
      return Tensor();
    };
    const Tensor clean = run(fault::Side::kTrainer, "");
    EXPECT_EQ(Differences(clean, run(fault::Side::kRollout, "")), 0)
        << "the two sides differ without a fault";
    const std::string on_rollout = std::string(f.fault) + "@rollout";
    EXPECT_EQ(Differences(clean, run(fault::Side::kTrainer, on_rollout)), 0)
        << "active on the wrong side";
    EXPECT_GT(Differences(clean, run(fault::Side::kRollout, on_rollout)), 0)
        << "the fault flips nothing";
    EXPECT_EQ(Differences(clean, run(fault::Side::kRollout, "")), 0) << "the fault stayed on";
  }
}

// Every declared fault of a row operator is in the table above, so none is listed that nothing
// proves.
TEST(Faults, TheTableCoversEveryRowOperatorsFault) {
  std::set<std::string> proved, sites;
  for (const FaultCase& f : Cases()) {
    proved.insert(f.fault);
    sites.insert(f.op);
  }
  int counted = 0;
  for (const fault::Fault* f : fault::All()) {
    if (!sites.contains(f->site)) continue;
    EXPECT_TRUE(proved.contains(f->name)) << f->name;
    EXPECT_STRNE(f->text, "");
    EXPECT_STRNE(f->gates, "");
    ++counted;
  }
  EXPECT_GE(counted, 38);
}

}  // namespace
}  // namespace tare::ops
