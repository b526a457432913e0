// tare contract: the operators' contract records, and the pages made of them.

#include <cstdio>
#include <memory>

#include "base/env.h"
#include "ops/contract_page.h"
#include "ops/registry.h"
#include "tools/command.h"

namespace tare {
namespace {

struct Options {
  bool json = false;
  std::string op;
  std::string dir = "docs/ops";
  bool check = false;
};

int List(const Options& options) {
  Json list = Json::array();
  for (const ops::OpInfo* op : ops::AllOps()) {
    for (const ops::OpKey& key : op->keys) {
      const ops::Contract c = op->select(key);
      list.push_back({{"name", c.op},
                      {"variant", c.variant},
                      {"version", c.version},
                      {"key", key.ToString()},
                      {"id", Hex(c.Id())}});
      if (!options.json) {
        fmt::print("{:<16} {:<26} v{}  {}  {}\n", c.op, c.variant, c.version,
                   Hex(c.Id()).substr(0, 16), key.ToString());
      }
    }
  }
  if (options.json) fmt::print("{}\n", Json({{"contracts", list}}).dump());
  return 0;
}

Result<const ops::OpInfo*> Find(const std::string& name) {
  if (const ops::OpInfo* op = ops::FindOp(name)) return op;
  std::string names;
  for (const ops::OpInfo* op : ops::AllOps()) names += " " + op->name;
  return Error(Code::kNotFound, "no operator is named '{}'; there are:{}", Printable(name), names);
}

int Show(const Options& options) {
  const auto op = Find(options.op);
  if (!op.ok()) return ReportError(op.status());
  if (options.json) {
    Json list = Json::array();
    for (const ops::OpKey& key : (*op)->keys) {
      const ops::Contract c = (*op)->select(key);
      list.push_back({{"key", key.ToString()}, {"id", Hex(c.Id())}, {"contract", c.ToJson()}});
    }
    fmt::print("{}\n", Json({{"contracts", list}}).dump());
  } else {
    fmt::print("{}", ops::ContractPage(**op));
  }
  return 0;
}

int Docs(const Options& options) {
  Env* env = Env::Real();
  if (!options.check) {
    if (const Status status = env->CreateDirs(options.dir); !status.ok())
      return ReportError(status);
  }
  int stale = 0;
  const auto page = [&](const std::string& name, const std::string& text) -> Status {
    const std::string path = options.dir + "/" + name;
    if (!options.check) return env->WriteFileAtomic(path, text);
    const auto found = env->ReadFile(path);
    if (found.ok() && *found == text) return Ok();
    fmt::print("{}: {}\n", path,
               found.ok() ? "differs from the contract record" : found.status().ToString());
    ++stale;
    return Ok();
  };
  for (const ops::OpInfo* op : ops::AllOps()) {
    if (const Status status = page(op->name + ".md", ops::ContractPage(*op)); !status.ok())
      return ReportError(status);
  }
  if (const Status status = page("README.md", ops::ContractIndex()); !status.ok())
    return ReportError(status);
  if (stale > 0) {
    fmt::print("{} pages are stale; `tare contract docs` writes them\n", stale);
    return ExitCode(Verdict::kFail);
  }
  return 0;
}

TARE_COMMAND(contract, [](CLI::App& root) {
  CLI::App* app = root.add_subcommand("contract", "the operators' contract records");
  app->require_subcommand(1);
  auto options = std::make_shared<Options>();
  CLI::App* list = app->add_subcommand("list", "every contract of this build with its ID");
  list->add_flag("--json", options->json, "for machines");
  list->callback([options] { SetExit(List(*options)); });
  CLI::App* show = app->add_subcommand("show", "one operator's contracts");
  show->add_option("op", options->op, "operator, as `tare contract list` names it")->required();
  show->add_flag("--json", options->json, "for machines");
  show->callback([options] { SetExit(Show(*options)); });
  CLI::App* docs = app->add_subcommand("docs", "write the page of every operator");
  docs->add_option("--dir", options->dir, "where the pages lie")->capture_default_str();
  docs->add_flag("--check", options->check, "compare instead of writing");
  docs->callback([options] { SetExit(Docs(*options)); });
});

}  // namespace
}  // namespace tare
