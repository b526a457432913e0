#include "tools/demo_workflow.h"

#include <cstdio>
#include <filesystem>
#include <vector>

#include "base/env.h"
#include "rl/process.h"
#include "tools/command.h"
#include "workflow/gates/collect.h"
#include "workflow/gates/table.h"
#include "workflow/layout.h"
#include "workflow/process.h"

namespace tare {
namespace {

// A command of the program; its exit status, or -1 when it was killed.
Result<int> Command(const WorkflowDemo& demo, const std::vector<std::string>& args,
                    const std::string& log) {
  std::vector<std::string> argv = {demo.program};
  argv.insert(argv.end(), args.begin(), args.end());
  TARE_ASSIGN_OR_RETURN(rl::Process p, rl::Process::Start(args[0], argv, {}, log));
  const rl::Exit end = p.Wait(300);
  return end.signal != 0 || !end.ended ? -1 : end.code;
}

// Sums as sentences, one a line: what the three finetuning arms of C7 read.
std::string Sums() {
  std::string text;
  for (int k = 0; k < 40; ++k) {
    const int a = k * 7 % 9 + 1, b = k * 5 % 8 + 1;
    text += fmt::format("{} + {} = {}\n", a, b, a + b);
  }
  return text;
}

Status Prepare(const WorkflowDemo& demo, const std::string& folder, const std::string& task) {
  Env* env = Env::Real();
  std::error_code ignored;
  std::filesystem::remove_all(folder, ignored);
  TARE_RETURN_IF_ERROR(env->CreateDirs(folder));
  TARE_RETURN_IF_ERROR(env->WriteFileAtomic(folder + "/sums.txt", Sums()));
  std::vector<std::string> args = {"init", task, "--model", demo.model};
  // A declared short workload, and a budget that a machine of unknown load can be held to.
  for (const char* value :
       {R"(task.name="tare demo --workflow")", R"(inference.implementation="tare")",
        R"(training.route="tare")", R"(training.optimizer="adamw")", "training.learning_rate=1e-3",
        R"(target.consistency="bitwise")", "target.max_slowdown_percent=100.0",
        R"(hardware.device="cpu")", "hardware.count=1", "workload.input_tokens=64",
        "workload.output_tokens=32", "workload.concurrency=[1,2]", R"(precision.kv_cache="bf16")",
        "parallelism.tp=1", "parallelism.pp=1", R"(requester.person="whoever runs this")"}) {
    args.insert(args.end(), {"--set", value});
  }
  TARE_ASSIGN_OR_RETURN(const int code, Command(demo, args, folder + "/init.log"));
  if (code != 0) {
    return Error(Code::kAborted, "`tare init` ended with {}; see {}/init.log", code, folder);
  }
  return Ok();
}

}  // namespace

int RunWorkflowDemo(const WorkflowDemo& demo) {
  Env* env = Env::Real();
  const int64_t begin = env->MonotonicNs();
  const auto seconds = [&](int64_t since) {
    return static_cast<double>(env->MonotonicNs() - since) * 1e-9;
  };
  const std::string folder = demo.out + "/workflow", task = folder + "/task";
  if (const Status s = Prepare(demo, folder, task); !s.ok()) return ReportError(s);
  Verdict worst = Verdict::kPass;
  int expected = 0;
  for (const std::string_view gate : workflow::kGateIds) {
    if (gate == "C10") break;  // after the second stop
    const bool stop = gate == "C1" || gate == "C9";
    workflow::RunGateOptions options;
    options.gate = gate;
    options.task = task;
    options.model = demo.model;
    options.program = demo.program;
    options.text = gate == "C7" ? folder + "/sums.txt" : "";
    options.faults = demo.faults;
    const int64_t started = env->MonotonicNs();
    const auto report = workflow::RunGate(env, workflow::CurrentActor(), options);
    if (!report.ok()) return ReportError(report.status());
    const bool right = report->verdict == (stop ? Verdict::kWaitingHuman : Verdict::kPass);
    fmt::print("{:<3} {:<14} {:6.1f} s  {}{}{}\n", gate, VerdictName(report->verdict),
               seconds(started), report->reason, report->reason.empty() ? "" : ": ",
               Printable(report->detail));
    if (report->judgement.scope.is_object()) {
      for (const Json& item : report->judgement.scope.value("not_covered", Json::array())) {
        fmt::print("      not covered: {}\n", Printable(item.value("what", "")));
      }
    }
    std::fflush(stdout);
    expected += right;
    if (!right && workflow::Gravity(report->verdict) >= workflow::Gravity(worst)) {
      worst = report->verdict == Verdict::kPass ? Verdict::kFail : report->verdict;
    }
    // What the person gets: the bundle of the stop, asked for and waiting.
    if (stop && right) {
      const auto asked = Command(demo, {"approve", std::string(gate), "--task", task},
                                 fmt::format("{}/approve-{}.txt", folder, gate));
      if (!asked.ok()) return ReportError(asked.status());
      fmt::print("      a person: {}/approve-{}.txt says what to read and to sign\n", folder, gate);
    }
  }
  const auto report =
      Command(demo, {"report", task, "--out", folder + "/report"}, folder + "/report.log");
  const auto verified = Command(demo, {"verify", task}, folder + "/verify.log");
  if (!report.ok()) return ReportError(report.status());
  if (!verified.ok()) return ReportError(verified.status());
  if (*verified != 0) worst = Verdict::kFail;
  fmt::print(
      "{} of 10 gates as they should be; ledger {}; report {}/report/report.html ({:.1f} s)\n",
      expected, *verified == 0 ? "verified" : "does not verify", folder, seconds(begin));
  std::fflush(stdout);
  if (worst != Verdict::kPass) fmt::print(stderr, "tare: {} demo\n", VerdictName(worst));
  return ExitCode(worst);
}

}  // namespace tare
