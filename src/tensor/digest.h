#pragma once

// The digest of a tensor: SHA-256 over
//
//   "tare.tensor/1\n" <dtype> "\n" <dimensions joined by ","> "\n" <32-byte SHA-256 of each 64 KiB
//   chunk of the little-endian bytes, in order; the last chunk may be short; none for no bytes>
//
// with the dtype's name of tensor/dtype.h ("bf16"); a scalar has no dimensions and an empty line.
// Because chunks are hashed apart, threads and devices share the work without moving a bit.

#include <cstdint>
#include <span>

#include "base/sha256.h"
#include "base/thread_pool.h"
#include "tensor/tensor.h"

namespace tare {

inline constexpr int64_t kDigestChunkBytes = int64_t{64} << 10;

// Number of chunks of a tensor of `size_bytes`.
inline int64_t DigestChunks(int64_t size_bytes) {
  return (size_bytes + kDigestChunkBytes - 1) / kDigestChunkBytes;
}

// REQUIRES: `data` is CPU memory holding the whole shape. A null pool runs on the caller.
Sha256Digest TensorDigest(DType dtype, const Shape& shape, const void* data,
                          ThreadPool* pool = nullptr);
inline Sha256Digest TensorDigest(const Tensor& tensor, ThreadPool* pool = nullptr) {
  return TensorDigest(tensor.dtype(), tensor.shape(), tensor.data(), pool);
}
// For callers that read the bytes anyway: joins chunk digests, which they computed, in order.
// REQUIRES: chunks.size() == DigestChunks(size of the tensor)
Sha256Digest JoinChunkDigests(DType dtype, const Shape& shape,
                              std::span<const Sha256Digest> chunks);

}  // namespace tare
