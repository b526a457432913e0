#include "compare/discrete.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "compare/bits.h"

namespace tare::compare {
namespace {

bool HasDuplicate(std::vector<int64_t> members) {
  std::erase(members, -1);
  std::sort(members.begin(), members.end());
  return std::adjacent_find(members.begin(), members.end()) != members.end();
}

Result<std::vector<int64_t>> Ranking(DType dtype, const void* scores, int64_t n) {
  std::vector<double> values(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) {
    values[static_cast<size_t>(i)] = WordToDouble(dtype, LoadWord(dtype, scores, i));
    if (std::isnan(values[static_cast<size_t>(i)])) return InvalidArgument("score {} is a NaN", i);
  }
  std::vector<int64_t> order(static_cast<size_t>(n));
  std::iota(order.begin(), order.end(), int64_t{0});
  // Stable: equal values (+0 and -0 among them) stay in index order.
  std::stable_sort(order.begin(), order.end(), [&](int64_t x, int64_t y) {
    return values[static_cast<size_t>(x)] > values[static_cast<size_t>(y)];
  });
  return order;
}

}  // namespace

std::string_view ChoiceName(Choice choice) {
  switch (choice) {
    case Choice::kEqual:
      return "equal";
    case Choice::kOrder:
      return "order";
    case Choice::kSet:
      return "set";
    case Choice::kDuplicate:
      return "duplicate";
  }
  return "";
}

Choice CompareChoice(std::span<const int64_t> a, std::span<const int64_t> b) {
  std::vector<int64_t> x(a.begin(), a.end()), y(b.begin(), b.end());
  if (HasDuplicate(x) || HasDuplicate(y)) return Choice::kDuplicate;
  if (x == y) return Choice::kEqual;
  std::sort(x.begin(), x.end());
  std::sort(y.begin(), y.end());
  return x == y ? Choice::kOrder : Choice::kSet;
}

Result<std::vector<int64_t>> TopKByContract(DType dtype, const void* scores, int64_t n, int64_t k) {
  if (k < 0 || k > n) return InvalidArgument("{} of {} scores cannot be chosen", k, n);
  TARE_ASSIGN_OR_RETURN(std::vector<int64_t> order, Ranking(dtype, scores, n));
  order.resize(static_cast<size_t>(k));
  return order;
}

std::optional<double> CutoffMargin(DType dtype, const void* scores, int64_t n, int64_t k) {
  const Result<std::vector<int64_t>> order = Ranking(dtype, scores, n);
  if (!order.ok() || k < 1 || k >= n) return std::nullopt;
  const auto value = [&](int64_t i) {
    return WordToDouble(dtype, LoadWord(dtype, scores, (*order)[static_cast<size_t>(i)]));
  };
  const double margin = value(k - 1) - value(k);
  if (std::isnan(margin)) return std::nullopt;
  return margin;
}

std::vector<int64_t> IntegerRow(const Tensor& tensor, int64_t row) {
  const int64_t width = tensor.dim(0) == 0 ? 0 : tensor.elements() / tensor.dim(0);
  std::vector<int64_t> out(static_cast<size_t>(width));
  for (int64_t i = 0; i < width; ++i) {
    const uint64_t word = LoadWord(tensor.dtype(), tensor.data(), row * width + i);
    const int shift = 64 - 8 * static_cast<int>(SizeOf(tensor.dtype()));
    const bool is_signed = tensor.dtype() != DType::kU8 && tensor.dtype() != DType::kBool;
    out[static_cast<size_t>(i)] =
        is_signed ? static_cast<int64_t>(word << shift) >> shift : static_cast<int64_t>(word);
  }
  return out;
}

}  // namespace tare::compare
