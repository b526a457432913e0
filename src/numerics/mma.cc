#include "numerics/mma.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "base/check.h"
#include "numerics/mma_internal.h"
#include "tensor/convert.h"

namespace tare::numerics {
namespace {

int64_t RoundUp(int64_t v, int64_t to) { return (v + to - 1) / to * to; }

using internal::MmaGroup;
using internal::MmaRows;

// The bf16 (f16 for f16) code of an operand: every fp8 value is a bf16 value.
template <MmaType kType>
uint16_t HalfOf(uint32_t code) {
  if constexpr (FormatOf(kType).bytes == 2) return static_cast<uint16_t>(code);
  const internal::MmaOperand o = internal::DecodeMma<kType>(code);
  if (o.nan) return 0x7fff;
  const uint16_t sign = o.negative ? 0x8000 : 0;
  if (o.inf) return sign | 0x7f80;
  if (o.significand == 0) return sign;
  // Renormalise: value = significand * 2^(exponent - point), significand below 16.
  const int top = 31 - __builtin_clz(o.significand);
  const int exponent = o.exponent - FormatOf(kType).significand_bits + top + 127;
  const uint32_t fraction = (o.significand << (7 - top)) & 0x7f;
  return static_cast<uint16_t>(sign | static_cast<uint32_t>(exponent) << 7 | fraction);
}

// The 256 values of an fp8 type as bf16.
template <MmaType kType>
const uint16_t* HalfTable() {
  static const auto table = [] {
    std::array<uint16_t, 256> t{};
    for (uint32_t code = 0; code < 256; ++code) t[code] = HalfOf<kType>(code);
    return t;
  }();
  return table.data();
}

// An element of A as the chain multiplies it.
template <class T>
T ChainValue(float x) {
  const T zero = std::copysign(internal::kChainZero<T>, static_cast<T>(x));
  const T scaled = static_cast<T>(x) * internal::kChainOff<T>;
  return x == 0 ? zero : scaled;
}

// Packs `count` rows from row r0 on (kWidth 1: a row of A; 64: a panel of B), elements of a group
// interleaved kWidth rows wide. Each loop after the gathering one runs over a flat array without
// branches, so that the compiler vectorises it.
template <MmaType kType, int kWidth>
void PackBlock(const typename MmaStorage<kType>::Type* in, int64_t row_stride, int64_t k_stride,
               int64_t r0, int64_t count, MmaRows& p) {
  using T = typename MmaStorage<kType>::Type;
  constexpr MmaFormat kFormat = FormatOf(kType);
  constexpr int kGroup = kFormat.group;
  constexpr int kCells = kGroup * kWidth;
  constexpr int kTop = (1 << kFormat.exponent_bits) - 1;
  constexpr int kFraction = (1 << kFormat.significand_bits) - 1;
  constexpr int kMagnitude = (kTop << kFormat.significand_bits) | kFraction;
  // The smallest magnitude that is special.
  constexpr int kSpecial = kFormat.has_infinity ? kTop << kFormat.significand_bits : kMagnitude;
  constexpr int16_t kNone = -10000;
  const int64_t groups = p.padded_k / kGroup;
  const int64_t block = r0 / kWidth;
  T cells[kCells];
  int16_t exponent[kCells];
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t k0 = g * kGroup;
    const int64_t k1 = std::min<int64_t>(kGroup, p.k - k0);
    if (k1 < kGroup || count < kWidth) std::fill(cells, cells + kCells, T{0});
    for (int64_t r = 0; r < count; ++r) {
      const T* from = in + (r0 + r) * row_stride + k0 * k_stride;
      for (int64_t i = 0; i < k1; ++i) cells[i * kWidth + r] = from[i * k_stride];
    }
    int16_t base = kNone;
    int special = 0;
    int zeros = 0;
    for (int i = 0; i < kCells; ++i) {
      const int magnitude = cells[i] & kMagnitude;
      const int field = magnitude >> kFormat.significand_bits;
      const int16_t e = static_cast<int16_t>(std::max(field, 1) - kFormat.bias);
      exponent[i] = magnitude == 0 ? kNone : e;
      zeros |= magnitude == 0;
      base = std::max(base, exponent[i]);
      special |= magnitude >= kSpecial;
    }
    MmaGroup info;
    info.special = special != 0;
    info.zero = base == kNone;
    info.has_zero = zeros != 0;
    info.chain = info.zero || info.special ? internal::kMmaNoChain : base;
    info.base = info.zero ? int16_t{0} : base;
    uint32_t signs[kWidth] = {};
    for (int i = 0; i < kGroup; ++i) {
      for (int r = 0; r < kWidth; ++r) {
        signs[r] |= static_cast<uint32_t>(cells[i * kWidth + r] > kMagnitude) << i;
      }
    }
    std::memcpy(&p.signs[static_cast<size_t>((block * groups + g) * kWidth)], signs, sizeof(signs));
    p.groups[static_cast<size_t>(block * groups + g)] = info;
    const size_t at = static_cast<size_t>((block * p.padded_k + k0) * kWidth);
    if constexpr (kFormat.bytes == 1) {
      std::memcpy(&p.codes[at], cells, sizeof(cells));
      const uint16_t* table = HalfTable<kType>();
      for (int i = 0; i < kCells; ++i) p.halves[at + static_cast<size_t>(i)] = table[cells[i]];
    } else {
      std::memcpy(&p.halves[at], cells, sizeof(cells));
    }
    int8_t relative[kCells];
    for (int i = 0; i < kCells; ++i) {
      const int16_t e =
          std::max<int16_t>(static_cast<int16_t>(exponent[i] - info.base), internal::kMmaFar);
      relative[i] = static_cast<int8_t>(exponent[i] == kNone ? internal::kMmaZero : e);
    }
    if constexpr (kWidth == 1) {
      for (int i = 0; i < kCells; ++i) {
        p.exponents4[at + static_cast<size_t>(i)] = static_cast<uint8_t>(relative[i]) * 0x01010101u;
      }
      const uint16_t* halves = &p.halves[at];
      for (int i = 0; i < kCells; ++i) {
        const float x = kType == MmaType::kF16 ? F16ToF32(halves[i]) : Bf16ToF32(halves[i]);
        if constexpr (kFormat.bytes == 1) {
          p.chain32[at + static_cast<size_t>(i)] = ChainValue<float>(x);
        } else {
          p.chain64[at + static_cast<size_t>(i)] = ChainValue<double>(x);
        }
      }
    } else {
      std::memcpy(&p.exponents[at], relative, sizeof(relative));
    }
  }
}

MmaRows PackRows(MmaType type, const void* codes, int64_t rows, int64_t k, int64_t row_stride,
                 int64_t k_stride, int64_t width) {
  TARE_CHECK(rows >= 0 && k >= 0);
  const MmaFormat format = FormatOf(type);
  MmaRows p;
  p.type = type;
  p.rows = rows;
  p.k = k;
  p.padded_k = RoundUp(k, format.group);
  const int64_t blocks = (rows + width - 1) / width;
  const size_t elements = static_cast<size_t>(blocks * width * p.padded_k);
  if (format.bytes == 1) p.codes.assign(elements, 0);
  p.halves.assign(elements, 0);
  if (width == 1) {
    p.exponents4.resize(elements);
    if (format.bytes == 1) {
      p.chain32.resize(elements);
    } else {
      p.chain64.resize(elements);
    }
  } else {
    p.exponents.resize(elements);
  }
  p.groups.resize(static_cast<size_t>(blocks * (p.padded_k / format.group)));
  p.signs.resize(p.groups.size() * static_cast<size_t>(width));
  const auto pack = [&](auto tag) {
    constexpr MmaType kType = decltype(tag)::value;
    using T = typename MmaStorage<kType>::Type;
    const T* in = static_cast<const T*>(codes);
    for (int64_t r = 0; r < rows; r += width) {
      const int64_t count = std::min(width, rows - r);
      if (width == 1) {
        PackBlock<kType, 1>(in, row_stride, k_stride, r, count, p);
      } else {
        PackBlock<kType, kMmaPanel>(in, row_stride, k_stride, r, count, p);
      }
    }
  };
  switch (type) {
    case MmaType::kBF16:
      pack(std::integral_constant<MmaType, MmaType::kBF16>());
      break;
    case MmaType::kF16:
      pack(std::integral_constant<MmaType, MmaType::kF16>());
      break;
    case MmaType::kE4M3:
      pack(std::integral_constant<MmaType, MmaType::kE4M3>());
      break;
    case MmaType::kE5M2:
      pack(std::integral_constant<MmaType, MmaType::kE5M2>());
      break;
  }
  return p;
}

template <MmaType kType>
void PlainTile(const internal::MmaRows& a, int64_t m0, int64_t m1, const internal::MmaRows& b,
               int64_t n0, int64_t n1, int64_t k0, int64_t k1, float* c, int64_t c_stride) {
  using T = typename MmaStorage<kType>::Type;
  constexpr int kGroup = FormatOf(kType).group;
  const T* ac = internal::MmaCodes<kType>(a);
  const T* bc = internal::MmaCodes<kType>(b);
  for (int64_t m = m0; m < m1; ++m) {
    for (int64_t n = n0; n < n1; ++n) {
      const T* panel = bc + n / kMmaPanel * b.padded_k * kMmaPanel + n % kMmaPanel;
      float d = c[(m - m0) * c_stride + (n - n0)];
      for (int64_t k = k0; k < k1; k += kGroup) {
        d = Sm90Step<kType>(ac + m * a.padded_k + k, panel + k * kMmaPanel, d, 1, kMmaPanel);
      }
      c[(m - m0) * c_stride + (n - n0)] = d;
    }
  }
}

}  // namespace

