#pragma once

// Tap: how code that computes reports what it computed. Models call it; the dump writer
// (tensor/dump.h) and in-process checkers implement it. A null tap costs one branch:
//
//   TARE_TAP(tap, y, TapPoint{.name = prefix + "input_layernorm.out", .layer = l, .op = "rmsnorm",
//                             .inputs = {prefix + "in"}});
//
// evaluates neither of the last two when `tap` is null.
//
// A *frame* is one forward or backward pass over a ragged batch: BeginFrame says which rows belong
// to which sequence, Emit follows in execution order, EndFrame closes. Calls of one tap come from
// one thread at a time. A tap does not fail its caller: it keeps its first error, and whoever owns
// it asks for it at the end (DumpWriter::Finish). Emit reads `value` before it returns, so the
// caller may overwrite the buffer afterwards. It does not promise to be callable while a CUDA graph
// is captured.

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/fault.h"
#include "base/sha256.h"
#include "tensor/tensor.h"

namespace tare {

enum class TapPhase : uint8_t { kPrefill, kDecode, kScore, kTrain, kBackward };
std::string_view TapPhaseName(TapPhase phase);  // "prefill", "decode", "score", "train", "backward"
std::optional<TapPhase> ParseTapPhase(std::string_view name);

// What a tensor is to a comparison. The questions are asked in this order: tokens, mask, discrete
// decisions, values.
enum class TapRole : uint8_t {
  kValue,     // compared bit by bit
  kDiscrete,  // a decision (router set, top-k ids, kept set) in its order, integer; -1 pads
  kMask,      // says which rows of other tensors count: u8, i8, bool or i32, 0 excludes
  kSentinel,  // a value that the tokens alone determine (the embedding row): proves the frame fresh
  kExpected,  // the sentinel recomputed from the tokens outside the frame; same name as the
              // sentinel
};
std::string_view TapRoleName(TapRole role);  // "value", "discrete", "mask", "sentinel", "expected"
std::optional<TapRole> ParseTapRole(std::string_view name);

// Identity of a token prefix: TokenHash{} for none, then
//   hash(t_0 .. t_p) = SHA-256( hash(t_0 .. t_{p-1}) as 32 bytes || t_p as little-endian int32 ).
// The pairing key of row p is (weight version, hash over t_0 .. t_p, p): everything that the row's
// value may depend on, and nothing about its batch. For a logprob, t_p is the token it belongs to.
using TokenHash = Sha256Digest;
TokenHash ExtendTokenHash(const TokenHash& before, std::span<const int32_t> tokens);

// A run of consecutive tokens of one sequence inside a frame: rows [row, row + tokens.size()) of
// every per-row tensor. Rows that no run names are padding.
struct TapRun {
  std::string sequence{};  // a name for people; never part of the pairing key
  TokenHash history{};     // hash over the tokens before `position`
  int64_t position = 0;    // absolute position of the first token
  int64_t row = 0;
  std::vector<int32_t> tokens{};
};

struct TapFrame {
  TapPhase phase = TapPhase::kScore;
  fault::Side side = fault::Side::kNone;
  std::string weight_version{};  // "theta0"; runs of different versions never pair
  int64_t step = 0;              // training step or engine step, for people
  std::vector<TapRun> runs{};
};

// One axis along which a tensor is cut over ranks. A tensor without entries is whole (or a
// replica).
struct TapShard {
  std::string axis{};  // "tp", "cp", "ep", "pp", "dp"
  int64_t dim = 0;     // the dimension that is cut
  int64_t index = 0;
  int64_t count = 1;
  std::string layout = "contiguous";  // or "zigzag", "interleaved"
};

struct TapPoint {
  std::string name{};  // unique in its frame: "layers.3.mlp.down_proj.out"
  int layer = -1;      // -1: outside the layers
  std::string op{};    // "linear": what the value came out of
  TapRole role = TapRole::kValue;
  // Names of the records of this frame that the operator read, weights excluded (the manifest's
  // weight hash speaks for them). Only with these can a locator call an operator the cause.
  std::vector<std::string> inputs{};
  // The value at row p reads rows of earlier positions (attention, scan, conv).
  bool reads_history = false;
  // dim 0 is the frame's rows. False: one value for the whole frame (a gradient, a norm).
  bool per_row = true;
  std::string mask{};  // name of the mask record, when one applies
  std::vector<TapShard> shards{};
};

class Tap {
 public:
  virtual ~Tap() = default;
  virtual void BeginFrame(const TapFrame& frame) = 0;
  // REQUIRES: inside a frame. Shape [rows, ...] when point.per_row. Fewer rows than the runs name
  // is a finding of the comparison (length-contract), so that a recorder can show what a system
  // returned.
  virtual void Emit(const TapPoint& point, const Tensor& value) = 0;
  virtual void EndFrame() = 0;
};

}  // namespace tare

// The point comes last, so that its braces may hold commas.
#define TARE_TAP(tap, value, ...)                                                \
  do {                                                                           \
    if (::tare::Tap* tare_tap = (tap); __builtin_expect(tare_tap != nullptr, 0)) \
      tare_tap->Emit(__VA_ARGS__, value);                                        \
  } while (false)
