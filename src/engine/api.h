#pragma once

// The routes of the server, as vLLM has them, and Tare's own beside them (docs/serving.md).
//
//   POST /v1/completions /v1/chat/completions /tokenize /detokenize
//   GET  /v1/models /health /metrics /version
//   GET  /weights /identity          what serves, and what decides its arithmetic
//   POST /update_weights /reset_prefix_cache /shutdown

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "engine/engine.h"
#include "engine/generation.h"
#include "engine/http/server.h"
#include "engine/metrics.h"
#include "models/tokenizer.h"

namespace tare::engine {

struct ApiConfig {
  std::string model_name;  // as clients name it
  std::string model_path;
  std::string api_key;  // empty: none asked for
  std::string version;  // of the program
  bool processed_logprobs = false;
  const models::Tokenizer* tokenizer = nullptr;
  // Renders messages; an error tells how to pass token ids instead.
  std::function<Result<std::string>(const std::vector<ChatMessage>& messages,
                                    bool add_generation_prompt)>
      chat;
  // What decides the arithmetic, beside what the engine itself knows.
  Json identity;
  // Asked by POST /shutdown and by nothing else.
  std::function<void()> shutdown;
};

class Api {
 public:
  Api(Engine* engine, ApiConfig config);
  ~Api();
  http::Handler handler();

 private:
  // One thread that runs what is posted to it, in order.
  class Worker {
   public:
    Worker();
    ~Worker();
    void Post(std::function<void()> task);

   private:
    std::mutex mutex_;
    std::condition_variable wake_;
    std::deque<std::function<void()>> tasks_;
    bool stop_ = false;
    std::thread thread_;
  };

  void Handle(const http::Request& request, const http::ResponderPtr& responder);
  void Generate(const http::Request& request, const http::ResponderPtr& responder, bool chat);
  Result<std::vector<std::vector<int32_t>>> Prompts(ParsedRequest* request);
  void Tokenize(const http::Request& request, const http::ResponderPtr& responder);
  void Detokenize(const http::Request& request, const http::ResponderPtr& responder);
  void UpdateWeights(const http::Request& request, const http::ResponderPtr& responder);
  Json Identity();

  Engine* engine_;
  ApiConfig config_;
  Metrics metrics_;
  Worker events_;    // generations: decoding and writing
  Worker commands_;  // what may take long: weight updates
};

// The answer for an error: 400 for an invalid argument (param: what stands before the first ':'),
// 404, 409 for a precondition, 413, 503 when a limit is reached, else 500.
void SendError(const http::ResponderPtr& responder, const Status& status);

}  // namespace tare::engine
