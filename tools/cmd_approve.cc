// `tare approve STEP`: asks for a review, prints the statement to sign, takes the signature. Tare
// never signs and holds no key; nothing replaces the reviewer.

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <memory>

#include "base/json.h"
#include "base/reasons.h"
#include "tools/command.h"
#include "workflow/process.h"
#include "workflow/record.h"
#include "workflow/signoff.h"

namespace tare {
namespace {

struct Options {
  std::string step;
  std::string dir = ".";
  std::vector<std::string> notes;
  bool statement = false;
  std::string person, decision = "approve";
  std::string accept, signature;
  bool force = false;
  bool json = false;
};

int Refused(const workflow::AcceptResult& result, bool json) {
  const Reason* r = FindReason(result.reason);
  if (json) {
    fmt::print("{}\n", Json{{"verdict", VerdictName(result.verdict)},
                            {"reason", result.reason},
                            {"detail", result.detail}}
                           .dump(1));
  } else if (result.verdict == Verdict::kPass) {
    fmt::print("approved by {}\n", Printable(result.detail));
  } else {
    fmt::print("{}: {}{}\n  next: {}\n", VerdictName(result.verdict),
               r == nullptr ? "" : r->sentence,
               result.detail.empty() ? "" : " (" + Printable(result.detail) + ")",
               r == nullptr ? "" : r->next);
  }
  if (result.verdict != Verdict::kPass) fmt::print(stderr, "{}\n", result.reason);
  return ExitCode(result.verdict);
}

int Run(const Options& options) {
  Env* env = Env::Real();
  workflow::AcceptContext context;
  if (options.force) context.force_words.push_back("--force");
  for (const char* name : {"TARE_FORCE", "TARE_YES", "TARE_APPROVE", "TARE_AUTO_APPROVE"}) {
    if (std::getenv(name) != nullptr) context.force_words.push_back(name);
  }
  if (options.statement) {
    auto view = workflow::ReadTask(env, options.dir);
    if (!view.ok()) return ReportError(view.status());
    workflow::Statement s;
    for (const auto& r : view->state.reviews) {
      if (r.step == options.step) s.bundle_sha256 = r.bundle_sha256;
    }
    if (s.bundle_sha256.empty()) {
      return ReportError(Error(Code::kPrecondition,
                               "no review of {} was requested: `tare approve {}`",
                               Printable(options.step), Printable(options.step)));
    }
    if (options.person.empty()) return ReportError(InvalidArgument("--statement needs --person"));
    s.task_id = view->state.task_id;
    s.step = options.step;
    s.person = options.person;
    s.decision = options.decision;
    s.time = std::max(FormatUtc(env->NowNs()), view->state.latest_time);
    auto text = workflow::EncodeStatement(s);
    if (!text.ok()) return ReportError(text.status());
    if (auto again = workflow::ParseStatement(*text); !again.ok())
      return ReportError(again.status());
    std::fputs(text->c_str(), stdout);
    return 0;
  }
  auto task = workflow::OpenWaiting(env, options.dir, workflow::CurrentActor());
  if (!task.ok()) return ReportError(task.status());
  if (!options.accept.empty() || !context.force_words.empty()) {
    std::string statement, signature;
    if (context.force_words.empty()) {
      auto a = env->ReadFile(options.accept);
      if (!a.ok()) return ReportError(a.status());
      const std::string path =
          options.signature.empty() ? options.accept + ".sig" : options.signature;
      auto b = env->ReadFile(path);
      if (!b.ok()) return ReportError(b.status());
      statement = *a;
      signature = *b;
      auto parsed = workflow::ParseStatement(statement);
      if (parsed.ok() && parsed->step != options.step) {
        return ReportError(InvalidArgument("the statement is about {}, not {}",
                                           Printable(parsed->step), Printable(options.step)));
      }
    }
    context.person_at_terminal = ::isatty(0) == 1 && ::isatty(2) == 1;
    if (const char* socket = std::getenv("SSH_AUTH_SOCK")) context.agent_socket = socket;
    auto result = workflow::AcceptSignOff(task->get(), statement, signature, context);
    if (!result.ok()) return ReportError(result.status());
    Status pages = (*task)->WriteIndexes();
    if (!pages.ok()) return ReportError(pages);
    return Refused(*result, options.json);
  }
  auto request = workflow::PrepareReview(task->get(), options.step, {}, options.notes);
  if (!request.ok()) return ReportError(request.status());
  Status pages = (*task)->WriteIndexes();
  if (!pages.ok()) return ReportError(pages);
  if (options.json) {
    fmt::print("{}\n", Json{{"verdict", "waiting-human"},
                            {"step", request->step},
                            {"bundle", request->bundle_sha256},
                            {"path", request->bundle_path}}
                           .dump(1));
  } else {
    fmt::print(
        "bundle {}\n  {}\nA reviewer of the list reads it, then, with a key that lives elsewhere:\n"
        "  tare approve {} --statement --person NAME > statement.json\n"
        "  ssh-keygen -Y sign -f KEY -n tare-review statement.json\n"
        "  (or a raw key: openssl pkeyutl -sign -rawin -inkey KEY.pem -in statement.json "
        "-out statement.json.sig)\n"
        "  tare approve {} --accept statement.json\n",
        request->bundle_sha256, request->bundle_path, request->step, request->step);
  }
  return ExitCode(Verdict::kWaitingHuman);
}

}  // namespace
}  // namespace tare

TARE_COMMAND(approve, [](CLI::App& root) {
  CLI::App* app =
      root.add_subcommand("approve", "ask for a person's review of a step, and take it");
  auto options = std::make_shared<tare::Options>();
  app->add_option("step", options->step, "C0 to C10, or task (the list of reviewers)")->required();
  app->add_option("--task", options->dir, "the task directory (default: here)");
  app->add_option("--note", options->notes, "an open point for the reviewer");
  app->add_flag("--statement", options->statement, "print the statement that the reviewer signs");
  app->add_option("--person", options->person, "who signs it");
  app->add_option("--decision", options->decision, "approve or reject")->capture_default_str();
  app->add_option("--accept", options->accept, "a signed statement");
  app->add_option("--signature", options->signature, "its signature (default: beside it, .sig)");
  app->add_flag("--force,--yes,-f,-y", options->force,
                "refused, always: no flag replaces a person");
  app->add_flag("--json", options->json, "for machines");
  app->callback([options] { tare::SetExit(tare::Run(*options)); });
});
