#pragma once

// Test support: one operator call with deterministic operands in guarded memory. Used by the
// generic suite and the fault tests.

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "ops/registry.h"
#include "ops/rows.h"
#include "tensor/convert.h"

namespace tare::ops {

inline constexpr int64_t kRows = 37;  // crosses a token lane count of 32

// A tensor whose last byte is followed by a page that faults and whose first byte has a canary
// before it: an operator that reads or writes past its operand dies, one that writes before is
// seen.
struct Guarded {
  char* base = nullptr;
  size_t bytes = 0;  // mapped, without the fault page
  size_t front = 0;  // canary bytes
  ~Guarded() {
    for (size_t i = 0; i < front; ++i)
      TARE_CHECK(base[i] == 0x5a) << "write before an operand at " << i;
    munmap(base, bytes + 4096);
  }
};
inline Tensor GuardedTensor(DType dtype, const Shape& shape) {
  const int64_t size = ElementCount(shape).value() * SizeOf(dtype);
  auto guard = std::make_shared<Guarded>();
  guard->bytes = static_cast<size_t>(RoundUp(size + 64, 4096));
  guard->base = static_cast<char*>(mmap(nullptr, guard->bytes + 4096, PROT_READ | PROT_WRITE,
                                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  TARE_CHECK(guard->base != MAP_FAILED);
  TARE_CHECK(mprotect(guard->base + guard->bytes, 4096, PROT_NONE) == 0);
  guard->front = guard->bytes - static_cast<size_t>(size);
  std::memset(guard->base, 0x5a, guard->front);
  const char* data = guard->base + guard->front;
  return Tensor::Wrap(data, dtype, shape, guard).value();
}

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 1) {}
  uint64_t Next() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  double Uniform() { return static_cast<double>(Next() >> 11) * 0x1p-53; }
  double Normal() { return (Uniform() + Uniform() + Uniform() + Uniform() - 2.0) * std::sqrt(3.0); }

 private:
  uint64_t state_;
};

inline double Get(const Tensor& t, int64_t i) {
  switch (t.dtype()) {
    case DType::kF64:
      return t.as<double>()[i];
    case DType::kF32:
      return t.as<float>()[i];
    case DType::kBF16:
      return ToFloat(t.as<uint16_t>()[i]);
    case DType::kF16:
      return F16ToF32(t.as<uint16_t>()[i]);
    case DType::kE4M3:
      return E4m3ToF32(t.as<uint8_t>()[i]);
    case DType::kI32:
      return t.as<int32_t>()[i];
    case DType::kI64:
      return static_cast<double>(t.as<int64_t>()[i]);
    case DType::kU8:
      return t.as<uint8_t>()[i];
    default:
      TARE_CHECK(false) << "dtype " << std::string(DTypeName(t.dtype()));
      return 0;
  }
}
inline void Put(Tensor& t, int64_t i, double v) {
  switch (t.dtype()) {
    case DType::kF64:
      t.mutable_as<double>()[i] = v;
      break;
    case DType::kF32:
      t.mutable_as<float>()[i] = static_cast<float>(v);
      break;
    case DType::kBF16:
      t.mutable_as<uint16_t>()[i] = F32ToBf16(static_cast<float>(v));
      break;
    case DType::kF16:
      t.mutable_as<uint16_t>()[i] = F32ToF16(static_cast<float>(v));
      break;
    case DType::kE4M3:
      t.mutable_as<uint8_t>()[i] = F32ToE4m3(static_cast<float>(v));
      break;
    case DType::kI32:
      t.mutable_as<int32_t>()[i] = static_cast<int32_t>(v);
      break;
    case DType::kI64:
      t.mutable_as<int64_t>()[i] = static_cast<int64_t>(v);
      break;
    case DType::kU8:
      t.mutable_as<uint8_t>()[i] = static_cast<uint8_t>(v);
      break;
    default:
      TARE_CHECK(false) << "dtype " << std::string(DTypeName(t.dtype()));
  }
}

// `plain` leaves out zeros and subnormals, where a derivative would meet a corner.
inline Tensor Filled(const Operand& o, uint64_t seed, bool plain = false) {
  Tensor t = GuardedTensor(o.dtype, o.shape);
  Random random(seed);
  const int64_t width = o.shape.empty() || o.shape[0] == 0 ? 1 : t.elements() / o.shape[0];
  for (int64_t i = 0; i < t.elements(); ++i) {
    const double normal = random.Normal();
    switch (o.fill) {
      case Fill::kNormal:
        Put(t, i, normal * o.scale);
        if (!plain && random.Next() % 23 == 0) Put(t, i, random.Next() % 2 ? 0.0 : -0.0);
        if (!plain && random.Next() % 41 == 0) Put(t, i, normal * 0x1p-128);
        break;
      case Fill::kRanked: {
        Put(t, i, normal * o.scale);
        for (int64_t j = i / width * width; plain && j < i; ++j) {
          if (Get(t, j) != Get(t, i)) continue;
          Put(t, i, random.Normal() * o.scale);
          j = i / width * width - 1;
        }
        break;
      }
      case Fill::kPositive:
        Put(t, i, (std::abs(normal) + 1.0) * o.scale);
        break;
      case Fill::kIndex:
        Put(t, i, static_cast<double>(random.Next() % static_cast<uint64_t>(o.limit)));
        break;
      case Fill::kAscending:
        Put(t, i, static_cast<double>(i));
        break;
      case Fill::kMask:
        Put(t, i, random.Next() % 4 != 0);
        break;
      case Fill::kUnit:
        Put(t, i, random.Uniform());
        break;
      case Fill::kLogprob:
        Put(t, i, -std::abs(normal) * o.scale);
        break;
      case Fill::kDistinct: {
        bool fresh = false;
        while (!fresh) {
          Put(t, i, static_cast<double>(random.Next() % static_cast<uint64_t>(o.limit)));
          fresh = true;
          for (int64_t j = i / width * width; j < i; ++j) fresh = fresh && Get(t, j) != Get(t, i);
        }
        break;
      }
    }
  }
  return t;
}

// A guarded copy of the rows of kRows operands, in the order of `rows`; kShared ones as they are.
inline Tensor TakeRows(const Operand& o, const Tensor& t, const std::vector<int64_t>& rows) {
  if (o.role == Role::kShared || t.data() == nullptr) return t;
  Shape shape = t.shape();
  const int64_t bytes = shape[0] == 0 ? 0 : t.size_bytes() / shape[0];
  shape[0] = static_cast<int64_t>(rows.size());
  Tensor out = GuardedTensor(t.dtype(), shape);
  for (size_t i = 0; i < rows.size(); ++i) {
    std::memcpy(static_cast<char*>(out.mutable_data()) + static_cast<int64_t>(i) * bytes,
                static_cast<const char*>(t.data()) + rows[i] * bytes, static_cast<size_t>(bytes));
  }
  return out;
}

inline std::vector<int64_t> Range(int64_t begin, int64_t end) {
  std::vector<int64_t> rows;
  for (int64_t i = begin; i < end; ++i) rows.push_back(i);
  return rows;
}

struct Case {
  const OpInfo* op;
  OpKey key;
  int64_t rows = kRows;
  int threads = 1;
  fault::Side side = fault::Side::kNone;
  Signature sig;
  std::vector<Tensor> in, out, dout, din;
  std::vector<TokenUnit> units;

