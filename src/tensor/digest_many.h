#pragma once

// The digests of many tensors at once: the threads share the chunks of all of them. In parts, for
// callers that have more to do with the bytes while these are in a cache.

#include <span>
#include <vector>

#include "tensor/digest.h"

namespace tare {

// Of each, in order; the digests of tensor/digest.h. A null pool runs on the caller.
// REQUIRES: CPU tensors
std::vector<Sha256Digest> TensorDigests(std::span<const Tensor> tensors,
                                        ThreadPool* pool = nullptr);

// One chunk of a tensor's bytes and where its digest goes.
struct DigestChunk {
  const void* data = nullptr;
  int64_t size_bytes = 0;
  Sha256Digest* digest = nullptr;
};

// Appends the chunks of `size_bytes` at `data`. Sizes `digests`, which must then stay where it is,
// for JoinChunkDigests once all are hashed.
void AddChunks(const void* data, int64_t size_bytes, std::vector<Sha256Digest>* digests,
               std::vector<DigestChunk>* chunks);
// Consecutive chunks [begin, end) of about a megabyte: what one thread takes at a time.
struct ChunkRun {
  size_t begin = 0, end = 0;
};
std::vector<ChunkRun> CutChunks(std::span<const DigestChunk> chunks);
// Fills the digests of one run.
void HashChunks(std::span<const DigestChunk> run);

}  // namespace tare
