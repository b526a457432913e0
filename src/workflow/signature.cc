#include "workflow/signature.h"

#include <openssl/evp.h>
#include <openssl/pem.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

#include "base/sha256.h"
#include "base/json.h"

namespace tare::workflow {
namespace {

constexpr std::string_view kAlphabet =
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
constexpr std::string_view kKeyType = "ssh-ed25519";
constexpr std::string_view kMagic = "SSHSIG";
constexpr std::string_view kArmorBegin = "-----BEGIN SSH SIGNATURE-----\n";
constexpr std::string_view kArmorEnd = "-----END SSH SIGNATURE-----\n";

using Pkey = std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)>;

// SSH wire strings: a length of four bytes, big end first, then the bytes.
bool TakeU32(std::string_view& in, uint32_t& value) {
  if (in.size() < 4) return false;
  value = 0;
  for (int i = 0; i < 4; ++i) value = value << 8 | static_cast<uint8_t>(in[static_cast<size_t>(i)]);
  in.remove_prefix(4);
  return true;
}
bool TakeWire(std::string_view& in, std::string_view& out) {
  uint32_t size = 0;
  if (!TakeU32(in, size) || in.size() < size) return false;
  out = in.substr(0, size);
  in.remove_prefix(size);
  return true;
}
void PutWire(std::string& out, std::string_view bytes) {
  const uint32_t n = static_cast<uint32_t>(bytes.size());
  for (int shift = 24; shift >= 0; shift -= 8) out += static_cast<char>(n >> shift);
  out += bytes;
}

std::string KeyBlob(const PublicKey& key) {
  std::string blob;
  PutWire(blob, kKeyType);
  PutWire(blob, {reinterpret_cast<const char*>(key.bytes.data()), key.bytes.size()});
  return blob;
}

// Encodings whose point has an order of 8 or less, sign bit cleared (canonical and not).
bool IsSmallOrder(std::array<uint8_t, 32> y) {
  static const std::vector<std::string> kBad = {
      "0000000000000000000000000000000000000000000000000000000000000000",
      "0100000000000000000000000000000000000000000000000000000000000000",
      "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
      "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
      "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
      "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
      "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f"};
  y[31] &= 0x7f;
  return std::find(kBad.begin(), kBad.end(), HexOf(y)) != kBad.end();
}

Result<PublicKey> KeyFromBytes(std::string_view bytes) {
  if (bytes.size() != 32)
    return InvalidArgument("an Ed25519 key has 32 bytes, not {}", bytes.size());
  PublicKey key;
  std::memcpy(key.bytes.data(), bytes.data(), 32);
  if (IsSmallOrder(key.bytes)) {
    return InvalidArgument("this public key is a point of small order: anyone can sign for it");
  }
  return key;
}

Result<PublicKey> KeyFromBlob(std::string_view blob) {
  std::string_view type, bytes;
  if (!TakeWire(blob, type)) return InvalidArgument("SSH key: cut short");
  if (type != kKeyType) {
    return InvalidArgument("SSH key type {}: only ssh-ed25519 is accepted", Printable(type));
  }
  if (!TakeWire(blob, bytes) || !blob.empty()) return InvalidArgument("SSH key: malformed");
  return KeyFromBytes(bytes);
}

int HexDigit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

// Bytes of a text that is hex throughout, else empty.
std::string DecodeHex(std::string_view text) {
  if (text.size() % 2 != 0) return "";
  std::string out;
  for (size_t i = 0; i < text.size(); i += 2) {
    const int a = HexDigit(text[i]), b = HexDigit(text[i + 1]);
    if (a < 0 || b < 0) return "";
    out += static_cast<char>(a * 16 + b);
  }
  return out;
}

std::string Digest(std::string_view algorithm, std::string_view message) {
  unsigned char out[EVP_MAX_MD_SIZE];
  unsigned int size = 0;
  const EVP_MD* md = algorithm == "sha256" ? EVP_sha256() : EVP_sha512();
  TARE_CHECK(EVP_Digest(message.data(), message.size(), out, &size, md, nullptr) == 1);
  return std::string(reinterpret_cast<char*>(out), size);
}

Result<Signature> ParseSshSignature(std::string_view text) {
  text.remove_prefix(kArmorBegin.size());
  if (!text.ends_with(kArmorEnd)) {
    return InvalidArgument("signature: the line END SSH SIGNATURE and a newline must be last");
  }
  text.remove_suffix(kArmorEnd.size());
  std::string base64;
  while (!text.empty()) {
    const size_t newline = text.find('\n');
    if (newline == std::string_view::npos || newline == 0 || newline > 76) {
      return InvalidArgument("signature: lines of 1 to 76 base64 characters are needed");
    }
    base64 += text.substr(0, newline);
    text.remove_prefix(newline + 1);
  }
  auto decoded = DecodeBase64(base64);
  if (!decoded.ok()) return decoded.status().Annotate("signature");
  std::string_view in = *decoded;
  const auto bad = [](std::string_view what) { return InvalidArgument("SSH signature: {}", what); };
  if (!in.starts_with(kMagic)) return bad("does not begin with SSHSIG");
  in.remove_prefix(kMagic.size());
  uint32_t version = 0;
  if (!TakeU32(in, version)) return bad("cut short");
  if (version != 1) return bad("only version 1 is known");
  std::string_view key, name_space, reserved, hash, blob, type, bytes;
  if (!TakeWire(in, key) || !TakeWire(in, name_space) || !TakeWire(in, reserved) ||
      !TakeWire(in, hash) || !TakeWire(in, blob)) {
    return bad("cut short");
  }
  if (!in.empty()) return bad("bytes after its end");
  Signature out;
  out.form = SignatureForm::kSsh;
  TARE_ASSIGN_OR_RETURN(out.key, KeyFromBlob(key));
  if (name_space != kSignatureNamespace) {
    return InvalidArgument("SSH signature: namespace `{}`; sign with `-n {}`",
                           Printable(name_space), kSignatureNamespace);
  }
  if (!reserved.empty()) return bad("the reserved field is not empty");
  if (hash != "sha256" && hash != "sha512") return bad("hash algorithm is not sha256 or sha512");
  out.hash_algorithm = hash;
  if (!TakeWire(blob, type) || type != kKeyType || !TakeWire(blob, bytes) || !blob.empty() ||
      bytes.size() != 64) {
    return bad("the signature blob is not 64 bytes of ssh-ed25519");
  }
  std::memcpy(out.bytes.data(), bytes.data(), 64);
  return out;
}

}  // namespace

