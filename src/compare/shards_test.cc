// One run on one process against the same run cut over ranks: every layout puts the same whole
// together, and every way in which ranks do not fit is named.

#include "compare/shards.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <functional>

#include "compare/open.h"

namespace tare::compare {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kTokens = 8, kWidth = 8;

float Value(int64_t row, int64_t column) { return static_cast<float>(100 * row + column + 1); }

// Which global index the part `index` of `count` holds at its place `i` of `size`; written apart
// from the code under test.
int64_t Global(const std::string& layout, int64_t index, int64_t count, int64_t size, int64_t i) {
  if (layout == "contiguous") return index * size + i;
  if (layout == "interleaved") return count * i + index;
  // zigzag: the whole in 2 * count parts, two of them here
  const int64_t part = size / 2;
  const int64_t which = i < part ? index : 2 * count - 1 - index;
  return which * part + (part == 0 ? 0 : i % part);
}

class ShardsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "shards_XXXXXX";
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    root_ = pattern;
  }
  void TearDown() override { fs::remove_all(root_); }

  // One rank of a run over the sequence 10, 11, ..: which token rows it holds, and how the columns
  // of `y` and the whole tensor `grad` are cut.
  struct Rank {
    std::vector<int64_t> positions = {};  // empty: all
    std::vector<TapShard> columns = {};
    std::vector<TapShard> rows = {};
    std::function<void(Tensor*)> change = {};
    std::string name = "y";
    bool grad = true;
    bool keep = true;
  };

  std::string Record(const std::string& path, const Rank& rank) {
    DumpOptions options;
    options.sync = false;
    options.manifest.side = "trainer";
    options.manifest.weights = {{"theta0", Sha256Of("w")}};
    if (!rank.keep) options.keep_payload = [](const TapPoint&) { return false; };
    auto w = DumpWriter::Create(Env::Real(), root_ + "/" + path, std::move(options)).value();
    std::vector<int64_t> positions = rank.positions;
    for (int64_t p = 0; rank.positions.empty() && p < kTokens; ++p) positions.push_back(p);
    TapFrame frame;
    frame.weight_version = "theta0";
    std::vector<int32_t> tokens;
    for (int64_t p = 0; p < kTokens; ++p) tokens.push_back(static_cast<int32_t>(10 + p));
    for (size_t i = 0; i < positions.size(); ++i) {
      const int64_t p = positions[i];
      if (i == 0 || positions[i - 1] + 1 != p) {
        const auto before = std::span<const int32_t>(tokens).first(static_cast<size_t>(p));
        frame.runs.push_back(
            {"s", ExtendTokenHash(TokenHash{}, before), p, static_cast<int64_t>(i), {}});
      }
      frame.runs.back().tokens.push_back(tokens[static_cast<size_t>(p)]);
    }
    w->BeginFrame(frame);
    int64_t size = kWidth;
    for (const TapShard& s : rank.columns) size /= s.count;
    Tensor y =
        Tensor::Allocate(DType::kF32, {static_cast<int64_t>(positions.size()), size}).value();
    Tensor grad = Tensor::Allocate(DType::kF32, {size}).value();
    for (int64_t c = 0; c < size; ++c) {
      int64_t g = c, inner = size;
      for (auto s = rank.columns.rbegin(); s != rank.columns.rend(); ++s) {
        g = Global(s->layout, s->index, s->count, inner, g);
        inner *= s->count;
      }
      for (size_t i = 0; i < positions.size(); ++i) {
        y.mutable_as<float>()[static_cast<int64_t>(i) * size + c] = Value(positions[i], g);
      }
      grad.mutable_as<float>()[c] = Value(0, g);
    }
    if (rank.change) rank.change(&y);
    std::vector<TapShard> shards = rank.columns;
    for (TapShard& s : shards) s.dim = 1;
    shards.insert(shards.end(), rank.rows.begin(), rank.rows.end());
    w->Emit({.name = rank.name, .layer = 0, .op = "linear", .shards = shards}, y);
    if (rank.grad) {
      w->Emit({.name = "grad", .op = "linear", .per_row = false, .shards = rank.columns}, grad);
    }
    w->EndFrame();
    EXPECT_TRUE(w->Finish().ok());
    return root_ + "/" + path;
  }

  Result<Report> Diff(const std::string& a, const std::string& b) {
    TARE_ASSIGN_OR_RETURN(const Input x, OpenInput(Env::Real(), root_ + "/" + a));
    TARE_ASSIGN_OR_RETURN(const Input y, OpenInput(Env::Real(), root_ + "/" + b));
    DiffOptions options;
    options.pool = &pool_;
    return DiffInputs(x, y, options);
  }
  void Ranks(const std::string& set, const std::vector<Rank>& ranks) {
    fs::remove_all(root_ + "/" + set);
    fs::create_directory(root_ + "/" + set);
    for (size_t r = 0; r < ranks.size(); ++r) {
      Record(set + "/rank" + std::to_string(r) + ".dump", ranks[r]);
    }
  }
  // The set equals the whole run, and shows one changed element where it is.
  void ExpectWhole(const std::string& set, std::vector<Rank> ranks) {
    Ranks(set, ranks);
    Result<Report> r = Diff("whole.dump", set);
    ASSERT_TRUE(r.ok()) << set << ": " << r.status().ToString();
    EXPECT_EQ(r->verdict, Verdict::kPass) << set << "\n" << Table(*r, {});
    EXPECT_EQ(r->totals.compared, kTokens * kWidth + kWidth);
    ranks.back().change = [](Tensor* y) { y->mutable_as<uint32_t>()[y->elements() - 1] ^= 1; };
    Ranks(set, ranks);
    r = Diff("whole.dump", set);
    ASSERT_TRUE(r.ok()) << r.status().ToString();
    EXPECT_EQ(r->verdict, Verdict::kFail);
    EXPECT_EQ(r->totals.mismatches, 1) << set << "\n" << Table(*r, {});
  }
  void ExpectError(const std::string& what, const std::vector<Rank>& ranks,
                   const std::vector<std::string>& says) {
    Ranks(what, ranks);
    const Result<Report> r = Diff("whole.dump", what);
    ASSERT_FALSE(r.ok()) << what << "\n" << Table(*r, {});
    for (const std::string& text : says) {
      EXPECT_NE(r.status().message().find(text), std::string::npos)
          << what << ": " << r.status().ToString() << " does not say " << text;
    }
  }

  std::string root_;
  ThreadPool pool_{1};
};

