#include "engine/client/client.h"

#include <boost/asio.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#include <charconv>
#include <chrono>
#include <memory>
#include <thread>

namespace tare::engine::client {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace bhttp = boost::beast::http;
using asio::ip::tcp;
using boost::system::error_code;

class Exchange : public std::enable_shared_from_this<Exchange> {
 public:
  Exchange(asio::io_context& io, const Endpoint& endpoint, const Call& call,
           Result<Response>* result)
      : stream_(io), endpoint_(endpoint), result_(result) {
    *result_ = Error(Code::kAborted, "{} {}: not finished", call.method, call.path);
    what_ = fmt::format("{} {}:{}{}", call.method, endpoint.host, endpoint.port, call.path);
    request_.method_string(call.method);
    request_.target(call.path);
    request_.version(11);
    request_.set(bhttp::field::host, fmt::format("{}:{}", endpoint.host, endpoint.port));
    request_.set(bhttp::field::connection, "close");
    if (!endpoint.api_key.empty())
      request_.set(bhttp::field::authorization, "Bearer " + endpoint.api_key);
    if (!call.body.empty()) request_.set(bhttp::field::content_type, "application/json");
    request_.body() = call.body;
    request_.prepare_payload();
    parser_.body_limit(size_t{4} << 30);
  }

  void Start() {
    error_code e;
    const asio::ip::address address = asio::ip::make_address(endpoint_.host, e);
    if (e) return Fail("address", e);
    stream_.expires_after(
        std::chrono::nanoseconds(static_cast<int64_t>(endpoint_.timeout_seconds * 1e9)));
    stream_.async_connect(
        tcp::endpoint(address, endpoint_.port), [self = shared_from_this()](error_code error) {
          if (error) return self->Fail("connect", error);
          bhttp::async_write(self->stream_, self->request_, [self](error_code write_error, size_t) {
            // A server that refuses early may close before it has read everything: its answer
            // counts.
            if (write_error && write_error != asio::error::broken_pipe &&
                write_error != asio::error::connection_reset) {
              return self->Fail("send", write_error);
            }
            bhttp::async_read(self->stream_, self->buffer_, self->parser_,
                              [self](error_code read_error, size_t) {
                                if (read_error) return self->Fail("receive", read_error);
                                self->Done();
                              });
          });
        });
  }

 private:
  void Fail(const char* step, error_code e) {
    *result_ = Error(Code::kAborted, "{}: {}: {}", what_, step, e.message());
  }
  void Done() {
    Response response;
    auto& message = parser_.get();
    response.status = static_cast<int>(message.result_int());
    for (const auto& field : message) {
      std::string name(field.name_string());
      for (char& c : name) c = static_cast<char>(c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c);
      response.headers[name] = std::string(field.value());
    }
    response.body = std::move(message.body());
    *result_ = std::move(response);
    error_code ignored;
    stream_.socket().shutdown(tcp::socket::shutdown_both, ignored);
  }

  beast::tcp_stream stream_;
  Endpoint endpoint_;
  Result<Response>* result_;
  std::string what_;
  bhttp::request<bhttp::string_body> request_;
  bhttp::response_parser<bhttp::string_body> parser_;
  beast::flat_buffer buffer_;
};

Result<uint32_t> ParseBits(const Json& word) {
  if (!word.is_string())
    return DataLoss("logprob bits: expected a hex string, got {}", word.type_name());
  const std::string s = word.get<std::string>();
  uint32_t bits = 0;
  if (s.size() != 10 || !s.starts_with("0x"))
    return DataLoss("logprob bits: '{}' is not 0x and eight digits", Printable(s));
  const auto [end, error] = std::from_chars(s.data() + 2, s.data() + 10, bits, 16);
  if (error != std::errc() || end != s.data() + 10)
    return DataLoss("logprob bits: '{}' is not hex", Printable(s));
  return bits;
}

Result<std::vector<uint32_t>> ParseWords(const Json& list) {
  std::vector<uint32_t> words;
  for (const Json& w : list) {
    TARE_ASSIGN_OR_RETURN(const uint32_t bits, ParseBits(w));
    words.push_back(bits);
  }
  return words;
}

Result<std::vector<uint8_t>> ParseHexBytes(const std::string& hex) {
  std::vector<uint8_t> bytes(hex.size() / 2);
  if (hex.size() % 2 != 0) return DataLoss("candidates: an odd number of hex digits");
  for (size_t i = 0; i < bytes.size(); ++i) {
    const auto [end, error] = std::from_chars(&hex[2 * i], &hex[2 * i] + 2, bytes[i], 16);
    if (error != std::errc() || end != &hex[2 * i] + 2)
      return DataLoss("candidates: not hex at digit {}", 2 * i);
  }
  return bytes;
}

Result<Sample> ParseSample(const Json& choice) {
  Sample s;
  const Json& bits = choice.at("tare");
  for (const Json& id : choice.at("token_ids")) s.tokens.push_back(id.get<int32_t>());
  TARE_ASSIGN_OR_RETURN(s.raw_logprob, ParseWords(bits.at("raw_logprob_bits")));
  TARE_ASSIGN_OR_RETURN(s.tempered_logprob, ParseWords(bits.at("tempered_logprob_bits")));
  TARE_ASSIGN_OR_RETURN(s.processed_logprob, ParseWords(bits.at("processed_logprob_bits")));
  for (const Json& v : bits.at("weight_version")) s.weight_version.push_back(v.get<int64_t>());
  for (const Json& v : bits.at("kept")) s.kept.push_back(v.get<int32_t>());
  if (bits.contains("candidates")) {
    for (const Json& hex : bits["candidates"]) {
      TARE_ASSIGN_OR_RETURN(std::vector<uint8_t> bytes, ParseHexBytes(hex.get<std::string>()));
      s.candidates.push_back(std::move(bytes));
    }
  }
  if (bits.contains("prompt_raw_logprob_bits")) {
    const Json& prompt = bits["prompt_raw_logprob_bits"];
    for (size_t i = 1; i < prompt.size(); ++i) {
      TARE_ASSIGN_OR_RETURN(const uint32_t word, ParseBits(prompt[i]));
      s.prompt_raw_logprob.push_back(word);
    }
  }
  s.finish_reason = choice.at("finish_reason").get<std::string>();
  const size_t n = s.tokens.size();
  if (s.raw_logprob.size() != n || s.tempered_logprob.size() != n ||
      s.processed_logprob.size() != n || s.weight_version.size() != n || s.kept.size() != n) {
    return DataLoss("a sample of {} tokens has lists of other lengths", n);
  }
  return s;
}

Result<Json> Answer(const Result<Response>& response, const std::string& what) {
  TARE_RETURN_IF_ERROR(response.status());
  Result<Json> json = ParseJson(response->body, {.max_bytes = size_t{4} << 30, .max_depth = 32});
  if (response->status / 100 == 2) return json;
  std::string message = response->body.substr(0, 500);
  if (json.ok() && json->is_object() && json->contains("error") && (*json)["error"].is_object()) {
    message = (*json)["error"].value("message", message);
  }
  return Error(response->status / 100 == 4 ? Code::kInvalidArgument : Code::kAborted, "{}: {} {}",
               what, response->status, Printable(message));
}

}  // namespace

