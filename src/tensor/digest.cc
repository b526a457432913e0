#include "tensor/digest.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <vector>

namespace tare {

Sha256Digest TensorDigest(DType dtype, const Shape& shape, const void* data, ThreadPool* pool) {
  const int64_t size = ElementCount(shape).value() * SizeOf(dtype);
  std::vector<Sha256Digest> chunks(DigestChunks(size));
  const auto hash = [&](int64_t i) {
    const int64_t begin = i * kDigestChunkBytes;
    chunks[i] =
        Sha256Of(static_cast<const char*>(data) + begin, std::min(kDigestChunkBytes, size - begin));
  };
  if (pool != nullptr && chunks.size() > 1) {
    pool->ParallelFor(static_cast<int64_t>(chunks.size()), hash);
  } else {
    for (size_t i = 0; i < chunks.size(); ++i) hash(static_cast<int64_t>(i));
  }
  return JoinChunkDigests(dtype, shape, chunks);
}

Sha256Digest JoinChunkDigests(DType dtype, const Shape& shape,
                              std::span<const Sha256Digest> chunks) {
  TARE_CHECK(static_cast<int64_t>(chunks.size()) ==
             DigestChunks(ElementCount(shape).value() * SizeOf(dtype)));
  Sha256 hash;
  hash.Update(fmt::format("tare.tensor/1\n{}\n{}\n", DTypeName(dtype), fmt::join(shape, ",")));
  hash.Update(chunks.data(), chunks.size() * sizeof(Sha256Digest));
  return hash.Finish();
}

}  // namespace tare
