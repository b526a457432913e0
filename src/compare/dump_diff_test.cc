// Dumps against each other: rows pair by token, whatever the batch, chunking or padding.

#include "compare/dump_diff.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>

#include "base/env.h"

namespace tare::compare {
namespace {

namespace fs = std::filesystem;
using Ints = std::vector<int32_t>;

// The value of a row is a function of its token history alone, as for a correct system.
uint32_t RowSeed(const Ints& tokens, size_t upto) {
  uint32_t h = 17;
  for (size_t i = 0; i <= upto; ++i) h = h * 2654435761u + static_cast<uint32_t>(tokens[i]);
  return h;
}

class DumpDiffTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "dump_diff_XXXXXX";
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    root_ = pattern;
  }
  void TearDown() override { fs::remove_all(root_); }

  std::unique_ptr<DumpWriter> Writer(const std::string& name, bool payload = true) {
    DumpOptions options;
    options.sync = false;
    options.manifest.weights = {{"theta0", Sha256Of(weights_)}};
    if (!payload) options.keep_payload = [](const TapPoint&) { return false; };
    return DumpWriter::Create(Env::Real(), root_ + "/" + name, std::move(options)).value();
  }
  Dump Close(DumpWriter& writer, const std::string& name) {
    EXPECT_TRUE(writer.Finish().ok()) << writer.status().ToString();
    return Dump::Open(Env::Real(), root_ + "/" + name).value();
  }

  // One run: tokens [begin, end) of a sequence at row `row`.
  struct Piece {
    std::string name;
    Ints tokens;
    size_t begin, end;
    int64_t row;
  };
  static TapFrame Frame(const std::vector<Piece>& pieces, TapPhase phase = TapPhase::kPrefill) {
    TapFrame frame{.phase = phase, .weight_version = "theta0"};
    for (const Piece& p : pieces) {
      const std::span<const int32_t> all(p.tokens);
      frame.runs.push_back({.sequence = p.name,
                            .history = ExtendTokenHash({}, all.first(p.begin)),
                            .position = static_cast<int64_t>(p.begin),
                            .row = p.row,
                            .tokens = Ints(p.tokens.begin() + p.begin, p.tokens.begin() + p.end)});
    }
    return frame;
  }
  // [rows, 4] f32; padding rows hold their row number.
  static Tensor Rows(const std::vector<Piece>& pieces, int64_t rows, uint32_t salt) {
    Tensor t = Tensor::Allocate(DType::kF32, {rows, 4}).value();
    for (int64_t i = 0; i < rows * 4; ++i) t.mutable_as<float>()[i] = static_cast<float>(1000 + i);
    for (const Piece& p : pieces) {
      for (size_t i = p.begin; i < p.end; ++i) {
        for (int64_t k = 0; k < 4; ++k) {
          t.mutable_as<float>()[(p.row + static_cast<int64_t>(i - p.begin)) * 4 + k] =
              static_cast<float>((RowSeed(p.tokens, i) + salt * 7919u + static_cast<uint32_t>(k)) %
                                 100003);
        }
      }
    }
    return t;
  }
  static void Write(DumpWriter& w, const std::vector<Piece>& pieces, int64_t rows,
                    TapPhase phase = TapPhase::kPrefill,
                    const std::function<void(Tensor&)>& plant = nullptr) {
    w.BeginFrame(Frame(pieces, phase));
    w.Emit({.name = "x", .layer = 0, .op = "linear"}, Rows(pieces, rows, 1));
    Tensor y = Rows(pieces, rows, 2);
    if (plant) plant(y);
    w.Emit({.name = "y", .layer = 1, .op = "linear", .inputs = {"x"}}, y);
    w.EndFrame();
  }
  Report Diff(const Dump& a, const Dump& b, DiffOptions options = {}) {
    options.pool = &pool_;
    return DiffDumps(a, b, options).value();
  }

  const Ints s0_ = {1, 2, 3, 4, 5, 6}, s1_ = {9, 8, 7};
  std::string weights_ = "w";
  std::string root_;
  ThreadPool pool_{2};
};

