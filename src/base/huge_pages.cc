#include "base/huge_pages.h"

#include <sys/mman.h>

#include <cstdint>
#include <mutex>

namespace tare {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kRegion = size_t{16} << 20;
constexpr size_t kOwnRegion = size_t{4} << 20;  // from here on an array shares with nobody

size_t RoundUp(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

struct Region {
  void* mapping = MAP_FAILED;
  size_t mapped = 0;
  char* begin = nullptr;  // aligned to a huge page
  size_t size = 0;
  size_t used = 0;  // under the lock of AllocateHuge

  explicit Region(size_t bytes) : mapped(bytes + kHugePage), size(bytes) {
    mapping = ::mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapping == MAP_FAILED) return;
    begin = reinterpret_cast<char*>(RoundUp(reinterpret_cast<uintptr_t>(mapping), kHugePage));
    (void)::madvise(begin, size, MADV_HUGEPAGE);  // a wish: its refusal changes nothing
  }
  ~Region() {
    if (mapping != MAP_FAILED) ::munmap(mapping, mapped);
  }
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
};

}  // namespace

std::shared_ptr<void> AllocateHuge(size_t bytes) {
  static std::mutex mutex;
  static std::weak_ptr<Region> open;
  if (bytes == 0 || bytes > SIZE_MAX / 2) return nullptr;
  const size_t wanted = RoundUp(bytes, 64);
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
  return {std::move(region), at};
}

}  // namespace tare
