#include "models/chat_template.h"

#include <array>

#include "base/json.h"
#include "base/sha256.h"
#include "models/utf8.h"

namespace tare::models {
namespace {

struct Known {
  const char* sha256;  // of the template's text
  ChatFormat format;
};
// A text with and without its closing newline is two hashes.
constexpr std::array<Known, 13> kKnown = {{
    {"153280e3ff55d19da1398bdb3914ee2a51b80429bfaedde11d7d216c39db80f3", ChatFormat::kChatMl},
    {"872be49dbb638044ad01b60388f48d469ff2980e5f0dccdc22ec907db54d0788", ChatFormat::kSmolLm2},
    {"793202280c0910ab26bc6eb57c8212c2417324c6d8c4efd0d10d59092ab3e3eb", ChatFormat::kQwen2},
    {"cd8e9439f0570856fd70470bf8889ebd8b5d1107207f67a5efb46e342330527f", ChatFormat::kQwen25},
    {"55b2f4a26ac9ee719330a61a0c39d9e538b0e9322212f048326318cff4f8674a", ChatFormat::kQwen25},
    {"d5495a1e5db0611132a97e46a65dbb64a642a499421228b9c8b93229097fa9a4", ChatFormat::kQwen25},
    {"4e9918361c284a93880606d182d64da6a9fe97cdc1f5c5a78c1c8840444246fc", ChatFormat::kQwen25},
    {"87a2728cb8dc9fe424d624542f6060ec05a1d285ebbec578bb078900e33396b5", ChatFormat::kQwen3},
    {"ba03a121d097859c7b5b9cd03af99aafe95275210d2876f642ad9929a150f122", ChatFormat::kLlama3},
    {"e10ca381b1ccc5cf9db52e371f3b6651576caee0a630b452e2816b2d404d4b65", ChatFormat::kLlama31},
    {"93c0e9aa3629bbd77e68dbc0f5621f6e6b23aa8d74b932595cdb8d64684526d7", ChatFormat::kLlama31},
    {"5816fce10444e03c2e9ee1ef8a4a1ea61ae7e69e438613f3b17b69d0426223a4", ChatFormat::kLlama32},
    {"d82792f95932f1c9cef5c4bd992f171225e3bf8c7b609b4557c9e1ec96be819f", ChatFormat::kLlama32},
}};

// What Python's str.strip takes off.
bool IsPythonSpace(uint32_t c) {
  return (c >= 0x09 && c <= 0x0d) || (c >= 0x1c && c <= 0x20) || c == 0x85 || c == 0xa0 ||
         c == 0x1680 || (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f ||
         c == 0x205f || c == 0x3000;
}

std::string_view Strip(std::string_view text) {
  size_t begin = text.size(), end = 0;
  for (size_t i = 0; i < text.size();) {
    const Utf8Piece piece = NextUtf8(text.substr(i));
    if (!IsPythonSpace(piece.code_point)) {
      begin = std::min(begin, i);
      end = i + piece.size_bytes;
    }
    i += piece.size_bytes;
  }
  return begin < end ? text.substr(begin, end - begin) : std::string_view();
}

std::string_view StripNewlines(std::string_view text, bool left, bool right) {
  while (left && !text.empty() && text.front() == '\n') text.remove_prefix(1);
  while (right && !text.empty() && text.back() == '\n') text.remove_suffix(1);
  return text;
}

std::string Turn(std::string_view role, std::string_view content) {
  return fmt::format("<|im_start|>{}\n{}<|im_end|>\n", role, content);
}

std::string RenderChatMl(const std::vector<ChatMessage>& messages, const char* system) {
  std::string out;
  if (system != nullptr && messages[0].role != "system") out += Turn("system", system);
  for (const ChatMessage& m : messages) out += Turn(m.role, m.content);
  return out;
}

std::string RenderQwen3(const std::vector<ChatMessage>& messages) {
  // The last message of the user that is no tool response: what answers it keeps its reasoning.
  size_t last_query = messages.size() - 1;
  for (size_t i = messages.size(); i-- > 0;) {
    const std::string& c = messages[i].content;
    if (messages[i].role == "user" &&
        !(c.starts_with("<tool_response>") && c.ends_with("</tool_response>"))) {
      last_query = i;
      break;
    }
  }
  std::string out;
  for (size_t i = 0; i < messages.size(); ++i) {
    const ChatMessage& m = messages[i];
    if (m.role != "assistant") {
      out += Turn(m.role, m.content);
      continue;
    }
    std::string_view content = m.content, reasoning;
    constexpr std::string_view kOpen = "<think>", kClose = "</think>";
    if (const size_t first = content.find(kClose); first != std::string_view::npos) {
      reasoning = StripNewlines(content.substr(0, first), false, true);
      if (const size_t open = reasoning.rfind(kOpen); open != std::string_view::npos) {
        reasoning = reasoning.substr(open + kOpen.size());
      }
      reasoning = StripNewlines(reasoning, true, false);
      content = StripNewlines(content.substr(content.rfind(kClose) + kClose.size()), true, false);
    }
    const bool last = i + 1 == messages.size();
    if (i > last_query && (last || !reasoning.empty())) {
      out += Turn("assistant",
                  fmt::format("<think>\n{}\n</think>\n\n{}", StripNewlines(reasoning, true, true),
                              StripNewlines(content, true, false)));
    } else {
      out += Turn("assistant", content);
    }
  }
  return out;
}

std::string LlamaTurn(std::string_view role, std::string_view content) {
  return fmt::format("<|start_header_id|>{}<|end_header_id|>\n\n{}<|eot_id|>", role,
                     Strip(content));
}

std::string RenderLlama3(const std::vector<ChatMessage>& messages, const ChatOptions& options) {
  std::string out = options.bos;
  for (const ChatMessage& m : messages) out += LlamaTurn(m.role, m.content);
  return out;
}

std::string RenderLlama31(const std::vector<ChatMessage>& messages, const ChatOptions& options) {
  const bool system = messages[0].role == "system";
  std::string out = options.bos;
  out += fmt::format(
      "<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\nToday "
      "Date: {}\n\n{}<|eot_id|>",
      options.date, system ? Strip(messages[0].content) : std::string_view());
  for (size_t i = system ? 1 : 0; i < messages.size(); ++i)
    out += LlamaTurn(messages[i].role, messages[i].content);
  return out;
}

}  // namespace

std::string_view ChatFormatName(ChatFormat format) {
  switch (format) {
    case ChatFormat::kChatMl:
      return "chatml";
    case ChatFormat::kSmolLm2:
      return "smollm2";
    case ChatFormat::kQwen2:
      return "qwen2";
    case ChatFormat::kQwen25:
      return "qwen2.5";
    case ChatFormat::kQwen3:
      return "qwen3";
    case ChatFormat::kLlama3:
      return "llama3";
    case ChatFormat::kLlama31:
      return "llama3.1";
    case ChatFormat::kLlama32:
      return "llama3.2";
  }
  return "";
}

Result<ChatFormat> FindChatFormat(std::string_view template_text) {
  const std::string hash = Hex(Sha256Of(template_text));
  for (const Known& known : kKnown) {
    if (hash == known.sha256) return known.format;
  }
  return Unsupported(
      "the chat template with SHA-256 {} is not one that is built in (chatml, smollm2, qwen2, "
      "qwen2.5, qwen3, llama3, "
      "llama3.1, llama3.2); render the chat yourself and pass token IDs as the prompt of "
      "/v1/completions, or text there",
      hash);
}

Result<std::string> RenderChat(ChatFormat format, const std::vector<ChatMessage>& messages,
                               const ChatOptions& options) {
  if (messages.empty()) return InvalidArgument("messages is empty");
  for (size_t i = 0; i < messages.size(); ++i) {
    const ChatMessage& m = messages[i];
    if (m.role != "system" && m.role != "user" && m.role != "assistant") {
      return InvalidArgument("messages[{}].role is \"{}\"; system, user and assistant are built", i,
                             Printable(m.role));
    }
    if (Status s = CheckUtf8(m.content); !s.ok())
      return s.Annotate(fmt::format("messages[{}].content", i));
  }
  const bool llama = format == ChatFormat::kLlama3 || format == ChatFormat::kLlama31 ||
                     format == ChatFormat::kLlama32;
  std::string out;
  switch (format) {
    case ChatFormat::kChatMl:
      out = RenderChatMl(messages, nullptr);
      break;
    case ChatFormat::kSmolLm2:
      out = RenderChatMl(messages,
                         "You are a helpful AI assistant named SmolLM, trained by Hugging Face");
      break;
    case ChatFormat::kQwen2:
      out = RenderChatMl(messages, "You are a helpful assistant.");
      break;
    case ChatFormat::kQwen25:
      out = RenderChatMl(messages,
                         "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.");
      break;
    case ChatFormat::kQwen3:
      out = RenderQwen3(messages);
      break;
    case ChatFormat::kLlama3:
      out = RenderLlama3(messages, options);
      break;
    case ChatFormat::kLlama31:
    case ChatFormat::kLlama32:
      out = RenderLlama31(messages, options);
      break;
  }
  if (options.add_generation_prompt) {
    out += llama ? "<|start_header_id|>assistant<|end_header_id|>\n\n" : "<|im_start|>assistant\n";
    if (format == ChatFormat::kQwen3 && !options.enable_thinking) out += "<think>\n\n</think>\n\n";
  }
  return out;
}

}  // namespace tare::models
