// `tare reasons [CODE]`: the reason codes, for people, as JSON, or as the page docs/reasons.md.

#include <cstdio>
#include <memory>

#include "base/json.h"
#include "base/reasons.h"
#include "tools/command.h"

namespace tare {
namespace {

struct Options {
  std::string code;
  bool markdown = false;
  bool json = false;
};

int Run(const Options& options) {
  if (!options.code.empty() && FindReason(options.code) == nullptr) {
    return ReportError(
        Error(Code::kNotFound, "reason {}: no such code; `tare reasons` lists all", options.code));
  }
  if (options.markdown) {
    std::fputs(ReasonsMarkdown().c_str(), stdout);
    return 0;
  }
  Json all = Json::array();
  for (const Reason& r : AllReasons()) {
    if (!options.code.empty() && r.code != options.code) continue;
    if (options.json) {
      all.push_back({{"code", r.code},
                     {"verdict", VerdictName(r.verdict)},
                     {"sentence", r.sentence},
                     {"next", r.next}});
    } else {
      fmt::print("{} ({})\n  {}\n  next: {}\n", r.code, VerdictName(r.verdict), r.sentence, r.next);
    }
  }
  if (options.json) fmt::print("{}\n", all.dump(1));
  return 0;
}

}  // namespace
}  // namespace tare

TARE_COMMAND(reasons, [](CLI::App& root) {
  CLI::App* app =
      root.add_subcommand("reasons", "why a verdict is not a pass, and what to do next");
  auto options = std::make_shared<tare::Options>();
  app->add_option("code", options->code, "one code");
  app->add_flag("--markdown", options->markdown, "as the page docs/reasons.md");
  app->add_flag("--json", options->json, "for machines");
  app->callback([options] { tare::SetExit(tare::Run(*options)); });
});
