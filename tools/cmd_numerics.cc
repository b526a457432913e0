// `tare numerics`: checks the arithmetic itself. `check` recomputes golden tiles of a Hopper tensor
// core, `fuzz` sets the fast kernels against the plain definition, `rate` measures them.

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>
#include <memory>

#include "base/env.h"
#include "base/json.h"
#include "base/verdict.h"
#include "numerics/golden.h"
#include "numerics/mma_fuzz_run.h"
#include "numerics/mma_rate.h"
#include "tools/command.h"

namespace tare {
namespace {

using namespace numerics;

struct Options {
  std::string file;
  std::string type;
  std::string kernel = "auto";
  double products = 1e8;
  uint64_t seed = 1;
  int rounds = 30;
  bool json = false;
};

Result<MmaKernel> KernelOf(const std::string& name) {
  for (const MmaKernel k : {MmaKernel::kAuto, MmaKernel::kPlain, MmaKernel::kAvx2,
                            MmaKernel::kAvx512, MmaKernel::kAvx512Dl}) {
    if (MmaKernelName(k) != name) continue;
    if (!MmaKernelSupported(k, MmaType::kBF16)) {
      return Unsupported("this CPU does not run the kernel {}", name);
    }
    return k;
  }
  return InvalidArgument("unknown kernel '{}'; auto, plain, avx2, avx512 or avx512-dl",
                         Printable(name));
}

Result<std::optional<MmaType>> TypeOf(const std::string& name) {
  if (name.empty()) return std::optional<MmaType>();
  if (const auto type = ParseMmaType(name)) return std::optional<MmaType>(type);
  return InvalidArgument("unknown type '{}'; bf16, f16, e4m3 or e5m2", Printable(name));
}

std::string Hex(uint32_t bits) { return fmt::format("{:#010x}", bits); }

int Print(const Json& json) {
  fmt::print("{}\n", json.dump(2));
  return 0;
}

int Check(const Options& o) {
  const auto type = TypeOf(o.type);
  if (!type.ok()) return ReportError(type.status());
  const auto kernel = KernelOf(o.kernel);
  if (!kernel.ok()) return ReportError(kernel.status());
  const auto report = CheckGolden(Env::Real(), o.file, *type, *kernel);
  if (!report.ok()) return ReportError(report.status());
  const Verdict verdict = report->checked == 0 ? Verdict::kInconclusive
                          : report->wrong == 0 ? Verdict::kPass
                                               : Verdict::kFail;
  if (o.json) {
    Json json = {{"schema", "tare.numerics.check/1"}, {"verdict", VerdictName(verdict)},
                 {"type", MmaTypeName(report->type)}, {"kernel", MmaKernelName(report->kernel)},
                 {"checked", report->checked},        {"wrong", report->wrong},
                 {"families", Json::array()}};
    for (const GoldenFamily& f : report->families) {
      Json j = {{"name", f.name}, {"checked", f.checked}, {"wrong", f.wrong}};
      if (f.first) {
        j["first"] = {{"tile", f.first->tile},    {"m", f.first->m},
                      {"n", f.first->n},          {"c", Hex(f.first->c_bits)},
                      {"got", Hex(f.first->got)}, {"want", Hex(f.first->want)}};
      }
      json["families"].push_back(j);
    }
    Print(json);
  } else {
    fmt::print("{}: {} step, kernel {}\n", Printable(o.file), MmaTypeName(report->type),
               MmaKernelName(report->kernel));
    for (const GoldenFamily& f : report->families) {
      fmt::print("  {:<22} {:>8} checked {:>8} wrong", Printable(f.name), f.checked, f.wrong);
      if (f.first) {
        fmt::print("; first at tile {} m {} n {}: got {} want {} (c {})", f.first->tile, f.first->m,
                   f.first->n, Hex(f.first->got), Hex(f.first->want), Hex(f.first->c_bits));
      }
      fmt::print("\n");
    }
    fmt::print("{}: {} of {} elements differ\n", VerdictName(verdict), report->wrong,
               report->checked);
  }
  return ExitCode(verdict);
}

int Fuzz(const Options& o) {
  const auto type = TypeOf(o.type);
  if (!type.ok()) return ReportError(type.status());
  const auto kernel = KernelOf(o.kernel);
  if (!kernel.ok()) return ReportError(kernel.status());
  if (!(o.products >= 1 && o.products <= 1e15)) {
    return ReportError(InvalidArgument("--products {} is not between 1 and 1e15", o.products));
  }
  std::vector<MmaType> types = {MmaType::kBF16, MmaType::kF16, MmaType::kE4M3, MmaType::kE5M2};
  if (*type) types = {**type};
  std::vector<MmaKernel> kernels;
  for (const MmaKernel k : kMmaFastKernels) {
    if (MmaKernelSupported(k, types[0])) kernels.push_back(k);
  }
  if (*kernel != MmaKernel::kAuto) kernels = {*kernel};
  if (kernels.empty()) return ReportError(Unsupported("this CPU runs no fast kernel"));
  // Each pair of kernel and type gets an equal part.
  const int64_t share =
      static_cast<int64_t>(o.products) / static_cast<int64_t>(types.size() * kernels.size()) + 1;
  const bool terminal = isatty(2) != 0;
  Json json = {{"schema", "tare.numerics.fuzz/1"}, {"seed", o.seed}, {"runs", Json::array()}};
  int64_t total = 0;
  bool equal = true;
  for (const MmaKernel k : kernels) {
    for (const MmaType t : types) {
      const MmaFuzzReport r = MmaFuzz(t, k, share, o.seed, [&](int64_t done) {
        if (terminal)
          fmt::print(stderr, "\r{} {}: {:.3g} products", MmaKernelName(k), MmaTypeName(t),
                     static_cast<double>(done));
      });
      if (terminal) fmt::print(stderr, "\r\x1b[K");
      total += r.products;
      Json run = {{"kernel", MmaKernelName(k)},
                  {"type", MmaTypeName(t)},
                  {"products", r.products},
                  {"elements", r.elements}};
      for (int i = 0; i < kPatternCount; ++i) {
        run["patterns"][std::string(PatternName(static_cast<Pattern>(i)))] =
            r.products_by_pattern[i];
      }
      if (!o.json) {
        fmt::print("{:<9} {:<5} {:>14} products {:>12} elements", MmaKernelName(k), MmaTypeName(t),
                   r.products, r.elements);
      }
      if (r.difference) {
        equal = false;
        run["difference"] = {
            {"seed", r.difference->seed},     {"pattern", PatternName(r.difference->pattern)},
            {"m", r.difference->m},           {"n", r.difference->n},
            {"k", r.difference->k},           {"got", Hex(r.difference->got)},
            {"want", Hex(r.difference->want)}};
        if (!o.json) {
          fmt::print("; DIFFERS: seed {} pattern {} m {} n {} K {}: got {} want {}",
                     r.difference->seed, PatternName(r.difference->pattern), r.difference->m,
                     r.difference->n, r.difference->k, Hex(r.difference->got),
                     Hex(r.difference->want));
        }
      }
      if (!o.json) fmt::print("\n");
      json["runs"].push_back(run);
    }
  }
  const Verdict verdict = equal ? Verdict::kPass : Verdict::kFail;
  json["products"] = total;
  json["verdict"] = VerdictName(verdict);
  if (o.json) {
    Print(json);
  } else {
    fmt::print("{}: fast against plain over {} products\n", VerdictName(verdict), total);
  }
  return ExitCode(verdict);
}

int Rate(const Options& o) {
  if (o.rounds < 1 || o.rounds > 100000) {
    return ReportError(InvalidArgument("--rounds {} is not between 1 and 100000", o.rounds));
  }
  Json json = {{"schema", "tare.numerics.rate/1"}, {"rates", Json::array()}};
  for (const MmaKernel k : kMmaFastKernels) {
    if (!MmaKernelSupported(k, MmaType::kBF16)) continue;
    for (const MmaType t : {MmaType::kBF16, MmaType::kF16, MmaType::kE4M3, MmaType::kE5M2}) {
      const MmaRate r = MeasureMmaRate(t, k, o.rounds);
      const double ratio = r.products_per_second / r.fma_per_second;
      if (o.json) {
        json["rates"].push_back({{"kernel", MmaKernelName(k)},
                                 {"type", MmaTypeName(t)},
                                 {"products_per_second", r.products_per_second},
                                 {"fma_per_second", r.fma_per_second},
                                 {"ratio", ratio}});
      } else {
        fmt::print("{:<9} {:<5} {:6.2f} G products/s, f32 FMA {:6.1f} G/s, ratio {:.3f}\n",
                   MmaKernelName(k), MmaTypeName(t), r.products_per_second * 1e-9,
                   r.fma_per_second * 1e-9, ratio);
      }
    }
  }
  return o.json ? Print(json) : 0;
}

TARE_COMMAND(numerics, [](CLI::App& root) {
  CLI::App* app = root.add_subcommand("numerics", "check the arithmetic itself");
  app->require_subcommand(1);
  auto o = std::make_shared<Options>();
  CLI::App* check =
      app->add_subcommand("check", "recompute golden tiles of a tensor core, bit by bit");
  check->add_option("file", o->file, "golden tiles (docs/formats/golden_tiles.md)")->required();
  check->add_option("--type", o->type, "bf16, f16, e4m3 or e5m2, where the file does not tell");
  check->add_option("--kernel", o->kernel, "auto, plain, avx2, avx512 or avx512-dl");
  check->add_flag("--json", o->json);
  check->callback([o] { SetExit(Check(*o)); });
  CLI::App* fuzz = app->add_subcommand("fuzz", "set the fast kernels against the plain definition");
  fuzz->add_option("--products", o->products, "how many products in all (1e8)");
  fuzz->add_option("--seed", o->seed);
  fuzz->add_option("--type", o->type, "one type only");
  fuzz->add_option("--kernel", o->kernel, "one kernel only");
  fuzz->add_flag("--json", o->json);
  fuzz->callback([o] { SetExit(Fuzz(*o)); });
  CLI::App* rate = app->add_subcommand("rate", "products a second beside the core's f32 FMA");
  rate->add_option("--rounds", o->rounds, "interleaved rounds, best of (30)");
  rate->add_flag("--json", o->json);
  rate->callback([o] { SetExit(Rate(*o)); });
});

}  // namespace
}  // namespace tare
