#pragma once

// BlockPool: which page of the KV cache belongs to whom, and which full pages hold a prefix that
// another sequence may reuse.
//
// A block's key is a SHA-256 chain over the weight version and every token up to its end, so a hit
// means: same weights, same history, same position. Keys are the only way into the cache: a block
// that is not full has none. A block nobody refers to keeps its content until it is needed for
// something else; the least recently released goes first. Not thread-safe: the engine's thread owns
// it.

#include <cstdint>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/sha256.h"
#include "base/status.h"

namespace tare::engine {

using BlockKey = Sha256Digest;

// The key before the first token. Two weight versions never share a block.
BlockKey RootKey(int64_t weight_version);
// The key of the block that holds `tokens` after everything that `parent` stands for.
BlockKey ExtendKey(const BlockKey& parent, std::span<const int32_t> tokens);

class BlockPool {
 public:
  // REQUIRES: num_blocks > 0
  BlockPool(int64_t num_blocks, bool prefix_caching);

  int64_t num_blocks() const { return static_cast<int64_t>(blocks_.size()); }
  int64_t free_blocks() const { return free_count_; }  // including those whose content is cached
  int64_t cached_blocks() const { return static_cast<int64_t>(by_key_.size()); }

  // A block with one reference and no key, or nullopt when all are in use.
  std::optional<int32_t> Allocate();
  // The block with this key, with one more reference; nullopt on a miss or without prefix caching.
  std::optional<int32_t> Acquire(const BlockKey& key);
  // REQUIRES: at least one reference.
  void Release(int32_t block);

  // Gives a full, referenced block its key. The first holder of a key stays; a second block with
  // the same content is simply not in the cache. No effect without prefix caching.
  void Publish(int32_t block, const BlockKey& key);

  // Forgets every key, also of blocks in use. Returns how many were dropped.
  int64_t DropCache();

  int32_t references(int32_t block) const { return blocks_[static_cast<size_t>(block)].references; }
  // CHECKs the free list against the reference counts. For tests.
  void CheckInvariants() const;

 private:
  struct Block {
    int32_t references = 0;
    bool has_key = false;
    BlockKey key{};
    int32_t previous = -1, next = -1;  // free list, least recently released first
  };
  struct KeyHash {
    size_t operator()(const BlockKey& key) const;
  };

  void PushFree(int32_t block);
  void RemoveFree(int32_t block);
  void DropKey(int32_t block);

  bool prefix_caching_;
  std::vector<Block> blocks_;
  std::unordered_map<BlockKey, int32_t, KeyHash> by_key_;
  int32_t head_ = -1, tail_ = -1;
  int64_t free_count_ = 0;
};

}  // namespace tare::engine
