#include "tensor/replay_command.h"

#include <fmt/format.h>

#include <filesystem>
#include <system_error>

namespace tare {

Json ReplayArguments(const ScoreCommand& c) {
  std::error_code error;
  const std::filesystem::path absolute = std::filesystem::absolute(c.model, error);
  Json out = {"score", error ? c.model : absolute.lexically_normal().string()};
  const auto add = [&](const char* flag, const std::string& value) {
    out.push_back(flag);
    out.push_back(value);
  };
  add("--tokens", "{tokens}");
  add("--dump", "{dump}");
  add("--profile", c.profile);
  add("--side", c.side);
  if (!c.faults.empty()) add("--fault", c.faults);
  if (!c.weight_version.empty()) add("--weight-version", c.weight_version);
  add("--batch-tokens", fmt::format("{}", c.batch_tokens));
  if (c.chunk > 0) {
    add("--chunk", fmt::format("{}", c.chunk));
    add("--page-size", fmt::format("{}", c.page_size));
  }
  if (c.row_align != 1) add("--row-align", fmt::format("{}", c.row_align));
  // Nine digits bring every float back.
  if (c.temperature != 1.0f) add("--temperature", fmt::format("{:.9g}", c.temperature));
  if (c.longest_first) add("--order", "length");
  for (const auto& [on, flag] : {std::pair{c.entropy, "--entropy"}, std::pair{c.tape, "--tape"},
                                 std::pair{c.native, "--native"}}) {
    if (on) out.push_back(flag);
  }
  return out;
}

}  // namespace tare
