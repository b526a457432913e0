#pragma once

// Discrete decisions: router sets, top-k ids, kept sets. Compared in their order, never sorted
// first: order decides later sums. The contract is value down, index up, distinct; -1 pads.

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/status.h"
#include "tensor/tensor.h"

namespace tare::compare {

enum class Choice {
  kEqual,
  kOrder,      // the same members in another order
  kSet,        // other members
  kDuplicate,  // a member twice on a side
};
std::string_view ChoiceName(Choice choice);  // "equal", "order", "set", "duplicate"

// Padding (-1) is compared in place and is no duplicate.
Choice CompareChoice(std::span<const int64_t> a, std::span<const int64_t> b);

// The k chosen by the contract. +0 and -0 tie; -inf is a legal score. kInvalidArgument for a NaN
// score (it names the index) or k above the number of scores.
Result<std::vector<int64_t>> TopKByContract(DType dtype, const void* scores, int64_t n, int64_t k);

// Score of the last chosen minus score of the first not chosen, by the contract: 0 is a tie at the
// cutoff. nullopt when all are chosen, a score is NaN, or both scores are infinite.
std::optional<double> CutoffMargin(DType dtype, const void* scores, int64_t n, int64_t k);

// Row `row` of an integer tensor [rows, ..., k] as int64, all of its trailing elements.
std::vector<int64_t> IntegerRow(const Tensor& tensor, int64_t row);

}  // namespace tare::compare
