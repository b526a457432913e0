#include "engine/parse.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <set>

namespace tare::engine {
namespace {

std::string TypeOf(const Json& v) { return v.type_name(); }

Status Want(const std::string& field, const char* what, const Json& got) {
  return InvalidArgument("{}: expected {}, got {}", field, what, TypeOf(got));
}

// Reads fields of one object and remembers which, so that the rest can be refused.
class Reader {
 public:
  explicit Reader(const Json& body) : body_(body) {}

  // The field when it is there and not null.
  const Json* Get(const std::string& field) {
    seen_.insert(field);
    const auto it = body_.find(field);
    return it == body_.end() || it->is_null() ? nullptr : &*it;
  }

  Status Bool(const std::string& field, bool* out) {
    const Json* v = Get(field);
    if (v == nullptr) return Ok();
    if (!v->is_boolean()) return Want(field, "true or false", *v);
    *out = v->get<bool>();
    return Ok();
  }
  Status Int(const std::string& field, int64_t low, int64_t high, int32_t* out) {
    const Json* v = Get(field);
    if (v == nullptr) return Ok();
    TARE_ASSIGN_OR_RETURN(const int64_t i, IntOf(field, *v, low, high));
    *out = static_cast<int32_t>(i);
    return Ok();
  }
  Status Float(const std::string& field, float* out) {
    const Json* v = Get(field);
    if (v == nullptr) return Ok();
    if (!v->is_number()) return Want(field, "a number", *v);
    const double d = v->get<double>();
    if (!std::isfinite(d)) return InvalidArgument("{}: it is not finite", field);
    *out = static_cast<float>(d);
    if (!std::isfinite(*out)) return InvalidArgument("{}: {} is beyond f32", field, d);
    return Ok();
  }
  Status String(const std::string& field, std::string* out) {
    const Json* v = Get(field);
    if (v == nullptr) return Ok();
    if (!v->is_string()) return Want(field, "a string", *v);
    *out = v->get<std::string>();
    return Ok();
  }
  // Accepted only where it changes nothing.
  Status Neutral(const std::string& field, const std::function<bool(const Json&)>& neutral,
                 const char* only) {
    const Json* v = Get(field);
    if (v == nullptr || neutral(*v)) return Ok();
    return InvalidArgument("{}: not supported here; only {} is accepted", field, only);
  }
  void Ignore(const std::string& field) { seen_.insert(field); }

  Status Rest() {
    for (const auto& [key, value] : body_.items()) {
      if (!seen_.contains(key))
        return InvalidArgument("{}: unknown field", Printable(key.substr(0, 80)));
    }
    return Ok();
  }

  static Result<int64_t> IntOf(const std::string& field, const Json& v, int64_t low, int64_t high) {
    if (!v.is_number_integer() || (v.is_number_unsigned() && v.get<uint64_t>() > INT64_MAX)) {
      return Want(field, "an integer", v);
    }
    const int64_t i = v.get<int64_t>();
    if (i < low || i > high)
      return InvalidArgument("{}: {} is not from {} to {}", field, i, low, high);
    return i;
  }

