#pragma once

// From the JSON of a completion or chat request to what the engine runs. Every field is checked; a
// refusal says `field: what is wrong and what would be right`. A field that vLLM knows and we do
// not act on is accepted at its neutral value only; an unknown field is refused by name: a
// parameter that is silently ignored changes results without a sign.

#include <optional>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "engine/sequence.h"

namespace tare::engine {

struct ChatMessage {
  std::string role, content;
};

struct ParsedRequest {
  bool chat = false;
  std::string model;
  // Completions: either texts or token lists, one entry per prompt. Chat: `messages`.
  std::vector<std::string> texts;
  std::vector<std::vector<int32_t>> token_prompts;
  std::vector<ChatMessage> messages;
  bool add_generation_prompt = true;
  bool add_special_tokens = true;

  SamplingParams params;
  bool max_tokens_given = false;  // chat without it: up to the model's length
  int32_t priority = 0;
  bool stream = false, include_usage = false, continuous_usage = false;
  bool return_token_ids = false;
  bool return_bits = false;  // "return_logprob_bits": exact f32 words beside the decimals
  bool skip_special_tokens = true;
  bool include_stop_str_in_output = false;
};

Result<ParsedRequest> ParseCompletion(const Json& body);
Result<ParsedRequest> ParseChat(const Json& body);

}  // namespace tare::engine
