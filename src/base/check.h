#pragma once

// TARE_CHECK(condition) << "context": a programmer's error, always on, ends the process with file,
// line and message. Input from outside is never checked this way: it gets a Status.

#include <sstream>

namespace tare::internal {

class CheckFailure {
 public:
  CheckFailure(const char* file, int line, const char* condition);
  [[noreturn]] ~CheckFailure();
  std::ostream& stream() { return stream_; }

 private:
  std::ostringstream stream_;
};

struct Voidify {
  void operator&(std::ostream&) const {}
};

}  // namespace tare::internal

#define TARE_CHECK(condition)          \
  (__builtin_expect(!!(condition), 1)) \
      ? (void)0                        \
      : ::tare::internal::Voidify() &  \
            ::tare::internal::CheckFailure(__FILE__, __LINE__, #condition).stream()
