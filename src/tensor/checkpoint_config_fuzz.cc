// Any bytes as config.json and generation_config.json (cut at the first NUL): a clear error or a
// config.

#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "tensor/checkpoint_config.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const size_t cut = text.find('\0');
  const std::string_view second = cut == std::string_view::npos ? "" : text.substr(cut + 1);
  const auto config = tare::ParseCheckpointConfig(text.substr(0, cut), second);
  if (!config.ok() && config.status().message().empty()) std::abort();
  if (config.ok()) {
    // What was read can be written and read again, to the same.
    const auto again = tare::ParseCheckpointConfig(config->raw.dump(), config->generation.dump());
    if (!again.ok() || again->raw != config->raw || again->eos_token_ids != config->eos_token_ids) {
      std::abort();
    }
  }
  return 0;
}
