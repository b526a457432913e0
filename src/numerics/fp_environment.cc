#include "numerics/fp_environment.h"

#include <cfenv>
#include <string>

#include "base/check.h"
#include "numerics/fp.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tare::numerics {

Status CheckFpEnvironment() {
  std::string wrong;
  const auto note = [&wrong](const char* text) {
    if (!wrong.empty()) wrong += "; ";
    wrong += text;
  };
  switch (std::fegetround()) {
    case FE_TONEAREST:
      break;
    case FE_UPWARD:
      note("rounding is upward, not to nearest");
      break;
    case FE_DOWNWARD:
      note("rounding is downward, not to nearest");
      break;
    case FE_TOWARDZERO:
      note("rounding is toward zero, not to nearest");
      break;
    default:
      note("rounding is of an unknown kind, not to nearest");
      break;
  }
#if defined(__x86_64__)
  const unsigned csr = _mm_getcsr();
  // The x87 unit, which fegetround reads, and SSE have a mode each.
  if ((csr & 0x6000) != 0 && std::fegetround() == FE_TONEAREST) {
    note("SSE rounding is not to nearest");
  }
  if ((csr & 0x8000) != 0) note("subnormal results are flushed to zero (FTZ)");
  if ((csr & 0x0040) != 0) note("subnormal operands are read as zero (DAZ)");
#endif
  // What the machine does, whatever its registers are called. volatile: not at compile time.
  volatile float smallest = FloatOf(0x00800000u), half = 0.5f;
  volatile float subnormal = smallest * half;
  if (BitsOf(subnormal) != 0x00400000u && wrong.empty()) note("subnormal results are lost");
  volatile float one = 1.0f, tie = 0x1p-24f;
  volatile float down = one + tie, up = (one + 0x1p-23f) + tie;
  if ((down != 1.0f || up != 1.0f + 0x1p-22f) && wrong.empty()) {
    note("ties are not rounded to even");
  }
  if (wrong.empty()) return Ok();
  return Status(Code::kPrecondition,
                "floating-point environment of this thread: " + wrong +
                    "; a loaded library has changed it, and every bit would differ");
}

void RequireFpEnvironment() {
  const Status status = CheckFpEnvironment();
  TARE_CHECK(status.ok()) << status.message();
}

}  // namespace tare::numerics
