#pragma once

// For tests: GGUF files field by field, right or wrong.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tare {

// Builds files field by field, right or wrong.
class GgufBuilder {
 public:
  template <typename T>
  GgufBuilder& Put(T value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof(value));
    return *this;
  }
  GgufBuilder& Text(std::string_view s) {
    Put<uint64_t>(s.size());
    bytes_ += s;
    return *this;
  }
  GgufBuilder& Start(uint64_t tensors, uint64_t values, uint32_t version = 3) {
    bytes_ = "GGUF";
    return Put(version).Put(tensors).Put(values);
  }
  GgufBuilder& Tensor(std::string_view name, std::vector<uint64_t> dims, uint32_t type,
                      uint64_t offset) {
    Text(name).Put(static_cast<uint32_t>(dims.size()));
    for (const uint64_t d : dims) Put(d);
    return Put(type).Put(offset);
  }
  GgufBuilder& String(std::string_view key, std::string_view value) {
    return Text(key).Put(8u).Text(value);
  }
  GgufBuilder& U32(std::string_view key, uint32_t value) { return Text(key).Put(4u).Put(value); }
  // Header, padding, then `data` as it is.
  std::string WithData(std::string_view data) { return Data(0) + std::string(data); }
  std::string Data(size_t n, size_t alignment = 32) {
    bytes_.resize((bytes_.size() + alignment - 1) / alignment * alignment);
    return bytes_ + std::string(n, 'd');
  }

 private:
  std::string bytes_;
};

}  // namespace tare