 private:
  const Json& body_;
  std::set<std::string> seen_;
};

Status ParseStop(Reader* r, ParsedRequest* out) {
  const Json* v = r->Get("stop");
  if (v == nullptr) return Ok();
  std::vector<std::string>& stop = out->params.stop;
  if (v->is_string()) {
    stop.push_back(v->get<std::string>());
  } else if (v->is_array()) {
    for (const Json& s : *v) {
      if (!s.is_string()) return Want("stop", "a string or a list of strings", s);
      stop.push_back(s.get<std::string>());
    }
  } else {
    return Want("stop", "a string or a list of strings", *v);
  }
  if (stop.size() > 64) return InvalidArgument("stop: {} strings; 64 are the most", stop.size());
  for (const std::string& s : stop) {
    if (s.empty()) return InvalidArgument("stop: an empty string would stop everything");
    if (s.size() > 1024)
      return InvalidArgument("stop: a string of {} bytes; 1024 are the most", s.size());
  }
  return Ok();
}

Result<std::vector<int32_t>> Ids(const std::string& field, const Json& list) {
  if (!list.is_array()) return Want(field, "a list of token ids", list);
  std::vector<int32_t> ids;
  ids.reserve(list.size());
  for (const Json& v : list) {
    TARE_ASSIGN_OR_RETURN(const int64_t id,
                          Reader::IntOf(field, v, 0, std::numeric_limits<int32_t>::max()));
    ids.push_back(static_cast<int32_t>(id));
  }
  return ids;
}

// What completions and chat share.
Status ParseCommon(Reader* r, ParsedRequest* out) {
  SamplingParams& p = out->params;
  TARE_RETURN_IF_ERROR(r->String("model", &out->model));
  TARE_RETURN_IF_ERROR(r->Float("temperature", &p.temperature));
  TARE_RETURN_IF_ERROR(r->Float("top_p", &p.top_p));
  TARE_RETURN_IF_ERROR(r->Int("top_k", -1, std::numeric_limits<int32_t>::max(), &p.top_k));
  if (p.top_k == -1) p.top_k = 0;  // vLLM: both are off
  TARE_RETURN_IF_ERROR(r->Float("min_p", &p.min_p));
  if (const Json* seed = r->Get("seed")) {
    if (!seed->is_number_integer()) return Want("seed", "an integer", *seed);
    p.seed = seed->is_number_unsigned() ? seed->get<uint64_t>()
                                        : static_cast<uint64_t>(seed->get<int64_t>());
  }
  TARE_RETURN_IF_ERROR(r->Int("n", 1, 4096, &p.n));
  TARE_RETURN_IF_ERROR(r->Int("min_tokens", 0, INT32_MAX, &p.min_tokens));
  TARE_RETURN_IF_ERROR(r->Bool("ignore_eos", &p.ignore_eos));
  TARE_RETURN_IF_ERROR(ParseStop(r, out));
  if (const Json* ids = r->Get("stop_token_ids")) {
    TARE_ASSIGN_OR_RETURN(p.stop_token_ids, Ids("stop_token_ids", *ids));
  }
  if (const Json* bias = r->Get("logit_bias")) {
    if (!bias->is_object()) return Want("logit_bias", "an object of token id to bias", *bias);
    for (const auto& [key, value] : bias->items()) {
      int32_t id = 0;
      const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), id);
      if (error != std::errc() || end != key.data() + key.size() || id < 0) {
        return InvalidArgument("logit_bias: '{}' is no token id", Printable(key.substr(0, 40)));
      }
      if (!value.is_number()) return Want("logit_bias", "a number for every id", value);
      const double d = value.get<double>();
      if (!(d >= -100.0 && d <= 100.0))
        return InvalidArgument("logit_bias: {} of token {} is not from -100 to 100", d, id);
      p.logit_bias.emplace_back(id, static_cast<float>(d));
    }
  }
  int32_t prompt_logprobs = -1;
  TARE_RETURN_IF_ERROR(r->Int("prompt_logprobs", 0, 1000, &prompt_logprobs));
  if (prompt_logprobs >= 0) p.prompt_logprobs = prompt_logprobs;
  TARE_RETURN_IF_ERROR(r->Int("priority", INT32_MIN, INT32_MAX, &out->priority));
  TARE_RETURN_IF_ERROR(r->Bool("stream", &out->stream));
  if (const Json* options = r->Get("stream_options")) {
    if (!options->is_object()) return Want("stream_options", "an object", *options);
    if (!out->stream) return InvalidArgument("stream_options: only with stream = true");
    Reader inner(*options);
    TARE_RETURN_IF_ERROR(
        inner.Bool("include_usage", &out->include_usage).Annotate("stream_options"));
    TARE_RETURN_IF_ERROR(
        inner.Bool("continuous_usage_stats", &out->continuous_usage).Annotate("stream_options"));
    TARE_RETURN_IF_ERROR(inner.Rest().Annotate("stream_options"));
  }
  if (out->stream && p.prompt_logprobs) {
    return InvalidArgument("prompt_logprobs: not available when stream = true");
  }
  TARE_RETURN_IF_ERROR(r->Bool("return_token_ids", &out->return_token_ids));
  TARE_RETURN_IF_ERROR(r->Bool("return_logprob_bits", &out->return_bits));
  TARE_RETURN_IF_ERROR(r->Bool("return_candidates", &p.candidates));
  TARE_RETURN_IF_ERROR(r->Bool("skip_special_tokens", &out->skip_special_tokens));
  TARE_RETURN_IF_ERROR(r->Bool("include_stop_str_in_output", &out->include_stop_str_in_output));
  TARE_RETURN_IF_ERROR(r->Bool("add_special_tokens", &out->add_special_tokens));
  if (p.candidates) out->return_bits = true;