std::string EncodeBase64(std::string_view bytes) {
  std::string out;
  for (size_t i = 0; i < bytes.size(); i += 3) {
    uint32_t word = 0;
    const size_t n = std::min<size_t>(3, bytes.size() - i);
    for (size_t k = 0; k < 3; ++k)
      word = word << 8 | (k < n ? static_cast<uint8_t>(bytes[i + k]) : 0);
    for (size_t k = 0; k < 4; ++k) out += k <= n ? kAlphabet[word >> (18 - 6 * k) & 63] : '=';
  }
  return out;
}

Result<std::string> DecodeBase64(std::string_view text) {
  if (text.size() % 4 != 0) return InvalidArgument("base64: the length is not a multiple of 4");
  std::string out;
  for (size_t i = 0; i < text.size(); i += 4) {
    uint32_t word = 0;
    int pads = 0;
    for (size_t k = 0; k < 4; ++k) {
      const char c = text[i + k];
      const size_t value = kAlphabet.find(c);
      if (c == '=' && i + 4 == text.size() && k >= 2) {
        ++pads;
        word <<= 6;
      } else if (value == std::string_view::npos || pads > 0) {
        return InvalidArgument("base64: bad character at {}", i + k);
      } else {
        word = word << 6 | static_cast<uint32_t>(value);
      }
    }
    for (int k = 0; k < 3 - pads; ++k) out += static_cast<char>(word >> (16 - 8 * k));
  }
  if (EncodeBase64(out) != text) return InvalidArgument("base64: not the canonical spelling");
  return out;
}

Result<PublicKey> ParsePublicKey(std::string_view text) {
  constexpr std::string_view kRawPrefix = "ed25519:";
  if (text.starts_with(kRawPrefix)) {
    const std::string_view hex = text.substr(kRawPrefix.size());
    const std::string bytes = DecodeHex(hex);
    if (hex.size() != 64 || bytes.size() != 32) {
      return InvalidArgument("public key: ed25519: must be followed by 64 hex digits");
    }
    return KeyFromBytes(bytes);
  }
  const size_t space = text.find(' ');
  if (space == std::string_view::npos) {
    return InvalidArgument("public key: `ssh-ed25519 AAAA...` or `ed25519:<64 hex>` is needed");
  }
  const std::string_view type = text.substr(0, space);
  if (type != kKeyType) {
    return InvalidArgument("public key type {}: only ssh-ed25519 is accepted", Printable(type));
  }
  std::string_view base64 = text.substr(space + 1);
  base64 = base64.substr(0, base64.find(' '));
  TARE_ASSIGN_OR_RETURN(const std::string blob, DecodeBase64(base64));
  return KeyFromBlob(blob);
}

std::string Fingerprint(const PublicKey& key) {
  const Sha256Digest digest = Sha256Of(KeyBlob(key));
  std::string text = EncodeBase64({reinterpret_cast<const char*>(digest.data()), digest.size()});
  while (!text.empty() && text.back() == '=') text.pop_back();
  return "SHA256:" + text;
}