TapShard Tp(int64_t index, int64_t count, const std::string& layout = "contiguous") {
  return {.axis = "tp", .dim = 0, .index = index, .count = count, .layout = layout};
}
TapShard Cp(int64_t index, int64_t count, const std::string& layout) {
  return {.axis = "cp", .dim = 0, .index = index, .count = count, .layout = layout};
}

TEST_F(ShardsTest, EveryLayoutPutsTheSameWholeTogether) {
  Record("whole.dump", {});
  for (const std::string layout : {"contiguous", "zigzag", "interleaved"}) {
    ExpectWhole("tp2." + layout,
                {{.columns = {Tp(0, 2, layout)}}, {.columns = {Tp(1, 2, layout)}}});
    // The order of the ranks' names is not their place.
    ExpectWhole("tp4." + layout, {{.columns = {Tp(3, 4, layout)}},
                                  {.columns = {Tp(0, 4, layout)}},
                                  {.columns = {Tp(2, 4, layout)}},
                                  {.columns = {Tp(1, 4, layout)}}});
  }
  // Experts outermost, tensor parallel inside each.
  const auto ep = [](int64_t index) {
    return TapShard{.axis = "ep", .dim = 0, .index = index, .count = 2};
  };
  ExpectWhole("ep2tp2", {{.columns = {ep(0), Tp(0, 2)}},
                         {.columns = {ep(0), Tp(1, 2)}},
                         {.columns = {ep(1), Tp(0, 2)}},
                         {.columns = {ep(1), Tp(1, 2)}}});
  // Context parallel: rows find their place by token.
  ExpectWhole("cp2.zigzag", {{.positions = {0, 1, 6, 7}, .rows = {Cp(0, 2, "zigzag")}},
                             {.positions = {2, 3, 4, 5}, .rows = {Cp(1, 2, "zigzag")}}});
  ExpectWhole("cp2.contiguous", {{.positions = {0, 1, 2, 3}, .rows = {Cp(0, 2, "contiguous")}},
                                 {.positions = {4, 5, 6, 7}, .rows = {Cp(1, 2, "contiguous")}}});
  ExpectWhole("cp2.interleaved", {{.positions = {0, 2, 4, 6}, .rows = {Cp(0, 2, "interleaved")}},
                                  {.positions = {1, 3, 5, 7}, .rows = {Cp(1, 2, "interleaved")}}});
  // Both at once.
  ExpectWhole("cp2tp2",
              {{.positions = {0, 1, 6, 7}, .columns = {Tp(0, 2)}, .rows = {Cp(0, 2, "zigzag")}},
               {.positions = {0, 1, 6, 7}, .columns = {Tp(1, 2)}, .rows = {Cp(0, 2, "zigzag")}},
               {.positions = {2, 3, 4, 5}, .columns = {Tp(0, 2)}, .rows = {Cp(1, 2, "zigzag")}},
               {.positions = {2, 3, 4, 5}, .columns = {Tp(1, 2)}, .rows = {Cp(1, 2, "zigzag")}}});
}

