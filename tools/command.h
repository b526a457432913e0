#pragma once

// How a command joins the program: one file tools/cmd_<name>.cc with
//
//   TARE_COMMAND(diff, [](CLI::App& root) {
//     CLI::App* app = root.add_subcommand("diff", "compare two sets of tensors bit by bit");
//     auto options = std::make_shared<Options>();
//     app->add_option("a", options->a)->required();
//     app->callback([options] { tare::SetExit(Run(*options)); });
//   });
//
// The exit status is ExitCode(verdict), or 64 and up for usage and environment errors.

#include <CLI/CLI.hpp>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "base/verdict.h"

namespace tare {

struct CommandRegistration {
  CommandRegistration(const char* name, std::function<void(CLI::App&)> add);
};

// The subcommand `name` of `parent`, made when it is not there: commands in different files share a
// group ("model import", "model mini").
CLI::App* Group(CLI::App& parent, const std::string& name, const std::string& text);

void SetExit(int status);

// For a command that runs another one: puts the words behind the first `--` as they were typed in
// the place of those that the parser found, which must be the same but for its splitting of lists.
Status TakeTyped(std::vector<std::string>* command);

// Prints "tare: <status>" on stderr and gives the exit status for it: 64 for an invalid argument,
// 65 for lost or malformed data, 66 for a missing file, 69 unsupported, 74 input/output, else 70.
int ReportError(const Status& status);

// "tare: <verdict> <reason>" on stderr, after everything that went to stdout: with both in one file
// the line stands behind the document and not inside it.
void PrintReason(Verdict verdict, std::string_view reason);

}  // namespace tare

#define TARE_COMMAND(name, ...) \
  static const ::tare::CommandRegistration tare_command_##name { #name, __VA_ARGS__ }
