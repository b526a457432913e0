#pragma once

// SHA-256 through OpenSSL (which picks the SHA extensions of the CPU).

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "base/status.h"

namespace tare {

using Sha256Digest = std::array<uint8_t, 32>;

class Sha256 {
 public:
  Sha256();
  ~Sha256();
  Sha256(const Sha256&) = delete;
  Sha256& operator=(const Sha256&) = delete;

  void Update(const void* data, size_t size_bytes);
  void Update(std::string_view data) { Update(data.data(), data.size()); }
  // Ends the message; the object then starts a new one.
  Sha256Digest Finish();

 private:
  struct Context;
  std::unique_ptr<Context> context_;
};

Sha256Digest Sha256Of(const void* data, size_t size_bytes);
inline Sha256Digest Sha256Of(std::string_view data) { return Sha256Of(data.data(), data.size()); }

// 64 lower-case hex digits.
std::string Hex(const Sha256Digest& digest);
std::string HexOf(std::span<const uint8_t> bytes);
// Exactly 64 lower-case hex digits, else kInvalidArgument.
Result<Sha256Digest> ParseSha256(std::string_view hex);

}  // namespace tare