TEST_F(DumpDiffTest, OtherBatchChunksAndDecodeStepsPairByToken) {
  auto wa = Writer("a");
  Write(*wa, {{"r0", s0_, 0, 6, 0}, {"r1", s1_, 0, 3, 6}}, 9, TapPhase::kScore);
  auto wb = Writer("b");
  Write(*wb, {{"q", s1_, 0, 2, 3}, {"p", s0_, 0, 3, 0}}, 8);  // chunk, padded, other order
  Write(*wb, {{"p", s0_, 3, 5, 0}}, 2);
  Write(*wb, {{"p", s0_, 5, 6, 1}, {"q", s1_, 2, 3, 0}}, 2, TapPhase::kDecode);
  const Dump a = Close(*wa, "a"), b = Close(*wb, "b");
  const Report r = Diff(a, b);
  EXPECT_EQ(r.verdict, Verdict::kPass) << Table(r, {});
  EXPECT_EQ(r.paired_tokens, 9);
  EXPECT_EQ(r.totals.compared, 2 * 9 * 4);
  EXPECT_EQ(r.units[0].padding_dropped, 3);
}

// The planted fault is named by sequence, position and coordinate, in whichever frame it lies.
TEST_F(DumpDiffTest, OneWrongElementIsFoundByTokenAndCoordinate) {
  auto wa = Writer("a");
  Write(*wa, {{"r0", s0_, 0, 6, 0}, {"r1", s1_, 0, 3, 6}}, 9);
  auto wb = Writer("b");
  Write(*wb, {{"p", s0_, 0, 3, 2}}, 5);
  Write(*wb, {{"q", s1_, 0, 3, 0}, {"p", s0_, 3, 6, 3}}, 6, TapPhase::kPrefill,
        [](Tensor& t) { t.mutable_as<uint32_t>()[4 * 4 + 2] ^= 1; });  // row 4: token 4 of s0
  const Dump a = Close(*wa, "a"), b = Close(*wb, "b");
  const Report r = Diff(a, b);
  EXPECT_EQ(r.verdict, Verdict::kFail);
  EXPECT_EQ(r.reason, "bit-mismatch");
  EXPECT_EQ(r.first_failing, "y");
  const Unit& y = r.units[1];
  EXPECT_EQ(y.counts.mismatches, 1);
  EXPECT_EQ(y.first_sequence, "r0");
  EXPECT_EQ(y.first_position, 4);
  EXPECT_EQ(y.first_coordinate, std::vector<int64_t>{2});
  EXPECT_EQ(y.counts.max_ulp, 1u);
}

TEST_F(DumpDiffTest, DigestsStandForBitsAndPayloadsAreAskedWhereTheyDiffer) {
  auto wa = Writer("a", false);
  Write(*wa, {{"r0", s0_, 0, 6, 0}}, 6);
  auto wb = Writer("b", false);
  Write(*wb, {{"r0", s0_, 0, 6, 0}}, 6);
  auto wc = Writer("c", false);
  Write(*wc, {{"r0", s0_, 0, 6, 0}}, 6, TapPhase::kPrefill,
        [](Tensor& t) { t.mutable_as<uint32_t>()[3] ^= 1; });
  auto wd = Writer("d", false);
  Write(*wd, {{"r0", s0_, 0, 6, 1}}, 7);
  const Dump a = Close(*wa, "a"), b = Close(*wb, "b"), c = Close(*wc, "c"), d = Close(*wd, "d");
  Report r = Diff(a, b);
  EXPECT_EQ(r.verdict, Verdict::kPass);
  EXPECT_TRUE(r.units[0].by_digest);
  EXPECT_EQ(r.totals.compared, 48);
  // Nothing was kept that could be verified: the digests still agree.
  EXPECT_EQ(Diff(a, b, {.verify = true}).verdict, Verdict::kPass);
  r = Diff(a, c);
  EXPECT_EQ(r.verdict, Verdict::kFail);
  EXPECT_EQ(r.reason, "payload-missing");
  r = Diff(a, d);  // the same tokens at other rows: digests of whole tensors say nothing
  EXPECT_EQ(r.verdict, Verdict::kInconclusive);
  EXPECT_EQ(r.reason, "payload-missing");
}

