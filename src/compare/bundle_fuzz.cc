// A replay bundle from anywhere: bundle.json, a line `====`, tensors.safetensors. `@SHA256@` in the
// first stands for the digest of the second, which no mutation would ever hit. An error or a bundle
// whose parts can be asked for.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "base/fault_env.h"
#include "base/sha256.h"
#include "compare/bundle.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace tare;
  constexpr std::string_view kCut = "====\n", kDigest = "@SHA256@";
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const size_t cut = text.find(kCut);
  std::string description(text.substr(0, cut));
  const std::string_view tensors =
      cut == std::string_view::npos ? std::string_view() : text.substr(cut + kCut.size());
  if (const size_t at = description.find(kDigest); at != std::string::npos) {
    description.replace(at, kDigest.size(), Hex(Sha256Of(tensors)));
  }
  FaultEnv env;
  if (!env.CreateDir("b").ok()) std::abort();
  for (const auto& [name, bytes] :
       {std::pair<std::string, std::string_view>{"b/bundle.json", description},
        std::pair<std::string, std::string_view>{"b/tensors.safetensors", tensors}}) {
    auto file = env.OpenWritable(name, Env::Mode::kTruncate);
    if (!file.ok() || !(*file)->Append(bytes).ok() || !(*file)->Close().ok()) std::abort();
  }
  const Result<compare::Bundle> bundle = compare::OpenBundle(&env, "b");
  if (!bundle.ok()) {
    if (bundle.status().message().empty()) std::abort();
    return 0;
  }
  for (const std::string side : {"a", "b"}) {
    (void)compare::ReplayCommand(*bundle, side);
    (void)compare::ReplayInput(&env, *bundle, side);
  }
  return 0;
}
