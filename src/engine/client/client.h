#pragma once

// The client side of the server, for the RL loop, tools and tests: HTTP/1.1 with time limits, and
// the calls that carry exact bits. It includes nothing of the engine itself.

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/status.h"

namespace tare::engine::client {

struct Endpoint {
  std::string host = "127.0.0.1";
  uint16_t port = 0;
  std::string api_key{};
  double timeout_seconds = 600;  // for one whole call
};

struct Call {
  std::string method = "POST";
  std::string path;
  std::string body;
};

struct Response {
  int status = 0;
  std::map<std::string, std::string> headers;  // names in lower case
  std::string body;
};

// kAborted when the connection breaks or the time is over; any HTTP status is an answer.
Result<Response> Send(const Endpoint& endpoint, const Call& call);
// All at once, one connection each; results in the order of the calls.
std::vector<Result<Response>> SendAll(const Endpoint& endpoint, const std::vector<Call>& calls);

// A JSON answer with status 2xx; else the server's own error as kInvalidArgument (4xx) or kAborted.
Result<Json> SendJson(const Endpoint& endpoint, const std::string& method, const std::string& path,
                      const Json& body = nullptr);

struct CompletionRequest {
  std::vector<int32_t> prompt{};
  int32_t n = 1;
  int32_t max_tokens = 16;
  float temperature = 1.0f;
  float top_p = 1.0f;
  int32_t top_k = 0;
  std::optional<uint64_t> seed{};
  std::vector<int32_t> stop_token_ids{};
  bool ignore_eos = false;
  bool prompt_logprobs = false;
  bool candidates = false;
};

struct Sample {
  std::vector<int32_t> tokens;
  // Bits of f32, one a token, by kind; never converted through decimals.
  std::vector<uint32_t> raw_logprob, tempered_logprob, processed_logprob;
  std::vector<int64_t> weight_version;
  std::vector<int32_t> kept;
  std::vector<std::vector<uint8_t>> candidates;
  std::vector<uint32_t> prompt_raw_logprob;  // of prompt[1..]
  std::string finish_reason;
};

// One result per request, each with its n samples.
std::vector<Result<std::vector<Sample>>> Complete(const Endpoint& endpoint,
                                                  const std::vector<CompletionRequest>& requests);

// Waits until GET /health answers 200. kAborted after `seconds`.
Status WaitHealthy(const Endpoint& endpoint, double seconds);

}  // namespace tare::engine::client