TEST_F(DumpDiffTest, UnpairedTokensWeightsAndCutsAreNoPass) {
  auto wa = Writer("a");
  Write(*wa, {{"r0", s0_, 0, 6, 0}}, 6);
  auto wb = Writer("b");
  Write(*wb, {{"r0", s0_, 0, 5, 0}}, 5);
  const Dump a = Close(*wa, "a"), b = Close(*wb, "b");
  Report r = Diff(a, b);
  EXPECT_EQ(r.reason, "unpaired-tokens");
  ASSERT_EQ(r.unpaired.size(), 1u);
  EXPECT_EQ(r.unpaired[0].position, 5);
  EXPECT_TRUE(r.unpaired[0].on_a);
  EXPECT_EQ(Diff(a, b, {.paired_only = true}).verdict, Verdict::kPass);
  weights_ = "other";
  auto wc = Writer("c");
  Write(*wc, {{"r0", s0_, 0, 6, 0}}, 6);
  r = Diff(a, Close(*wc, "c"));
  EXPECT_EQ(r.verdict, Verdict::kRefused);
  EXPECT_EQ(r.reason, "weight-hash-mismatch");
  fs::remove(root_ + "/a/manifest.json");
  r = Diff(Dump::Open(Env::Real(), root_ + "/a").value(), a);
  EXPECT_EQ(r.verdict, Verdict::kInconclusive);
  EXPECT_EQ(r.reason, "dump-cut");
}

TEST_F(DumpDiffTest, VerifyRefusesAPayloadThatWasChangedLater) {
  auto wa = Writer("a");
  Write(*wa, {{"r0", s0_, 0, 6, 0}}, 6);
  auto wb = Writer("b");
  Write(*wb, {{"r0", s0_, 0, 6, 0}}, 6);
  const Dump a = Close(*wa, "a");
  Dump b = Close(*wb, "b");
  EXPECT_EQ(Diff(a, b, {.verify = true}).verdict, Verdict::kPass);
  {
    std::FILE* f = std::fopen((root_ + "/b/" + DumpShardName(0)).c_str(), "r+b");
    std::fseek(f, -1, SEEK_END);
    std::fputc(0x55, f);
    std::fclose(f);
  }
  b = Dump::Open(Env::Real(), root_ + "/b").value();
  const Report r = Diff(a, b, {.verify = true});
  EXPECT_EQ(r.verdict, Verdict::kRefused);
  EXPECT_EQ(r.reason, "digest-mismatch");
}

TEST_F(DumpDiffTest, WholeFrameTensorsPairByNameAndStep) {
  const auto write = [&](const std::string& name, float second) {
    auto w = Writer(name);
    for (int step = 0; step < 2; ++step) {
      w->BeginFrame({.phase = TapPhase::kBackward, .weight_version = "theta0", .step = step});
      Tensor g = Tensor::Allocate(DType::kF32, {2}).value();
      g.mutable_as<float>()[1] = step == 1 ? second : 1.0f;
      w->Emit({.name = "w.grad", .op = "linear", .per_row = false}, g);
      w->EndFrame();
    }
    return Close(*w, name);
  };
  const Dump a = write("a", 2.0f), b = write("b", 2.0f), c = write("c", 2.5f);
  EXPECT_EQ(Diff(a, b).verdict, Verdict::kPass);
  const Report r = Diff(a, c);
  EXPECT_EQ(r.verdict, Verdict::kFail);
  EXPECT_EQ(r.first_failing, "w.grad @ theta0 step 1");
  EXPECT_EQ(r.units[1].first_at, "[1]");
}

TEST_F(DumpDiffTest, MaskOfTheFrameExcludesItsRows) {
  const auto write = [&](const std::string& name, float masked, std::vector<uint8_t> mask) {
    auto w = Writer(name);
    const std::vector<Piece> pieces = {{"r0", s1_, 0, 3, 0}};
    w->BeginFrame(Frame(pieces));
    Tensor m = Tensor::Allocate(DType::kU8, {3}).value();
    std::memcpy(m.mutable_data(), mask.data(), 3);
    w->Emit({.name = "loss_mask", .role = TapRole::kMask}, m);
    Tensor l = Tensor::Allocate(DType::kF32, {3}).value();
    l.mutable_as<float>()[0] = -1;
    l.mutable_as<float>()[1] = masked;
    l.mutable_as<float>()[2] = -2;
    w->Emit({.name = "logprobs", .op = "logprob", .mask = "loss_mask"}, l);
    w->EndFrame();
    return Close(*w, name);
  };
  const Dump a = write("a", 0, {1, 0, 1}), b = write("b", -30, {1, 0, 1}),
             c = write("c", 0, {1, 1, 1});
  Report r = Diff(a, b);
  EXPECT_EQ(r.verdict, Verdict::kPass);
  EXPECT_EQ(r.units[1].counts.compared, 2);
  EXPECT_EQ(r.units[1].counts.masked, 1);
  EXPECT_EQ(Diff(a, c).reason, "mask-differs");
  EXPECT_EQ(Diff(a, a, {.mask = "absent"}).reason, "mask-missing");
}

