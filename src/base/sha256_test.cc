#include "base/sha256.h"

#include <gtest/gtest.h>

#include <string>

namespace tare {
namespace {

// The vectors of FIPS 180-4, and a message cut anywhere gives the same digest.
TEST(Sha256, KnownVectors) {
  EXPECT_EQ(Hex(Sha256Of("")), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(Hex(Sha256Of("abc")),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(Hex(Sha256Of("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(Hex(Sha256Of(std::string(1000000, 'a'))),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  const std::string text(300, 'x');
  Sha256 hash;
  for (size_t cut = 0; cut <= text.size(); cut += 7) {
    hash.Update(std::string_view(text).substr(0, cut));
    hash.Update(std::string_view(text).substr(cut));
    EXPECT_EQ(hash.Finish(), Sha256Of(text)) << cut;  // and Finish starts anew
  }
}

TEST(Sha256, HexRoundTrip) {
  const Sha256Digest digest = Sha256Of("abc");
  EXPECT_EQ(ParseSha256(Hex(digest)).value(), digest);
  EXPECT_FALSE(ParseSha256("").ok());
  EXPECT_FALSE(ParseSha256(Hex(digest) + "0").ok());
  std::string upper = Hex(digest);
  upper[1] = 'A';
  EXPECT_FALSE(ParseSha256(upper).ok());
  upper[1] = 'g';
  EXPECT_EQ(ParseSha256(upper).status().code(), Code::kInvalidArgument);
}

}  // namespace
}  // namespace tare