std::string_view MmaKernelName(MmaKernel kernel) {
  switch (kernel) {
    case MmaKernel::kAuto:
      return "auto";
    case MmaKernel::kPlain:
      return "plain";
    case MmaKernel::kAvx2:
      return "avx2";
    case MmaKernel::kAvx512:
      return "avx512";
    case MmaKernel::kAvx512Dl:
      return "avx512-dl";
  }
  return "";
}

bool MmaKernelSupported(MmaKernel kernel, MmaType) {
  return kernel == MmaKernel::kAuto || kernel == MmaKernel::kPlain ||
         internal::MmaFastTile(kernel) != nullptr;
}

MmaKernel MmaBestKernel(MmaType) {
  for (const MmaKernel kernel : {MmaKernel::kAvx512Dl, MmaKernel::kAvx512, MmaKernel::kAvx2}) {
    if (internal::MmaFastTile(kernel) != nullptr) return kernel;
  }
  return MmaKernel::kPlain;
}

MmaA MmaA::Pack(MmaType type, const void* codes, int64_t rows, int64_t k, int64_t row_stride,
                int64_t k_stride) {
  MmaA a;
  a.p_ = PackRows(type, codes, rows, k, row_stride, k_stride, 1);
  return a;
}

MmaB MmaB::Pack(MmaType type, const void* codes, int64_t rows, int64_t k, int64_t row_stride,
                int64_t k_stride) {
  MmaB b;
  b.p_ = PackRows(type, codes, rows, k, row_stride, k_stride, kMmaPanel);
  return b;
}

