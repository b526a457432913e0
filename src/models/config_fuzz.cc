// Any bytes as config.json: a clear error, or a configuration whose dimensions fit together.

#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "base/json.h"
#include "models/config.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto json = tare::ParseJson({reinterpret_cast<const char*>(data), size});
  if (!json.ok()) return 0;
  const auto config = tare::models::ParseConfig(*json);
  if (!config.ok()) {
    if (config.status().message().empty()) std::abort();
    return 0;
  }
  if (config->layers.empty() || config->vocab < 1 || config->hidden < 1 || config->kv_heads < 1 ||
      config->head_dim < 1 || config->q_heads % config->kv_heads != 0) {
    std::abort();
  }
  return 0;
}
