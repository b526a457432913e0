// What a forward reports through a tap: every operator by the agreed name, in order, with inputs
// that were reported before; values that do not depend on packing; and no bit moved by watching.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <map>
#include <set>

#include "base/json.h"
#include "models/score.h"
#include "models/testing_batch.h"
#include "tensor/checkpoint.h"
#include "tensor/convert.h"

namespace tare::models {
namespace {

using testing::Bits;
using testing::Context;
using testing::Reference;

class Collector : public Tap {
 public:
  struct Record {
    TapPoint point;
    Tensor value;
    int frame;
  };
  void BeginFrame(const TapFrame& frame) override {
    EXPECT_FALSE(open_);
    open_ = true;
    frames.push_back(frame);
  }
  void Emit(const TapPoint& point, const Tensor& value) override {
    EXPECT_TRUE(open_);
    records.push_back({point, *value.Clone(), static_cast<int>(frames.size()) - 1});
  }
  void EndFrame() override {
    EXPECT_TRUE(open_);
    open_ = false;
  }
  const Record* Find(const std::string& name) const {
    for (const Record& r : records) {
      if (r.point.name == name && r.point.role != TapRole::kExpected) return &r;
    }
    return nullptr;
  }

  std::vector<TapFrame> frames;
  std::vector<Record> records;
  bool open_ = false;
};

TEST(ReportTest, NamesInputsAndSentinel) {
  const Reference ref("mini");
  const Model model = ref.MakeModel(DType::kBF16);
  Context context(2);
  const std::vector<uint32_t> unwatched = Bits(context.Run(model, ref.MakeBatch()).logprob);
  Collector tap;
  EXPECT_EQ(Bits(context.Run(model, ref.MakeBatch(), nullptr, &tap).logprob), unwatched)
      << "watching moved a bit";
  EXPECT_FALSE(tap.open_);
  ASSERT_EQ(tap.frames.size(), 2u);
  ASSERT_EQ(tap.frames[0].runs.size(), ref.lengths.size());
  std::set<std::string> seen;
  int moe = 0;
  for (const auto& r : tap.records) {
    if (r.point.role == TapRole::kExpected) {
      const auto* sentinel = tap.Find(r.point.name);
      ASSERT_NE(sentinel, nullptr);
      EXPECT_EQ(0, std::memcmp(sentinel->value.data(), r.value.data(), r.value.size_bytes()))
          << "stale frame";
      continue;
    }
    for (const std::string& input : r.point.inputs)
      EXPECT_TRUE(seen.contains(input)) << r.point.name << " reads " << input;
    EXPECT_TRUE(seen.insert(r.point.name).second) << r.point.name << " twice";
    if (r.frame == 0) {
      EXPECT_EQ(r.value.dim(0), static_cast<int64_t>(ref.tokens.size())) << r.point.name;
    }
    moe += r.point.role == TapRole::kDiscrete;
  }
  EXPECT_EQ(moe, 2) << "router decisions of the two MoE layers";
  for (const char* name : {"embed.out", "layers.0.self_attn.q.rope", "layers.1.self_attn.attn.out",
                           "layers.2.mlp.router.ids", "layers.2.mlp.experts.out",
                           "layers.5.mlp.down_proj.out", "layers.5.out", "norm.out", "logprob"}) {
    EXPECT_TRUE(seen.contains(name)) << name;
  }
  // The logprob frame: rows are targets, each run's first history is the prompt before it.
  const auto* logprob = tap.Find("logprob");
  ASSERT_NE(logprob, nullptr);
  int64_t targets = 0;
  for (const TapRun& run : tap.frames[1].runs) {
    EXPECT_EQ(run.row, targets);
    targets += static_cast<int64_t>(run.tokens.size());
  }
  EXPECT_EQ(logprob->value.dim(0), targets);
  const TapRun& first = tap.frames[1].runs[0];
  EXPECT_EQ(first.position, 1);
  EXPECT_EQ(first.history, ExtendTokenHash(TokenHash{}, std::span(ref.tokens).first(1)));
}

// Every reported row is the same bits in a chunked run through pages as in a whole one.
TEST(ReportTest, EveryReportedRowIsInvariant) {
  const Model model = *MiniModel(nullptr, {.pack = false});
  Context context(1);
  ScoreSequence s;
  for (int i = 0; i < 40; ++i) s.tokens.push_back((i * 71 + 5) % 512);
  Collector whole, cut;
  ASSERT_TRUE(ScoreSequences(context.ctx, model, {s}, {}, &context.scratch, &whole).ok());
  ScoreOptions chunked;
  chunked.chunk = 7;
  ASSERT_TRUE(ScoreSequences(context.ctx, model, {s}, chunked, &context.scratch, &cut).ok());
  int compared = 0;
  for (const auto& r : cut.records) {
    const auto* w = whole.Find(r.point.name);
    ASSERT_NE(w, nullptr) << r.point.name;
    const int64_t row = r.value.size_bytes() / r.value.dim(0);
    // The position of the frame's first row, less that of the whole frame's.
    const TapRun& run = cut.frames[r.frame].runs[0];
    const int64_t at = run.position - whole.frames[w->frame].runs[0].position;
    EXPECT_EQ(0, std::memcmp(r.value.data(), static_cast<const char*>(w->value.data()) + at * row,
                             r.value.size_bytes()))
        << r.point.name << " at position " << run.position;
    ++compared;
  }
  EXPECT_GT(compared, 500);
}

TEST(ReportTest, BackwardReportsTheStreamsGradient) {
  const Reference ref("mini");
  const Model model = ref.MakeModel(DType::kBF16);
  Context context(1);
  Tape tape;
  const Batch batch = ref.MakeBatch();
  context.Run(model, batch, &tape);
  auto gradients = Gradients::Zeros(model);
  LossGradient loss;
  loss.dlogprob = ref.dlogprob;
  Collector tap;
  ASSERT_TRUE(
      Backward(context.ctx, model, batch, loss, &tape, &context.scratch, &*gradients, 0, &tap)
          .ok());
  ASSERT_EQ(tap.frames.size(), 1u);
  EXPECT_EQ(tap.frames[0].phase, TapPhase::kBackward);
  ASSERT_EQ(tap.records.size(), 7u);
  EXPECT_EQ(tap.records[0].point.name, "norm.grad");
  EXPECT_EQ(tap.records[6].point.name, "layers.0.grad");
}

// The names and the values of a real system: vLLM's first three layers of SmolLM2 on 20 tokens.
// bf16 roundings at other places leave a relative RMS difference of about 2^-8; another formula
// leaves far more.
TEST(ReportTest, NamesAndValuesOfARealSystem) {
  const char* path = std::getenv("TARE_SMOLLM2");
  const std::string dir = path != nullptr ? path : std::string(TARE_SOURCE_DIR) + "/models/smollm2";
  if (!Env::Real()->Exists(dir + "/config.json"))
    GTEST_SKIP() << dir << " is absent; scripts/get_model.sh fetches it";
  auto file =
      SafetensorsFile::Open(Env::Real(), std::string(TARE_SOURCE_DIR) +
                                             "/tests/data/real/layers/vllm.prefill.safetensors");
  ASSERT_TRUE(file.ok()) << file.status().ToString();
  std::vector<int32_t> tokens;
  std::vector<std::string> order;
  for (const auto& [key, value] : file->metadata()) {
    if (key == "token_ids") {
      for (const Json& id : *ParseJson(value)) tokens.push_back(id.get<int32_t>());
    }
    if (key == "order") {
      for (const Json& name : *ParseJson(value)) order.push_back(name.get<std::string>());
    }
  }
  ASSERT_EQ(tokens.size(), 20u);
  ASSERT_EQ(order.size(), 46u);
  Context context(0);
  auto checkpoint = Checkpoint::Open(dir);
  ASSERT_TRUE(checkpoint.ok());
  auto model = Model::Load(&context.pool, *checkpoint, {.pack = false});
  ASSERT_TRUE(model.ok()) << model.status().ToString();
  Batch batch;
  TokenRun run;
  run.tokens = tokens;
  batch.runs = {run};
  Collector tap;
  context.Run(*model, batch, nullptr, &tap);
  double worst = 0;
  std::string worst_at;
  for (const std::string& name : order) {
    const auto* ours = tap.Find(name);
    ASSERT_NE(ours, nullptr) << name;
    const Tensor theirs = *file->Get(name);
    ASSERT_EQ(ours->value.shape(), theirs.shape()) << name;
    ASSERT_EQ(ours->value.dtype(), theirs.dtype()) << name;
    double difference = 0, size = 0;
    for (int64_t i = 0; i < theirs.elements(); ++i) {
      const double a = Bf16ToF32(ours->value.as<uint16_t>()[i]),
                   b = Bf16ToF32(theirs.as<uint16_t>()[i]);
      difference += (a - b) * (a - b);
      size += b * b;
    }
    const double relative = std::sqrt(difference / size);
    if (relative > worst) worst = relative, worst_at = name;
    EXPECT_LT(relative, 0x1p-6) << name;
  }
  std::printf("46 tensors of vLLM: largest relative RMS difference %.5f at %s\n", worst,
              worst_at.c_str());
}

}  // namespace
}  // namespace tare::models
