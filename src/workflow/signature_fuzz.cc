// Any bytes as signature, public key, statement, private key file or page: no crash, and nothing
// that a fuzzer makes up verifies.

#include <cstdint>

#include "base/check.h"
#include "workflow/index.h"
#include "workflow/signature.h"
#include "workflow/signoff.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace tare::workflow;
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  static const PublicKey key =
      *ParsePublicKey("ed25519:3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c");
  auto signature = ParseSignature(bytes);
  if (signature.ok()) TARE_CHECK(!VerifySignature(key, *signature, "never signed").ok());
  auto parsed = ParsePublicKey(bytes);
  if (parsed.ok()) TARE_CHECK(Fingerprint(*parsed).size() == 50);
  auto statement = ParseStatement(bytes);
  if (statement.ok()) TARE_CHECK(*EncodeStatement(*statement) == bytes);
  auto page = SplitFooter(bytes);
  if (page.ok()) TARE_CHECK(WithFooter(page->first, page->second) == bytes);
  (void)FindPrivateKeys(bytes);
  auto decoded = DecodeBase64(bytes);
  if (decoded.ok()) TARE_CHECK(EncodeBase64(*decoded) == bytes);
  return 0;
}
