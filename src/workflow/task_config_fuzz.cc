// Any bytes as task.toml or a recipe: what is accepted survives being written and read again.

#include <cstdint>

#include "base/check.h"
#include "workflow/task_config.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace tare::workflow;
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  auto config = ParseTaskConfig(bytes, "task.toml");
  if (config.ok()) {
    auto again = ParseTaskConfig(RenderTaskToml(*config), "task.toml");
    TARE_CHECK(again.ok()) << again.status().ToString();
    TARE_CHECK(again->values.size() == config->values.size());
    for (const auto& [key, value] : config->values)
      TARE_CHECK(again->Text(key) == value.text) << key;
    TARE_CHECK(again->AuthorityDigest() == config->AuthorityDigest());
    auto logged = ConfigFromJson(ConfigToJson(*config));
    TARE_CHECK(logged.ok() && logged->AuthorityDigest() == config->AuthorityDigest());
  }
  (void)ParseRecipe(bytes, "recipe.toml");
  return 0;
}
