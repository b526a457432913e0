// What is about to be done, before anything is allocated, stopped or published: within what a
// person granted, and within the budget. Nothing here does anything; whoever acts asks first.

#include <fmt/format.h>

#include <algorithm>

#include "workflow/claims/claim.h"

namespace tare::workflow {
namespace {

struct Action {
  std::string verb, what;
};

}  // namespace

GateJudgement JudgePlan(const Json& document) {
  Judging j("plan", document, "tare.claim.plan/v1");
  const Field root = j.root();
  const std::string track = root.At("track").OneOf({"baseline", "consistency", "none"});
  const Field grants = root.At("grants");
  const std::set<std::string> devices = grants.At("devices").StringSet(),
                              nodes = grants.At("nodes").StringSet(),
                              publish = grants.At("publish").StringSet(),
                              own_jobs = grants.At("own_jobs").StringSet();
  const Field budget = root.At("budget");
  const int64_t most_nodes = budget.At("nodes").Int(0, 1 << 20),
                most_devices = budget.At("devices").Int(0, 1 << 20);
  std::vector<Action> actions;
  for (const Field& a : root.At("actions").Items(1)) {
    actions.push_back({a.At("do").OneOf({"use-device", "use-node", "stop-job", "push-image",
                                         "open-pull-request", "run-command"}),
                       a.At("what").Str()});
  }
  if (!j.WellFormed()) return j.Finish();

  std::set<std::string> used_nodes, used_devices;
  for (const Action& a : actions) {
    const std::set<std::string>* allowed = a.verb == "use-device"    ? &devices
                                           : a.verb == "use-node"    ? &nodes
                                           : a.verb == "stop-job"    ? &own_jobs
                                           : a.verb == "run-command" ? nullptr
                                                                     : &publish;
    if (a.verb == "use-device") used_devices.insert(a.what);
    if (a.verb == "use-node") used_nodes.insert(a.what);
    // A command runs as the user who asked; it needs no grant, and reaches nothing by itself.
    j.Require(
        "GEN-30", allowed == nullptr || allowed->contains(a.what), reason::kNoPermission,
        fmt::format("{} {}: {}", a.verb, Printable(a.what),
                    a.verb == "stop-job" ? "the job is not this task's" : "nobody granted it"));
  }
  const auto within = [&](const char* what, size_t used, int64_t most) {
    j.Require("TRACK-09", static_cast<int64_t>(used) <= most, reason::kPlanOverBudget,
              fmt::format("{} {} are planned, the budget holds {}", used, what, most));
  };
  within("nodes", used_nodes.size(), most_nodes);
  within("devices", used_devices.size(), most_devices);
  j.Cover(
      {.shape = {fmt::format("{} actions", actions.size())},
       .topology = {fmt::format("{} nodes, {} devices", used_nodes.size(), used_devices.size())},
       .dtype = {"none"},
       .model = {"none"},
       .path = {track},
       .contracts = {}});
  return j.Finish();
}

}  // namespace tare::workflow
