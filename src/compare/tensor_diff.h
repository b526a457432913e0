#pragma once

// Compares two sets of named tensors: safetensors files, checkpoints, tensors in memory. Pairs by
// name; a name on one side only is a failure unless a pattern leaves it out by name.

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/env.h"
#include "base/status.h"
#include "base/thread_pool.h"
#include "compare/report.h"
#include "tensor/safetensors.h"
#include "tensor/tensor.h"

namespace tare::compare {

struct DiffOptions {
  std::vector<std::string> only{};  // shell patterns on names; empty: all
  std::vector<std::string> ignore{};
  std::string mask{};  // name of a mask tensor that both sides hold; empty: none
  std::vector<Tier> tiers{};
  bool digests = false;        // compute each tensor's digest in the same pass
  bool upcast = false;         // diagnose differing dtypes: the narrower converted exactly
  bool round = false;          // diagnose differing dtypes: the wider rounded to the narrower
  bool paired_only = false;    // unpaired tokens become scope instead of failing
  bool verify = false;         // dumps: read payloads and check them against their digests
  bool placeholders = false;   // values are logprobs: a constant stand-in means a wrong mask
  ThreadPool* pool = nullptr;  // REQUIRES: not null
};

// True when the patterns let `name` in.
bool InScope(const std::string& name, const DiffOptions& options);
// ok, or kInvalidArgument for more than kMaxTiers tiers or two of one name.
Status CheckOptions(const DiffOptions& options);

class TensorSource {
 public:
  struct Entry {
    std::string name;
    DType dtype = DType::kF32;
    Shape shape;
  };
  virtual ~TensorSource() = default;
  virtual const std::vector<Entry>& entries() const = 0;  // in the order to report
  virtual Result<Tensor> Load(size_t i) const = 0;        // CPU
  virtual std::string name() const = 0;
  virtual bool ordered() const { return false; }  // entries are in the order of execution
};

// Tensors in memory.
class MemorySource : public TensorSource {
 public:
  MemorySource(std::string name, std::vector<std::pair<std::string, Tensor>> tensors);
  const std::vector<Entry>& entries() const override { return entries_; }
  Result<Tensor> Load(size_t i) const override { return tensors_.at(i).second; }
  std::string name() const override { return name_; }

 private:
  std::string name_;
  std::vector<std::pair<std::string, Tensor>> tensors_;
  std::vector<Entry> entries_;
};

// An open .safetensors file. Names in `order` come first, in that order, then the rest as they lie.
std::unique_ptr<TensorSource> MakeSafetensorsSource(SafetensorsFile file,
                                                    const std::vector<std::string>& order = {});

// The report is `refused` for a name that one side holds twice, or a mask that is absent,
// malformed, or fits no tensor. An error only when a tensor cannot be read or the options are
// wrong.
Result<Report> DiffTensors(const TensorSource& a, const TensorSource& b,
                           const DiffOptions& options);

// The coordinate of a flat index.
std::vector<int64_t> Coordinate(const Shape& shape, int64_t index);
std::string CoordinateText(const std::vector<int64_t>& coordinate);

// Mask elements as 0 and 1. kInvalidArgument for any other value; refuse with mask-malformed then.
Result<std::vector<uint8_t>> MaskBytes(const Tensor& mask, const std::string& name);

// Counts of the pair after conversion, for Unit::diagnosis. Nothing when a dtype is an integer.
void Diagnose(const Tensor& a, const Tensor& b, const DiffOptions& options, Unit* unit);

}  // namespace tare::compare
