#include "engine/generation.h"

#include <algorithm>
#include <cstring>
#include <random>

#include "engine/faults.h"

namespace tare::engine {
namespace {

std::string RandomHex() {
  std::random_device device;
  return fmt::format("{:08x}{:08x}", device(), device());
}

int64_t Characters(std::string_view utf8) {
  return std::count_if(utf8.begin(), utf8.end(),
                       [](char c) { return (static_cast<uint8_t>(c) & 0xC0) != 0x80; });
}

// The longest tail of `text` that is a proper beginning of some stop string.
size_t HeldTail(std::string_view text, const std::vector<std::string>& stops) {
  size_t held = 0;
  for (const std::string& stop : stops) {
    for (size_t n = std::min(text.size(), stop.size() - 1); n > held; --n) {
      if (text.ends_with(std::string_view(stop).substr(0, n))) {
        held = n;
        break;
      }
    }
  }
  return held;
}

std::string Dump(const Json& j) { return j.dump(-1, ' ', false, Json::error_handler_t::replace); }

}  // namespace

std::string F32Bits(float value) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  return fmt::format("0x{:08x}", bits);
}

Generation::Generation(const Shared& shared, ParsedRequest request,
                       std::vector<std::vector<int32_t>> prompts, http::ResponderPtr responder)
    : shared_(shared),
      request_(std::move(request)),
      prompts_(std::move(prompts)),
      responder_(std::move(responder)),
      id_((request_.chat ? "chatcmpl-" : "cmpl-") + RandomHex()),
      created_(std::chrono::duration_cast<std::chrono::seconds>(
                   std::chrono::system_clock::now().time_since_epoch())
                   .count()),
      start_(std::chrono::steady_clock::now()) {
  for (size_t p = 0; p < prompts_.size(); ++p) {
    for (int32_t i = 0; i < request_.params.n; ++i) {
      Choice c;
      c.prompt = static_cast<int64_t>(p);
      if (shared_.tokenizer != nullptr) {
        c.decoder = std::make_unique<models::StreamDecoder>(*shared_.tokenizer,
                                                            request_.skip_special_tokens);
      }
      choices_.push_back(std::move(c));
    }
  }
  unfinished_ = choices_.size();
}

Status Generation::Start(const std::function<void(std::function<void()>)>& post) {
  for (size_t p = 0; p < prompts_.size(); ++p) {
    Request r;
    r.id = fmt::format("{}-{}", id_, p);
    r.prompt = prompts_[p];
    r.params = request_.params;
    r.priority = request_.priority;
    const size_t first = p * static_cast<size_t>(request_.params.n);
    r.callback = [self = shared_from_this(), post, first](const SequenceEvent& event) {
      post([self, first, event] { self->OnEvent(first, event); });
    };
    if (Status status = shared_.engine->Submit(std::move(r)); !status.ok()) {
      gone_ = true;
      for (size_t q = 0; q < p; ++q) shared_.engine->Abort(fmt::format("{}-{}", id_, q));
      return status;
    }
  }
  return Ok();
}

void Generation::Abort() {
  gone_ = true;
  for (size_t p = 0; p < prompts_.size(); ++p) shared_.engine->Abort(fmt::format("{}-{}", id_, p));
}

std::string Generation::TokenText(int32_t id) const {
  if (shared_.tokenizer == nullptr || id < 0 || id >= shared_.tokenizer->vocab_size())
    return fmt::format("token_id:{}", id);
  const int32_t one[] = {id};
  const Result<std::string> text = shared_.tokenizer->Decode(one);
  return text.ok() ? *text : fmt::format("token_id:{}", id);
}

