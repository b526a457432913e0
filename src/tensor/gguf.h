#pragma once

// The GGUF format, versions 2 and 3, little-endian: metadata and tensors of llama.cpp's files.
// docs/formats/gguf.md has the layout, every check, and what is refused by name.
//
// The file is mapped and its whole header checked before anything is answered: counts against the
// bytes that are there, types, unique keys and names, aligned, disjoint, gap-free tensors inside
// the file. Malformed files are kDataLoss; version 1, big-endian files and block types that are not
// dequantised are kUnsupported. Messages start with the path and carry the offset.

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/env.h"
#include "base/status.h"
#include "tensor/gguf_blocks.h"
#include "tensor/tensor.h"

namespace tare {

// A metadata value: a scalar is an array of one. Integers and bools live in `integers` (u64 by its
// bits), floats in `floats`, strings in `strings`.
struct GgufValue {
  enum class Type : uint32_t {
    kU8,
    kI8,
    kU16,
    kI16,
    kU32,
    kI32,
    kF32,
    kBool,
    kString,
    kArray,
    kU64,
    kI64,
    kF64
  };
  Type type = Type::kU8;  // of the elements
  bool is_array = false;
  std::vector<int64_t> integers;
  std::vector<double> floats;
  std::vector<std::string> strings;
};
std::string_view GgufTypeName(GgufValue::Type type);  // "u32", "string", ...

struct GgufEntry {
  std::string name;
  const GgufTypeInfo* type = nullptr;
  Shape shape;         // row-major as everywhere here: the file's dimensions, reversed
  uint64_t begin = 0;  // offset in the file
  uint64_t size_bytes = 0;
};

class GgufFile {
 public:
  static Result<GgufFile> Open(Env* env, const std::string& path);
  // REQUIRES: bytes.data() aligned to 64 bytes; `owner` keeps them alive.
  static Result<GgufFile> Parse(std::string_view bytes, std::shared_ptr<const void> owner,
                                const std::string& where);

  uint32_t version() const { return version_; }
  const std::vector<std::pair<std::string, GgufValue>>& metadata() const { return metadata_; }
  const std::vector<GgufEntry>& entries() const { return entries_; }  // in file order
  const GgufEntry* FindTensor(std::string_view name) const;

  // nullptr when the key is absent.
  const GgufValue* Find(std::string_view key) const;
  // A scalar of the right kind: kNotFound when absent, kDataLoss for another kind, both name the
  // key.
  Result<int64_t> Integer(std::string_view key) const;  // u64 above 2^63 - 1 is kDataLoss
  Result<double> Float(std::string_view key) const;
  Result<bool> Bool(std::string_view key) const;
  Result<std::string> String(std::string_view key) const;  // UTF-8

  // The tensor dequantised to f32, in the file's row order.
  Result<Tensor> DequantizeF32(const GgufEntry& entry) const;
  const std::string& where() const { return where_; }

 private:
  std::string where_;
  uint32_t version_ = 0;
  std::vector<std::pair<std::string, GgufValue>> metadata_;
  std::vector<GgufEntry> entries_;
  std::string_view bytes_;
  std::shared_ptr<const void> owner_;
};

}  // namespace tare
