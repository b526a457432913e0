#include "tensor/gguf_blocks.h"

#include <cmath>
#include <cstring>
#include <string>

#include "tensor/convert.h"

namespace tare {
namespace {

constexpr GgufTypeInfo kTypes[] = {
    {0, "F32", 1, 4, true},          {1, "F16", 1, 2, true},
    {2, "Q4_0", 32, 18, true},       {3, "Q4_1", 32, 20, true},
    {6, "Q5_0", 32, 22, true},       {7, "Q5_1", 32, 24, true},
    {8, "Q8_0", 32, 34, true},       {9, "Q8_1", 32, 40, false},
    {10, "Q2_K", 256, 84, false},    {11, "Q3_K", 256, 110, false},
    {12, "Q4_K", 256, 144, true},    {13, "Q5_K", 256, 176, true},
    {14, "Q6_K", 256, 210, true},    {15, "Q8_K", 256, 292, false},
    {16, "IQ2_XXS", 256, 66, false}, {17, "IQ2_XS", 256, 74, false},
    {18, "IQ3_XXS", 256, 98, false}, {19, "IQ1_S", 256, 50, false},
    {20, "IQ4_NL", 32, 18, false},   {21, "IQ3_S", 256, 110, false},
    {22, "IQ2_S", 256, 82, false},   {23, "IQ4_XS", 256, 136, false},
    {24, "I8", 1, 1, false},         {25, "I16", 1, 2, false},
    {26, "I32", 1, 4, false},        {27, "I64", 1, 8, false},
    {28, "F64", 1, 8, false},        {29, "IQ1_M", 256, 56, false},
    {30, "BF16", 1, 2, true},        {34, "TQ1_0", 256, 54, false},
    {35, "TQ2_0", 256, 66, false},   {39, "MXFP4", 32, 17, false},
    {40, "NVFP4", 64, 36, false},    {41, "Q1_0", 128, 18, false},
};

float Half(const uint8_t* p) { return F16ToF32(static_cast<uint16_t>(p[0] | p[1] << 8)); }

// Low nibbles are elements 0..15 of the block, high nibbles 16..31.
void Q4_0(const uint8_t* b, float* y) {
  const float d = Half(b);
  for (int i = 0; i < 16; ++i) {
    y[i] = d * static_cast<float>((b[2 + i] & 15) - 8);
    y[i + 16] = d * static_cast<float>((b[2 + i] >> 4) - 8);
  }
}

void Q4_1(const uint8_t* b, float* y) {
  const float d = Half(b);
  const float m = Half(b + 2);
  for (int i = 0; i < 16; ++i) {
    y[i] = d * static_cast<float>(b[4 + i] & 15) + m;
    y[i + 16] = d * static_cast<float>(b[4 + i] >> 4) + m;
  }
}

// The fifth bit of element i is bit i of a little-endian word.
int FifthBit(const uint8_t* word, int i) { return (word[i / 8] >> (i % 8) & 1) << 4; }

void Q5_0(const uint8_t* b, float* y) {
  const float d = Half(b);
  for (int i = 0; i < 16; ++i) {
    y[i] = d * static_cast<float>(((b[6 + i] & 15) | FifthBit(b + 2, i)) - 16);
    y[i + 16] = d * static_cast<float>(((b[6 + i] >> 4) | FifthBit(b + 2, i + 16)) - 16);
  }
}

void Q5_1(const uint8_t* b, float* y) {
  const float d = Half(b);
  const float m = Half(b + 2);
  for (int i = 0; i < 16; ++i) {
    y[i] = d * static_cast<float>((b[8 + i] & 15) | FifthBit(b + 4, i)) + m;
    y[i + 16] = d * static_cast<float>((b[8 + i] >> 4) | FifthBit(b + 4, i + 16)) + m;
  }
}

void Q8_0(const uint8_t* b, float* y) {
  const float d = Half(b);
  for (int i = 0; i < 32; ++i) y[i] = static_cast<float>(static_cast<int8_t>(b[2 + i])) * d;
}

// Six-bit scale and minimum of sub-block j (0..7) out of 12 packed bytes.
void ScaleMin(const uint8_t* packed, int j, float* scale, float* min) {
  int s = 0;
  int m = 0;
  if (j < 4) {
    s = packed[j] & 63;
    m = packed[j + 4] & 63;
  } else {
    s = (packed[j + 4] & 15) | (packed[j - 4] >> 2 & 0x30);
    m = packed[j + 4] >> 4 | (packed[j] >> 2 & 0x30);
  }
  *scale = static_cast<float>(s);
  *min = static_cast<float>(m);
}

void Q4_K(const uint8_t* b, float* y) {
  const float d = Half(b);
  const float dmin = Half(b + 2);
  for (int j = 0; j < 8; ++j) {
    float scale = 0;
    float min = 0;
    ScaleMin(b + 4, j, &scale, &min);
    const float ds = d * scale;
    const float dm = dmin * min;
    const uint8_t* q = b + 16 + j / 2 * 32;
    for (int i = 0; i < 32; ++i) {
      y[j * 32 + i] = ds * static_cast<float>(q[i] >> (j % 2 * 4) & 15) - dm;
    }
  }
}

void Q5_K(const uint8_t* b, float* y) {
  const float d = Half(b);
  const float dmin = Half(b + 2);
  for (int j = 0; j < 8; ++j) {
    float scale = 0;
    float min = 0;
    ScaleMin(b + 4, j, &scale, &min);
    const float ds = d * scale;
    const float dm = dmin * min;
    const uint8_t* high = b + 16;
    const uint8_t* q = b + 48 + j / 2 * 32;
    for (int i = 0; i < 32; ++i) {
      const int v = (q[i] >> (j % 2 * 4) & 15) | (high[i] >> j & 1) << 4;
      y[j * 32 + i] = ds * static_cast<float>(v) - dm;
    }
  }
}

void Q6_K(const uint8_t* b, float* y) {
  const float d = Half(b + 208);
  for (int j = 0; j < 16; ++j) {
    const float scale = d * static_cast<float>(static_cast<int8_t>(b[192 + j]));
    for (int i = 0; i < 16; ++i) {
      // Halves of 128 elements; in each, 64 low bytes serve four runs of 32, and 32 high bytes too.
      const int at = j * 16 + i;
      const int half = at / 128;
      const int run = at % 128 / 32;
      const int column = at % 32;
      const int low = b[half * 64 + run % 2 * 32 + column] >> (run / 2 * 4) & 15;
      const int high = b[128 + half * 32 + column] >> (run * 2) & 3;
      y[at] = scale * static_cast<float>((low | high << 4) - 32);
    }
  }
}

using BlockFunction = void (*)(const uint8_t*, float*);

BlockFunction FunctionOf(uint32_t id) {
  switch (id) {
    case 2:
      return Q4_0;
    case 3:
      return Q4_1;
    case 6:
      return Q5_0;
    case 7:
      return Q5_1;
    case 8:
      return Q8_0;
    case 12:
      return Q4_K;
    case 13:
      return Q5_K;
    case 14:
      return Q6_K;
    default:
      return nullptr;
  }
}

}  // namespace

const GgufTypeInfo* FindGgufType(uint32_t id) {
  for (const GgufTypeInfo& t : kTypes) {
    if (t.id == id) return &t;
  }
  return nullptr;
}

std::string ReadableGgufTypes() {
  std::string out;
  for (const GgufTypeInfo& t : kTypes) {
    if (t.readable) out += (out.empty() ? "" : " ") + std::string(t.name);
  }
  return out;
}

void DequantizeGguf(const GgufTypeInfo& type, const void* src, float* dst, int64_t elements) {
  TARE_CHECK(type.readable && elements % type.block_elements == 0) << type.name;
  if (elements == 0) return;
  if (type.id == 0) {
    std::memcpy(dst, src, static_cast<size_t>(elements) * sizeof(float));
    return;
  }
  if (type.id == 1 || type.id == 30) {
    TARE_CHECK(reinterpret_cast<uintptr_t>(src) % 2 == 0);
    const Status status =
        ConvertElements(src, type.id == 1 ? DType::kF16 : DType::kBF16, dst, DType::kF32, elements);
    TARE_CHECK(status.ok()) << status.ToString();
    return;
  }
  const BlockFunction function = FunctionOf(type.id);
  const auto* block = static_cast<const uint8_t*>(src);
  const float nan = F32FromBits(0x7fffffff);
  for (int64_t at = 0; at < elements; at += type.block_elements, block += type.block_bytes) {
    float* y = dst + at;
    function(block, y);
    for (int64_t i = 0; i < type.block_elements; ++i) y[i] = std::isnan(y[i]) ? nan : y[i];
  }
}

}  // namespace tare
