#pragma once

// Generation: one HTTP request on its way: collects the events of its samples, turns tokens into
// text, looks for stop strings, and writes vLLM's answer, whole or as a stream of events.

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "engine/http/server.h"
#include "engine/metrics.h"
#include "engine/parse.h"
#include "models/tokenizer.h"

namespace tare::engine {

class Generation : public std::enable_shared_from_this<Generation> {
 public:
  struct Shared {
    Engine* engine = nullptr;
    Metrics* metrics = nullptr;
    const models::Tokenizer* tokenizer = nullptr;  // null: ids alone, no text
    std::string fingerprint;                       // "tare-0.1.0-1a2b3c4d"
    std::string model_name;
    bool processed_logprobs = false;  // which logprob the field of that name carries
  };

  Generation(const Shared& shared, ParsedRequest request, std::vector<std::vector<int32_t>> prompts,
             http::ResponderPtr responder);

  // Queues every sample. On an error nothing runs and the caller answers.
  Status Start(const std::function<void(std::function<void()>)>& post);
  const std::string& id() const { return id_; }
  void Abort();  // the client has gone

 private:
  struct Choice {
    int64_t prompt = 0;
    std::unique_ptr<models::StreamDecoder> decoder;
    std::string text;                 // given out or, unstreamed, collected
    std::string held;                 // might be the start of a stop string
    int64_t offset = 0;               // characters before the next token
    std::vector<TokenOutput> tokens;  // unstreamed: all; streamed: not yet given out
    std::vector<PromptLogprob> prompt_logprobs;
    int64_t generated = 0;
    int64_t cached_tokens = 0;
    int64_t weight_version = 0;
    std::string finish;  // empty while it runs
    Json stop_reason = nullptr;
    std::string error;
    std::chrono::steady_clock::time_point last_token;
  };

  void OnEvent(size_t first_choice, const SequenceEvent& event);
  void TakeTokens(Choice* c, const SequenceEvent& event, std::string* delta);
  void StreamChunk(size_t index, const std::string& delta, const std::vector<TokenOutput>& tokens);
  void FinishAll();
  Json ChoiceJson(size_t index, const std::string& text, const std::vector<TokenOutput>& tokens,
                  bool delta);
  Json LogprobsJson(Choice* c, const std::vector<TokenOutput>& tokens);
  Json ChatLogprobsJson(const std::vector<TokenOutput>& tokens) const;
  Json PromptLogprobsJson(const Choice& c) const;
  Json BitsJson(const Choice& c, const std::vector<TokenOutput>& tokens) const;
  Json Envelope(const char* object) const;
  Json Usage() const;
  float Shown(const TokenOutput& t) const {
    return shared_.processed_logprobs ? t.processed_logprob : t.raw_logprob;
  }
  std::string TokenText(int32_t id) const;

  Shared shared_;
  ParsedRequest request_;
  std::vector<std::vector<int32_t>> prompts_;
  http::ResponderPtr responder_;
  std::string id_;
  int64_t created_ = 0;
  std::chrono::steady_clock::time_point start_;
  std::vector<Choice> choices_;
  size_t unfinished_ = 0;
  bool first_token_seen_ = false;
  bool stream_begun_ = false;
  bool gone_ = false;
};

// "0xbf800000": the bits of an f32.
std::string F32Bits(float value);

}  // namespace tare::engine
