#pragma once

// The contract of an operator: every choice that can move a bit, as data. Its canonical JSON is
// what documents, dumps, receipts and the generic tests read, and the SHA-256 of that text is the
// contract ID. Whoever changes any bit of any output raises `version`.

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/json.h"
#include "base/sha256.h"
#include "base/status.h"
#include "numerics/profile.h"
#include "tensor/dtype.h"

namespace tare::ops {

// One operand of a contract: `name`, the dtype it has in memory and its shape in words ("[T, H]").
struct ContractTensor {
  std::string name;
  std::string dtype;
  std::string shape;
};

// The largest error that the gradient (or forward) may have against the independent float64 oracle.
// A value passes when |got - oracle| <= absolute + relative * scale, where scale is the largest
// magnitude of the oracle in the same row (of a row output) or tensor (of a sum over rows). Fixed
// before the result is known; `reason` says where the number comes from. Both are powers of two,
// kept as exponents so that the record holds integers only.
struct Tolerance {
  int relative_log2 = -20;
  int absolute_log2 = -100;
  std::string reason;
};

struct Contract {
  std::string op;       // "rmsnorm"
  std::string variant;  // "unit-offset", "llama3", ...; empty when there is one form only
  int version = 1;
  // The profile a contraction uses; "any" for an operator whose bits are the same in all of them.
  std::string profile = "any";
  // Ordered f32 operations, in the notation of docs/numerics.md: `lanes(128) of fma(x, x, .)`.
  std::vector<std::string> formula;
  std::vector<std::string> backward;
  // Rules of the reductions. 0 means that the operator has no such reduction.
  int64_t segments = 0;
  int64_t batch_segments = 0;
  int64_t lanes = 0;        // over a row
  int64_t token_lanes = 0;  // over the tokens of a unit (gradients of shared parameters)
  int64_t unit_rows = 0;    // a sequence is cut every so many tokens from its own start
  int64_t leaves = 0;       // over the vocabulary
  int64_t block = 0;        // ids (or elements) in a block
  int64_t kv_tile = 0;
  int64_t kv_split = 0;
  // Constants that decide bits, by name: integers as they are, floats as hex words (see HexWord).
  std::vector<std::pair<std::string, std::string>> constants;
  std::vector<ContractTensor> inputs;
  std::vector<ContractTensor> outputs;
  std::vector<std::string> rounding_points;     // "y: f32 to bf16, nearest even, once"
  std::vector<std::string> saved_for_backward;  // names of inputs and outputs
  std::vector<std::string> errors;              // what is refused, and how it is named
  // "batch", "position", "chunk", "cache", "tile", "threads", "simd", "device", "tp", ...
  std::vector<std::string> invariant_over;
  Tolerance forward_tolerance;
  Tolerance gradient_tolerance;

  Json ToJson() const;
  // One line, keys sorted: equal contracts give equal bytes.
  std::string Canonical() const;
  // SHA-256 of Canonical().
  Sha256Digest Id() const;
};

// "f32:0x3727c5ac", "f64:0x40c3880000000000": a float as its bits, for Contract::constants.
std::string HexWord(float value);
std::string HexWord(double value);

// Everything that may decide a contract: the operator's dtypes and model dimensions. There is no
// field for batch, token count, page layout, device, thread or SM count: what is not here cannot
// choose an arithmetic.
struct OpKey {
  Profile profile = Profile::kIeeeF32;
  DType dtype = DType::kBF16;      // of activations
  DType out_dtype = DType::kBF16;  // of the output, where an operator may differ
  std::string variant = "";        // operator's own word: "residual", "llama3", ...
  std::vector<std::pair<std::string, int64_t>> dims = {};  // "hidden": 576, ...

  // The named dimension. REQUIRES: present.
  int64_t dim(std::string_view name) const;
  // "rmsnorm-like text": "profile=any dtype=bf16 out=bf16 variant=residual hidden=576".
  std::string ToString() const;
};

// The shared vocabulary of invariant_over for operators whose rows are independent.
std::vector<std::string> RowInvariance();

}  // namespace tare::ops
