// `tare init DIR`: makes a task directory. `tare init DIR --amend WHY` records an edit of
// task.toml.

#include <cstdio>
#include <memory>

#include "base/json.h"
#include "tools/command.h"
#include "workflow/process.h"
#include "workflow/record.h"
#include "workflow/task.h"

namespace tare {
namespace {

struct Options {
  std::string dir = ".";
  workflow::InitOptions init;
  std::vector<std::string> set;
  std::string amend;
  bool json = false;
};

int Report(const workflow::InitReport& report, const std::string& task_id, bool json) {
  if (json) {
    Json out = {{"task", task_id},
                {"conflicts", Json::array()},
                {"questions", Json::array()},
                {"notes", report.notes}};
    for (const auto& c : report.conflicts) {
      out["conflicts"].push_back(
          {{"key", c.key},
           {"kept", {{"value", c.kept.text}, {"origin", c.kept.origin}}},
           {"dropped", {{"value", c.dropped.text}, {"origin", c.dropped.origin}}}});
    }
    for (const auto& q : report.questions) {
      out["questions"].push_back({{"key", q.key}, {"text", q.text}, {"blocks", q.blocks}});
    }
    fmt::print("{}\n", out.dump(1, ' ', false, Json::error_handler_t::replace));
  } else {
    fmt::print("task {}\n", task_id);
    for (const std::string& note : report.notes) fmt::print("  {}\n", Printable(note));
    for (const auto& c : report.conflicts) {
      fmt::print("conflict: {} = {} ({}) holds over {} ({})\n", c.key, Printable(c.kept.text),
                 Printable(c.kept.origin), Printable(c.dropped.text), Printable(c.dropped.origin));
    }
    for (const auto& q : report.questions) {
      fmt::print("question, blocks {}: {}\n", q.blocks, Printable(q.text));
    }
  }
  return 0;
}

int Run(Options options) {
  Env* env = Env::Real();
  const std::string actor = workflow::CurrentActor();
  if (!options.amend.empty()) {
    auto task = workflow::OpenWaiting(env, options.dir, actor);
    if (!task.ok()) return ReportError(task.status());
    auto report = (*task)->Amend(options.amend);
    if (!report.ok()) return ReportError(report.status());
    return Report(*report, (*task)->state().task_id, options.json);
  }
  for (const std::string& text : options.set) {
    const size_t equals = text.find('=');
    if (equals == std::string::npos) {
      return ReportError(InvalidArgument("--set {}: KEY=VALUE is needed", Printable(text)));
    }
    options.init.user_values.emplace_back(text.substr(0, equals), text.substr(equals + 1));
  }
  workflow::InitReport report;
  auto task = workflow::Task::Init(env, options.dir, actor, options.init, &report);
  if (!task.ok()) return ReportError(task.status());
  return Report(report, (*task)->state().task_id, options.json);
}

}  // namespace
}  // namespace tare

TARE_COMMAND(init, [](CLI::App& root) {
  CLI::App* app =
      root.add_subcommand("init", "make a task directory, or record an edit of its task.toml");
  auto options = std::make_shared<tare::Options>();
  app->add_option("dir", options->dir, "the task directory (default: here)");
  app->add_option("--model", options->init.model_path,
                  "checkpoint to recover missing values from: a folder or a .safetensors file");
  app->add_option("--config", options->init.config_files,
                  "resolved configuration of another system (.json, .toml) to recover from");
  app->add_option("--recipe", options->init.recipe,
                  "values in task.toml's keys, below the user's own");
  app->add_option("--from", options->init.user_toml, "the user's own task.toml to start from");
  app->add_option("--set", options->set, "one value: KEY=VALUE");
  app->add_option("--amend", options->amend, "record task.toml as it is now, for this reason");
  app->add_flag("--json", options->json, "for machines");
  app->callback([options] { tare::SetExit(tare::Run(*options)); });
});
