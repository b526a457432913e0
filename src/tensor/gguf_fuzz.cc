// Any bytes: a clear error, or a file whose metadata and every tensor can be read.

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "tensor/gguf.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  void* copy = std::aligned_alloc(64, (size + 63) / 64 * 64 + 64);
  std::memcpy(copy, data, size);
  const std::shared_ptr<const void> owner(copy,
                                          [](const void* p) { std::free(const_cast<void*>(p)); });
  const auto file = tare::GgufFile::Parse({static_cast<const char*>(copy), size}, owner, "input");
  if (!file.ok()) {
    if (file.status().message().empty()) std::abort();
    return 0;
  }
  for (const auto& [key, value] : file->metadata()) {
    (void)file->Integer(key);
    (void)file->Float(key);
    (void)file->Bool(key);
    (void)file->String(key);
  }
  for (const auto& entry : file->entries()) {
    // No block holds two elements a byte: the memory follows the input's size.
    if (!file->DequantizeF32(entry).ok()) std::abort();
    if (file->FindTensor(entry.name) != &entry) std::abort();
  }
  return 0;
}
