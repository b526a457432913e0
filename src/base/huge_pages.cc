#include "base/huge_pages.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>

#if defined(__SANITIZE_ADDRESS__)
#define TARE_ADDRESS_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define TARE_ADDRESS_SANITIZER 1
#endif
#endif

namespace tare {
namespace {

constexpr size_t kLargest = size_t{1} << 40;  // more is a mistake in the caller's arithmetic

size_t RoundUp(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

#ifndef TARE_ADDRESS_SANITIZER
constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kRegion = size_t{16} << 20;
constexpr size_t kOwnRegion = size_t{4} << 20;  // from here on an array shares with nobody

struct Region {
  void* mapping = MAP_FAILED;
  size_t mapped = 0;
  char* begin = nullptr;  // aligned to a huge page
  size_t size = 0;
  size_t used = 0;  // under the lock of AllocateHuge

  explicit Region(size_t bytes) : mapped(bytes + kHugePage), size(bytes) {
    mapping = ::mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapping == MAP_FAILED) return;
    const auto at = reinterpret_cast<uintptr_t>(mapping);
    begin = static_cast<char*>(mapping) + (RoundUp(at, kHugePage) - at);
    (void)::madvise(begin, size, MADV_HUGEPAGE);  // a wish: its refusal changes nothing
  }
  ~Region() {
    if (mapping != MAP_FAILED) ::munmap(mapping, mapped);
  }
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
};
#endif

}  // namespace

std::shared_ptr<void> AllocateHuge(size_t bytes) {
  if (bytes == 0 || bytes > kLargest) return nullptr;
  const size_t wanted = RoundUp(bytes, 64);
#ifdef TARE_ADDRESS_SANITIZER
  // Each array on its own, so that the sanitizer knows where it ends.
  void* own = std::aligned_alloc(64, wanted);
  if (own == nullptr) return nullptr;
  std::memset(own, 0, wanted);
  return {own, std::free};
#else
  static std::mutex mutex;
  static std::weak_ptr<Region> open;
  if (wanted >= kOwnRegion) {
    auto own = std::make_shared<Region>(RoundUp(wanted, kHugePage));
    char* at = own->begin;
    return at == nullptr ? nullptr : std::shared_ptr<void>(std::move(own), at);
  }
  std::lock_guard lock(mutex);
  std::shared_ptr<Region> region = open.lock();
  if (region == nullptr || region->size - region->used < wanted) {
    region = std::make_shared<Region>(kRegion);
    if (region->begin == nullptr) return nullptr;
    open = region;
  }
  char* at = region->begin + region->used;
  region->used += wanted;
  // A count of its own: one that is the region's would tell the holder of an array how many arrays
  // the region has.
  return {at, [held = std::move(region)](void*) {}};
#endif
}

}  // namespace tare
