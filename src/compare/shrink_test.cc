// Shrinking against computations that a test writes by itself: which input it keeps, and what it
// says when there is nothing to shrink.

#include "compare/shrink.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>

namespace tare::compare {
namespace {

namespace fs = std::filesystem;

// Does row `p` of sequence `s` of the batch differ on side B?
using Differs = std::function<bool(const ReplayBatch&, size_t s, int64_t p)>;

class ShrinkTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "shrink_XXXXXX";
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    root_ = pattern;
  }
  void TearDown() override { fs::remove_all(root_); }

  Dump Record(const ReplayBatch& batch, const Differs& differs, bool replay = true) {
    DumpOptions options;
    options.sync = false;
    options.manifest.weights = {{"theta0", Sha256Of("w")}};
    if (replay) options.manifest.identity = {{"replay", {"score", "{tokens}", "{dump}"}}};
    const std::string path = root_ + "/" + std::to_string(++number_) + ".dump";
    auto w = DumpWriter::Create(Env::Real(), path, std::move(options)).value();
    TapFrame frame;
    frame.weight_version = "theta0";
    int64_t rows = 0;
    for (const ReplaySequence& s : batch) {
      frame.runs.push_back({s.name, TokenHash{}, 0, rows, {s.tokens.begin(), s.tokens.end() - 1}});
      rows += static_cast<int64_t>(s.tokens.size()) - 1;
    }
    w->BeginFrame(frame);
    Tensor y = Tensor::Allocate(DType::kF32, {rows, 1}).value();
    Tensor x = Tensor::Allocate(DType::kF32, {rows, 1}).value();
    int64_t row = 0;
    for (size_t s = 0; s < batch.size(); ++s) {
      for (int64_t p = 0; p + 1 < static_cast<int64_t>(batch[s].tokens.size()); ++p, ++row) {
        const float value = static_cast<float>(batch[s].tokens[static_cast<size_t>(p)]);
        x.mutable_as<float>()[row] = value;
        y.mutable_as<float>()[row] = value + (differs && differs(batch, s, p) ? 1.0f : 0.0f);
      }
    }
    w->Emit({.name = "x", .op = "embedding", .role = TapRole::kSentinel}, x);
    w->Emit({.name = "x", .op = "embedding", .role = TapRole::kExpected}, x);
    w->Emit({.name = "y", .layer = 0, .op = "scan", .inputs = {"x"}}, y);
    w->EndFrame();
    EXPECT_TRUE(w->Finish().ok());
    return Dump::Open(Env::Real(), path).value();
  }

  compare::Bundle Bundled(const ReplayBatch& batch, const Differs& differs, bool replay = true) {
    const Dump a = Record(batch, nullptr, replay), b = Record(batch, differs, replay);
    DiffOptions options;
    options.pool = &pool_;
    const LocateReport r = Locate(a, b, options, nullptr).value();
    EXPECT_TRUE(r.found);
    const std::string path = root_ + "/bundle" + std::to_string(++number_);
    const Status written = WriteBundle(Env::Real(), path, a, b, r);
    EXPECT_TRUE(written.ok()) << written.ToString();
    return OpenBundle(Env::Real(), path).value();
  }

  ShrinkReport Run(const compare::Bundle& bundle, const Differs& differs, int max_runs = 200) {
    ShrinkOptions options;
    options.pool = &pool_;
    options.max_runs = max_runs;
    return Shrink(Env::Real(), bundle, options,
                  [&](const ReplayBatch& a, const ReplayBatch& b) -> Result<Replayed> {
                    Replayed out;
                    out.a = std::make_unique<Dump>(Record(a, nullptr));
                    out.b = std::make_unique<Dump>(Record(b, differs));
                    return out;
                  })
        .value();
  }

  static ReplayBatch Batch() {
    ReplayBatch batch;
    for (int s = 0; s < 5; ++s) {
      ReplaySequence q;
      q.name = "s" + std::to_string(s);
      for (int p = 0; p < 40; ++p) q.tokens.push_back(100 * s + p);
      q.first = 30;
      batch.push_back(q);
    }
    return batch;
  }

  std::string root_;
  int number_ = 0;
  ThreadPool pool_{1};
};

bool Holds(const ReplayBatch& batch, int32_t token) {
  for (const ReplaySequence& s : batch) {
    for (const int32_t t : s.tokens) {
      if (t == token) return true;
    }
  }
  return false;
}

