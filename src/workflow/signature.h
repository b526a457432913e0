#pragma once

// Ed25519 signatures in the two forms that people have keys for: OpenSSH (`ssh-keygen -Y sign`,
// "SSHSIG") and raw Ed25519 (`openssl pkeyutl -sign -rawin`). Verification only: nothing here
// signs, and Tare never holds a private key. docs/formats/signoff.md.

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace tare::workflow {

// The namespace a reviewer gives to `ssh-keygen -Y sign -n`.
inline constexpr std::string_view kSignatureNamespace = "tare-review";

struct PublicKey {
  std::array<uint8_t, 32> bytes{};
  friend bool operator==(const PublicKey&, const PublicKey&) = default;
};

// "ssh-ed25519 AAAA... [comment]" or "ed25519:<64 hex>". Points of small order, for which anyone
// can make signatures, are refused, and so are other key types (by name).
Result<PublicKey> ParsePublicKey(std::string_view text);
// "SHA256:..." as `ssh-keygen -l` prints it.
std::string Fingerprint(const PublicKey& key);

enum class SignatureForm { kSsh, kRaw };
struct Signature {
  SignatureForm form = SignatureForm::kRaw;
  std::array<uint8_t, 64> bytes{};
  PublicKey key;               // kSsh: the key that the signature says made it
  std::string hash_algorithm;  // kSsh: "sha256" or "sha512"
};
// An armored SSHSIG of namespace tare-review, or a raw signature: 64 bytes, 128 hex digits or 88
// base64 characters, the last two with at most one newline after them.
Result<Signature> ParseSignature(std::string_view bytes);

// Ok when `signature` is `key`'s over `message`; kDataLoss when it is not.
Status VerifySignature(const PublicKey& key, const Signature& signature, std::string_view message);

// Public halves of private keys found in a file's bytes: OpenSSH, PEM, PKCS #8 in DER, a raw seed
// of 32 bytes alone or before its public key, as bytes, hex or base64. `opaque` says that there is
// a private key whose public half cannot be told.
struct PrivateKeyScan {
  std::vector<PublicKey> keys;
  bool opaque = false;
};
PrivateKeyScan FindPrivateKeys(std::string_view bytes);

// Ed25519 keys that the ssh-agent at this socket offers. Other key types are left out. kNotFound
// when nobody listens there; any other error is an agent that did not say.
Result<std::vector<PublicKey>> AgentKeys(const std::string& socket_path);

// Base64 (RFC 4648, canonical, padded); kInvalidArgument otherwise.
Result<std::string> DecodeBase64(std::string_view text);
std::string EncodeBase64(std::string_view bytes);

}  // namespace tare::workflow