// H08, SHAPE-14, SHAPE-15: equal but stale captures are no pass; fresh ones align by tokens.
TEST_F(DumpDiffTest, H08StaleFramesAreInconclusiveAndPaddedFreshOnesPass) {
  const std::vector<Piece> five = {{"r0", {1, 2, 3, 4, 5}, 0, 5, 0}};
  const auto write = [&](const std::string& name, int64_t rows, float sentinel) {
    auto w = Writer(name);
    w->BeginFrame(Frame(five));
    Tensor s = Tensor::Allocate(DType::kF32, {rows, 2}).value(), e = s.Clone().value();
    for (int64_t i = 0; i < rows * 2; ++i) {
      s.mutable_as<float>()[i] = i < 10 ? sentinel : 99.0f;  // a pad row holds anything
      e.mutable_as<float>()[i] = 7.0f;
    }
    w->Emit({.name = "embed.out", .op = "embedding", .role = TapRole::kSentinel}, s);
    w->Emit({.name = "embed.out", .op = "embedding", .role = TapRole::kExpected}, e);
    for (int layer = 0; layer < 3; ++layer) {
      w->Emit({.name = "layers." + std::to_string(layer) + ".out", .layer = layer, .op = "block"},
              Rows(five, rows, static_cast<uint32_t>(layer)));
    }
    w->EndFrame();
    return Close(*w, name);
  };
  const Dump stale_a = write("sa", 5, 1.0f), stale_b = write("sb", 5, 1.0f);
  Report r = Diff(stale_a, stale_b);
  EXPECT_EQ(r.verdict, Verdict::kInconclusive);
  EXPECT_EQ(r.reason, "stale-capture");
  ASSERT_EQ(r.notes.size(), 2u);
  EXPECT_NE(r.notes[0].find("stale frame 0"), std::string::npos) << r.notes[0];
  EXPECT_NE(r.notes[0].find("0x3f800000, the tokens give 0x40e00000"), std::string::npos)
      << r.notes[0];
  const Dump six = write("six", 6, 7.0f), fresh = write("five", 5, 7.0f);
  r = Diff(six, fresh);
  EXPECT_EQ(r.verdict, Verdict::kPass) << Table(r, {});
  EXPECT_EQ(r.paired_tokens, 5);
  EXPECT_EQ(r.units[1].padding_dropped, 1);
  // An expected value that owes nothing to the recorder: the embedding table itself.
  Tensor table = Tensor::Allocate(DType::kF32, {6, 2}).value();
  for (int64_t i = 0; i < 12; ++i) table.mutable_as<float>()[i] = 7.0f;
  DiffOptions options;
  options.pool = &pool_;
  EXPECT_EQ(DiffDumps(six, fresh, options, &table)->verdict, Verdict::kPass);
  table.mutable_as<float>()[4] = 6.0f;  // the row of token 2
  r = DiffDumps(six, fresh, options, &table).value();
  EXPECT_EQ(r.reason, "stale-capture");
  EXPECT_NE(r.notes[0].find("position 1"), std::string::npos) << r.notes[0];
}