TEST_F(ShrinkTest, KeepsWhatTheDifferenceNeedsAndNothingElse) {
  // Row of token 233 differs when token 225 stands before it in its sequence and sequence 4 is in
  // the batch.
  const Differs differs = [](const ReplayBatch& batch, size_t s, int64_t p) {
    const auto& tokens = batch[s].tokens;
    const auto at = std::find(tokens.begin(), tokens.begin() + p, 225);
    return tokens[static_cast<size_t>(p)] == 233 && at != tokens.begin() + p && Holds(batch, 404);
  };
  const compare::Bundle bundle = Bundled(Batch(), differs);
  const ShrinkReport r = Run(bundle, differs);
  ASSERT_EQ(r.verdict, Verdict::kPass) << ShrinkTable(r);
  EXPECT_TRUE(r.minimal);
  // Side A needs nobody else, side B sequence 4.
  ASSERT_EQ(r.a.size(), 1u);
  ASSERT_EQ(r.b.size(), 2u) << ShrinkTable(r);
  EXPECT_EQ(r.b[1].name, "s4");
  EXPECT_EQ(r.b[0].tokens.front(), 225);
  EXPECT_EQ(r.b[0].tokens[r.b[0].tokens.size() - 2], 233);
  EXPECT_EQ(r.a[0].tokens, r.b[0].tokens);
  EXPECT_EQ(r.located.site.position, 8);
  EXPECT_EQ(r.sequences_before, 10);
  EXPECT_EQ(r.tokens_before, 400);
  EXPECT_EQ(ShrinkJson(r)["site"]["name"], "y");
}

TEST_F(ShrinkTest, SaysWhenTheSearchWasCutShort) {
  const Differs differs = [](const ReplayBatch& batch, size_t s, int64_t p) {
    return batch[s].tokens[static_cast<size_t>(p)] == 233 && Holds(batch, 404);
  };
  const ShrinkReport r = Run(Bundled(Batch(), differs), differs, 4);
  EXPECT_EQ(r.verdict, Verdict::kPass);
  EXPECT_FALSE(r.minimal);
  EXPECT_EQ(r.runs, 4);
  EXPECT_NE(ShrinkTable(r).find("not minimal"), std::string::npos);
}

TEST_F(ShrinkTest, ADifferenceThatDoesNotComeBackIsAFailure) {
  const Differs differs = [](const ReplayBatch& batch, size_t s, int64_t p) {
    return batch[s].tokens[static_cast<size_t>(p)] == 233;
  };
  const ShrinkReport r = Run(Bundled(Batch(), differs), nullptr);
  EXPECT_EQ(r.verdict, Verdict::kFail);
  EXPECT_EQ(r.reason, "replay-differs");
  // Without a command there is nothing to run.
  const ShrinkReport none = Run(Bundled(Batch(), differs, false), differs);
  EXPECT_EQ(none.verdict, Verdict::kInconclusive);
  EXPECT_EQ(none.reason, "missing-capture");
  EXPECT_EQ(none.runs, 0);
}

TEST_F(ShrinkTest, ABatchIsReadFromTheDumpWithTheTokensBefore) {
  // A decode step: the row's run holds one token; those before stand in an earlier frame.
  DumpOptions options;
  options.sync = false;
  auto w = DumpWriter::Create(Env::Real(), root_ + "/decode.dump", std::move(options)).value();
  const std::vector<int32_t> tokens = {5, 6, 7, 8};
  TokenHash hash{};
  for (size_t i = 0; i < tokens.size(); ++i) {
    TapFrame frame;
    frame.weight_version = "theta0";
    frame.runs = {{"s", hash, static_cast<int64_t>(i), 0, {tokens[i]}}};
    w->BeginFrame(frame);
    w->Emit({.name = "y", .op = "scan"}, Tensor::Allocate(DType::kF32, {1, 1}).value());
    w->EndFrame();
    hash = ExtendTokenHash(hash, {&tokens[i], 1});
  }
  ASSERT_TRUE(w->Finish().ok());
  const Dump dump = Dump::Open(Env::Real(), root_ + "/decode.dump").value();
  const ReplayBatch batch = BatchOfFrame(dump, 3, hash, 3).value();
  ASSERT_EQ(batch.size(), 1u);
  EXPECT_EQ(batch[0].tokens, (std::vector<int32_t>{5, 6, 7, 8, 8}));  // and one to score
  EXPECT_EQ(batch[0].first, 4);
  EXPECT_EQ(SequenceOfRow(batch, hash, 3), 0);
  EXPECT_EQ(SequenceOfRow(batch, hash, 2), -1);
  EXPECT_EQ(HistoryTokens(dump, "theta1", hash, 4).status().code(), Code::kNotFound);
  // Written and read back; anything else is an error that names the line.
  EXPECT_EQ(ParseReplayBatch(FormatReplayBatch(batch)).value()[0].tokens, batch[0].tokens);
  for (const char* bad : {"", "{}\n", "{\"sequence\":\"s\",\"prompt\":[1],\"tokens\":[2]}",
                          "{\"sequence\":\"s\",\"prompt\":[],\"tokens\":[2]}\n",
                          "{\"sequence\":\"s\",\"prompt\":[1],\"tokens\":[-2]}\n",
                          "{\"sequence\":\"s\",\"prompt\":[1],\"tokens\":[2.5]}\n",
                          "{\"sequence\":1,\"prompt\":[1],\"tokens\":[2]}\n",
                          "{\"sequence\":\"s\",\"prompt\":[1],\"tokens\":[2],\"x\":1}\n"}) {
    EXPECT_EQ(ParseReplayBatch(bad).status().code(), Code::kDataLoss) << bad;
  }
}

}  // namespace
}  // namespace tare::compare
