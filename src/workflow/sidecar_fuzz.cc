// Any bytes as a sidecar or a conclusion: what is accepted has exactly one spelling.

#include <cstdint>

#include "base/check.h"
#include "workflow/evidence.h"
#include "workflow/sidecar.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace tare::workflow;
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  auto sidecar = ParseSidecar(bytes);
  if (sidecar.ok()) {
    auto again = EncodeSidecar(*sidecar);
    TARE_CHECK(again.ok() && *again == bytes);
  }
  auto conclusion = Conclusion::Parse(bytes);
  if (conclusion.ok()) {
    auto again = Conclusion::FromJson(conclusion->ToJson());
    TARE_CHECK(again.ok() && again->ToJson() == conclusion->ToJson());
  }
  (void)Scope::FromText(bytes);
  (void)EmptinessOf("x.safetensors", bytes);
  (void)EmptinessOf("x.json", bytes);
  return 0;
}