void Generation::TakeTokens(Choice* c, const SequenceEvent& event, std::string* delta) {
  const auto now = std::chrono::steady_clock::now();
  const SamplingParams& p = request_.params;
  for (const TokenOutput& t : event.tokens) {
    if (!c->finish.empty()) return;  // a stop string was found; what came after does not count
    c->generated++;
    c->weight_version = t.weight_version;
    if (!first_token_seen_) {
      first_token_seen_ = true;
      shared_.metrics->FirstToken(std::chrono::duration<double>(now - start_).count());
    } else if (c->generated > 1) {
      shared_.metrics->NextToken(std::chrono::duration<double>(now - c->last_token).count());
    }
    c->last_token = now;
    c->tokens.push_back(t);
    if (c->decoder == nullptr) continue;
    // The id that ends the text is not part of it.
    const bool last = event.finish && &t == &event.tokens.back();
    if (last && *event.finish == FinishReason::kStop && request_.skip_special_tokens &&
        (shared_.tokenizer->IsSpecial(t.token))) {
      continue;
    }
    const Result<std::string> piece = c->decoder->Push(t.token);
    c->held += piece.ok() ? *piece : std::string();
    if (p.stop.empty() || c->generated < p.min_tokens) {
      *delta += std::exchange(c->held, {});
      continue;
    }
    size_t at = std::string::npos;
    const std::string* found = nullptr;
    for (const std::string& stop : p.stop) {
      const size_t here = c->held.find(stop);
      if (here < at) {
        at = here;
        found = &stop;
      }
    }
    if (found != nullptr) {
      *delta += c->held.substr(0, at + (request_.include_stop_str_in_output ? found->size() : 0));
      c->held.clear();
      c->finish = "stop";
      c->stop_reason = *found;
      return;
    }
    const size_t keep = HeldTail(c->held, p.stop);
    *delta += c->held.substr(0, c->held.size() - keep);
    c->held.erase(0, c->held.size() - keep);
  }
}

void Generation::OnEvent(size_t first_choice, const SequenceEvent& event) {
  if (gone_) return;
  const size_t index = first_choice + static_cast<size_t>(event.index);
  Choice& c = choices_[index];
  if (!c.finish.empty()) return;
  if (!event.prompt_logprobs.empty()) c.prompt_logprobs = event.prompt_logprobs;
  c.cached_tokens = event.cached_tokens;
  std::string delta;
  TakeTokens(&c, event, &delta);
  if (!c.finish.empty()) {
    shared_.engine->Abort(fmt::format("{}-{}", id_, c.prompt), event.index);
  } else if (event.finish) {
    c.finish = FinishReasonName(*event.finish);
    if (event.stop_token) c.stop_reason = *event.stop_token;
    c.error = event.error;
    if (c.decoder) {
      const std::string rest = c.decoder->Finish();
      delta += c.held + rest;
      c.held.clear();
    }
  }
  c.text += delta;
  if (request_.stream) StreamChunk(index, delta, std::exchange(c.tokens, {}));
  if (!c.finish.empty() && --unfinished_ == 0) FinishAll();
}

Json Generation::Envelope(const char* object) const {
  return Json{
      {"id", id_}, {"object", object}, {"created", created_}, {"model", shared_.model_name}};
}

Json Generation::Usage() const {
  int64_t prompt = 0, completion = 0, cached = 0;
  for (const auto& p : prompts_) prompt += std::ssize(p);
  for (const Choice& c : choices_) {
    completion += c.generated;
    cached += c.cached_tokens;
  }
  return Json{{"prompt_tokens", prompt},
              {"total_tokens", prompt + completion},
              {"completion_tokens", completion},
              {"prompt_tokens_details", Json{{"cached_tokens", cached}}}};
}

Json Generation::LogprobsJson(Choice* c, const std::vector<TokenOutput>& tokens) {
  Json offsets = Json::array(), values = Json::array(), texts = Json::array(), tops = Json::array();
  for (const TokenOutput& t : tokens) {
    const std::string text = TokenText(t.token);
    offsets.push_back(c->offset);
    c->offset += Characters(text);
    values.push_back(Shown(t));
    texts.push_back(text);
    Json top = Json::object();
    top[text] = Shown(t);
    for (const TopLogprob& e : t.top) {
      const std::string key = TokenText(e.token);
      if (!top.contains(key)) top[key] = e.logprob;
    }
    tops.push_back(std::move(top));
  }
  return Json{{"text_offset", offsets},
              {"token_logprobs", values},
              {"tokens", texts},
              {"top_logprobs", tops}};
}

