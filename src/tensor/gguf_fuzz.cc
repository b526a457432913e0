// Any bytes: a clear error, or a file whose metadata and every tensor can be read.

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "tensor/checkpoint_config.h"
#include "tensor/gguf.h"
#include "tensor/gguf_checkpoint.h"

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
  if (const auto mapped = tare::MapGgufTensors(*file); mapped.ok()) {
    for (const auto& item : *mapped) {
      if (!tare::ReadGgufMapped(*file, item).ok()) std::abort();
    }
  }
  if (const auto config = tare::GgufConfig(*file); config.ok()) {
    // What is made from the metadata must be readable as a config.json.
    (void)tare::ParseCheckpointConfig(
        config->dump(-1, ' ', false, tare::Json::error_handler_t::replace), "");
  }
  (void)tare::GgufTokenizer(*file);
  return 0;
}
