#include "tensor/tap.h"

#include <cstring>

namespace tare {
namespace {

constexpr std::array<std::string_view, 5> kPhases = {"prefill", "decode", "score", "train",
                                                     "backward"};
constexpr std::array<std::string_view, 5> kRoles = {"value", "discrete", "mask", "sentinel",
                                                    "expected"};

template <typename E>
std::optional<E> Find(const std::array<std::string_view, 5>& names, std::string_view name) {
  for (size_t i = 0; i < names.size(); ++i) {
    if (names[i] == name) return static_cast<E>(i);
  }
  return std::nullopt;
}

}  // namespace

std::string_view TapPhaseName(TapPhase phase) { return kPhases[static_cast<size_t>(phase)]; }
std::optional<TapPhase> ParseTapPhase(std::string_view name) {
  return Find<TapPhase>(kPhases, name);
}
std::string_view TapRoleName(TapRole role) { return kRoles[static_cast<size_t>(role)]; }
std::optional<TapRole> ParseTapRole(std::string_view name) { return Find<TapRole>(kRoles, name); }

TokenHash ExtendTokenHash(const TokenHash& before, std::span<const int32_t> tokens) {
  TokenHash hash = before;
  uint8_t message[36];
  for (const int32_t token : tokens) {
    std::memcpy(message, hash.data(), 32);
    const uint32_t bits = static_cast<uint32_t>(token);
    for (int i = 0; i < 4; ++i) message[32 + i] = static_cast<uint8_t>(bits >> (8 * i));
    hash = Sha256Of(message, sizeof(message));
  }
  return hash;
}

}  // namespace tare
