// Any bytes: a clear error, or a file whose every tensor can be read to its last byte.

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "tensor/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  void* copy = std::aligned_alloc(8, (size + 7) / 8 * 8 + 8);
  std::memcpy(copy, data, size);
  const std::shared_ptr<const void> owner(copy,
                                          [](const void* p) { std::free(const_cast<void*>(p)); });
  const auto file =
      tare::SafetensorsFile::Parse({static_cast<const char*>(copy), size}, owner, "input");
  if (!file.ok()) {
    if (file.status().message().empty()) std::abort();
    return 0;
  }
  uint64_t total = 0;
  volatile uint8_t sink = 0;
  for (const auto& entry : file->entries()) {
    const tare::Tensor t = file->View(entry);
    total += static_cast<uint64_t>(t.size_bytes());
    const auto* bytes = static_cast<const uint8_t*>(t.data());
    for (int64_t i = 0; i < t.size_bytes(); ++i) sink = sink ^ bytes[i];
    if (file->Find(entry.name) != &entry) std::abort();
  }
  if (total > size) std::abort();
  return 0;
}