Json Generation::ChatLogprobsJson(const std::vector<TokenOutput>& tokens) const {
  const auto entry = [&](int32_t id, float logprob) {
    const std::string text = TokenText(id);
    Json bytes = Json::array();
    if (shared_.tokenizer != nullptr && id >= 0 && id < shared_.tokenizer->vocab_size()) {
      for (const char b : shared_.tokenizer->TokenBytes(id))
        bytes.push_back(static_cast<uint8_t>(b));
    }
    return Json{{"token", text}, {"logprob", logprob}, {"bytes", bytes}};
  };
  Json content = Json::array();
  for (const TokenOutput& t : tokens) {
    Json e = entry(t.token, Shown(t));
    Json top = Json::array();
    for (const TopLogprob& other : t.top) top.push_back(entry(other.token, other.logprob));
    e["top_logprobs"] = std::move(top);
    content.push_back(std::move(e));
  }
  return Json{{"content", content}};
}

Json Generation::PromptLogprobsJson(const Choice& c) const {
  const std::vector<int32_t>& prompt = prompts_[static_cast<size_t>(c.prompt)];
  Json list = Json::array({nullptr});  // the first token has nothing before it
  for (size_t i = 0; i < c.prompt_logprobs.size(); ++i) {
    const PromptLogprob& p = c.prompt_logprobs[i];
    Json entry = Json::object();
    const auto add = [&](int32_t id, float logprob, int32_t rank) {
      const std::string key = std::to_string(id);
      if (entry.contains(key)) return;
      entry[key] = Json{{"logprob", logprob}, {"decoded_token", TokenText(id)}};
      if (rank > 0) entry[key]["rank"] = rank;
    };
    add(prompt[i + 1], p.raw_logprob, p.rank);
    for (size_t k = 0; k < p.top.size(); ++k)
      add(p.top[k].token, p.top[k].logprob, static_cast<int32_t>(k) + 1);
    list.push_back(std::move(entry));
  }
  return list;
}

// The exact words, each kind by its own name: they are not interchangeable.
Json Generation::BitsJson(const Choice& c, const std::vector<TokenOutput>& tokens) const {
  Json raw = Json::array(), tempered = Json::array(), processed = Json::array(),
       kept = Json::array(), versions = Json::array(), candidates = Json::array();
  for (const TokenOutput& t : tokens) {
    raw.push_back(F32Bits(t.raw_logprob));
    tempered.push_back(F32Bits(t.tempered_logprob));
    processed.push_back(F32Bits(t.processed_logprob));
    kept.push_back(t.kept);
    versions.push_back(t.weight_version);
    if (request_.params.candidates) candidates.push_back(HexOf(t.candidates));
  }
  Json bits{{"dtype", "f32"},
            {"raw_logprob_bits", raw},
            {"tempered_logprob_bits", tempered},
            {"processed_logprob_bits", processed},
            {"kept", kept},
            {"weight_version", versions}};
  if (request_.params.candidates) bits["candidates"] = std::move(candidates);
  if (!c.prompt_logprobs.empty()) {
    Json prompt = Json::array({nullptr});
    for (const PromptLogprob& p : c.prompt_logprobs) prompt.push_back(F32Bits(p.raw_logprob));
    bits["prompt_raw_logprob_bits"] = std::move(prompt);
  }
  return bits;
}

Json Generation::ChoiceJson(size_t index, const std::string& text,
                            const std::vector<TokenOutput>& tokens, bool delta) {
  Choice& c = choices_[index];
  Json j{{"index", index}};
  if (request_.chat) {
    if (delta) {
      j["delta"] = Json{{"content", text}};
    } else {
      j["message"] = Json{{"role", "assistant"}, {"content", text}};
    }
    j["logprobs"] = request_.params.logprobs ? ChatLogprobsJson(tokens) : Json(nullptr);
  } else {
    j["text"] = text;
    j["logprobs"] = request_.params.logprobs ? LogprobsJson(&c, tokens) : Json(nullptr);
  }
  j["finish_reason"] = c.finish.empty() ? Json(nullptr) : Json(c.finish);
  j["stop_reason"] = c.stop_reason;
  if (!c.error.empty()) j["error"] = c.error;
  j["weight_version"] = c.weight_version;
  if (request_.return_token_ids) {
    Json ids = Json::array();
    for (const TokenOutput& t : tokens) ids.push_back(t.token);
    j["token_ids"] = std::move(ids);
  }
  if (request_.return_bits) j["tare"] = BitsJson(c, tokens);
  return j;
}

