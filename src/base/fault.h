#pragma once

// Planted faults: named one-line defects that prove that a checker checks. An operator or a runtime
// step asks `fault::Active(kRopeCastBeforeRotate, side)` at the place where the defect would sit.
// Nothing is active unless a command line or a test selects it; the check is then one relaxed load.
//
// A fault is declared once, beside the code that asks for it:
//   TARE_FAULT(kWindowOffByOne, "attention.window_off_by_one", "attention", "C3,C5",
//              "sliding window admits key i - window");

#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace tare::fault {

// Which of the two systems a piece of code works for. Library code is told by its context.
enum class Side : uint8_t { kNone = 0, kRollout = 1, kTrainer = 2 };
std::string_view SideName(Side side);  // "none", "rollout", "trainer"

struct Fault {
  const char* name;   // "rope.cast_before_rotate"
  const char* site;   // the operator or runtime step that a locator must name
  const char* gates;  // comma-separated gates that must catch it
  const char* text;   // one sentence: what is done wrong
  // Bit 0: rollout, bit 1: trainer, bit 2: code without a side.
  std::atomic<uint32_t> active_on{0};

  Fault(const char* name, const char* site, const char* gates, const char* text);
};

inline bool Active(const Fault& fault, Side side) {
  const uint32_t mask = fault.active_on.load(std::memory_order_relaxed);
  if (__builtin_expect(mask == 0, 1)) return false;
  return (mask & (side == Side::kRollout ? 1u : side == Side::kTrainer ? 2u : 4u)) != 0;
}

// Every declared fault, by name.
std::vector<const Fault*> All();

// Selects faults for this process: "name@rollout,name@trainer,name@both". An unknown name or side
// is kInvalidArgument that lists near names. An empty spec clears all.
Status Select(std::string_view spec);
void Clear();
// The spec in force, canonical; empty when none. Goes into every execution identity.
std::string Selected();

// For tests: active inside a scope.
class Scoped {
 public:
  explicit Scoped(std::string_view spec);
  ~Scoped();
  Scoped(const Scoped&) = delete;
  Scoped& operator=(const Scoped&) = delete;

 private:
  std::string before_;
};

}  // namespace tare::fault

#define TARE_FAULT(variable, name, site, gates, text) \
  inline ::tare::fault::Fault variable { name, site, gates, text }
