#include "engine/api.h"

#include <openssl/crypto.h>

#include <chrono>

#include "base/json.h"

namespace tare::engine {
namespace {

std::string Dump(const Json& j) { return j.dump(-1, ' ', false, Json::error_handler_t::replace); }

void SendJson(const http::ResponderPtr& responder, const Json& j, int status = 200) {
  responder->Send(status, "application/json", Dump(j));
}

void SendErrorText(const http::ResponderPtr& responder, int code, const char* type,
                   const std::string& message, const Json& param) {
  SendJson(
      responder,
      Json{{"error", Json{{"message", message}, {"type", type}, {"param", param}, {"code", code}}}},
      code);
}

// A Result of something that may throw inside a library.
template <typename F>
auto Guarded(F&& f) -> decltype(f()) {
  try {
    return f();
  } catch (const std::exception& e) {
    return InvalidArgument("body: {}", e.what());
  }
}

Result<Json> Body(const http::Request& request) {
  if (request.body.empty()) return InvalidArgument("body: it is empty; a JSON object is expected");
  Result<Json> json = ParseJson(request.body, {.max_bytes = size_t{64} << 20, .max_depth = 32});
  if (!json.ok()) return InvalidArgument("body: {}", json.status().message());
  if (!json->is_object())
    return InvalidArgument("body: expected an object, got {}", json->type_name());
  return json;
}

}  // namespace

void SendError(const http::ResponderPtr& responder, const Status& status) {
  const std::string& m = status.message();
  const size_t colon = m.find(':');
  const bool named = colon < 80 && m.find(' ') >= colon;
  const Json param = named ? Json(m.substr(0, colon)) : Json(nullptr);
  switch (status.code()) {
    case Code::kInvalidArgument:
    case Code::kUnsupported:
      return SendErrorText(responder, 400, "BadRequestError", m, param);
    case Code::kNotFound:
      return SendErrorText(responder, 404, "NotFoundError", m, param);
    case Code::kPrecondition:
    case Code::kDataLoss:
      return SendErrorText(responder, 409, "ConflictError", m, param);
    case Code::kExhausted:
      return SendErrorText(responder, 503, "ServiceUnavailableError", m, param);
    default:
      return SendErrorText(responder, 500, "InternalServerError", m, param);
  }
}

Api::Worker::Worker() {
  thread_ = std::thread([this] {
    for (;;) {
      std::function<void()> task;
      {
        std::unique_lock lock(mutex_);
        wake_.wait(lock, [&] { return stop_ || !tasks_.empty(); });
        if (tasks_.empty()) return;
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      task();
    }
  });
}

Api::Worker::~Worker() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_one();
  thread_.join();
}

void Api::Worker::Post(std::function<void()> task) {
  {
    std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
  }
  wake_.notify_one();
}

Api::Api(Engine* engine, ApiConfig config) : engine_(engine), config_(std::move(config)) {}
Api::~Api() = default;

http::Handler Api::handler() {
  return [this](const std::shared_ptr<const http::Request>& request,
                const http::ResponderPtr& responder) { Handle(*request, responder); };
}

void Api::Handle(const http::Request& request, const http::ResponderPtr& responder) {
  const bool get = request.method == "GET" || request.method == "HEAD";
  const bool post = request.method == "POST";
  const std::string& path = request.path;
  if (!config_.api_key.empty() && path != "/health") {
    const auto it = request.headers.find("authorization");
    const std::string wanted = "Bearer " + config_.api_key;
    if (it == request.headers.end() || it->second.size() != wanted.size() ||
        CRYPTO_memcmp(it->second.data(), wanted.data(), wanted.size()) != 0) {
      return SendErrorText(responder, 401, "AuthenticationError",
                           "a valid API key is needed: Authorization: Bearer KEY", "authorization");
    }
  }
  struct Route {
    const char* path;
    bool post;
    std::function<void()> run;
  };
  const Route routes[] = {
      {"/v1/completions", true, [&] { Generate(request, responder, false); }},
      {"/v1/chat/completions", true, [&] { Generate(request, responder, true); }},
      {"/tokenize", true, [&] { Tokenize(request, responder); }},
      {"/detokenize", true, [&] { Detokenize(request, responder); }},
      {"/update_weights", true, [&] { UpdateWeights(request, responder); }},
      {"/reset_prefix_cache", true,
       [&] {
         commands_.Post([this, responder] {
           const Result<int64_t> dropped = engine_->ResetPrefixCache();
           if (!dropped.ok()) return SendError(responder, dropped.status());
           SendJson(responder, Json{{"dropped_blocks", *dropped}});
         });
       }},
      {"/shutdown", true,
       [&] {
         SendJson(responder, Json{{"status", "stopping"}}, 202);
         if (config_.shutdown) config_.shutdown();
       }},
      {"/health", false, [&] { responder->Send(engine_->GetStats().healthy ? 200 : 503, "", ""); }},
      {"/version", false,
       [&] {
         const Switch& s = engine_->config().batch_invariant;
         SendJson(responder, Json{{"version", config_.version},
                                  {"batch_invariant", s.effective == ops::BatchInvariance::kOn},
                                  {kSwitchName, s.raw ? Json(*s.raw) : Json(nullptr)}});
       }},
      {"/v1/models", false,
       [&] {
         Json model{{"id", config_.model_name},
                    {"object", "model"},
                    {"created", 0},
                    {"owned_by", "tare"},
                    {"root", config_.model_path},
                    {"parent", nullptr},
                    {"max_model_len", engine_->config().scheduler.max_model_len}};
         SendJson(responder, Json{{"object", "list"}, {"data", Json::array({model})}});
       }},
      {"/metrics", false,
       [&] {
         responder->Send(200, "text/plain; version=0.0.4; charset=utf-8",
                         metrics_.Print(engine_->GetStats(), config_.model_name,
                                        engine_->config().batch_invariant.effective ==
                                            ops::BatchInvariance::kOn));
       }},
      {"/weights", false,
       [&] {
         commands_.Post([this, responder] {
           const Result<std::string> hash = engine_->WeightHash();
           if (!hash.ok()) return SendError(responder, hash.status());
           SendJson(responder,
                    Json{{"version", engine_->GetStats().weight_version}, {"sha256", *hash}});
         });
       }},
      {"/identity", false, [&] { SendJson(responder, Identity()); }},
  };
  for (const Route& route : routes) {
    if (path != route.path) continue;
    if (route.post ? post : get) return route.run();
    return SendErrorText(responder, 405, "MethodNotAllowedError",
                         fmt::format("{} wants {}", path, route.post ? "POST" : "GET"), "method");
  }
  SendErrorText(responder, 404, "NotFoundError",
                fmt::format("no route {}", Printable(path.substr(0, 200))), "path");
}

Result<std::vector<std::vector<int32_t>>> Api::Prompts(ParsedRequest* r) {
  if (!r->token_prompts.empty()) return std::move(r->token_prompts);
  if (config_.tokenizer == nullptr) {
    return InvalidArgument(
        "{}: this model has no tokenizer; send token ids as `prompt` to /v1/completions",
        r->chat ? "messages" : "prompt");
  }
  const char* field = r->chat ? "messages" : "prompt";
  if (r->chat) {
    TARE_ASSIGN_OR_RETURN(std::string text, config_.chat(r->messages, r->add_generation_prompt));
    r->texts = {std::move(text)};
  }
  std::vector<std::vector<int32_t>> prompts;
  for (const std::string& text : r->texts) {
    // A chat template writes the special tokens itself.
    const models::EncodeOptions options{.parse_special = true,
                                        .add_special = !r->chat && r->add_special_tokens};
    Result<std::vector<int32_t>> ids = config_.tokenizer->Encode(text, options);
    if (!ids.ok()) return InvalidArgument("{}: {}", field, ids.status().message());
    prompts.push_back(*std::move(ids));
  }
  return prompts;
}

void Api::Generate(const http::Request& request, const http::ResponderPtr& responder, bool chat) {
  const Result<Json> body = Body(request);
  if (!body.ok()) return SendError(responder, body.status());
  Result<ParsedRequest> parsed =
      Guarded([&] { return chat ? ParseChat(*body) : ParseCompletion(*body); });
  if (!parsed.ok()) return SendError(responder, parsed.status());
  if (!parsed->model.empty() && parsed->model != config_.model_name) {
    return SendErrorText(responder, 404, "NotFoundError",
                         fmt::format("model: `{}` is not served; `{}` is",
                                     Printable(parsed->model.substr(0, 200)), config_.model_name),
                         "model");
  }
  Result<std::vector<std::vector<int32_t>>> prompts = Prompts(&*parsed);
  if (!prompts.ok()) return SendError(responder, prompts.status());
  const int64_t longest = engine_->config().scheduler.max_model_len;
  for (const auto& prompt : *prompts) {
    const int64_t left = longest - std::ssize(prompt);
    if (left < 1) {
      return SendError(responder,
                       InvalidArgument("{}: {} tokens leave no room in the model's length of {}",
                                       chat ? "messages" : "prompt", prompt.size(), longest));
    }
    if (chat && !parsed->max_tokens_given) {
      parsed->params.max_tokens = static_cast<int32_t>(std::min<int64_t>(left, INT32_MAX));
    } else if (parsed->params.max_tokens > left) {
      return SendError(
          responder,
          InvalidArgument("max_tokens: {} with a prompt of {} exceeds the model's length of {}",
                          parsed->params.max_tokens, prompt.size(), longest));
    }
  }
  const Generation::Shared shared{.engine = engine_,
                                  .metrics = &metrics_,
                                  .tokenizer = config_.tokenizer,
                                  .fingerprint = config_.version,
                                  .model_name = config_.model_name,
                                  .processed_logprobs = config_.processed_logprobs};
  const auto generation =
      std::make_shared<Generation>(shared, *std::move(parsed), *std::move(prompts), responder);
  // Everything of a generation happens on the event worker; so does the news that the client has
  // gone.
  responder->OnClose([this, weak = std::weak_ptr<Generation>(generation)] {
    events_.Post([weak] {
      if (const auto g = weak.lock()) g->Abort();
    });
  });
  const Status status =
      generation->Start([this](std::function<void()> task) { events_.Post(std::move(task)); });
  if (!status.ok()) SendError(responder, status);
}

void Api::Tokenize(const http::Request& request, const http::ResponderPtr& responder) {
  const Result<Json> body = Body(request);
  if (!body.ok()) return SendError(responder, body.status());
  Json as_request = *body;
  for (const char* key : {"return_token_strs"}) as_request.erase(key);
  const bool chat = as_request.contains("messages");
  Result<ParsedRequest> parsed =
      Guarded([&] { return chat ? ParseChat(as_request) : ParseCompletion(as_request); });
  if (!parsed.ok()) return SendError(responder, parsed.status());
  const Result<std::vector<std::vector<int32_t>>> prompts = Prompts(&*parsed);
  if (!prompts.ok()) return SendError(responder, prompts.status());
  if (prompts->size() != 1)
    return SendError(responder, InvalidArgument("prompt: one text is expected"));
  SendJson(responder, Json{{"count", prompts->front().size()},
                           {"max_model_len", engine_->config().scheduler.max_model_len},
                           {"tokens", prompts->front()}});
}

void Api::Detokenize(const http::Request& request, const http::ResponderPtr& responder) {
  const Result<Json> body = Body(request);
  if (!body.ok()) return SendError(responder, body.status());
  if (config_.tokenizer == nullptr)
    return SendError(responder, Unsupported("tokens: this model has no tokenizer"));
  const auto it = body->find("tokens");
  if (it == body->end() || !it->is_array())
    return SendError(responder, InvalidArgument("tokens: a list of token ids is expected"));
  std::vector<int32_t> ids;
  for (const Json& v : *it) {
    if (!v.is_number_integer() || v.get<int64_t>() < 0 ||
        v.get<int64_t>() >= config_.tokenizer->vocab_size()) {
      return SendError(responder, InvalidArgument("tokens: entry {} is no token id", ids.size()));
    }
    ids.push_back(v.get<int32_t>());
  }
  const Result<std::string> text = config_.tokenizer->Decode(ids);
  if (!text.ok()) return SendError(responder, text.status());
  SendJson(responder, Json{{"prompt", *text}});
}

void Api::UpdateWeights(const http::Request& request, const http::ResponderPtr& responder) {
  const Result<Json> body = Body(request);
  if (!body.ok()) return SendError(responder, body.status());
  int64_t version = 0;
  std::string path, sha256;
  InFlight in_flight = InFlight::kFinish;
  for (const auto& [key, value] : body->items()) {
    if (key == "version" && value.is_number_integer()) {
      version = value.get<int64_t>();
    } else if (key == "path" && value.is_string()) {
      path = value.get<std::string>();
    } else if (key == "sha256" && value.is_string()) {
      sha256 = value.get<std::string>();
    } else if (key == "in_flight" && value.is_string()) {
      const std::string rule = value.get<std::string>();
      if (rule != "finish" && rule != "abort" && rule != "refuse") {
        return SendError(responder, InvalidArgument("in_flight: finish, abort or refuse"));
      }
      in_flight = rule == "finish"  ? InFlight::kFinish
                  : rule == "abort" ? InFlight::kAbort
                                    : InFlight::kRefuse;
    } else {
      return SendError(
          responder,
          InvalidArgument(
              "{}: unknown field or wrong type; version (integer), path, sha256, in_flight",
              Printable(key.substr(0, 80))));
    }
  }
  if (path.empty())
    return SendError(responder, InvalidArgument("path: missing; a checkpoint directory"));
  if (const Result<Sha256Digest> digest = ParseSha256(sha256); !digest.ok()) {
    return SendError(responder, InvalidArgument("sha256: {}; `tare model hash` prints it",
                                                digest.status().message()));
  }
  commands_.Post([this, responder, version, path, sha256, in_flight] {
    const Result<UpdateReport> report = engine_->UpdateWeights(version, path, sha256, in_flight);
    if (!report.ok()) return SendError(responder, report.status());
    SendJson(responder, Json{{"version", report->version},
                             {"sha256", report->sha256},
                             {"dropped_blocks", report->dropped_blocks},
                             {"finished", report->finished},
                             {"aborted", report->aborted},
                             {"load_seconds", report->load_seconds}});
  });
}

Json Api::Identity() {
  Json id = config_.identity;
  const EngineConfig& c = engine_->config();
  const Switch& s = c.batch_invariant;
  const Status recheck = Recheck(s);
  id["switch"] =
      Json{{"name", kSwitchName},
           {"at_start", s.raw ? Json(*s.raw) : Json(nullptr)},
           {"effective", s.effective == ops::BatchInvariance::kOn ? 1 : 0},
           {"changed_since_start", recheck.ok() ? Json(nullptr) : Json(recheck.message())}};
  const WorkerChecks w = engine_->workers();
  id["workers"] =
      Json{{"threads", w.threads}, {"checked", w.checked}, {"saw_another_switch", w.other_switch}};
  id["profile"] = ProfileName(c.profile);
  id["faults"] = fault::Selected();
  id["block_size"] = c.scheduler.block_size;
  id["num_blocks"] = c.scheduler.num_blocks;
  id["max_num_seqs"] = c.scheduler.max_num_seqs;
  id["max_num_batched_tokens"] = c.scheduler.max_num_batched_tokens;
  id["max_model_len"] = c.scheduler.max_model_len;
  id["prefix_caching"] = c.scheduler.prefix_caching;
  id["chunked_prefill"] = c.scheduler.chunked_prefill;
  const Stats stats = engine_->GetStats();
  id["weight_version"] = stats.weight_version;
  // Since the process began.
  id["counters"] = Json{{"mixed_steps", stats.scheduler.mixed_steps},
                        {"cache_hits", stats.scheduler.prefix_hits},
                        {"updates", stats.weight_updates}};
  Json kernels = Json::object();
  for (const ops::Launch& l : engine_->TakeLaunches()) {
    Json& k = kernels[l.op + " " + l.kernel + " " + l.dtypes];
    k = k.is_null() ? 1 : k.get<int64_t>() + 1;
  }
  id["kernels_since_last_call"] = std::move(kernels);
  return id;
}

}  // namespace tare::engine
