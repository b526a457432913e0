#pragma once

// The 10,000 generated strings of tests/data/tokenizer/make_golden.py, step by step the same. For
// tests.

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tare::models::testing {

class SplitMix {
 public:
  explicit SplitMix(uint64_t seed) : state_(seed) {}
  uint64_t Next() {
    state_ += 0x9E3779B97F4A7C15u;
    uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  uint64_t Below(uint64_t n) { return (Next() >> 33) % n; }

 private:
  uint64_t state_;
};

inline void AppendUtf8(uint32_t c, std::string* out) {
  const auto put = [&](uint32_t byte) { out->push_back(static_cast<char>(byte)); };
  if (c < 0x80) {
    put(c);
  } else if (c < 0x800) {
    put(0xC0 | c >> 6), put(0x80 | (c & 0x3F));
  } else if (c < 0x10000) {
    put(0xE0 | c >> 12), put(0x80 | (c >> 6 & 0x3F)), put(0x80 | (c & 0x3F));
  } else {
    put(0xF0 | c >> 18), put(0x80 | (c >> 12 & 0x3F)), put(0x80 | (c >> 6 & 0x3F)),
        put(0x80 | (c & 0x3F));
  }
}

inline std::string GoldenString(uint64_t index) {
  static constexpr std::array<std::pair<uint32_t, uint32_t>, 22> kRanges = {
      {{0x20, 0x7e},       {0xa1, 0x17f},     {0x300, 0x36f},     {0x391, 0x3a1},
       {0x410, 0x44f},     {0x5d0, 0x5ea},    {0x621, 0x64a},     {0x660, 0x669},
       {0x905, 0x939},     {0x966, 0x96f},    {0xe01, 0xe3a},     {0x1100, 0x1112},
       {0x2160, 0x2188},   {0x2460, 0x249b},  {0x3041, 0x3096},   {0x4e00, 0x9fa5},
       {0xac00, 0xd7a3},   {0xff10, 0xff19},  {0x1d7ce, 0x1d7ff}, {0x1f300, 0x1f5ff},
       {0x1f600, 0x1f64f}, {0x20000, 0x2a6d6}}};
  static constexpr std::array<uint32_t, 20> kSpaces = {
      0x9,    0xa,    0xb,    0xc,    0xd,    0x1c,   0x20,   0x85,   0xa0,   0x1680,
      0x180e, 0x2000, 0x200a, 0x200b, 0x2028, 0x2029, 0x202f, 0x205f, 0x3000, 0xfeff};
  static const auto* pieces =
      new std::vector<std::string>{"'s",
                                   "'S",
                                   "'T",
                                   "'re",
                                   "'VE",
                                   "'ll",
                                   "'Ll",
                                   "'d",
                                   "'m",
                                   "'",
                                   "''",
                                   "don't",
                                   "it's",
                                   "I'M",
                                   "you're",
                                   "<|endoftext|>",
                                   "<|im_start|>",
                                   "<|im_end|>",
                                   "<|im_",
                                   "\r\n",
                                   "\n\n",
                                   "\n ",
                                   " \n",
                                   "\t",
                                   "  ",
                                   "   ",
                                   "0",
                                   "12",
                                   "123",
                                   "1234",
                                   "3.14",
                                   "1e-9",
                                   "0x1F",
                                   "def f(x):\n    return x\n",
                                   "http://a.b/c?d=e&f",
                                   "...",
                                   "---",
                                   "!!!",
                                   "$%&",
                                   " the",
                                   " and",
                                   "The",
                                   "tion",
                                   "e\u0301",
                                   "\u00e9",
                                   "a\u0308\u0323",
                                   "\u1112\u1161\u11ab",
                                   "\U0001f468\u200d\U0001f469\u200d\U0001f467",
                                   "\U0001f1e9\U0001f1ea",
                                   "\ufb01",
                                   "\u017f",
                                   "\u212a",
                                   "\u2126",
                                   "\u0130",
                                   "\u00df",
                                   "\u1e9e",
                                   "'\u017f",
                                   "\u0344",
                                   "\u2adc"};
  SplitMix r(index);
  std::string out;
  const auto piece = [&] { return (*pieces)[r.Below(pieces->size())]; };
  for (uint64_t parts = r.Below(12), i = 0; i < parts; ++i) {
    switch (r.Below(8)) {
      case 0:
        out += piece();
        break;
      case 1: {
        const uint32_t c = kSpaces[r.Below(kSpaces.size())];
        for (uint64_t n = 1 + r.Below(3); n > 0; --n) AppendUtf8(c, &out);
        break;
      }
      case 2:
        for (uint64_t n = 1 + r.Below(7); n > 0; --n)
          out.push_back(static_cast<char>('0' + r.Below(10)));
        break;
      case 3:
      case 4:
        if (r.Below(2) == 1) out.push_back(' ');
        for (uint64_t n = 1 + r.Below(9); n > 0; --n)
          out.push_back(static_cast<char>('a' + r.Below(26)));
        break;
      case 5: {
        const auto [low, high] = kRanges[r.Below(kRanges.size())];
        for (uint64_t n = 1 + r.Below(5); n > 0; --n) {
          AppendUtf8(low + static_cast<uint32_t>(r.Below(high - low + 1)), &out);
        }
        break;
      }
      case 6: {
        const char c = static_cast<char>(33 + r.Below(15));
        out.append(1 + r.Below(3), c);
        break;
      }
      default: {
        const std::string first = piece();
        out += first + " ";
        out += piece();
      }
    }
  }
  return out;
}

}  // namespace tare::models::testing
