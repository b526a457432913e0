// `tare`: parses the command line and hands over to the command. Compiled for the plain baseline of
// the architecture, so that a CPU without a fused multiply-add is refused with a sentence.

#include <algorithm>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "base/json.h"
#include "tools/command.h"

namespace tare {
namespace {

struct Entry {
  const char* name;
  std::function<void(CLI::App&)> add;
};

std::vector<Entry>& Commands() {
  static auto* commands = new std::vector<Entry>();
  return *commands;
}

int exit_status = 0;
std::vector<std::string> typed;  // the command line without the program's name

// An option takes one value each time it is named. Left alone, CLI11 lets a list take every word up
// to the next option and the `--` behind them too: then another command is run and recorded than
// the one that was typed.
void OneValueEach(CLI::App* app) {
  for (CLI::Option* option : app->get_options()) {
    if (option->nonpositional()) option->allow_extra_args(false);
  }
  for (CLI::App* sub : app->get_subcommands([](CLI::App*) { return true; })) OneValueEach(sub);
}

bool CpuHasFma() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("fma") && __builtin_cpu_supports("avx2");
#else
  return true;
#endif
}

}  // namespace

CommandRegistration::CommandRegistration(const char* name, std::function<void(CLI::App&)> add) {
  Commands().push_back({name, std::move(add)});
}

CLI::App* Group(CLI::App& parent, const std::string& name, const std::string& text) {
  const auto same = parent.get_subcommands([&](CLI::App* app) { return app->get_name() == name; });
  if (!same.empty()) return same.front();
  CLI::App* made = parent.add_subcommand(name, text);
  made->require_subcommand(1);
  return made;
}

void SetExit(int status) { exit_status = status; }

void PrintReason(Verdict verdict, std::string_view reason) {
  std::fflush(stdout);
  fmt::print(stderr, "tare: {} {}\n", VerdictName(verdict), Printable(reason));
}

Status TakeTyped(std::vector<std::string>* command) {
  const auto mark = std::find(typed.begin(), typed.end(), "--");
  const std::vector<std::string> words(mark == typed.end() ? mark : mark + 1, typed.end());
  // What the parser makes of them: it takes a word in square brackets for a list of words.
  std::vector<std::string> parsed;
  const std::function<void(const std::string&)> take = [&](const std::string& word) {
    if (!word.starts_with('[') || !word.ends_with(']')) return parsed.push_back(word);
    for (const std::string& part : CLI::detail::split(word.substr(1, word.size() - 2), ',')) {
      if (!part.empty()) take(part);
    }
  };
  for (const std::string& word : words) take(word);
  if (parsed != *command) {
    return InvalidArgument(
        "the command stands behind `--`, after all options: none of its words is Tare's");
  }
  *command = words;
  return Ok();
}

int ReportError(const Status& status) {
  std::fprintf(stderr, "tare: %s\n", Printable(status.ToString()).c_str());
  switch (status.code()) {
    case Code::kInvalidArgument:
      return kExitUsage;
    case Code::kDataLoss:
      return kExitData;
    case Code::kNotFound:
      return kExitNoInput;
    case Code::kUnsupported:
      return kExitUnavailable;
    case Code::kIo:
    case Code::kExhausted:
    case Code::kAlreadyExists:
      return kExitIo;
    default:
      return kExitSoftware;
  }
}

namespace {

int Main(int argc, char** argv) {
  if (!CpuHasFma()) {
    std::fprintf(stderr,
                 "tare: this CPU lacks AVX2 and a fused multiply-add; an emulated one has other "
                 "bits, so Tare does not run here\n");
    return kExitUnavailable;
  }
  CLI::App app{"Tare makes LLM training and inference agree to the last bit, and proves it.",
               "tare"};
  app.require_subcommand(1);
  app.set_version_flag("--version", "tare 0.1.0");
  std::vector<Entry> commands = Commands();
  std::sort(commands.begin(), commands.end(),
            [](const Entry& a, const Entry& b) { return std::string(a.name) < b.name; });
  for (const Entry& command : commands) command.add(app);
  OneValueEach(&app);
  if (argc > 1) typed.assign(argv + 1, argv + argc);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    const int status = app.exit(error);
    return status == 0 ? 0 : kExitUsage;
  }
  return exit_status;
}

}  // namespace
}  // namespace tare

int main(int argc, char** argv) { return tare::Main(argc, argv); }
