#include "engine/serving.h"

#include <malloc.h>
#include <unistd.h>

#include <filesystem>

#include "base/env.h"
#include "models/chat_template.h"
#include "models/load_tokenizer.h"
#include "models/packed.h"
#include "tensor/checkpoint.h"
#include "tensor/digest.h"
#include "tensor/weight_hash.h"

namespace tare::engine {
namespace {

// None for a checkpoint that brings no tokenizer: it serves token ids.
Result<std::optional<models::Tokenizer>> OptionalTokenizer(const Checkpoint& checkpoint) {
  const TokenizerSource& source = checkpoint.tokenizer();
  if (source.tokenizer_json_path.empty() && source.gguf_model.empty())
    return std::optional<models::Tokenizer>();
  TARE_ASSIGN_OR_RETURN(models::Tokenizer tokenizer,
                        models::LoadTokenizer(Env::Real(), checkpoint));
  return std::optional<models::Tokenizer>(std::move(tokenizer));
}

// Renders messages; for a model without a known template an answer that says what to do instead.
std::function<Result<std::string>(const std::vector<ChatMessage>&, bool)> ChatRenderer(
    const Checkpoint& checkpoint) {
  const auto format = [&]() -> Result<models::ChatFormat> {
    TARE_ASSIGN_OR_RETURN(const std::string text,
                          models::LoadChatTemplate(Env::Real(), checkpoint));
    return models::FindChatFormat(text);
  }();
  return [format](const std::vector<ChatMessage>& messages,
                  bool add_generation_prompt) -> Result<std::string> {
    if (!format.ok()) return InvalidArgument("messages: {}", format.status().message());
    std::vector<models::ChatMessage> list;
    list.reserve(messages.size());
    for (const ChatMessage& m : messages) list.push_back({m.role, m.content});
    models::ChatOptions options;
    options.add_generation_prompt = add_generation_prompt;
    Result<std::string> text = models::RenderChat(*format, list, options);
    if (!text.ok()) return InvalidArgument("messages: {}", text.status().message());
    return text;
  };
}

std::string SelfHash() {
  const Result<std::string> bytes = Env::Real()->ReadFile("/proc/self/exe");
  return bytes.ok() ? Hex(Sha256Of(*bytes)) : "unreadable: " + bytes.status().message();
}

}  // namespace

Result<std::string> HeldWeightHash(const models::Model& model, ThreadPool* pool, bool codes) {
  TARE_ASSIGN_OR_RETURN(const Sha256Digest digest, models::HashHeld(pool, model, codes));
  return Hex(digest);
}

Result<std::unique_ptr<Serving>> Serving::Start(const ServingConfig& given) {
  ServingConfig config = given;
  // What is freed goes back to the system: else the old weights of every update stay with the C
  // library.
  ::mallopt(M_MMAP_THRESHOLD, 256 << 10);
  TARE_ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::Open(config.model_path));
  std::unique_ptr<Serving> serving(new Serving());
  serving->model_name_ = config.served_model_name;
  if (serving->model_name_.empty()) {
    const std::filesystem::path path(config.model_path);
    serving->model_name_ =
        path.has_filename() ? path.filename().string() : path.parent_path().filename().string();
  }
  TARE_ASSIGN_OR_RETURN(serving->tokenizer_, OptionalTokenizer(checkpoint));

  const models::ModelOptions options{.max_positions = config.engine.scheduler.max_model_len,
                                     .side = config.engine.side};
  // Codes of the Hopper step are made at load, not by the first request; the native arm computes in
  // its own way whatever the profile.
  const bool codes = config.engine.profile == Profile::kSm90Mma &&
                     config.engine.batch_invariant.effective == ops::BatchInvariance::kOn;
  ThreadPool pool(config.engine.threads);
  TARE_ASSIGN_OR_RETURN(models::Model model, models::Model::Load(&pool, checkpoint, options));
  if (codes) models::MakeCodes(&pool, model);
  if (config.engine.eos.empty()) {
    for (const int64_t id : checkpoint.config().eos_token_ids)
      config.engine.eos.push_back(static_cast<int32_t>(id));
  }
  TARE_ASSIGN_OR_RETURN(const std::string weights, HeldWeightHash(model, &pool, codes));
  const int threads = config.engine.threads;
  Engine::Hooks hooks{
      .load = [options, threads](const std::string& path,
                                 models::Model* memory) -> Result<LoadedWeights> {
        TARE_ASSIGN_OR_RETURN(const Checkpoint update, Checkpoint::Open(path));
        ThreadPool load_pool(threads);
        models::ModelOptions bare = options;
        bare.pack = false;
        std::vector<WeightHashItem> items;
        TARE_ASSIGN_OR_RETURN(models::Model loaded,
                              models::Model::Load(&load_pool, update, bare, memory, &items));
        TARE_ASSIGN_OR_RETURN(const Sha256Digest digest, HashOfItems(std::move(items)));
        return LoadedWeights{std::move(loaded), Hex(digest)};
      },
      .repack = [threads, codes](models::Model* model) -> Status {
        ThreadPool pack_pool(threads);
        TARE_RETURN_IF_ERROR(model->Repack(&pack_pool));
        if (codes) models::MakeCodes(&pack_pool, *model);
        return Ok();
      },
      .weight_hash = [threads, codes](const models::Model& held) -> Result<std::string> {
        ThreadPool hash_pool(threads);
        return HeldWeightHash(held, &hash_pool, codes);
      },
  };
  TARE_ASSIGN_OR_RETURN(serving->engine_,
                        Engine::Create(std::move(model), config.engine, std::move(hooks)));

  ApiConfig api{.model_name = serving->model_name_,
                .model_path = config.model_path,
                .api_key = config.api_key,
                .version = config.program_version,
                .processed_logprobs = config.processed_logprobs,
                .tokenizer = serving->tokenizer(),
                .chat = nullptr,
                .identity = Json{{"program", "tare"},
                                 {"version", config.program_version},
                                 {"binary_sha256", SelfHash()},
                                 {"pid", static_cast<int64_t>(::getpid())},
                                 {"model", serving->model_name_},
                                 {"weights_at_start", weights},
                                 {"device", DeviceName(Device::kCpu)}},
                .shutdown = config.shutdown};
  api.chat = ChatRenderer(checkpoint);
  serving->api_ = std::make_unique<Api>(serving->engine_.get(), std::move(api));
  TARE_ASSIGN_OR_RETURN(serving->server_,
                        http::Server::Start(config.http, serving->api_->handler()));
  return serving;
}

Serving::~Serving() { Stop(0); }

void Serving::Stop(double seconds) {
  // The engine first, so that answers in flight can still be written.
  if (engine_) engine_->Stop(seconds);
  if (server_) server_->Stop(seconds > 0 ? 5 : 0);
}

}  // namespace tare::engine
