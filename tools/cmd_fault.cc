// tare fault list: the catalogue of planted faults.

#include <cstdio>
#include <memory>

#include "base/fault.h"
#include "base/json.h"
#include "ops/registry.h"
#include "tools/command.h"

namespace tare {
namespace {

struct Options {
  bool json = false;
  std::string site;
};

int List(const Options& options) {
  // Touching the registry links every operator, so that its faults are declared.
  (void)ops::AllOps();
  Json list = Json::array();
  size_t name_width = 4, site_width = 4, gates_width = 5;
  std::vector<const fault::Fault*> chosen;
  for (const fault::Fault* f : fault::All()) {
    if (!options.site.empty() && options.site != f->site) continue;
    chosen.push_back(f);
    name_width = std::max(name_width, std::string_view(f->name).size());
    site_width = std::max(site_width, std::string_view(f->site).size());
    gates_width = std::max(gates_width, std::string_view(f->gates).size());
    list.push_back({{"name", f->name}, {"site", f->site}, {"gates", f->gates}, {"text", f->text}});
  }
  if (chosen.empty()) {
    return ReportError(Error(Code::kNotFound,
                             "no planted fault has the site '{}'; `tare fault list` prints all",
                             options.site));
  }
  if (options.json) {
    fmt::print("{}\n", Json({{"faults", list}}).dump());
    return 0;
  }
  fmt::print("{:<{}}  {:<{}}  {:<{}}  {}\n", "NAME", name_width, "SITE", site_width, "GATES",
             gates_width, "WHAT IS DONE WRONG");
  for (const fault::Fault* f : chosen) {
    fmt::print("{:<{}}  {:<{}}  {:<{}}  {}\n", f->name, name_width, f->site, site_width, f->gates,
               gates_width, f->text);
  }
  fmt::print("{} faults. Select with NAME@rollout, NAME@trainer or NAME@both.\n", chosen.size());
  return 0;
}

TARE_COMMAND(fault, [](CLI::App& root) {
  CLI::App* app = root.add_subcommand(
      "fault", "planted faults: named defects that prove that a checker checks");
  app->require_subcommand(1);
  auto options = std::make_shared<Options>();
  CLI::App* list =
      app->add_subcommand("list", "name, site, gates that must catch it, and what is done wrong");
  list->add_flag("--json", options->json, "for machines");
  list->add_option("--site", options->site, "only the faults of one operator or step");
  list->callback([options] { SetExit(List(*options)); });
});

}  // namespace
}  // namespace tare
