// The walk back: gradients near float64 autograd, and the same bits however the batch is packed,
// cut into micro-batches, aligned, recomputed or threaded.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "models/forward.h"
#include "models/testing_batch.h"

namespace tare::models {
namespace {

using testing::Bits;
using testing::Context;
using ::testing::HasSubstr;
using testing::Reference;

struct Options {
  bool recompute = false;
  int64_t max_logit_bytes = int64_t{1} << 28;
  int64_t row_align = 1;
  // Micro-batches: how many sequences each; 0 is all at once.
  int64_t micro = 0;
  bool entropy = true;
};

Gradients Train(Context& context, const Model& model, const Reference& ref, const Options& options,
                int32_t segments = 1) {
  auto gradients = Gradients::Zeros(model, segments);
  TARE_CHECK(gradients.ok());
  const Batch whole = ref.MakeBatch();
  const int64_t sequences = static_cast<int64_t>(whole.runs.size());
  const int64_t micro = options.micro == 0 ? sequences : options.micro;
  Tape tape(TapeOptions{options.recompute, options.max_logit_bytes});
  size_t at = 0;
  for (int64_t first = 0; first < sequences; first += micro) {
    Batch batch = whole;
    batch.row_align = options.row_align;
    batch.runs.assign(whole.runs.begin() + first,
                      whole.runs.begin() + std::min(sequences, first + micro));
    const ForwardOutput out = context.Run(model, batch, &tape);
    LossGradient loss;
    loss.dlogprob = std::span(ref.dlogprob).subspan(at, out.logprob.size());
    if (options.entropy) loss.dentropy = std::span(ref.dentropy).subspan(at, out.logprob.size());
    at += out.logprob.size();
    // A segment is a contiguous run of sequences.
    const int32_t segment = static_cast<int32_t>(first * segments / sequences);
    const Status s =
        Backward(context.ctx, model, batch, loss, &tape, &context.scratch, &*gradients, segment);
    TARE_CHECK(s.ok()) << s.ToString();
  }
  TARE_CHECK(FinishGradients(context.ctx, model, &*gradients).ok());
  return *std::move(gradients);
}

std::vector<std::vector<uint32_t>> BitsOf(const Model& model, const Gradients& gradients) {
  std::vector<std::vector<uint32_t>> out;
  for (size_t i = 0; i < model.parameters().size(); ++i) {
    const Tensor& g = gradients.of(static_cast<int>(i));
    out.push_back(Bits(std::span(g.as<float>(), g.elements())));
  }
  return out;
}

// Gradients by Hugging Face tensor, sorted by name, as the reference has them.
std::map<std::string, std::vector<double>> ByName(const Model& model, const Gradients& gradients) {
  std::map<std::string, std::vector<double>> out;
  for (size_t i = 0; i < model.parameters().size(); ++i) {
    const Parameter& p = model.parameters()[i];
    const Tensor& g = gradients.of(static_cast<int>(i));
    const int64_t row = g.elements() / g.dim(0);
    for (const ParameterPart& part : p.parts) {
      const float* from = g.as<float>() + part.row * row;
      out[part.name].assign(from, from + part.shape[0] * row);
    }
  }
  return out;
}

// Worst relative error over tensors: of the norm, and of sampled elements against the tensor's RMS.
struct Errors {
  double norm = 0, element = 0;
  std::string norm_at, element_at;
};

Errors Compare(const Model& model, const Gradients& gradients, const Reference& ref) {
  Errors worst;
  const auto named = ByName(model, gradients);
  TARE_CHECK(named.size() == ref.grad_norm.size());
  size_t row = 0;
  for (const auto& [name, g] : named) {
    double sum = 0;
    for (double x : g) sum += x * x;
    const double want = ref.grad_norm[row];
    const double error = std::abs(std::sqrt(sum) - want) / want;
    if (error > worst.norm) worst.norm = error, worst.norm_at = name;
    const double rms = want / std::sqrt(static_cast<double>(g.size()));
    const size_t step = std::max<size_t>(1, g.size() / 64);
    for (size_t i = 0; i < 64 && i * step < g.size(); ++i) {
      const double e = std::abs(g[i * step] - ref.grad_sample[row * 64 + i]) / rms;
      if (e > worst.element) worst.element = e, worst.element_at = name;
    }
    ++row;
  }
  return worst;
}

// In f32 what remains is P's short polynomial (2^-13, attention.h) and f32 sums; an element may be
// far above its tensor's RMS, so the element bound is looser. A wrong term anywhere makes errors
// near 1.
TEST(BackwardTest, GradientsNearFloat64InF32) {
  for (const char* variant : {"mini", "tied_bias"}) {
    const Reference ref(variant);
    const Model model = ref.MakeModel(DType::kF32);
    Context context(2);
    for (bool recompute : {false, true}) {
      const Gradients gradients = Train(context, model, ref, {.recompute = recompute});
      const Errors e = Compare(model, gradients, ref);
      std::printf("%s f32: norm %.2e (%s), element %.2e (%s)\n", variant, e.norm, e.norm_at.c_str(),
                  e.element, e.element_at.c_str());
      EXPECT_LT(e.norm, 2e-3) << e.norm_at;
      EXPECT_LT(e.element, 2e-2) << e.element_at;
    }
  }
}

// bf16 activations and operands: 2^-9 at each rounding, and the routes of near-tied tokens may
// differ.
TEST(BackwardTest, GradientsNearFloat64InBf16) {
  for (const char* variant : {"mini", "tied_bias"}) {
    const Reference ref(variant);
    const Model model = ref.MakeModel(DType::kBF16);
    Context context(2);
    const Gradients gradients = Train(context, model, ref, {});
    const Errors e = Compare(model, gradients, ref);
    std::printf("%s bf16: norm %.2e (%s), element %.2e (%s)\n", variant, e.norm, e.norm_at.c_str(),
                e.element, e.element_at.c_str());
    EXPECT_LT(e.norm, 0.25) << e.norm_at;
  }
}

class BackwardInvariance : public ::testing::TestWithParam<std::tuple<Profile, const char*>> {
 protected:
  BackwardInvariance() : ref_(std::get<1>(GetParam())), model_(ref_.MakeModel(DType::kBF16)) {
    expected_ = With({}, 1);
  }
  std::vector<std::vector<uint32_t>> With(const Options& options, int threads) {
    Context context(threads);
    context.ctx.profile = std::get<0>(GetParam());
    return BitsOf(model_, Train(context, model_, ref_, options));
  }
  Reference ref_;
  Model model_;
  std::vector<std::vector<uint32_t>> expected_;
};

TEST_P(BackwardInvariance, ThreadsMicroBatchesPaddingRecompute) {
  EXPECT_EQ(With({}, 3), expected_) << "threads";
  EXPECT_EQ(With({.micro = 1}, 2), expected_) << "one sequence at a time";
  EXPECT_EQ(With({.micro = 3}, 2), expected_) << "micro-batches of three";
  EXPECT_EQ(With({.row_align = 16}, 2), expected_) << "aligned rows";
  EXPECT_EQ(With({.recompute = true}, 2), expected_) << "recompute";
  EXPECT_EQ(With({.max_logit_bytes = 0}, 2), expected_) << "logits computed again";
  EXPECT_EQ(With({.recompute = true, .max_logit_bytes = 0, .row_align = 16, .micro = 2}, 2),
            expected_)
      << "all at once";
  // Negative control: another loss has other gradients.
  EXPECT_NE(With({.entropy = false}, 2), expected_);
}

INSTANTIATE_TEST_SUITE_P(All, BackwardInvariance,
                         ::testing::Combine(::testing::Values(Profile::kIeeeF32, Profile::kSm90Mma),
                                            ::testing::Values("mini", "tied_bias")),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param) == Profile::kIeeeF32
                                                  ? "ieee_"
                                                  : "sm90_") +
                                  std::get<1>(info.param);
                         });

