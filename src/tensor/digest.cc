#include "tensor/digest.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <vector>

#include "base/check.h"
#include "tensor/digest_many.h"

namespace tare {

namespace {

void HashAll(std::span<const DigestChunk> chunks, ThreadPool* pool) {
  const std::vector<ChunkRun> runs = CutChunks(chunks);
  if (pool == nullptr || runs.size() < 2) return HashChunks(chunks);
  pool->ParallelFor(std::ssize(runs), [&](int64_t i) {
    const auto [begin, end] = runs[static_cast<size_t>(i)];
    HashChunks(chunks.subspan(begin, end - begin));
  });
}

}  // namespace

void AddChunks(const void* data, int64_t size_bytes, std::vector<Sha256Digest>* digests,
               std::vector<DigestChunk>* chunks) {
  digests->resize(static_cast<size_t>(DigestChunks(size_bytes)));
  for (size_t i = 0; i < digests->size(); ++i) {
    const int64_t begin = static_cast<int64_t>(i) * kDigestChunkBytes;
    chunks->push_back({static_cast<const char*>(data) + begin,
                       std::min(kDigestChunkBytes, size_bytes - begin), &(*digests)[i]});
  }
}

std::vector<ChunkRun> CutChunks(std::span<const DigestChunk> chunks) {
  constexpr int64_t kRunBytes = 1 << 20;
  std::vector<ChunkRun> runs;
  size_t begin = 0;
  int64_t bytes = 0;
  for (size_t i = 0; i < chunks.size(); ++i) {
    bytes += chunks[i].size_bytes;
    if (bytes < kRunBytes && i + 1 < chunks.size()) continue;
    runs.push_back({begin, i + 1});
    begin = i + 1;
    bytes = 0;
  }
  return runs;
}

void HashChunks(std::span<const DigestChunk> run) {
  for (const DigestChunk& chunk : run)
    *chunk.digest = Sha256Of(chunk.data, static_cast<size_t>(chunk.size_bytes));
}

Sha256Digest TensorDigest(DType dtype, const Shape& shape, const void* data, ThreadPool* pool) {
  std::vector<Sha256Digest> digests;
  std::vector<DigestChunk> chunks;
  AddChunks(data, ElementCount(shape).value() * SizeOf(dtype), &digests, &chunks);
  HashAll(chunks, pool);
  return JoinChunkDigests(dtype, shape, digests);
}

std::vector<Sha256Digest> TensorDigests(std::span<const Tensor> tensors, ThreadPool* pool) {
  std::vector<std::vector<Sha256Digest>> digests(tensors.size());
  std::vector<DigestChunk> chunks;
  for (size_t i = 0; i < tensors.size(); ++i) {
    TARE_CHECK(tensors[i].device() == Device::kCpu) << "the digest of a tensor elsewhere";
    AddChunks(tensors[i].data(), tensors[i].size_bytes(), &digests[i], &chunks);
  }
  HashAll(chunks, pool);
  std::vector<Sha256Digest> out;
  out.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i)
    out.push_back(JoinChunkDigests(tensors[i].dtype(), tensors[i].shape(), digests[i]));
  return out;
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
