#pragma once

// Everything between a checkpoint on disk and a server on a port: loads the model and its
// tokenizer, starts engine, API and HTTP. What `tare serve` runs, and what tests and tools run in
// their process.

#include <memory>
#include <optional>
#include <string>

#include "engine/api.h"
#include "engine/engine.h"
#include "engine/http/server.h"
#include "models/tokenizer.h"

namespace tare::engine {

struct ServingConfig {
  std::string model_path;
  std::string served_model_name;  // empty: the last part of the path
  EngineConfig engine;
  http::ServerConfig http;
  std::string api_key;
  bool processed_logprobs = false;
  std::string program_version = "0.1.0";
  std::function<void()> shutdown;  // called by POST /shutdown
};

// The canonical weight hash of what a model holds in memory and computes from, 64 hex digits: over
// its tensors, after every packed copy was compared with them. kDataLoss names the first copy that
// holds something else.
// `codes`: the codes of the Hopper step too.
Result<std::string> HeldWeightHash(const models::Model& model, ThreadPool* pool, bool codes);

class Serving {
 public:
  static Result<std::unique_ptr<Serving>> Start(const ServingConfig& config);
  ~Serving();

  uint16_t port() const { return server_->port(); }
  Engine& engine() { return *engine_; }
  const models::Tokenizer* tokenizer() const { return tokenizer_ ? &*tokenizer_ : nullptr; }
  const std::string& model_name() const { return model_name_; }
  // Requests in flight get up to `seconds`; then everything ends.
  void Stop(double seconds);

 private:
  Serving() = default;
  std::string model_name_;
  std::optional<models::Tokenizer> tokenizer_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<Api> api_;
  std::unique_ptr<http::Server> server_;
};

}  // namespace tare::engine
