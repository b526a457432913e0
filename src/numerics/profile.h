#pragma once

// The profiles: which step a contraction uses. Everything else is identical in all of them.
// A profile is a value, never an #ifdef.

#include <cstdint>
#include <optional>
#include <string_view>

namespace tare {

enum class Profile : uint8_t {
  kIeeeF32,  // one IEEE fma per product, k ascending, f32 accumulator from +0
  kSm90Mma,  // the Hopper tensor-core step (docs/numerics.md), k ascending
};

std::string_view ProfileName(Profile profile);  // "ieee-f32", "sm90-mma"
std::optional<Profile> ParseProfile(std::string_view name);

}  // namespace tare