Result<Signature> ParseSignature(std::string_view bytes) {
  if (bytes.starts_with(kArmorBegin)) return ParseSshSignature(bytes);
  std::string raw;
  if (bytes.size() == 64) {
    raw = bytes;
  } else {
    std::string_view text = bytes;
    if (text.ends_with('\n')) text.remove_suffix(1);
    if (text.size() == 128) {
      raw = DecodeHex(text);
    } else if (text.size() == 88) {
      auto decoded = DecodeBase64(text);
      if (decoded.ok()) raw = *std::move(decoded);
    }
  }
  if (raw.size() != 64) {
    return InvalidArgument(
        "signature: neither an armored SSH signature nor 64 raw bytes, 128 hex digits or 88 base64 "
        "characters");
  }
  Signature out;
  std::memcpy(out.bytes.data(), raw.data(), 64);
  return out;
}

Status VerifySignature(const PublicKey& key, const Signature& signature, std::string_view message) {
  std::string signed_bytes;
  if (signature.form == SignatureForm::kSsh) {
    if (signature.key != key) {
      return DataLoss("the signature was made by key {}, not {}", Fingerprint(signature.key),
                      Fingerprint(key));
    }
    signed_bytes = kMagic;
    PutWire(signed_bytes, kSignatureNamespace);
    PutWire(signed_bytes, "");
    PutWire(signed_bytes, signature.hash_algorithm);
    PutWire(signed_bytes, Digest(signature.hash_algorithm, message));
    message = signed_bytes;
  }
  const Pkey pkey(EVP_PKEY_new_raw_public_key(EVP_PKEY_ED25519, nullptr, key.bytes.data(), 32),
                  EVP_PKEY_free);
  const std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> context(EVP_MD_CTX_new(),
                                                                        EVP_MD_CTX_free);
  if (pkey == nullptr || context == nullptr ||
      EVP_DigestVerifyInit(context.get(), nullptr, nullptr, nullptr, pkey.get()) != 1) {
    return Error(Code::kInternal, "OpenSSL cannot verify Ed25519");
  }
  if (EVP_DigestVerify(context.get(), signature.bytes.data(), signature.bytes.size(),
                       reinterpret_cast<const unsigned char*>(message.data()),
                       message.size()) != 1) {
    return DataLoss("the signature does not match the signed bytes under key {}", Fingerprint(key));
  }
  return Ok();
}

PrivateKeyScan FindPrivateKeys(std::string_view bytes) {
  PrivateKeyScan scan;
  constexpr std::string_view kOpenSsh = "-----BEGIN OPENSSH PRIVATE KEY-----";
  for (size_t at = bytes.find(kOpenSsh); at != std::string_view::npos;
       at = bytes.find(kOpenSsh, at + 1)) {
    std::string base64;
    for (const char c : bytes.substr(at + kOpenSsh.size(), 1 << 16)) {
      if (c == '-') break;
      if (kAlphabet.find(c) != std::string_view::npos || c == '=') base64 += c;
    }
    auto blob = DecodeBase64(base64);
    std::string_view in = blob.ok() ? std::string_view(*blob) : std::string_view();
    constexpr std::string_view kHeader{"openssh-key-v1\0", 15};
    std::string_view cipher, kdf, options, key;
    uint32_t count = 0;
    bool found = false;
    if (in.starts_with(kHeader)) {
      in.remove_prefix(kHeader.size());
      if (TakeWire(in, cipher) && TakeWire(in, kdf) && TakeWire(in, options) &&
          TakeU32(in, count) && TakeWire(in, key)) {
        auto parsed = KeyFromBlob(key);  // the public half stands in clear text
        found = true;                    // another key type can sign nothing here
        if (parsed.ok()) scan.keys.push_back(*parsed);
      }
    }
    if (!found) scan.opaque = true;
  }
  const auto add = [&](EVP_PKEY* raw) {
    const Pkey key(raw, EVP_PKEY_free);
    PublicKey out;
    size_t size = out.bytes.size();
    if (key != nullptr && EVP_PKEY_id(key.get()) == EVP_PKEY_ED25519 &&
        EVP_PKEY_get_raw_public_key(key.get(), out.bytes.data(), &size) == 1) {
      scan.keys.push_back(out);
    }
  };
  for (const std::string_view begin : {std::string_view("-----BEGIN PRIVATE KEY-----"),
                                       std::string_view("-----BEGIN ENCRYPTED PRIVATE KEY-----")}) {
    for (size_t at = bytes.find(begin); at != std::string_view::npos;
         at = bytes.find(begin, at + 1)) {
      const std::string_view pem = bytes.substr(at, 1 << 16);
      const std::unique_ptr<BIO, decltype(&BIO_free)> bio(
          BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())), BIO_free);
      // A callback that knows no password: an encrypted key stays closed instead of asking.
      EVP_PKEY* key = PEM_read_bio_PrivateKey(
          bio.get(), nullptr, [](char*, int, int, void*) { return 0; }, nullptr);
      if (key == nullptr) {
        scan.opaque = true;
      } else {
        add(key);
      }
    }
  }
  const auto add_seed = [&](std::string_view seed) {
    add(EVP_PKEY_new_raw_private_key(EVP_PKEY_ED25519, nullptr,
                                     reinterpret_cast<const unsigned char*>(seed.data()), 32));
  };
  // PKCS #8 in DER: the algorithm's identifier, then the seed in two octet strings.
  constexpr std::string_view kDerSeed{"\x06\x03\x2b\x65\x70\x04\x22\x04\x20", 9};
  for (size_t at = bytes.find(kDerSeed); at != std::string_view::npos;
       at = bytes.find(kDerSeed, at + 1)) {
    if (bytes.size() - at >= kDerSeed.size() + 32) add_seed(bytes.substr(at + kDerSeed.size(), 32));
  }
  // Encrypted (PBES2): whose it is cannot be told.
  constexpr std::string_view kPbes2{"\x06\x09\x2a\x86\x48\x86\xf7\x0d\x01\x05\x0d", 11};
  if (bytes.find(kPbes2) != std::string_view::npos) scan.opaque = true;
  std::string_view text = bytes;
  if (text.size() > 32 && text.back() == '\n') text.remove_suffix(1);
  std::vector<std::string> raws = {std::string(bytes)};
  if (text.size() == 64 || text.size() == 128) raws.push_back(DecodeHex(text));
  if (text.size() == 44 || text.size() == 88) {
    auto decoded = DecodeBase64(text);
    if (decoded.ok()) raws.push_back(*std::move(decoded));
  }
  for (const std::string& raw : raws) {
    if (raw.size() == 32) add_seed(raw);
    if (raw.size() != 64) continue;
    // 64 bytes are as well a signature: a key when the second half is the first one's public key.
    const size_t before = scan.keys.size();
    add_seed(std::string_view(raw).substr(0, 32));
    if (scan.keys.size() > before &&
        std::memcmp(scan.keys.back().bytes.data(), raw.data() + 32, 32) != 0)
      scan.keys.pop_back();
  }
  return scan;
}

