#include "engine/block_pool.h"

#include <cstring>

#include "base/check.h"

namespace tare::engine {

BlockKey RootKey(int64_t weight_version) {
  Sha256 hash;
  hash.Update("tare kv block 1");
  hash.Update(&weight_version, sizeof(weight_version));
  return hash.Finish();
}

BlockKey ExtendKey(const BlockKey& parent, std::span<const int32_t> tokens) {
  Sha256 hash;
  hash.Update(parent.data(), parent.size());
  hash.Update(tokens.data(), tokens.size_bytes());
  return hash.Finish();
}

size_t BlockPool::KeyHash::operator()(const BlockKey& key) const {
  size_t h = 0;
  std::memcpy(&h, key.data(), sizeof(h));
  return h;
}

BlockPool::BlockPool(int64_t num_blocks, bool prefix_caching)
    : prefix_caching_(prefix_caching), blocks_(static_cast<size_t>(num_blocks)) {
  TARE_CHECK(num_blocks > 0 && num_blocks <= INT32_MAX);
  for (int32_t b = 0; b < num_blocks; ++b) PushFree(b);
}

void BlockPool::PushFree(int32_t block) {
  Block& b = blocks_[static_cast<size_t>(block)];
  b.previous = tail_;
  b.next = -1;
  if (tail_ >= 0) blocks_[static_cast<size_t>(tail_)].next = block;
  tail_ = block;
  if (head_ < 0) head_ = block;
  ++free_count_;
}

void BlockPool::RemoveFree(int32_t block) {
  Block& b = blocks_[static_cast<size_t>(block)];
  if (b.previous >= 0) blocks_[static_cast<size_t>(b.previous)].next = b.next;
  if (b.next >= 0) blocks_[static_cast<size_t>(b.next)].previous = b.previous;
  if (head_ == block) head_ = b.next;
  if (tail_ == block) tail_ = b.previous;
  b.previous = b.next = -1;
  --free_count_;
}

void BlockPool::DropKey(int32_t block) {
  Block& b = blocks_[static_cast<size_t>(block)];
  if (!b.has_key) return;
  by_key_.erase(b.key);
  b.has_key = false;
}

std::optional<int32_t> BlockPool::Allocate() {
  if (head_ < 0) return std::nullopt;
  const int32_t block = head_;
  RemoveFree(block);
  DropKey(block);
  blocks_[static_cast<size_t>(block)].references = 1;
  return block;
}

std::optional<int32_t> BlockPool::Acquire(const BlockKey& key) {
  if (!prefix_caching_) return std::nullopt;
  const auto it = by_key_.find(key);
  if (it == by_key_.end()) return std::nullopt;
  Block& b = blocks_[static_cast<size_t>(it->second)];
  if (b.references++ == 0) RemoveFree(it->second);
  return it->second;
}

void BlockPool::Release(int32_t block) {
  Block& b = blocks_[static_cast<size_t>(block)];
  TARE_CHECK(b.references > 0) << "block " << block << " released more often than taken";
  if (--b.references == 0) PushFree(block);
}

void BlockPool::Publish(int32_t block, const BlockKey& key) {
  if (!prefix_caching_) return;
  Block& b = blocks_[static_cast<size_t>(block)];
  TARE_CHECK(b.references > 0);
  if (b.has_key || !by_key_.emplace(key, block).second) return;
  b.has_key = true;
  b.key = key;
}

int64_t BlockPool::DropCache() {
  const auto dropped = static_cast<int64_t>(by_key_.size());
  for (const auto& [key, block] : by_key_) blocks_[static_cast<size_t>(block)].has_key = false;
  by_key_.clear();
  return dropped;
}

void BlockPool::CheckInvariants() const {
  std::vector<bool> listed(blocks_.size(), false);
  int64_t count = 0;
  for (int32_t b = head_; b >= 0; b = blocks_[static_cast<size_t>(b)].next) {
    TARE_CHECK(!listed[static_cast<size_t>(b)]) << "block " << b << " is on the free list twice";
    listed[static_cast<size_t>(b)] = true;
    ++count;
  }
  TARE_CHECK(count == free_count_);
  for (size_t b = 0; b < blocks_.size(); ++b) {
    TARE_CHECK(listed[b] == (blocks_[b].references == 0)) << "block " << b;
    if (!blocks_[b].has_key) continue;
    const auto it = by_key_.find(blocks_[b].key);
    TARE_CHECK(it != by_key_.end() && it->second == static_cast<int32_t>(b)) << "block " << b;
  }
}

}  // namespace tare::engine
