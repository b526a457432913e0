// Bisection over layers against computations whose faults are known: every place, and two at once.

#include "compare/probe.h"

#include <fnmatch.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <set>

namespace tare::compare {
namespace {

namespace fs = std::filesystem;

class ProbeTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "probe_XXXXXX";
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    root_ = pattern;
  }
  void TearDown() override { fs::remove_all(root_); }

  // `layers` layers of two operators, `mid` and `out`, which each add 1; from a faulty one on
  // everything is off by 16 a fault.
  std::unique_ptr<Dump> Record(int64_t layers, const std::set<std::string>& faults,
                               const std::vector<std::string>& names) {
    DumpOptions options;
    options.sync = false;
    options.manifest.weights = {{"theta0", Sha256Of("w")}};
    options.manifest.identity = {{"replay", {"score", "m"}}};
    options.record = [&](const TapPoint& p) {
      return std::any_of(names.begin(), names.end(), [&](const std::string& n) {
        return ::fnmatch(n.c_str(), p.name.c_str(), 0) == 0;
      });
    };
    const std::string path = root_ + "/" + std::to_string(++number_) + ".dump";
    auto w = DumpWriter::Create(Env::Real(), path, std::move(options)).value();
    TapFrame frame;
    frame.weight_version = "theta0";
    frame.runs = {{"s", TokenHash{}, 0, 0, {4, 5, 6}}};
    w->BeginFrame(frame);
    Tensor x = Tensor::Allocate(DType::kF32, {3, 1}).value();
    const auto emit = [&](const std::string& name, int layer, const std::string& input,
                          TapRole role = TapRole::kValue) {
      TapPoint p;
      p.name = name;
      p.layer = layer;
      p.op = name.substr(name.rfind('.') + 1);
      p.role = role;
      if (!input.empty()) p.inputs = {input};
      w->Emit(p, x);
    };
    emit("embed.out", -1, "", TapRole::kSentinel);
    emit("embed.out", -1, "", TapRole::kExpected);
    std::string before = "embed.out";
    const auto step = [&](const std::string& name, int layer) {
      for (int i = 0; i < 3; ++i) x.mutable_as<float>()[i] += faults.count(name) > 0 ? 17.0f : 1.0f;
      emit(name, layer, before);
      before = name;
    };
    for (int l = 0; l < layers; ++l) {
      step("layers." + std::to_string(l) + ".mid", l);
      step("layers." + std::to_string(l) + ".out", l);
    }
    step("norm.out", -1);
    w->EndFrame();
    EXPECT_TRUE(w->Finish().ok());
    return std::make_unique<Dump>(Dump::Open(Env::Real(), path).value());
  }

  ProbeReport Run(int64_t layers, const std::set<std::string>& faults) {
    Bundle bundle;
    bundle.description = {{"a", {{"identity", {{"replay", {"score", "m"}}}}}},
                          {"b", {{"identity", {{"replay", {"score", "m"}}}}}}};
    return Probe(bundle, layers, &pool_,
                 [&](const std::vector<std::string>& names) -> Result<Replayed> {
                   Replayed out;
                   out.a = Record(layers, {}, names);
                   out.b = Record(layers, faults, names);
                   return out;
                 })
        .value();
  }

  std::string root_;
  int number_ = 0;
  ThreadPool pool_{1};
};

TEST_F(ProbeTest, C308EveryPlaceIsFoundWithinTheBound) {
  for (const int64_t layers : {1, 2, 3, 7, 8}) {
    int bound = 1;
    while ((int64_t{1} << (bound - 1)) < layers + 1) ++bound;
    std::vector<std::string> places = {"norm.out"};
    for (int l = 0; l < layers; ++l) {
      places.push_back("layers." + std::to_string(l) + ".mid");
      places.push_back("layers." + std::to_string(l) + ".out");
    }
    for (const std::string& place : places) {
      const ProbeReport r = Run(layers, {place});
      EXPECT_EQ(r.verdict, Verdict::kFail) << ProbeTable(r);
      EXPECT_EQ(r.reason, "first-divergence") << ProbeTable(r);
      EXPECT_EQ(r.located.site.name, place) << ProbeTable(r);
      EXPECT_LE(r.runs, bound) << ProbeTable(r);
    }
  }
}

TEST_F(ProbeTest, WithTwoFaultsOneOfThemIsNamedWithEqualInputs) {
  const ProbeReport r = Run(8, {"layers.2.mid", "layers.6.out"});
  EXPECT_EQ(r.verdict, Verdict::kFail) << ProbeTable(r);
  EXPECT_EQ(r.located.site.name, "layers.2.mid") << ProbeTable(r);
  EXPECT_EQ(ProbeJson(r)["site"]["proven"], true);
}

TEST_F(ProbeTest, NothingToFindIsNoPass) {
  const ProbeReport equal = Run(4, {});
  EXPECT_EQ(equal.verdict, Verdict::kInconclusive);
  EXPECT_EQ(equal.reason, "no-difference");
  Bundle bundle;
  bundle.description = Json::object();
  const ProbeReport none = Probe(bundle, 4, &pool_, nullptr).value();
  EXPECT_EQ(none.verdict, Verdict::kInconclusive);
  EXPECT_EQ(none.reason, "missing-capture");
  EXPECT_EQ(none.runs, 0);
}

}  // namespace
}  // namespace tare::compare