Result<std::vector<PublicKey>> AgentKeys(const std::string& socket_path) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (socket_path.size() >= sizeof(address.sun_path)) {
    return Error(Code::kNotFound, "ssh-agent: the socket path is too long to be one");
  }
  std::memcpy(address.sun_path, socket_path.data(), socket_path.size());
  const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return Errno("socket", socket_path, errno);
  const std::unique_ptr<const int, void (*)(const int*)> closer(&fd,
                                                                [](const int* f) { ::close(*f); });
  const timeval limit = {5, 0};
  (void)::setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
  (void)::setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
  if (::connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return Error(Code::kNotFound, "no ssh-agent at {}: {}", Printable(socket_path),
                 std::strerror(errno));
  }
  constexpr char kRequest[5] = {0, 0, 0, 1, 11};  // SSH_AGENTC_REQUEST_IDENTITIES
  if (::send(fd, kRequest, sizeof(kRequest), MSG_NOSIGNAL) != sizeof(kRequest)) {
    return Errno("send to ssh-agent", socket_path, errno);
  }
  std::string answer;
  uint32_t expected = 0;
  char buffer[4096];
  while (answer.size() < 4 || answer.size() < size_t{4} + expected) {
    const ssize_t n = ::recv(fd, buffer, sizeof(buffer), 0);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return Error(Code::kIo, "ssh-agent at {} did not answer", Printable(socket_path));
    answer.append(buffer, static_cast<size_t>(n));
    if (answer.size() >= 4) {
      std::string_view head = answer;
      (void)TakeU32(head, expected);
      if (expected > 256 * 1024) return Error(Code::kIo, "ssh-agent: an answer too long to be one");
    }
  }
  std::string_view in = std::string_view(answer).substr(4, expected);
  if (in.empty() || in[0] != 12) return Error(Code::kIo, "ssh-agent: it lists no identities");
  in.remove_prefix(1);
  uint32_t count = 0;
  if (!TakeU32(in, count)) return Error(Code::kIo, "ssh-agent: malformed answer");
  std::vector<PublicKey> keys;
  for (uint32_t i = 0; i < count; ++i) {
    std::string_view blob, comment;
    if (!TakeWire(in, blob) || !TakeWire(in, comment)) {
      return Error(Code::kIo, "ssh-agent: malformed answer");
    }
    auto key = KeyFromBlob(blob);
    if (key.ok()) keys.push_back(*key);
  }
  return keys;
}

}  // namespace tare::workflow
