// `tare backward` on MINI: the facts that C6 and C7 rest on, as they are and with planted faults,
// and the scan of the sources against planted mechanisms.

#include <algorithm>
#include <map>
#include <set>

#include "base/json.h"
#include "tool.h"

namespace tare {
namespace {

class BackwardTool : public ToolTest {
 protected:
  void SetUp() override {
    ToolTest::SetUp();
    ASSERT_EQ(Tare("model mini " + In("mini")).status, 0);
  }
  Json Facts(const std::string& rest) {
    const ToolRun run = Tare("backward " + In("mini") + " " + rest);
    EXPECT_EQ(run.status, 0) << run.err;
    Result<Json> json = ParseJson(run.out);
    EXPECT_TRUE(json.ok()) << run.out.substr(0, 500);
    return json.ok() ? *json : Json::object();
  }
};

// C6-01, C6-04, C6-06, BWD-05.
TEST_F(BackwardTool, TheInventoryOfMini) {
  const Json facts = Facts("--inventory").at("inventory");
  std::set<std::string> names;
  for (const Json& op : facts.at("operators")) {
    names.insert(op.at("name").get<std::string>());
    // A backward reads what the contract says that forward saves, and nothing else.
    EXPECT_EQ(op.at("saved"), op.at("reads")) << op.dump();
    EXPECT_EQ(op.at("contract").get<std::string>().size(), 64u);
  }
  for (const char* name : {"attention", "linear", "grouped_linear", "rmsnorm", "router", "gate"})
    EXPECT_TRUE(names.contains(name)) << name;
  ASSERT_EQ(facts.at("poisoned").size(), 3u);
  for (const Json& p : facts.at("poisoned"))
    EXPECT_EQ(p.at("gradient_before"), p.at("gradient_after")) << p.dump();
  EXPECT_EQ(facts.at("weight_change_raises"), true);
  EXPECT_EQ(facts.at("graph").at("trained_value"), "executed forward") << facts.at("graph").dump();
  EXPECT_EQ(facts.at("scan").at("hits").size(), 0u) << facts.at("scan").dump();
  EXPECT_EQ(facts.at("scan").at("run_time_hits").size(), 0u) << facts.at("scan").dump();
  EXPECT_GT(facts.at("scan").at("sources_scanned"), 300);
}

// BWD-05: a gradient that leaves a factor out is not that of the forward that ran.
TEST_F(BackwardTool, AGradientOfAnotherFunctionIsSeen) {
  const Json facts = Facts("--inventory --fault gate.detached_forward@trainer").at("inventory");
  EXPECT_EQ(facts.at("graph").at("trained_value"), "another function") << facts.at("graph").dump();
}

// C7-02, C7-03, C7-05.
TEST_F(BackwardTool, GradientsInThreeLayers) {
  const Json all = Facts("--gradients").at("gradients");
  for (const auto& [layer, most] :
       std::map<std::string, double>{{"operator", 1e-4}, {"module", 5e-3}, {"model", 0.1}}) {
    ASSERT_FALSE(all.at("layers").at(layer).empty()) << layer;
    for (const Json& c : all.at("layers").at(layer)) {
      for (const auto& [input, sides] : c.at("inputs").items())
        EXPECT_EQ(sides.at("production"), sides.at("reference")) << layer << " " << input;
      for (const Json& q : c.at("quantities")) {
        EXPECT_LE(q.at("error").get<double>(), most) << c.at("where") << " " << q.at("name");
        EXPECT_FALSE(q.at("all_zero").get<bool>()) << q.at("name");
      }
    }
  }
  const Json& moved = all.at("perturbation");
  EXPECT_NE(moved.at("production_before"), moved.at("production_after"));
  EXPECT_EQ(moved.at("reference_before"), moved.at("reference_after"));
}

TEST_F(BackwardTool, AWrongGradientIsFarOff) {
  const Json all =
      Facts("--gradients --fault linear.dw_without_partial_group@trainer").at("gradients");
  double worst = 0;
  for (const Json& c : all.at("layers").at("operator")) {
    for (const Json& q : c.at("quantities")) worst = std::max(worst, q.at("error").get<double>());
  }
  EXPECT_GT(worst, 0.01);
}

// C6-04: a library put before all others, and sources that look symbols up behind it, are named.
TEST_F(BackwardTool, PatchingIsSeen) {
  const std::string command = "LD_PRELOAD=libm.so.6 " + Program() + " backward " + In("mini") +
                              " --inventory >" + In("preloaded") + " 2>/dev/null";
  ASSERT_EQ(std::system(command.c_str()), 0);
  const auto json = ParseJson(Env::Real()->ReadFile(In("preloaded")).value());
  ASSERT_TRUE(json.ok());
  EXPECT_NE(json->at("inventory").at("scan").at("preload").dump().find("LD_PRELOAD"),
            std::string::npos);

  std::filesystem::create_directories(In("src"));
  std::filesystem::create_directories(In("tools"));
  const auto scan = [&] {
    const std::string cmake = "cmake -DROOT=" + root_ + " -DOUT=" + In("scan.inc") + " -P " +
                              TARE_SOURCE_DIR "/cmake/scan_sources.cmake >/dev/null 2>&1";
    EXPECT_EQ(std::system(cmake.c_str()), 0);
    return Env::Real()->ReadFile(In("scan.inc")).value();
  };
  Write("src/plain.cc", "int x() { return 1; }\n");
  EXPECT_EQ(scan().find("plain.cc"), std::string::npos);
  for (const char* planted :
       {"auto next = dlsym(RTLD_NEXT, \"malloc\");", "mprotect(p, n, PROT_READ | PROT_EXEC);",
        "void f() __attribute__((ifunc(\"pick\")));", "setenv(\"LD_PRELOAD\", path, 1);"}) {
    Write("src/planted.cc", planted);
    EXPECT_NE(scan().find("planted.cc"), std::string::npos) << planted;
  }
}

}  // namespace
}  // namespace tare
