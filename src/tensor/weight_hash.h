#pragma once

// The canonical weight hash: one SHA-256 for the weights of a model, the same whatever the file
// format, the sharding, the order in the file, or the container's metadata.
// docs/formats/weight_hash.md:
//
//   SHA-256( "tare.weights/1\n" and, for every tensor by name (bytewise), one line of canonical
//   JSON
//            {"digest":"<tensor digest, 64 hex>","dtype":"bf16","name":"...","shape":[2,3]} "\n" )
//
// The tensor digest is the one of tensor/digest.h. A stored lm_head.weight that the config ties and
// that equals the embedding is left out: tied is tied, stored once or twice.

#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/sha256.h"
#include "base/status.h"
#include "base/thread_pool.h"
#include "tensor/checkpoint.h"
#include "tensor/tensor.h"

namespace tare {

struct WeightHashItem {
  std::string name;
  DType dtype = DType::kF32;
  Shape shape;
  Sha256Digest digest{};  // tensor/digest.h
  // Of the plain bytes, as `sha256sum` gives it; on request only: it is a second pass.
  std::optional<Sha256Digest> plain_sha256;
};

struct WeightHash {
  Sha256Digest digest{};
  std::vector<WeightHashItem> tensors;  // by name
  int64_t total_bytes = 0;
};

// Of a checkpoint's canonical tensors. `pool` may be null.
Result<WeightHash> HashWeights(const Checkpoint& checkpoint, ThreadPool* pool = nullptr,
                               bool plain_sha256 = false);

// Of items in any order, for weights that live in memory. kInvalidArgument: a name twice, or not
// UTF-8.
Result<Sha256Digest> HashOfItems(std::vector<WeightHashItem> items);

// Of named CPU tensors in any order, which the threads of `pool` (null: the caller) hash together.
Result<Sha256Digest> HashOfTensors(std::span<const std::pair<std::string, Tensor>> tensors,
                                   ThreadPool* pool = nullptr);

}  // namespace tare