// H10: rows of a bucket that hold no token are excluded and counted; a missing row is named.
TEST_F(DumpDiffTest, H10PadRowsInRouteRecords) {
  const std::vector<Piece> five = {{"r0", {1, 2, 3, 4, 5}, 0, 5, 0}};
  const auto write = [&](const std::string& name, int64_t rows, int32_t pad_a, int32_t pad_b) {
    auto w = Writer(name);
    w->BeginFrame(Frame(five));
    Tensor t = Tensor::Allocate(DType::kI32, {rows, 2}).value();
    for (int64_t i = 0; i < rows; ++i) {
      t.mutable_as<int32_t>()[2 * i] = i < 5 ? static_cast<int32_t>(i % 4) : pad_a;
      t.mutable_as<int32_t>()[2 * i + 1] = i < 5 ? static_cast<int32_t>((i + 1) % 4) : pad_b;
    }
    w->Emit({.name = "routes", .layer = 0, .op = "router", .role = TapRole::kDiscrete}, t);
    w->EndFrame();
    return Close(*w, name);
  };
  const Dump real = write("real", 5, 0, 0), old = write("old", 8, 3, 1),
             short_ = write("short", 4, 0, 0), zeros = write("zeros", 8, 0, 0),
             sentinel = write("sentinel", 8, -1, -1);
  for (const Dump* bucket : {&old, &zeros, &sentinel}) {
    const Report r = Diff(real, *bucket);
    EXPECT_EQ(r.verdict, Verdict::kPass) << Table(r, {});
    EXPECT_EQ(r.units[0].rows, 5);
    EXPECT_EQ(r.units[0].padding_dropped, 3);
  }
  const Report r = Diff(real, short_);
  EXPECT_EQ(r.verdict, Verdict::kFail);
  EXPECT_EQ(r.reason, "length-contract");
  EXPECT_NE(r.units[0].note.find("no row for sequence r0 position 4"), std::string::npos)
      << r.units[0].note;
}

// H09, DISC-01, DISC-02: a flip by a last-bit score is the finding; later values are withheld.
TEST_F(DumpDiffTest, H09SetFlipIsNamedWithLayerTokenAndMarginBeforeLaterValues) {
  const std::vector<Piece> one = {{"r0", {1, 2}, 0, 2, 0}};
  const auto write = [&](const std::string& name, std::vector<int32_t> ids, float later) {
    auto w = Writer(name);
    w->BeginFrame(Frame(one));
    Tensor s = Tensor::Allocate(DType::kF32, {2, 4}).value();
    const float scores[] = {.5f, .25f, .25f, .25f, .25f, .5f, .125f, .125f};
    std::memcpy(s.mutable_data(), scores, sizeof(scores));
    w->Emit({.name = "layers.3.router.logits", .layer = 3, .op = "router"}, s);
    Tensor t = Tensor::Allocate(DType::kI32, {2, 2}).value();
    std::memcpy(t.mutable_data(), ids.data(), 16);
    w->Emit({.name = "layers.3.router.ids",
             .layer = 3,
             .op = "router_topk",
             .role = TapRole::kDiscrete,
             .inputs = {"layers.3.router.logits"}},
            t);
    Tensor y = Tensor::Allocate(DType::kF32, {2, 1}).value();
    y.mutable_as<float>()[0] = later;
    w->Emit({.name = "layers.3.moe.out", .layer = 3, .op = "combine"}, y);
    w->EndFrame();
    return Close(*w, name);
  };
  const Dump good = write("good", {0, 1, 1, 0}, 1), flip = write("flip", {0, 3, 1, 0}, 2),
             order = write("order", {0, 1, 0, 1}, 1), twice = write("twice", {0, 0, 1, 0}, 1);
  Report r = Diff(good, flip);
  EXPECT_EQ(r.reason, "set-differs");
  EXPECT_EQ(r.units[1].set_differs, 1);
  EXPECT_NE(r.units[1].note.find("layer 3, sequence r0 position 0"), std::string::npos)
      << r.units[1].note;
  EXPECT_NE(r.units[1].note.find("margin at the cutoff 0 (tie)"), std::string::npos)
      << r.units[1].note;
  EXPECT_NE(r.units[1].note.find("by contract [0, 1]"), std::string::npos) << r.units[1].note;
  EXPECT_EQ(r.units[2].reason, "decisions-differ");
  r = Diff(good, order);
  EXPECT_EQ(r.reason, "order-differs");
  EXPECT_EQ(r.units[1].set_differs, 0);
  EXPECT_EQ(r.units[1].order_differs, 1);
  EXPECT_EQ(Diff(good, twice).reason, "duplicate-choice");
  EXPECT_EQ(Diff(good, good).verdict, Verdict::kPass);
}

}  // namespace
}  // namespace tare::compare
