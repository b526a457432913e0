#pragma once

// What the tests of the contraction operators share: guarded buffers, hostile values, SIMD targets.

#include <hwy/targets.h>

#include <cstdint>
#include <random>
#include <vector>

#include "ops/linear/gemm.h"

namespace tare::ops::testing_support {

// A buffer of one dtype with guard elements on both sides.
class Buffer {
 public:
  Buffer(DType dtype, int64_t count) : dtype_(dtype), count_(count) {
    bytes_.assign(static_cast<size_t>((count + 2 * kGuard) * SizeOf(dtype)), 0x5a);
  }
  void* data() { return bytes_.data() + kGuard * SizeOf(dtype_); }
  const void* data() const { return bytes_.data() + kGuard * SizeOf(dtype_); }
  float* f32() { return static_cast<float*>(data()); }
  float at(int64_t i) const { return gemm::LoadAsF32(data(), dtype_, i); }
  void set(int64_t i, float v) { gemm::StoreRounded(data(), dtype_, i, v); }
  int64_t count() const { return count_; }
  bool GuardsIntact() const {
    const size_t g = static_cast<size_t>(kGuard * SizeOf(dtype_));
    for (size_t i = 0; i < g; ++i) {
      if (bytes_[i] != 0x5a || bytes_[bytes_.size() - 1 - i] != 0x5a) return false;
    }
    return true;
  }
  bool operator==(const Buffer& o) const { return bytes_ == o.bytes_; }

 private:
  static constexpr int64_t kGuard = 64;
  DType dtype_;
  int64_t count_;
  std::vector<uint8_t> bytes_;
};

// Normal values with zeros of both signs, subnormals and a wide exponent range mixed in.
inline void Fill(Buffer& b, std::mt19937& rng, float scale = 1.0f) {
  std::normal_distribution<float> normal(0.0f, scale);
  for (int64_t i = 0; i < b.count(); ++i) {
    float v = normal(rng);
    switch (rng() % 64) {
      case 0:
        v = 0.0f;
        break;
      case 1:
        v = -0.0f;
        break;
      case 2:
        v *= 1e-39f;
        break;
      case 3:
        v *= 4096.0f;
        break;
      default:
        break;
    }
    b.set(i, v);
  }
}

// Every SIMD target that this machine has, one after another.
template <typename Body>
void ForEachTarget(const Body& body) {
  for (int64_t target : hwy::SupportedAndGeneratedTargets()) {
    hwy::SetSupportedTargetsForTest(target);
    body();
  }
  hwy::SetSupportedTargetsForTest(0);
}

}  // namespace tare::ops::testing_support
