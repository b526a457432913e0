#include "tensor/convert.h"

#include <array>
#include <atomic>
#include <limits>

#if defined(__F16C__) && defined(__AVX2__)
#include <immintrin.h>
#endif

namespace tare {
namespace {

constexpr int64_t kGrain = int64_t{1} << 16;

template <DType kDType>
struct IntegerType;
template <>
struct IntegerType<DType::kI64> {
  using Type = int64_t;
};
template <>
struct IntegerType<DType::kI32> {
  using Type = int32_t;
};
template <>
struct IntegerType<DType::kI16> {
  using Type = int16_t;
};
template <>
struct IntegerType<DType::kI8> {
  using Type = int8_t;
};
template <>
struct IntegerType<DType::kU8> {
  using Type = uint8_t;
};
template <>
struct IntegerType<DType::kBool> {
  using Type = uint8_t;
};

template <DType kDType, bool kFloat = IsFloat(kDType)>
struct Storage {
  using Type = typename FloatFormat<kDType>::Bits;
};
template <DType kDType>
struct Storage<kDType, false> {
  using Type = typename IntegerType<kDType>::Type;
};

// The first element that failed, over all ranges.
class FirstBad {
 public:
  void Note(int64_t i) {
    int64_t seen = index_.load();
    while (i < seen && !index_.compare_exchange_weak(seen, i)) {
    }
  }
  int64_t index() const { return index_.load(); }
  bool any() const { return index() != std::numeric_limits<int64_t>::max(); }

 private:
  std::atomic<int64_t> index_{std::numeric_limits<int64_t>::max()};
};

template <DType kTo>
bool StoreInteger(int64_t value, typename Storage<kTo>::Type* out) {
  using T = typename Storage<kTo>::Type;
  if (kTo == DType::kBool ? (value < 0 || value > 1)
                          : (value < std::numeric_limits<T>::min() ||
                             (sizeof(T) < 8 && value > int64_t{std::numeric_limits<T>::max()}))) {
    return false;
  }
  *out = static_cast<T>(value);
  return true;
}

// One element; false when an integer destination does not hold it, or a bool byte is no bool.
template <DType kFrom, DType kTo>
bool ConvertOne(typename Storage<kFrom>::Type in, typename Storage<kTo>::Type* out,
                Fp8Overflow overflow) {
  if constexpr (IsFloat(kFrom) && IsFloat(kTo)) {
    *out = ConvertFloatBits<kFrom, kTo>(in, overflow);
    return true;
  } else if constexpr (IsFloat(kFrom)) {
    // Every float dtype is a subset of f64, and f64 to int64 is exact below 2^63.
    const uint64_t bits = ConvertFloatBits<kFrom, DType::kF64>(in);
    double value;
    std::memcpy(&value, &bits, sizeof(value));
    if (!(value >= -0x1p63 && value < 0x1p63)) return false;
    const int64_t integer = static_cast<int64_t>(value);
    return static_cast<double>(integer) == value && StoreInteger<kTo>(integer, out);
  } else if constexpr (IsFloat(kTo)) {
    if (kFrom == DType::kBool && in > 1) return false;
    const auto value = static_cast<int64_t>(in);  // NOLINT(bugprone-signed-char-misuse)
    const uint64_t magnitude =
        value < 0 ? uint64_t{0} - static_cast<uint64_t>(value) : static_cast<uint64_t>(value);
    *out = internal::EncodeFloat<kTo>(value < 0, magnitude, 0, overflow);
    return true;
  } else {
    if (kFrom == DType::kBool && in > 1) return false;
    return StoreInteger<kTo>(in, out);
  }
}

#if defined(__F16C__) && defined(__AVX2__)
// Eight at a time. The instructions round to nearest even by their immediate and keep NaN payloads,
// so NaN lanes are replaced. They ignore the flush modes of MXCSR for half-precision operands, but
// DAZ would flush f32 subnormal sources: those all round to zero in f16 anyway.
int64_t F16ToF32Wide(const uint16_t* src, uint32_t* dst, int64_t n) {
  int64_t i = 0;
  const __m256i nan = _mm256_set1_epi32(0x7fffffff);
  for (; i + 8 <= n; i += 8) {
    const __m256 x = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i)));
    const __m256 is_nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    _mm256_storeu_si256(
        reinterpret_cast<__m256i*>(dst + i),
        _mm256_blendv_epi8(_mm256_castps_si256(x), nan, _mm256_castps_si256(is_nan)));
  }
  return i;
}

int64_t F32ToF16Wide(const uint32_t* src, uint16_t* dst, int64_t n) {
  int64_t i = 0;
  const __m128i nan = _mm_set1_epi16(0x7fff);
  const __m128i magnitude = _mm_set1_epi16(0x7fff);
  const __m128i infinity = _mm_set1_epi16(0x7c00);
  for (; i + 8 <= n; i += 8) {
    const __m256 x = _mm256_loadu_ps(reinterpret_cast<const float*>(src + i));
    const __m128i h = _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m128i is_nan = _mm_cmpgt_epi16(_mm_and_si128(h, magnitude), infinity);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + i), _mm_blendv_epi8(h, nan, is_nan));
  }
  return i;
}
#endif