  const auto zero = [](const Json& v) { return v.is_number() && v.get<double>() == 0.0; };
  const auto one = [](const Json& v) { return v.is_number() && v.get<double>() == 1.0; };
  const auto no = [](const Json& v) { return v.is_boolean() && !v.get<bool>(); };
  const auto yes = [](const Json& v) { return v.is_boolean() && v.get<bool>(); };
  const auto empty = [](const Json& v) { return (v.is_array() || v.is_object()) && v.empty(); };
  TARE_RETURN_IF_ERROR(r->Neutral("presence_penalty", zero, "0"));
  TARE_RETURN_IF_ERROR(r->Neutral("frequency_penalty", zero, "0"));
  TARE_RETURN_IF_ERROR(r->Neutral("repetition_penalty", one, "1"));
  TARE_RETURN_IF_ERROR(r->Neutral("length_penalty", one, "1"));
  TARE_RETURN_IF_ERROR(r->Neutral("use_beam_search", no, "false"));
  TARE_RETURN_IF_ERROR(r->Neutral("early_stopping", no, "false"));
  TARE_RETURN_IF_ERROR(r->Neutral("best_of", one, "1"));
  TARE_RETURN_IF_ERROR(r->Neutral("spaces_between_special_tokens", yes, "true"));
  TARE_RETURN_IF_ERROR(r->Neutral(
      "truncate_prompt_tokens", [](const Json&) { return false; }, "null"));
  TARE_RETURN_IF_ERROR(r->Neutral("allowed_token_ids", empty, "[]"));
  TARE_RETURN_IF_ERROR(r->Neutral("bad_words", empty, "[]"));
  TARE_RETURN_IF_ERROR(r->Neutral(
      "response_format",
      [](const Json& v) { return v.is_object() && v.value("type", "") == "text"; },
      "{\"type\": \"text\"}"));
  // Says nothing about the result.
  r->Ignore("user");
  r->Ignore("request_id");
  r->Ignore("metadata");
  r->Ignore("store");
  return Ok();
}

}  // namespace

Result<ParsedRequest> ParseCompletion(const Json& body) {
  if (!body.is_object()) return Want("body", "an object", body);
  ParsedRequest out;
  Reader r(body);
  TARE_RETURN_IF_ERROR(ParseCommon(&r, &out));
  TARE_RETURN_IF_ERROR(r.Int("max_tokens", 1, INT32_MAX, &out.params.max_tokens));
  out.max_tokens_given = body.contains("max_tokens") && !body["max_tokens"].is_null();
  int32_t logprobs = -1;
  TARE_RETURN_IF_ERROR(r.Int("logprobs", 0, 1000, &logprobs));
  if (logprobs >= 0) out.params.logprobs = logprobs;
  TARE_RETURN_IF_ERROR(r.Neutral(
      "echo", [](const Json& v) { return v.is_boolean() && !v.get<bool>(); }, "false"));
  TARE_RETURN_IF_ERROR(r.Neutral(
      "suffix", [](const Json& v) { return v.is_string() && v.get<std::string>().empty(); },
      "null"));

  const Json* prompt = r.Get("prompt");
  if (prompt == nullptr)
    return InvalidArgument("prompt: missing; a string, token ids, or a list of either");
  if (prompt->is_string()) {
    out.texts.push_back(prompt->get<std::string>());
  } else if (prompt->is_array() && !prompt->empty()) {
    const Json& first = prompt->front();
    if (first.is_number()) {
      TARE_ASSIGN_OR_RETURN(std::vector<int32_t> ids, Ids("prompt", *prompt));
      out.token_prompts.push_back(std::move(ids));
    } else {
      for (const Json& item : *prompt) {
        if (item.is_string() != first.is_string())
          return Want("prompt", "strings or token lists, not both", item);
        if (item.is_string()) {
          out.texts.push_back(item.get<std::string>());
        } else {
          TARE_ASSIGN_OR_RETURN(std::vector<int32_t> ids, Ids("prompt", item));
          out.token_prompts.push_back(std::move(ids));
        }
      }
    }
  } else {
    return Want("prompt", "a string, token ids, or a non-empty list of either", *prompt);
  }
  TARE_RETURN_IF_ERROR(r.Rest());
  return out;
}

