#pragma once

// Chat templates: messages to the prompt text that a model was trained on. A template is a Jinja
// program; Tare runs none. It knows the published ones by the SHA-256 of their text and renders
// them natively; an unknown one is refused with the way to pass token IDs instead, since a nearly
// right prompt shifts every logprob without any sign.

#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace tare::models {

enum class ChatFormat : uint8_t {
  kChatMl,   // no default system message (MINI, many others)
  kSmolLm2,  // ChatML, default system message of SmolLM2
  kQwen2,
  kQwen25,
  kQwen3,  // drops reasoning of earlier turns' assistants
  kLlama3,
  kLlama31,  // also 3.3
  kLlama32,
};
std::string_view ChatFormatName(ChatFormat format);  // "chatml", "smollm2", "qwen2", ...

struct ChatMessage {
  std::string role;  // "system", "user" or "assistant"
  std::string content;
};

struct ChatOptions {
  bool add_generation_prompt = true;
  bool enable_thinking = true;  // Qwen3: false closes the reasoning block at once
  // Llama 3.1 and 3.2: "Today Date". The template's own fallback; a renderer with a clock would put
  // today there, and the prompt would change overnight.
  std::string date = "26 Jul 2024";
  std::string bos = "<|begin_of_text|>";  // Llama 3
};

// kUnsupported for an unknown template: its hash, what is known, and what to do.
Result<ChatFormat> FindChatFormat(std::string_view template_text);

// kInvalidArgument for no messages, an unknown role, or content that is not UTF-8.
Result<std::string> RenderChat(ChatFormat format, const std::vector<ChatMessage>& messages,
                               const ChatOptions& options = {});

}  // namespace tare::models