template <DType kFrom, DType kTo>
void ConvertRange(const void* src, void* dst, int64_t begin, int64_t end, Fp8Overflow overflow,
                  FirstBad* bad) {
  const auto* in = static_cast<const typename Storage<kFrom>::Type*>(src);
  auto* out = static_cast<typename Storage<kTo>::Type*>(dst);
  if constexpr (kFrom == kTo && kFrom != DType::kBool) {
    std::memcpy(out + begin, in + begin, static_cast<size_t>((end - begin) * SizeOf(kFrom)));
  } else if constexpr (kFrom == DType::kF32 && kTo == DType::kBF16) {
    // Without branches, so that the compiler makes it wide.
    for (int64_t i = begin; i < end; ++i) {
      const uint32_t u = in[i];
      const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
      out[i] = static_cast<uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : rounded);
    }
  } else if constexpr (kFrom == DType::kBF16 && kTo == DType::kF32) {
    for (int64_t i = begin; i < end; ++i) {
      const uint32_t u = in[i];
      out[i] = (u & 0x7fffu) > 0x7f80u ? 0x7fffffffu : u << 16;
    }
  } else if constexpr (SizeOf(kFrom) == 1 && IsFloat(kFrom) && IsFloat(kTo)) {
    std::array<typename Storage<kTo>::Type, 256> table;
    for (int v = 0; v < 256; ++v) {
      table[static_cast<size_t>(v)] =
          ConvertFloatBits<kFrom, kTo>(static_cast<uint8_t>(v), overflow);
    }
    for (int64_t i = begin; i < end; ++i) out[i] = table[in[i]];
  } else {
    int64_t i = begin;
#if defined(__F16C__) && defined(__AVX2__)
    if constexpr (kFrom == DType::kF16 && kTo == DType::kF32) {
      i += F16ToF32Wide(in + begin, out + begin, end - begin);
    } else if constexpr (kFrom == DType::kF32 && kTo == DType::kF16) {
      i += F32ToF16Wide(in + begin, out + begin, end - begin);
    }
#endif
    for (; i < end; ++i) {
      if (!ConvertOne<kFrom, kTo>(in[i], &out[i], overflow)) {
        bad->Note(i);
        return;
      }
    }
  }
}

using RangeFunction = void (*)(const void*, void*, int64_t, int64_t, Fp8Overflow, FirstBad*);

template <int kFrom, int... kTo>
constexpr std::array<RangeFunction, kDTypeCount> Row(std::integer_sequence<int, kTo...>) {
  return {&ConvertRange<static_cast<DType>(kFrom), static_cast<DType>(kTo)>...};
}
template <int... kFrom>
constexpr std::array<std::array<RangeFunction, kDTypeCount>, kDTypeCount> Table(
    std::integer_sequence<int, kFrom...> all) {
  return {Row<kFrom>(all)...};
}

std::string ElementText(const void* src, DType from, int64_t i) {
  const auto* bytes = static_cast<const uint8_t*>(src) + i * SizeOf(from);
  std::string hex;
  for (int64_t b = SizeOf(from) - 1; b >= 0; --b) hex += fmt::format("{:02x}", bytes[b]);
  return "0x" + hex;
}

}  // namespace

Status ConvertElements(const void* src, DType from, void* dst, DType to, int64_t n,
                       Fp8Overflow overflow, ThreadPool* pool) {
  static constexpr auto kTable = Table(std::make_integer_sequence<int, kDTypeCount>());
  if (n < 0) return InvalidArgument("{} elements to convert", n);
  const RangeFunction range = kTable[static_cast<size_t>(from)][static_cast<size_t>(to)];
  FirstBad bad;
  if (pool == nullptr) {
    if (n > 0) range(src, dst, 0, n, overflow, &bad);
  } else {
    pool->ParallelRanges(n, kGrain, [&](int64_t begin, int64_t end) {
      range(src, dst, begin, end, overflow, &bad);
    });
  }
  if (!bad.any()) return Ok();
  const std::string bits = ElementText(src, from, bad.index());
  if (from == DType::kBool &&
      (IsFloat(to) || to == DType::kBool || static_cast<const uint8_t*>(src)[bad.index()] > 1)) {
    return DataLoss("element {} of a bool tensor is {}; 0 or 1 expected", bad.index(), bits);
  }
  return InvalidArgument("element {} ({} {}) is not a value of {}", bad.index(), DTypeName(from),
                         bits, DTypeName(to));
}

Result<Tensor> Convert(const Tensor& tensor, DType to, Fp8Overflow overflow, ThreadPool* pool) {
  if (tensor.device() != Device::kCpu) {
    return Unsupported("Convert reads CPU tensors, this one is on {}", DeviceName(tensor.device()));
  }
  if (tensor.dtype() == to) return tensor;
  TARE_ASSIGN_OR_RETURN(Tensor out, Tensor::Allocate(to, tensor.shape()));
  TARE_RETURN_IF_ERROR(ConvertElements(tensor.data(), tensor.dtype(), out.mutable_data(), to,
                                       tensor.elements(), overflow, pool));
  return out;
}

}  // namespace tare