Result<ParsedRequest> ParseChat(const Json& body) {
  if (!body.is_object()) return Want("body", "an object", body);
  ParsedRequest out;
  out.chat = true;
  Reader r(body);
  TARE_RETURN_IF_ERROR(ParseCommon(&r, &out));
  const Json* old_name = r.Get("max_tokens");
  const Json* new_name = r.Get("max_completion_tokens");
  if (old_name && new_name && *old_name != *new_name) {
    return InvalidArgument("max_completion_tokens: differs from max_tokens; give one of them");
  }
  TARE_RETURN_IF_ERROR(r.Int("max_tokens", 1, INT32_MAX, &out.params.max_tokens));
  TARE_RETURN_IF_ERROR(r.Int("max_completion_tokens", 1, INT32_MAX, &out.params.max_tokens));
  out.max_tokens_given = old_name || new_name;
  bool logprobs = false;
  TARE_RETURN_IF_ERROR(r.Bool("logprobs", &logprobs));
  int32_t top = 0;
  TARE_RETURN_IF_ERROR(r.Int("top_logprobs", 0, 1000, &top));
  if (top > 0 && !logprobs) return InvalidArgument("top_logprobs: only with logprobs = true");
  if (logprobs) out.params.logprobs = top;
  TARE_RETURN_IF_ERROR(r.Bool("add_generation_prompt", &out.add_generation_prompt));
  const auto no = [](const Json& v) { return v.is_boolean() && !v.get<bool>(); };
  const auto empty = [](const Json& v) { return (v.is_array() || v.is_object()) && v.empty(); };
  TARE_RETURN_IF_ERROR(r.Neutral("continue_final_message", no, "false"));
  TARE_RETURN_IF_ERROR(r.Neutral("echo", no, "false"));
  TARE_RETURN_IF_ERROR(r.Neutral("tools", empty, "[]"));
  TARE_RETURN_IF_ERROR(r.Neutral(
      "tool_choice", [](const Json& v) { return v == "none" || v == "auto"; }, "\"none\""));
  TARE_RETURN_IF_ERROR(r.Neutral("chat_template_kwargs", empty, "{}"));
  TARE_RETURN_IF_ERROR(r.Neutral(
      "chat_template", [](const Json&) { return false; }, "null"));
  r.Ignore("parallel_tool_calls");

  const Json* messages = r.Get("messages");
  if (messages == nullptr)
    return InvalidArgument("messages: missing; a list of {{\"role\", \"content\"}}");
  if (!messages->is_array() || messages->empty())
    return Want("messages", "a non-empty list", *messages);
  for (size_t i = 0; i < messages->size(); ++i) {
    const std::string at = fmt::format("messages[{}]", i);
    const Json& m = (*messages)[i];
    if (!m.is_object()) return Want(at, "an object", m);
    Reader inner(m);
    ChatMessage message;
    TARE_RETURN_IF_ERROR(inner.String("role", &message.role).Annotate(at));
    if (message.role.empty()) return InvalidArgument("{}.role: missing", at);
    const Json* content = inner.Get("content");
    if (content == nullptr) return InvalidArgument("{}.content: missing", at);
    if (content->is_string()) {
      message.content = content->get<std::string>();
    } else if (content->is_array()) {
      for (const Json& part : *content) {
        if (!part.is_object() || part.value("type", "") != "text" || !part.contains("text") ||
            !part["text"].is_string()) {
          return InvalidArgument("{}.content: only parts of type text are supported", at);
        }
        message.content += part["text"].get<std::string>();
      }
    } else {
      return Want(at + ".content", "a string or a list of text parts", *content);
    }
    inner.Ignore("name");
    TARE_RETURN_IF_ERROR(inner.Rest().Annotate(at));
    out.messages.push_back(std::move(message));
  }
  TARE_RETURN_IF_ERROR(r.Rest());
  return out;
}

}  // namespace tare::engine