// Data parallelism by two ranks: each segment of the global batch in its own slot, wherever
// computed.
TEST(BackwardTest, BatchSegmentsGiveTheSameBitsForEveryCut) {
  const Reference ref("tied_bias");
  const Model model = ref.MakeModel(DType::kBF16);
  Context context(2);
  const auto a = BitsOf(model, Train(context, model, ref, {.micro = 2}, 2));
  const auto b = BitsOf(model, Train(context, model, ref, {.micro = 1}, 2));
  EXPECT_EQ(a, b);
}

TEST(BackwardTest, RefusesAMisusedTape) {
  const Reference ref("mini");
  const Model model = ref.MakeModel(DType::kBF16);
  Context context(1);
  auto gradients = Gradients::Zeros(model);
  const Batch batch = ref.MakeBatch();
  Tape tape;
  LossGradient loss;
  loss.dlogprob = ref.dlogprob;
  const auto run = [&](const Batch& b, const LossGradient& l, int32_t segment = 0) {
    return Backward(context.ctx, model, b, l, &tape, &context.scratch, &*gradients, segment);
  };
  EXPECT_EQ(run(batch, loss).code(), Code::kPrecondition);
  context.Run(model, batch, &tape);
  Batch other = batch;
  other.runs.pop_back();
  EXPECT_THAT(run(other, loss).message(), HasSubstr("another batch"));
  LossGradient shorter;
  shorter.dlogprob = std::span(ref.dlogprob).subspan(1);
  EXPECT_THAT(run(batch, shorter).message(), HasSubstr("gradients for them"));
  EXPECT_THAT(run(batch, loss, 1).message(), HasSubstr("batch segment 1 of 1"));
  EXPECT_TRUE(run(batch, loss).ok());
  EXPECT_EQ(run(batch, loss).code(), Code::kPrecondition) << "a tape serves once";
  auto cache = KvCache::Create(model.config(), 4, 16);
  Batch cached = batch;
  cached.cache = &*cache;
  EXPECT_THAT(Forward(context.ctx, model, cached, &context.scratch, &tape).status().message(),
              HasSubstr("packed K and V"));
}

// C6-06: weights changed in place between forward and backward are refused, never used silently;
// the same tape with weights that nobody touched serves.
TEST(Backward, WeightsChangedSinceForwardAreRefused) {
  Context context(1);
  const Reference ref("tied_bias");
  Model model = ref.MakeModel(DType::kF32);
  const Batch batch = ref.MakeBatch();
  auto gradients = Gradients::Zeros(model);
  ASSERT_TRUE(gradients.ok());
  LossGradient loss;
  loss.dlogprob = ref.dlogprob;
  Tape tape;
  context.Run(model, batch, &tape);
  float* weight = model.mutable_parameters()[0].value.mutable_as<float>();
  weight[0] = std::nextafter(weight[0], 1e9f);
  const Status refused =
      Backward(context.ctx, model, batch, loss, &tape, &context.scratch, &*gradients);
  EXPECT_EQ(refused.code(), Code::kPrecondition);
  EXPECT_THAT(refused.message(), HasSubstr("opened for writing"));
  context.Run(model, batch, &tape);
  EXPECT_TRUE(Backward(context.ctx, model, batch, loss, &tape, &context.scratch, &*gradients).ok());
}

}  // namespace
}  // namespace tare::models
