#pragma once

// What a client asks for, what it gets back, and the state of one sampled sequence in between.

#include <bit>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/block_pool.h"

namespace tare::engine {

struct SamplingParams {
  float temperature = 1.0f;  // finite, >= 0; 0 is greedy
  float top_p = 1.0f;        // (0, 1]
  int32_t top_k = 0;         // 0: off
  float min_p = 0.0f;        // [0, 1]
  std::optional<uint64_t> seed;
  int32_t n = 1;
  int32_t max_tokens = 16;
  int32_t min_tokens = 0;
  bool ignore_eos = false;
  std::vector<int32_t> stop_token_ids;
  std::vector<std::string> stop;  // text; looked for by the API layer, which aborts the sequence
  std::vector<std::pair<int32_t, float>> logit_bias;  // by id, each finite or -inf
  // Top-n lists beside the token's own logprob; nullopt: no logprobs at all.
  std::optional<int32_t> logprobs;
  std::optional<int32_t> prompt_logprobs;
  bool candidates = false;  // the kept set as a bitmap of ceil(V / 8) bytes per token
};

enum class FinishReason : uint8_t { kStop, kLength, kAbort, kError };
const char* FinishReasonName(FinishReason reason);  // "stop", "length", "abort", "error"

struct TopLogprob {
  int32_t token = -1;
  float logprob = 0.0f;  // raw
};

struct TokenOutput {
  int32_t token = -1;
  float raw_logprob = 0.0f;        // log-softmax of the logits as the model gave them, T = 1
  float tempered_logprob = 0.0f;   // at the request's temperature (greedy: at T = 1)
  float processed_logprob = 0.0f;  // at the temperature, over the kept set after bias
  int32_t kept = 0;                // size of the kept set
  int64_t weight_version = 0;      // of the weights that produced this token
  std::vector<TopLogprob> top{};
  std::vector<uint8_t> candidates{};
};

// What a prompt row holds until it is computed: no logprob has these bits, and 0.0 is one.
inline constexpr uint32_t kAbsentLogprob = 0x7FC0BEEF;

struct PromptLogprob {
  float raw_logprob =
      std::bit_cast<float>(kAbsentLogprob);  // of the token at this position, given those before it
  int32_t rank = 0;                          // 1: the most likely; filled with a top list
  std::vector<TopLogprob> top{};
};

// Given out in order: first the prompt's logprobs (once, when asked for), then tokens, then the
// end. Called on the engine's thread: return soon, throw nothing.
struct SequenceEvent {
  int32_t index = 0;                             // of the sample, 0 .. n-1
  std::vector<PromptLogprob> prompt_logprobs{};  // [prompt - 1], positions 1 ..
  std::vector<TokenOutput> tokens{};
  std::optional<FinishReason> finish{};
  std::optional<int32_t> stop_token{};  // the id that ended it, unless it was EOS
  std::string error{};                  // with kError
  int64_t cached_tokens = 0;            // prompt tokens that came from the prefix cache
};
using EventCallback = std::function<void(const SequenceEvent&)>;

struct Request {
  std::string id;
  std::vector<int32_t> prompt;
  SamplingParams params;
  int32_t priority = 0;  // lower goes first; equal by arrival
  EventCallback callback;
};

// One sample of one request. Owned by the scheduler; no locks.
struct Sequence {
  uint64_t id = 0;  // by arrival
  std::shared_ptr<const Request> request;
  int32_t index = 0;
  uint64_t seed = 0;

  std::vector<int32_t> tokens;  // prompt, then what was sampled
  int64_t prompt_tokens = 0;
  int64_t computed = 0;  // tokens whose K and V are in the blocks
  std::vector<int32_t> blocks;
  std::vector<BlockKey> keys;  // of the full blocks of `tokens` that are published or were hit
  int64_t weight_version = 0;  // of the content of `blocks`

  int64_t cached_tokens = 0;
  int64_t preemptions = 0;
  std::vector<PromptLogprob> prompt_logprobs;
  bool prompt_sent = false;

  int64_t generated() const { return static_cast<int64_t>(tokens.size()) - prompt_tokens; }
  int64_t remaining() const { return static_cast<int64_t>(tokens.size()) - computed; }
};

}  // namespace tare::engine
