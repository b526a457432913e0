#pragma once

// The safetensors format: eight bytes little-endian header length N, N bytes of JSON, then the
// data. docs/formats/safetensors.md has every rule and the error that breaks it.
//
// Reading maps the file: a Tensor is a view of the mapping and keeps it alive. The whole header is
// checked before anything is answered: a file that opens has disjoint, gap-free, aligned tensors
// that end exactly at the end of the file. Malformed files are kDataLoss, dtypes of the format that
// Tare does not know kUnsupported; messages start with the path.

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/env.h"
#include "base/status.h"
#include "tensor/tensor.h"

namespace tare {

inline constexpr uint64_t kSafetensorsMaxHeaderBytes = 100'000'000;  // the limit of the format

struct SafetensorsEntry {
  std::string name;
  DType dtype = DType::kF32;
  Shape shape;
  uint64_t begin = 0;  // offsets from the start of the data, in bytes
  uint64_t end = 0;
};

class SafetensorsFile {
 public:
  static Result<SafetensorsFile> Open(Env* env, const std::string& path);
  // Over bytes that `owner` keeps alive; `where` names them in messages. REQUIRES: bytes.data()
  // aligned to 8 bytes.
  static Result<SafetensorsFile> Parse(std::string_view bytes, std::shared_ptr<const void> owner,
                                       const std::string& where);

  // In data order.
  const std::vector<SafetensorsEntry>& entries() const { return entries_; }
  // nullptr when there is none.
  const SafetensorsEntry* Find(std::string_view name) const;
  // `__metadata__`, in file order.
  const std::vector<std::pair<std::string, std::string>>& metadata() const { return metadata_; }
  // kNotFound names the file. No copy.
  Result<Tensor> Get(std::string_view name) const;
  Tensor View(const SafetensorsEntry& entry) const;  // REQUIRES: an entry of this file
  const std::string& where() const { return where_; }

 private:
  std::string where_;
  std::vector<SafetensorsEntry> entries_;
  std::vector<uint32_t> by_name_;  // indices into entries_, sorted by name
  std::vector<std::pair<std::string, std::string>> metadata_;
  const char* data_ = nullptr;
  std::shared_ptr<const void> owner_;
};

struct SafetensorsSpec {
  std::string name;
  DType dtype = DType::kF32;
  Shape shape;
};

// Writes `path` by a temporary file, fsync and rename: the file is whole or absent. Tensors are
// laid out by element size, largest first, then by name (as the reference library does), so all are
// aligned; `produce` is asked for each once, in that order, and only one is in memory at a time. A
// tensor of another dtype or shape than its spec, or a bad or double name, is kInvalidArgument.
Status WriteSafetensors(Env* env, const std::string& path, std::vector<SafetensorsSpec> specs,
                        std::vector<std::pair<std::string, std::string>> metadata,
                        const std::function<Result<Tensor>(const SafetensorsSpec&)>& produce);
// The same from tensors in memory.
Status WriteSafetensors(Env* env, const std::string& path,
                        const std::vector<std::pair<std::string, Tensor>>& tensors,
                        std::vector<std::pair<std::string, std::string>> metadata = {});
// The same over the file at `path` (base/overwrite.h): not atomic. It is on the disk when this
// returns ok.
Status OverwriteSafetensors(const std::string& path,
                            const std::vector<std::pair<std::string, Tensor>>& tensors,
                            std::vector<std::pair<std::string, std::string>> metadata = {});

}  // namespace tare
