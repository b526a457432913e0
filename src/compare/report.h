#pragma once

// What a comparison found, its verdict, and how people and machines read it. Every kind of input
// (tensors by name, rows by token, logprobs) fills the same report.

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/sha256.h"
#include "base/verdict.h"
#include "compare/bits.h"
#include "tensor/tap.h"
#include "tensor/tensor.h"

namespace tare::compare {

// One name on both sides, or on one.
struct Unit {
  std::string name;
  TapRole role = TapRole::kValue;
  bool on_a = true;
  bool on_b = true;
  DType dtype_a = DType::kF32;
  DType dtype_b = DType::kF32;
  Shape shape_a;
  Shape shape_b;
  int64_t elements = 0;  // offered for comparison, masked ones included
  BitCounts counts;
  bool by_digest = false;  // equal digests stood for equal bits; no payload was read
  std::string first_at;    // where counts.first (or first_non_finite) lies, for people
  std::vector<int64_t> first_coordinate;
  std::string first_sequence;  // with tokens: where in which sequence
  int64_t first_position = -1;
  std::optional<Sha256Digest> digest_a;
  std::optional<Sha256Digest> digest_b;
  // Discrete decisions, in rows.
  int64_t set_differs = 0;
  int64_t order_differs = 0;
  int64_t duplicates = 0;
  int64_t rows = 0;  // paired rows, when rows were paired
  int64_t padding_dropped = 0;
  // A diagnosis after conversion, never a verdict: "upcast to f32", "f32 rounded to bf16".
  std::string diagnosis;
  BitCounts diagnosis_counts;

  Verdict verdict = Verdict::kInconclusive;
  std::string_view reason;  // of base/reasons.h; empty for a pass
  std::string note;
};

// Logprobs by position in the sequence: where along it they part. Positions [begin, end).
struct PositionBucket {
  int64_t begin = 0, end = 0;
  int64_t compared = 0, mismatches = 0;
  double max_abs = 0, sum_abs = 0;  // of |a - b| over finite mismatches
};

// A token without a partner, or a place where two token sequences part.
struct TokenPlace {
  std::string sequence;
  int64_t position = -1;  // absolute
  int64_t index = -1;     // among the scored tokens of its sequence; -1 where there is no such cut
  std::string weights;
  bool on_a = false;  // which side has it
  int32_t token = 0;
};

struct Scope {
  std::vector<std::string> only;
  std::vector<std::string> ignore;
  std::vector<std::string> excluded;  // names that the patterns left out, both sides together
  bool paired_only = false;
  std::string mask;
};

struct Report {
  std::string kind;                         // "tensors", "logprobs", "dumps"
  std::string a, b;                         // as named by the caller
  std::vector<Unit> units;                  // in the order of the first input
  std::vector<PositionBucket> by_position;  // logprobs of one dtype only; at most 64 of equal width
  std::vector<Tier> tiers;
  Scope scope;
  std::vector<std::string> notes;  // a dump that was cut, padding that was dropped, ...
  bool cut = false;                // an input ends early
  // With tokens.
  int64_t paired_tokens = 0;
  int64_t tokens_a = 0;
  int64_t tokens_b = 0;
  int64_t sequences_a = 0;
  int64_t sequences_b = 0;
  int64_t same_sequences = 0;  // all tokens of the sequence agree
  std::vector<TokenPlace> unpaired;
  std::vector<TokenPlace>
      divergences;                // first differing token of each sequence that both sides name
  int64_t self_inconsistent = 0;  // keys that one side holds twice with different bits
  bool decimal = false;           // values came as text
  bool ordered = false;           // `units` are in the order of execution

  // Set by Conclude.
  Verdict verdict = Verdict::kInconclusive;
  std::string_view reason;
  std::string why;  // one line for people
  BitCounts totals;
  int64_t compared_units = 0;
  int64_t differing_units = 0;
  std::string first_failing;  // name of the first failing unit, when `ordered`
};

// Judges each unit from its counts, then the whole. Questions are asked in this order: presence and
// tokens, masks, discrete decisions, dtype and shape, bits. `placeholders`: the units hold
// logprobs, so a constant stand-in on one side is a wrong mask.
void Conclude(Report* report, bool placeholders);
// Ends a report that cannot be made, with what was wrong and where.
void Refuse(Report* report, std::string_view reason, std::string_view detail);

struct TableOptions {
  int top = 20;             // rows; 0: all
  bool equal_rows = false;  // show units that agree, too
};
std::string Table(const Report& report, const TableOptions& options);
// Complete: every unit, every unpaired token. Written in pieces, so that a large report costs no
// tree.
void WriteJson(const Report& report, const std::function<void(std::string_view)>& out);

}  // namespace tare::compare