void MmaTile(const MmaA& a, int64_t m0, int64_t m1, const MmaB& b, int64_t n0, int64_t n1,
             int64_t k0, int64_t k1, float* c, int64_t c_stride, MmaKernel kernel) {
  TARE_CHECK(a.type() == b.type() && a.k() == b.k()) << "operands of different contractions";
  const int group = FormatOf(a.type()).group;
  TARE_CHECK(0 <= m0 && m0 <= m1 && m1 <= a.rows() && 0 <= n0 && n0 <= n1 && n1 <= b.rows() &&
             0 <= k0 && k0 <= k1 && k1 <= a.k())
      << "tile out of bounds";
  TARE_CHECK(n0 % kMmaPanel == 0 && k0 % group == 0 && (k1 % group == 0 || k1 == a.k()))
      << "tile cuts a panel or a group";
  TARE_CHECK(MmaKernelSupported(kernel, a.type())) << MmaKernelName(kernel);
  if (kernel == MmaKernel::kAuto) kernel = MmaBestKernel(a.type());
  if (kernel != MmaKernel::kPlain) {
    internal::MmaFastTile(kernel)(a.packed(), m0, m1, b.packed(), n0, n1, k0, k1, c, c_stride);
    return;
  }
  const auto run = [&](auto tile) {
    tile(a.packed(), m0, m1, b.packed(), n0, n1, k0, k1, c, c_stride);
  };
  switch (a.type()) {
    case MmaType::kBF16:
      run(PlainTile<MmaType::kBF16>);
      break;
    case MmaType::kF16:
      run(PlainTile<MmaType::kF16>);
      break;
    case MmaType::kE4M3:
      run(PlainTile<MmaType::kE4M3>);
      break;
    case MmaType::kE5M2:
      run(PlainTile<MmaType::kE5M2>);
      break;
  }
}

}  // namespace tare::numerics