TEST_F(ShardsTest, ReplicasAreBitChecked) {
  Record("whole.dump", {});
  Ranks("dp2", {{}, {}});
  Result<Report> r = Diff("whole.dump", "dp2");
  ASSERT_TRUE(r.ok()) << r.status().ToString();
  EXPECT_EQ(r->verdict, Verdict::kPass) << Table(*r, {});
  EXPECT_NE(Table(*r, {}).find("72 elements were held twice and bit-checked"), std::string::npos)
      << Table(*r, {});
  // One bit of one replica, on either side of the command.
  Ranks("dp2", {{}, {.change = [](Tensor* y) { y->mutable_as<uint32_t>()[19] ^= 1; }}});
  for (const bool first : {true, false}) {
    r = first ? Diff("dp2", "whole.dump") : Diff("whole.dump", "dp2");
    ASSERT_TRUE(r.ok()) << r.status().ToString();
    EXPECT_EQ(r->verdict, Verdict::kFail);
    EXPECT_EQ(r->reason, "bit-mismatch");
    for (const char* says : {"differs from itself", "rank0.dump", "rank1.dump", "s@2 element 3",
                             "0x434c0000 against 0x434c0001"}) {
      EXPECT_NE(r->why.find(says), std::string::npos) << r->why;
    }
  }
}

TEST_F(ShardsTest, StagesOfAPipelineFollowEachOther) {
  Record("whole.dump", {.grad = false});
  Ranks("pp2", {{.name = "y", .grad = false}, {.name = "z", .grad = false}});
  const Result<Report> r = Diff("pp2", "pp2");
  ASSERT_TRUE(r.ok()) << r.status().ToString();
  EXPECT_EQ(r->verdict, Verdict::kPass) << Table(*r, {});
  ASSERT_EQ(r->units.size(), 2u);
  EXPECT_EQ(r->units[0].name, "y");
  EXPECT_EQ(r->units[1].name, "z");
}

TEST_F(ShardsTest, OverlapsAndGapsAreErrors) {
  Record("whole.dump", {});
  ExpectError("gap", {{.columns = {Tp(0, 2)}}},
              {"y", "gap", "element 4", "s@0", "tp 0/2 of dimension 1 contiguous"});
  ExpectError("row gap",
              {{.positions = {0, 1, 2, 3}, .columns = {Tp(0, 2)}},
               {.positions = {0, 1, 2, 3, 4}, .columns = {Tp(1, 2)}}},
              {"gap", "s@4"});
  ExpectError("overlap", {{.columns = {Tp(0, 2)}}, {.columns = {Tp(1, 2)}}, {}},
              {"y: overlap", "rank0.dump (tp 0/2", "rank2.dump (whole)"});
  ExpectError("other counts",
              {{.columns = {Tp(0, 2)}}, {.columns = {Tp(1, 2)}}, {.columns = {Tp(3, 4)}}},
              {"overlap", "tp 3/4"});
  ExpectError("two layouts", {{.columns = {Tp(0, 2)}}, {.columns = {Tp(1, 2, "interleaved")}}},
              {"overlap", "interleaved"});
  ExpectError("wrong place",
              {{.positions = {0, 1, 2, 3}, .rows = {Cp(0, 2, "zigzag")}},
               {.positions = {4, 5, 6, 7}, .rows = {Cp(1, 2, "zigzag")}}},
              {"says cp 0/2 zigzag", "position 2", "lies in part 1"});
  ExpectError("no payload", {{.columns = {Tp(0, 2)}, .keep = false}, {.columns = {Tp(1, 2)}}},
              {"kept without payload"});
  ExpectError("odd zigzag", {{.columns = {Tp(0, 8, "zigzag")}}}, {"even number"});
}

TEST_F(ShardsTest, ACutRankMakesACutWhole) {
  Record("whole.dump", {});
  Ranks("tp2", {{.columns = {Tp(0, 2)}}, {.columns = {Tp(1, 2)}}});
  fs::remove(root_ + "/tp2/rank1.dump/manifest.json");
  const Result<Report> r = Diff("whole.dump", "tp2");
  ASSERT_TRUE(r.ok()) << r.status().ToString();
  EXPECT_EQ(r->verdict, Verdict::kInconclusive) << Table(*r, {});
  EXPECT_EQ(r->reason, "dump-cut");
}

}  // namespace
}  // namespace tare::compare
