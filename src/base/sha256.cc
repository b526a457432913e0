#include "base/sha256.h"

#include <openssl/evp.h>

namespace tare {

struct Sha256::Context {
  EVP_MD_CTX* evp = EVP_MD_CTX_new();
  ~Context() { EVP_MD_CTX_free(evp); }
};

Sha256::Sha256() : context_(std::make_unique<Context>()) {
  TARE_CHECK(context_->evp != nullptr &&
             EVP_DigestInit_ex(context_->evp, EVP_sha256(), nullptr) == 1);
}

Sha256::~Sha256() = default;

void Sha256::Update(const void* data, size_t size_bytes) {
  if (size_bytes == 0) return;
  TARE_CHECK(EVP_DigestUpdate(context_->evp, data, size_bytes) == 1);
}

Sha256Digest Sha256::Finish() {
  Sha256Digest digest;
  unsigned int size = 0;
  TARE_CHECK(EVP_DigestFinal_ex(context_->evp, digest.data(), &size) == 1 && size == digest.size());
  TARE_CHECK(EVP_DigestInit_ex(context_->evp, EVP_sha256(), nullptr) == 1);
  return digest;
}

Sha256Digest Sha256Of(const void* data, size_t size_bytes) {
  Sha256 hash;
  hash.Update(data, size_bytes);
  return hash.Finish();
}

std::string HexOf(std::span<const uint8_t> bytes) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string out;
  out.reserve(bytes.size() * 2);
  for (uint8_t b : bytes) {
    out.push_back(kDigits[b >> 4]);
    out.push_back(kDigits[b & 15]);
  }
  return out;
}

std::string Hex(const Sha256Digest& digest) { return HexOf(digest); }

Result<Sha256Digest> ParseSha256(std::string_view hex) {
  Sha256Digest digest{};
  if (hex.size() != 64) {
    return InvalidArgument("a SHA-256 has 64 hex digits, this has {}", hex.size());
  }
  for (size_t i = 0; i < 64; ++i) {
    const char c = hex[i];
    int v = -1;
    if (c >= '0' && c <= '9') v = c - '0';
    if (c >= 'a' && c <= 'f') v = c - 'a' + 10;
    if (v < 0) return InvalidArgument("a SHA-256 is lower-case hex; digit {} is not", i);
    digest[i / 2] = static_cast<uint8_t>(digest[i / 2] << 4 | v);
  }
  return digest;
}

}  // namespace tare
