#include "workflow/uuid.h"

#include <openssl/rand.h>

#include <array>
#include <mutex>

#include "base/check.h"

namespace tare::workflow {

std::string NewRunId(Env* env) {
  std::array<uint8_t, 10> random;
  TARE_CHECK(RAND_bytes(random.data(), static_cast<int>(random.size())) == 1)
      << "the system gives no random bytes";
  static std::mutex mutex;
  static uint64_t last_ms = 0;
  static uint32_t counter = 0;
  uint64_t ms;
  uint32_t count;
  {
    std::lock_guard<std::mutex> hold(mutex);
    const uint64_t now = static_cast<uint64_t>(env->NowNs() / 1'000'000);
    if (now > last_ms) {
      last_ms = now;
      counter = random[8] & 0x7f;  // room for the counter to grow inside one millisecond
    } else if (++counter > 0xfff) {
      ++last_ms;
      counter = 0;
    }
    ms = last_ms;
    count = counter;
  }
  return fmt::format("{:08x}-{:04x}-7{:03x}-{:02x}{:02x}-{:02x}{:02x}{:02x}{:02x}{:02x}{:02x}",
                     static_cast<uint32_t>(ms >> 16), static_cast<uint32_t>(ms & 0xffff), count,
                     0x80 | (random[0] & 0x3f), random[1], random[2], random[3], random[4],
                     random[5], random[6], random[7]);
}

bool IsRunId(std::string_view text) {
  if (text.size() != 36) return false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (i == 8 || i == 13 || i == 18 || i == 23) {
      if (c != '-') return false;
    } else if (!((c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'))) {
      return false;
    }
  }
  return text[14] == '7' &&
         (text[19] == '8' || text[19] == '9' || text[19] == 'a' || text[19] == 'b');
}

}  // namespace tare::workflow
