// Locating on a small simulated model whose operators really feed each other: a planted 1-ulp fault
// grows downstream and into later tokens, as in a real one.

#include "compare/locate.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <optional>
#include <random>

#include "base/env.h"
#include "compare/bundle.h"

namespace tare::compare {
namespace {

namespace fs = std::filesystem;
using Ints = std::vector<int32_t>;

constexpr int kLayers = 6;
constexpr int kWidth = 4;
const char* const kOps[] = {"norm", "proj", "scan", "gate", "out"};

struct Fault {
  int layer, op, sequence, position;
};

using Row = std::array<uint32_t, kWidth>;  // bits of finite floats

Row Mix(const Row& x, uint32_t salt) {
  Row y;
  for (int k = 0; k < kWidth; ++k) {
    uint32_t h = salt * 2246822519u;
    for (int j = 0; j < kWidth; ++j)
      h = (h ^ x[static_cast<size_t>((k + j) % kWidth)]) * 2654435761u + (h >> 15);
    y[static_cast<size_t>(k)] = 0x3f000000u | (h & 0x007fffffu);
  }
  return y;
}

// values[name][sequence][position]
using Values = std::map<std::string, std::vector<std::vector<Row>>>;

Values Compute(const std::vector<Ints>& sequences, const std::optional<Fault>& fault) {
  Values v;
  std::vector<std::vector<Row>> x(sequences.size());
  for (size_t s = 0; s < sequences.size(); ++s) {
    for (const int32_t t : sequences[s])
      x[s].push_back(Mix({static_cast<uint32_t>(t), 1, 2, 3}, 7));
  }
  v["embed.out"] = x;
  for (int l = 0; l < kLayers; ++l) {
    for (int o = 0; o < 5; ++o) {
      for (size_t s = 0; s < x.size(); ++s) {
        Row state = {};
        for (size_t p = 0; p < x[s].size(); ++p) {
          Row in = x[s][p];
          if (o == 2) {  // reads history
            for (size_t k = 0; k < in.size(); ++k) in[k] += state[k] * 31;
            state = in;
          }
          x[s][p] = Mix(in, static_cast<uint32_t>(l * 8 + o));
          if (fault && fault->layer == l && fault->op == o &&
              fault->sequence == static_cast<int>(s) && fault->position == static_cast<int>(p)) {
            x[s][p][2] ^= 1;
          }
        }
      }
      v["layers." + std::to_string(l) + "." + kOps[o]] = x;
    }
  }
  return v;
}

struct Piece {
  int sequence;
  int begin, end;
};

class LocateTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "locate_XXXXXX";
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    root_ = pattern;
  }
  void TearDown() override { fs::remove_all(root_); }

  struct Recording {
    std::vector<std::vector<Piece>> frames{};
    std::string skip{};  // a name not captured
    bool declare_inputs = true;
    bool sentinel = true;
    bool weights = true;
    int padding = 0;
  };

  Dump Record(const std::string& name, const Values& values, const Recording& how) {
    DumpOptions options;
    options.sync = false;
    if (how.weights) options.manifest.weights = {{"theta0", Sha256Of("w")}};
    fs::remove_all(root_ + "/" + name);
    auto w = DumpWriter::Create(Env::Real(), root_ + "/" + name, std::move(options)).value();
    for (const std::vector<Piece>& pieces : how.frames) {
      TapFrame frame{.phase = TapPhase::kPrefill, .weight_version = "theta0"};
      int64_t rows = 0;
      for (const Piece& p : pieces) {
        const Ints& tokens = sequences_[static_cast<size_t>(p.sequence)];
        frame.runs.push_back({.sequence = "s" + std::to_string(p.sequence),
                              .history = ExtendTokenHash({}, std::span<const int32_t>(tokens).first(
                                                                 static_cast<size_t>(p.begin))),
                              .position = p.begin,
                              .row = rows,
                              .tokens = Ints(tokens.begin() + p.begin, tokens.begin() + p.end)});
        rows += p.end - p.begin;
      }
      w->BeginFrame(frame);
      const auto tensor = [&](const std::string& point) {
        Tensor t = Tensor::Allocate(DType::kF32, {rows + how.padding, kWidth}).value();
        char* out = static_cast<char*>(t.mutable_data());
        for (const Piece& p : pieces) {
          for (int i = p.begin; i < p.end; ++i, out += sizeof(Row)) {
            std::memcpy(
                out,
                values.at(point)[static_cast<size_t>(p.sequence)][static_cast<size_t>(i)].data(),
                sizeof(Row));
          }
        }
        return t;
      };
      w->Emit({.name = "embed.out",
               .op = "embedding",
               .role = how.sentinel ? TapRole::kSentinel : TapRole::kValue},
              tensor("embed.out"));
      if (how.sentinel)
        w->Emit({.name = "embed.out", .op = "embedding", .role = TapRole::kExpected},
                tensor("embed.out"));
      std::string before = "embed.out";
      for (int l = 0; l < kLayers; ++l) {
        for (int o = 0; o < 5; ++o) {
          const std::string point = "layers." + std::to_string(l) + "." + kOps[o];
          if (point != how.skip) {
            TapPoint p{.name = point, .layer = l, .op = kOps[o]};
            if (how.declare_inputs) p.inputs = {before};
            p.reads_history = o == 2;
            w->Emit(p, tensor(point));
          }
          before = point;
        }
      }
      w->EndFrame();
    }
    EXPECT_TRUE(w->Finish().ok()) << w->status().ToString();
    return Dump::Open(Env::Real(), root_ + "/" + name).value();
  }
  LocateReport Find(const Dump& a, const Dump& b) {
    DiffOptions options;
    options.pool = &pool_;
    return Locate(a, b, options, nullptr).value();
  }

