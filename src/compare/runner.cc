#include "compare/runner.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "tensor/digest.h"

namespace tare::compare {
namespace {

// A multiple of the digest chunk; small enough that two threads finish together, large enough that
// the bookkeeping of a piece does not show.
constexpr int64_t kPieceBytes = int64_t{2} << 20;
static_assert(kPieceBytes % kDigestChunkBytes == 0);
constexpr int64_t kWindowBytes = int64_t{512} << 20;
constexpr size_t kWindowPairs = 8192;

// Asks the kernel to map a piece's pages in one call rather than one fault for every 64 KiB. Only
// advice: memory that is no file mapping refuses it, and the pages then come by faults.
void Populate(const void* data, int64_t size_bytes) {
#ifdef MADV_POPULATE_READ
  if (size_bytes < (int64_t{1} << 20)) return;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data) & ~uintptr_t{4095};
  const uintptr_t end = reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(size_bytes);
  // A whole page. NOLINTNEXTLINE(performance-no-int-to-ptr)
  (void)::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_POPULATE_READ);
#else
  (void)data;
  (void)size_bytes;
#endif
}

}  // namespace

struct Runner::Piece {
  size_t pair;
  int64_t begin, end;  // elements of the pair
  BitCounts counts;
  Sha256Digest* chunks_a = nullptr;
  Sha256Digest* chunks_b = nullptr;
};

Runner::Runner(ThreadPool* pool, std::span<const Tier> tiers, bool digests,
               std::deque<UnitCounts>* results)
    : pool_(pool), tiers_(tiers), digests_(digests), results_(results) {}

Runner::~Runner() = default;

void Runner::Add(Pair pair) {
  TARE_CHECK(pair.a.dtype() == pair.b.dtype() && pair.a.elements() == pair.b.elements());
  if (results_->size() <= static_cast<size_t>(pair.unit))
    results_->resize(static_cast<size_t>(pair.unit) + 1);
  const int64_t size = pair.a.size_bytes();
  const int64_t element = SizeOf(pair.a.dtype());
  UnitCounts& unit = (*results_)[static_cast<size_t>(pair.unit)];
  if (digests_) {
    unit.chunks_a.resize(static_cast<size_t>(DigestChunks(size)));
    unit.chunks_b.resize(unit.chunks_a.size());
  }
  for (int64_t begin = 0; begin < size; begin += kPieceBytes) {
    const int64_t end = std::min(size, begin + kPieceBytes);
    Piece piece{
        .pair = pairs_.size(), .begin = begin / element, .end = end / element, .counts = {}};
    if (digests_) {
      piece.chunks_a = unit.chunks_a.data() + begin / kDigestChunkBytes;
      piece.chunks_b = unit.chunks_b.data() + begin / kDigestChunkBytes;
    }
    pieces_.push_back(piece);
  }
  pairs_.push_back(std::move(pair));
  window_bytes_ += 2 * size;
  if (window_bytes_ >= kWindowBytes || pairs_.size() >= kWindowPairs) RunWindow();
}

void Runner::RunWindow() {
  pool_->ParallelFor(static_cast<int64_t>(pieces_.size()), [this](int64_t i) {
    Piece& piece = pieces_[static_cast<size_t>(i)];
    const Pair& pair = pairs_[piece.pair];
    const int64_t element = SizeOf(pair.a.dtype());
    const char* a = static_cast<const char*>(pair.a.data());
    const char* b = static_cast<const char*>(pair.b.data());
    Populate(a + piece.begin * element, (piece.end - piece.begin) * element);
    Populate(b + piece.begin * element, (piece.end - piece.begin) * element);
    const MaskView mask{pair.mask == nullptr ? nullptr : pair.mask->data() + pair.mask_offset,
                        pair.mask_repeat};
    if (piece.chunks_a == nullptr) {
      piece.counts = CompareRange(pair.a.dtype(), a, b, piece.begin, piece.end, mask, tiers_);
      return;
    }
    // A chunk at a time, so that hashing finds in the cache what comparing has read.
    const int64_t chunk = kDigestChunkBytes / element;
    for (int64_t begin = piece.begin, c = 0; begin < piece.end; begin += chunk, ++c) {
      const int64_t end = std::min(piece.end, begin + chunk);
      piece.counts.Merge(CompareRange(pair.a.dtype(), a, b, begin, end, mask, tiers_));
      const size_t bytes = static_cast<size_t>((end - begin) * element);
      piece.chunks_a[c] = Sha256Of(a + begin * element, bytes);
      // The counts leave masked elements out, so equality of the bytes is asked again; they are in
      // the first-level cache.
      piece.chunks_b[c] = std::memcmp(a + begin * element, b + begin * element, bytes) == 0
                              ? piece.chunks_a[c]
                              : Sha256Of(b + begin * element, bytes);
    }
  });
  for (Piece& piece : pieces_) {
    const Pair& pair = pairs_[piece.pair];
    BitCounts& counts = piece.counts;
    for (int64_t* index :
         {&counts.first.index, &counts.first_non_finite.index, &counts.max_ulp_index}) {
      if (*index >= 0) *index += pair.base;
    }
    (*results_)[static_cast<size_t>(pair.unit)].counts.Merge(counts);
  }
  pieces_.clear();
  pairs_.clear();
  window_bytes_ = 0;
}

void Runner::Finish() { RunWindow(); }

}  // namespace tare::compare