void Generation::StreamChunk(size_t index, const std::string& delta,
                             const std::vector<TokenOutput>& tokens) {
  Choice& c = choices_[index];
  if (tokens.empty() && delta.empty() && c.finish.empty()) return;
  if (!stream_begun_) {
    stream_begun_ = true;
    responder_->BeginStream("text/event-stream; charset=utf-8");
  }
  const char* object = request_.chat ? "chat.completion.chunk" : "text_completion";
  const bool first = c.generated == std::ssize(tokens);
  if (request_.chat && first) {
    Json head = Envelope(object);
    Json choice{{"index", index},
                {"delta", Json{{"role", "assistant"}, {"content", ""}}},
                {"logprobs", nullptr},
                {"finish_reason", nullptr}};
    head["choices"] = Json::array({choice});
    if (request_.return_token_ids)
      head["prompt_token_ids"] = prompts_[static_cast<size_t>(c.prompt)];
    responder_->Write("data: " + Dump(head) + "\n\n");
  }
  Json j = Envelope(object);
  Json choice = ChoiceJson(index, delta, tokens, true);
  if (!request_.chat && request_.return_token_ids) {
    choice["prompt_token_ids"] =
        first ? Json(prompts_[static_cast<size_t>(c.prompt)]) : Json(nullptr);
  }
  j["choices"] = Json::array({std::move(choice)});
  if (request_.continuous_usage) j["usage"] = Usage();
  responder_->Write("data: " + Dump(j) + "\n\n");
}

void Generation::FinishAll() {
  int64_t generated = 0;
  for (const Choice& c : choices_) generated += c.generated;
  int64_t prompt = 0;
  for (const auto& p : prompts_) prompt += std::ssize(p);
  shared_.metrics->Done(
      {.e2e_seconds =
           std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(),
       .prompt_tokens = prompt,
       .generated_tokens = generated,
       .max_tokens = request_.params.max_tokens,
       .n = request_.params.n});
  if (request_.stream) {
    if (request_.include_usage) {
      Json j = Envelope(request_.chat ? "chat.completion.chunk" : "text_completion");
      j["choices"] = Json::array();
      j["usage"] = Usage();
      j["system_fingerprint"] = shared_.fingerprint;
      responder_->Write("data: " + Dump(j) + "\n\n");
    }
    responder_->Write("data: [DONE]\n\n");
    responder_->End();
    return;
  }
  // A sample that could not be computed makes the whole answer an error: half an answer with status
  // 200 would count as success.
  for (const Choice& c : choices_) {
    if (c.error.empty()) continue;
    const Json error{{"error", Json{{"message", c.error},
                                    {"type", "InternalServerError"},
                                    {"param", nullptr},
                                    {"code", 500}}}};
    responder_->Send(500, "application/json", Dump(error));
    return;
  }
  Json j = Envelope(request_.chat ? "chat.completion" : "text_completion");
  Json list = Json::array();
  for (size_t i = 0; i < choices_.size(); ++i) {
    const Choice& c = choices_[i];
    Json choice = ChoiceJson(i, c.text, c.tokens, false);
    if (request_.params.prompt_logprobs && !request_.chat)
      choice["prompt_logprobs"] = PromptLogprobsJson(c);
    if (!request_.chat && request_.return_token_ids)
      choice["prompt_token_ids"] = prompts_[static_cast<size_t>(c.prompt)];
    list.push_back(std::move(choice));
  }
  j["choices"] = std::move(list);
  j["usage"] = Usage();
  j["system_fingerprint"] = shared_.fingerprint;
  if (request_.chat) {
    if (request_.params.prompt_logprobs)
      j["prompt_logprobs"] = PromptLogprobsJson(choices_.front());
    if (request_.return_token_ids) j["prompt_token_ids"] = prompts_.front();
  }
  responder_->Send(200, "application/json", Dump(j));
}

}  // namespace tare::engine