  // Whole sequences in one frame; chunks and decode steps of the same.
  const Recording whole_{.frames = {{{0, 0, 9}, {1, 0, 7}, {2, 0, 5}}}};
  const Recording chunks_{
      .frames = {{{1, 0, 4}, {0, 0, 3}}, {{2, 0, 5}, {1, 4, 7}}, {{0, 3, 8}}, {{0, 8, 9}}},
      .padding = 2};
  const std::vector<Ints> sequences_ = {
      {5, 3, 9, 1, 4, 4, 8, 2, 7}, {6, 6, 1, 3, 2, 9, 5}, {5, 3, 9, 7, 7}};
  ThreadPool pool_{2};
  std::string root_;
};

// GEN-02, SHAPE-11: 20 random sites, all named exactly, with the first differing token.
TEST_F(LocateTest, GEN02TwentyPlantedFaultsAreNamedExactly) {
  const Dump good = Record("good", Compute(sequences_, {}), whole_);
  std::mt19937 random(20);
  for (int i = 0; i < 20; ++i) {
    Fault f;
    f.layer = static_cast<int>(random() % kLayers);
    f.op = static_cast<int>(random() % 5);
    f.sequence = static_cast<int>(random() % 3);
    // Beyond the prefix that sequences 0 and 2 share, so that the key is one sequence's alone.
    f.position =
        3 + static_cast<int>(random() % (sequences_[static_cast<size_t>(f.sequence)].size() - 3));
    const LocateReport r = Find(good, Record("bad", Compute(sequences_, f), chunks_));
    ASSERT_TRUE(r.found) << LocateTable(r);
    EXPECT_EQ(r.site.name, "layers." + std::to_string(f.layer) + "." + kOps[f.op]);
    EXPECT_EQ(r.site.sequence, "s" + std::to_string(f.sequence));
    EXPECT_EQ(r.site.position, f.position);
    EXPECT_EQ(r.site.coordinate, std::vector<int64_t>{2});
    EXPECT_EQ(r.verdict, Verdict::kFail) << LocateTable(r);
    EXPECT_EQ(r.reason, "first-divergence");
    // The table of layers: equal before, the first differing token from the fault's layer on.
    for (const LayerRow& row : r.layers) {
      EXPECT_EQ(row.differing == 0, row.layer < f.layer) << row.layer;
      if (row.layer == f.layer) {
        ASSERT_EQ(row.first_tokens.size(), 1u);
        EXPECT_EQ(row.first_tokens[0].second, f.position);
      }
    }
  }
}

// SHAPE-10: the scan at token 8 differs most visibly, but the fault sits at token 3 upstream.
TEST_F(LocateTest, SHAPE10HistoryDoesNotTakeTheBlame) {
  const Fault f{1, 1, 0, 3};
  const Dump good = Record("good", Compute(sequences_, {}), chunks_);
  const Dump bad = Record("bad", Compute(sequences_, f), whole_);
  LocateReport r = Find(good, bad);
  EXPECT_EQ(r.site.name, "layers.1.proj");
  EXPECT_EQ(r.site.position, 3);
  EXPECT_EQ(r.verdict, Verdict::kFail);
  // A probe at token 8 alone sees only the scan: a candidate, with the reason (SHAPE-13).
  const Recording probe{.frames = {{{0, 8, 9}}}};
  r = Find(Record("pa", Compute(sequences_, {}), probe),
           Record("pb", Compute(sequences_, f), probe));
  EXPECT_EQ(r.site.name, "layers.1.scan");
  EXPECT_EQ(r.verdict, Verdict::kInconclusive);
  EXPECT_EQ(r.reason, "candidate-only");
  EXPECT_NE(LocateTable(r).find("a single position only narrows"), std::string::npos)
      << LocateTable(r);
}

