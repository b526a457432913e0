// A Hugging Face directory from anywhere: config.json, the index, and two shards, joined by lines
// `====`. An error or a checkpoint whose every tensor can be read.

#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "base/fault_env.h"
#include "tensor/checkpoint.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace tare;
  constexpr std::string_view kCut = "====\n";
  std::string_view text(reinterpret_cast<const char*>(data), size);
  FaultEnv env;
  if (!env.CreateDir("m").ok()) std::abort();
  for (const std::string name :
       {"m/config.json", "m/model.safetensors.index.json", "m/a.safetensors", "m/b.safetensors"}) {
    const size_t end = text.find(kCut);
    auto file = env.OpenWritable(name, Env::Mode::kTruncate);
    if (!file.ok() || !(*file)->Append(text.substr(0, end)).ok() || !(*file)->Close().ok()) {
      std::abort();
    }
    if (end == std::string_view::npos) break;
    text.remove_prefix(end + kCut.size());
  }
  CheckpointOptions options;
  options.env = &env;
  const Result<Checkpoint> checkpoint = Checkpoint::Open("m", options);
  if (!checkpoint.ok()) {
    if (checkpoint.status().message().empty()) std::abort();
    return 0;
  }
  for (const std::string& name : checkpoint->names()) {
    if (checkpoint->Find(name) == nullptr || !checkpoint->Get(name).ok()) std::abort();
  }
  (void)checkpoint->CanonicalNames();
  return 0;
}
