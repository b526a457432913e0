#include "numerics/mma.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"

namespace tare::numerics {
namespace {

int64_t RoundUp(int64_t v, int64_t to) { return (v + to - 1) / to * to; }

template <MmaType kType>
void PackCodes(const void* codes, int64_t row_stride, int64_t k_stride, int64_t panel,
               internal::MmaRows& p) {
  using T = typename MmaStorage<kType>::Type;
  const T* in = static_cast<const T*>(codes);
  T* out = reinterpret_cast<T*>(p.codes.data());
  for (int64_t r = 0; r < p.rows; ++r) {
    for (int64_t k = 0; k < p.k; ++k) {
      const int64_t at = panel == 0 ? r * p.padded_k + k
                                    : (r / panel * p.padded_k + k) * panel + r % panel;
      out[at] = in[r * row_stride + k * k_stride];
    }
  }
}

internal::MmaRows PackRows(MmaType type, const void* codes, int64_t rows, int64_t k,
                           int64_t row_stride, int64_t k_stride, int64_t panel) {
  TARE_CHECK(rows >= 0 && k >= 0);
  const MmaFormat format = FormatOf(type);
  internal::MmaRows p;
  p.type = type;
  p.rows = rows;
  p.k = k;
  p.padded_k = RoundUp(k, format.group);
  const int64_t stored_rows = panel == 0 ? rows : RoundUp(rows, panel);
  p.codes.assign(static_cast<size_t>(stored_rows * p.padded_k * format.bytes), 0);
  switch (type) {
    case MmaType::kBF16: PackCodes<MmaType::kBF16>(codes, row_stride, k_stride, panel, p); break;
    case MmaType::kF16: PackCodes<MmaType::kF16>(codes, row_stride, k_stride, panel, p); break;
    case MmaType::kE4M3: PackCodes<MmaType::kE4M3>(codes, row_stride, k_stride, panel, p); break;
    case MmaType::kE5M2: PackCodes<MmaType::kE5M2>(codes, row_stride, k_stride, panel, p); break;
  }
  return p;
}

template <MmaType kType>
void PlainTile(const internal::MmaRows& a, int64_t m0, int64_t m1, const internal::MmaRows& b,
               int64_t n0, int64_t n1, int64_t k0, int64_t k1, float* c, int64_t c_stride) {
  using T = typename MmaStorage<kType>::Type;
  constexpr int kGroup = FormatOf(kType).group;
  const T* ac = reinterpret_cast<const T*>(a.codes.data());
  const T* bc = reinterpret_cast<const T*>(b.codes.data());
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
    case MmaKernel::kAuto: return "auto";
    case MmaKernel::kPlain: return "plain";
    case MmaKernel::kAvx2: return "avx2";
    case MmaKernel::kAvx512: return "avx512";
  }
  return "";
}

bool MmaKernelSupported(MmaKernel kernel, MmaType) {
  return kernel == MmaKernel::kAuto || kernel == MmaKernel::kPlain;
}

MmaKernel MmaBestKernel(MmaType) { return MmaKernel::kPlain; }

MmaA MmaA::Pack(MmaType type, const void* codes, int64_t rows, int64_t k, int64_t row_stride,
                int64_t k_stride) {
  MmaA a;
  a.p_ = PackRows(type, codes, rows, k, row_stride, k_stride, 0);
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
  const auto run = [&](auto tile) { tile(a.packed(), m0, m1, b.packed(), n0, n1, k0, k1, c, c_stride); };
  switch (a.type()) {
    case MmaType::kBF16: run(PlainTile<MmaType::kBF16>); break;
    case MmaType::kF16: run(PlainTile<MmaType::kF16>); break;
    case MmaType::kE4M3: run(PlainTile<MmaType::kE4M3>); break;
    case MmaType::kE5M2: run(PlainTile<MmaType::kE5M2>); break;
  }
}

}  // namespace tare::numerics
