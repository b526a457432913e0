#pragma once

// The registry of operators. `add_op(name)` in src/ops/CMakeLists.txt is the one line that enters
// an operator; the list is generated in the build tree and calls tare::ops::<name>::Info(), so that
// a linker can drop nothing. Generic tests, benches, the support table and the operator pages read
// it.

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "ops/contract.h"
#include "ops/op.h"
#include "ops/units.h"
#include "tensor/tensor.h"

namespace tare::ops {

// How an operand's first dimension relates to tokens.
enum class Role : uint8_t {
  kRows,    // [rows, ...]: row t belongs to token t alone
  kShared,  // the same for all rows: weights, tables; as an output, a reduction over all rows
};

// What a generic test may put into an input so that the operator accepts it.
enum class Fill : uint8_t {
  kNormal,     // standard normal times `scale`, some zeros of both signs and subnormals
  kRanked,     // as kNormal, but where derivatives are taken no two of a row are equal: choices by
               // rank
  kPositive,   // |normal| * scale + scale: temperatures, second moments
  kIndex,      // integers in [0, limit)
  kAscending,  // rows in order: 0, 1, 2, ... (positions)
  kMask,       // 0 or 1
  kUnit,       // uniform in [0, 1]
  kDistinct,   // each row holds distinct integers in [0, limit)
  kLogprob,    // -|normal| * scale
};

struct Operand {
  std::string name;
  DType dtype = DType::kF32;
  Shape shape;  // for the asked number of rows
  Role role = Role::kRows;
  Fill fill = Fill::kNormal;
  float scale = 1.0f;
  int64_t limit = 0;
  // An input with a gradient, or an output whose gradient arrives. The gradient of a kRows operand
  // has the dtype `grad_dtype`; that of a kShared input is an f32 main gradient that is added to.
  bool grad = false;
  DType grad_dtype = DType::kF32;
  // A non-finite value is refused with an error that names the row (temperatures, say).
  bool finite = false;
  // An output saved for backward alone: it is compared bit by bit but has no oracle.
  bool saved = false;
};

struct Signature {
  std::vector<Operand> inputs;
  std::vector<Operand> outputs;
};

// Tensors in the order of the signature. `dout` and `din` hold a Tensor for every operand with
// `grad` and an undefined one elsewhere.
struct ForwardCall {
  int64_t rows = 0;
  std::span<const Tensor> in;
  std::span<Tensor> out;
};
struct BackwardCall {
  int64_t rows = 0;
  std::span<const Tensor> in;
  std::span<const Tensor> out;  // what forward wrote
  std::span<const Tensor> dout;
  std::span<Tensor> din;
  std::span<const TokenUnit> units;  // for sums over tokens
};

struct OpInfo {
  std::string name;
  std::vector<DType> dtypes;    // of activations
  std::vector<Device> devices;  // where it is built
  std::vector<Profile> profiles;
  // Typical keys: each profile, dtype and variant, at small dimensions that cross the contract's
  // constants. The generic suite runs over them; the first one's contract is the operator's page.
  std::vector<OpKey> keys;
  // Decides everything that can move a bit.
  std::function<Contract(const OpKey&)> select;
  std::function<Signature(const OpKey&, int64_t rows)> signature;
  std::function<Status(const Ctx&, const OpKey&, const ForwardCall&)> forward;
  // Null when a backward has no meaning.
  std::function<Status(const Ctx&, const OpKey&, const BackwardCall&)> backward;
  // The dimension that the contract's row reduction runs over ("hidden"), which the suite sets to
  // values around the contract's constants, in multiples of width_step; empty when there is none.
  std::string width_dim = "";
  int64_t width_step = 1;
  // False when rows read each other (attention over a sequence, a norm over a whole model): the
  // suite then leaves out the tests that cut rows, and the operator's own test holds them.
  bool rows_independent = true;
  // False when a non-finite input is refused by name instead of propagated.
  bool propagates_non_finite = true;
};

// Every operator of this build, by name.
const std::vector<const OpInfo*>& AllOps();
// Null when there is none of that name.
const OpInfo* FindOp(std::string_view name);

}  // namespace tare::ops
