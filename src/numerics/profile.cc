#include "numerics/profile.h"

namespace tare {

std::string_view ProfileName(Profile profile) {
  return profile == Profile::kIeeeF32 ? "ieee-f32" : "sm90-mma";
}

std::optional<Profile> ParseProfile(std::string_view name) {
  if (name == "ieee-f32") return Profile::kIeeeF32;
  if (name == "sm90-mma") return Profile::kSm90Mma;
  return std::nullopt;
}

}  // namespace tare