// SHAPE-12: without the inputs it stays a candidate.
TEST_F(LocateTest, SHAPE12MissingCaptureIsInconclusive) {
  const Fault f{2, 3, 1, 4};
  Recording how = whole_;
  how.skip = "layers.2.scan";  // the input of the gate
  LocateReport r =
      Find(Record("a", Compute(sequences_, {}), how), Record("b", Compute(sequences_, f), how));
  EXPECT_EQ(r.site.name, "layers.2.gate");
  EXPECT_EQ(r.verdict, Verdict::kInconclusive);
  EXPECT_EQ(r.reason, "missing-capture");
  how = whole_;
  how.declare_inputs = false;
  r = Find(Record("a", Compute(sequences_, {}), how), Record("b", Compute(sequences_, f), how));
  EXPECT_EQ(r.reason, "missing-capture");
  how = whole_;
  how.sentinel = false;
  r = Find(Record("a", Compute(sequences_, {}), how), Record("b", Compute(sequences_, f), how));
  EXPECT_EQ(r.verdict, Verdict::kInconclusive);
  EXPECT_EQ(r.reason, "no-sentinel");
  how = whole_;
  how.weights = false;
  r = Find(Record("a", Compute(sequences_, {}), how), Record("b", Compute(sequences_, f), how));
  EXPECT_EQ(r.verdict, Verdict::kInconclusive);
}

TEST_F(LocateTest, EqualDumpsHaveNothingToLocate) {
  const Values v = Compute(sequences_, {});
  const LocateReport r = Find(Record("a", v, whole_), Record("b", v, chunks_));
  EXPECT_EQ(r.verdict, Verdict::kInconclusive);
  EXPECT_EQ(r.reason, "no-difference");
  EXPECT_FALSE(r.found);
}

// SHAPE-14: equal and stale is refused before anything is compared.
TEST_F(LocateTest, SHAPE14StaleCapturesAreNotSearched) {
  Values v = Compute(sequences_, {});
  Dump a = Record("a", v, whole_);
  DiffOptions options;
  options.pool = &pool_;
  Tensor table = Tensor::Allocate(DType::kF32, {10, kWidth}).value();  // rows of other weights
  const LocateReport r = Locate(a, a, options, &table).value();
  EXPECT_EQ(r.verdict, Verdict::kInconclusive);
  EXPECT_EQ(r.reason, "stale-capture");
}

// GEN-01: the bundle stands alone, knows when it was altered, and knows its bits again.
TEST_F(LocateTest, BundleHoldsInputsOutputsAndKnowsItsBits) {
  const Fault f{2, 3, 1, 4};
  const Dump a = Record("a", Compute(sequences_, {}), whole_),
             b = Record("b", Compute(sequences_, f), chunks_);
  const LocateReport r = Find(a, b);
  const std::string path = root_ + "/bundle";
  ASSERT_TRUE(WriteBundle(Env::Real(), path, a, b, r).ok());
  EXPECT_EQ(WriteBundle(Env::Real(), path, a, b, r).code(), Code::kAlreadyExists);
  const Bundle bundle = OpenBundle(Env::Real(), path).value();
  EXPECT_NE(bundle.output_a, bundle.output_b);
  EXPECT_EQ(CheckReplay(bundle, "a", a)->verdict, Verdict::kPass);
  EXPECT_EQ(CheckReplay(bundle, "b", b)->verdict, Verdict::kPass);
  EXPECT_EQ(CheckReplay(bundle, "b", a)->reason, "replay-differs");
  // The same tokens in another batch bring the same bits; other tokens are not there.
  EXPECT_EQ(CheckReplay(bundle, "a", Record("c", Compute(sequences_, {}), chunks_))->verdict,
            Verdict::kPass);
  EXPECT_EQ(
      CheckReplay(bundle, "a", Record("d", Compute(sequences_, {}), {.frames = {{{0, 0, 9}}}}))
          ->reason,
      "missing-capture");
  std::FILE* file = std::fopen((path + "/tensors.safetensors").c_str(), "r+b");
  std::fseek(file, -1, SEEK_END);
  std::fputc(0x77, file);
  std::fclose(file);
  EXPECT_NE(OpenBundle(Env::Real(), path).status().message().find("altered"), std::string::npos);
}

}  // namespace
}  // namespace tare::compare
