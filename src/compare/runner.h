#pragma once

// Runs the bit comparison of many pairs of tensors on all threads: large ones cut into pieces,
// small ones side by side. The cut is fixed by size alone, so every figure (the order of sums
// included) is the same for any number of threads. Holds at most a window of tensors at a time, so
// memory stays bounded however large the sets are.

#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "base/sha256.h"
#include "base/thread_pool.h"
#include "compare/bits.h"
#include "tensor/tensor.h"

namespace tare::compare {

// A pair of equally shaped runs of elements of one dtype. A unit (a row of the report) is one pair
// or several, joined in the order in which they are added.
struct Pair {
  int64_t unit = 0;
  Tensor a;
  Tensor b;
  // Index of the pair's first element among the elements of its unit.
  int64_t base = 0;
  std::shared_ptr<const std::vector<uint8_t>> mask;  // null: every element counts
  int64_t mask_offset = 0;                           // position in `mask` of the first element
  int64_t mask_repeat = 1;
};

struct UnitCounts {
  BitCounts counts;
  // With digests: of each side, when the unit is one pair of whole tensors.
  std::vector<Sha256Digest> chunks_a;
  std::vector<Sha256Digest> chunks_b;
};

class Runner {
 public:
  // `results` outlives the runner; result i belongs to unit i and grows as needed. Digests cost one
  // pass: a chunk that is equal on both sides is hashed once.
  Runner(ThreadPool* pool, std::span<const Tier> tiers, bool digests,
         std::deque<UnitCounts>* results);
  ~Runner();

  // REQUIRES: equal dtype and shape, CPU memory.
  void Add(Pair pair);
  void Finish();

 private:
  struct Piece;
  void RunWindow();

  ThreadPool* pool_;
  std::span<const Tier> tiers_;
  bool digests_;
  std::deque<UnitCounts>* results_;
  std::vector<Pair> pairs_;
  std::vector<Piece> pieces_;
  int64_t window_bytes_ = 0;
};

}  // namespace tare::compare