  Case(const OpInfo* op, OpKey key, int64_t rows = kRows, uint64_t seed = 1, bool plain = false)
      : op(op), key(std::move(key)), rows(rows) {
    sig = op->signature(this->key, rows);
    for (const Operand& o : sig.inputs) in.push_back(Filled(o, seed++, plain));
    for (const Operand& o : sig.outputs)
      dout.push_back(o.grad ? Filled(GradOf(o), seed++, plain) : Tensor());
    if (rows > 20) {
      units = {{0, 20}, {20, rows - 20}};
    } else if (rows > 0) {
      units = {{0, rows}};
    }
  }

  static Operand GradOf(const Operand& o) {
    Operand g = o;
    g.dtype = o.grad_dtype;
    g.fill = Fill::kNormal;
    g.scale = 1.0f;
    return g;
  }

  Ctx MakeCtx(ThreadPool& pool) const {
    Ctx ctx;
    ctx.pool = &pool;
    ctx.profile = key.profile;
    ctx.side = side;
    return ctx;
  }

  Status TryForward() {
    ThreadPool pool(threads);
    out.clear();
    for (const Operand& o : sig.outputs) {
      out.push_back(GuardedTensor(o.dtype, o.shape));
      if (o.role == Role::kShared) continue;  // sums are added to: they start at zero
      std::memset(out.back().mutable_data(), 0x5b, static_cast<size_t>(out.back().size_bytes()));
    }
    return op->forward(MakeCtx(pool), key, ForwardCall{rows, in, out});
  }
  void Forward() {
    const Status status = TryForward();
    ASSERT_TRUE(status.ok()) << status.ToString();
  }
  void NewGradients() {
    din.clear();
    for (const Operand& o : sig.inputs) {
      if (!o.grad) {
        din.emplace_back();
        continue;
      }
      din.push_back(GuardedTensor(o.role == Role::kRows ? o.grad_dtype : DType::kF32, o.shape));
      // A main gradient is added to; a row gradient is overwritten.
      for (int64_t i = 0; i < din.back().elements(); ++i) {
        Put(din.back(), i, o.role == Role::kRows ? 77.0 : 0.25);
      }
    }
  }
  void Backward(bool fresh = true) {
    ThreadPool pool(threads);
    if (fresh) NewGradients();
    const Status status =
        op->backward(MakeCtx(pool), key, BackwardCall{rows, in, out, dout, din, units});
    ASSERT_TRUE(status.ok()) << status.ToString();
  }

  // The same operands cut to some rows.
  Case Rows(const std::vector<int64_t>& rows_taken) const {
    Case c = *this;
    c.rows = static_cast<int64_t>(rows_taken.size());
    c.sig = op->signature(key, c.rows);
    for (size_t i = 0; i < in.size(); ++i) c.in[i] = TakeRows(sig.inputs[i], in[i], rows_taken);
    for (size_t i = 0; i < dout.size(); ++i)
      c.dout[i] = TakeRows(sig.outputs[i], dout[i], rows_taken);
    c.units.clear();
    if (c.rows > 0) c.units = {{0, c.rows}};
    return c;
  }
};

}  // namespace tare::ops