std::vector<Result<Response>> SendAll(const Endpoint& endpoint, const std::vector<Call>& calls) {
  std::vector<Result<Response>> results(calls.size(), Error(Code::kAborted, "not sent"));
  asio::io_context io{1};
  for (size_t i = 0; i < calls.size(); ++i) {
    std::make_shared<Exchange>(io, endpoint, calls[i], &results[i])->Start();
  }
  io.run();
  return results;
}

Result<Response> Send(const Endpoint& endpoint, const Call& call) {
  return SendAll(endpoint, {call}).front();
}

Result<Json> SendJson(const Endpoint& endpoint, const std::string& method, const std::string& path,
                      const Json& body) {
  return Answer(Send(endpoint, {method, path, body.is_null() ? "" : body.dump()}),
                method + " " + path);
}

std::vector<Result<std::vector<Sample>>> Complete(const Endpoint& endpoint,
                                                  const std::vector<CompletionRequest>& requests) {
  std::vector<Call> calls;
  for (const CompletionRequest& r : requests) {
    Json body{{"prompt", r.prompt},
              {"n", r.n},
              {"max_tokens", r.max_tokens},
              {"temperature", r.temperature},
              {"top_p", r.top_p},
              {"top_k", r.top_k},
              {"ignore_eos", r.ignore_eos},
              {"stop_token_ids", r.stop_token_ids},
              {"logprobs", 0},
              {"return_token_ids", true},
              {"return_logprob_bits", true},
              {"return_candidates", r.candidates}};
    if (r.seed) body["seed"] = *r.seed;
    if (r.prompt_logprobs) body["prompt_logprobs"] = 0;
    calls.push_back({"POST", "/v1/completions", body.dump()});
  }
  std::vector<Result<std::vector<Sample>>> results;
  for (const Result<Response>& response : SendAll(endpoint, calls)) {
    results.push_back([&]() -> Result<std::vector<Sample>> {
      TARE_ASSIGN_OR_RETURN(const Json json, Answer(response, "POST /v1/completions"));
      try {
        std::vector<Sample> samples;
        for (const Json& choice : json.at("choices")) {
          TARE_ASSIGN_OR_RETURN(Sample sample, ParseSample(choice));
          samples.push_back(std::move(sample));
        }
        return samples;
      } catch (const nlohmann::json::exception& e) {
        return DataLoss("POST /v1/completions: {}", e.what());
      }
    }());
  }
  return results;
}

Status WaitHealthy(const Endpoint& endpoint, double seconds) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  Endpoint quick = endpoint;
  quick.timeout_seconds = 2;
  Status last = Error(Code::kAborted, "no answer yet");
  while (std::chrono::steady_clock::now() < deadline) {
    const Result<Response> r = Send(quick, {"GET", "/health", ""});
    if (r.ok() && r->status == 200) return Ok();
    last = r.ok() ? Error(Code::kAborted, "GET /health: {}", r->status) : r.status();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  return last;
}

}  // namespace tare::engine::client
