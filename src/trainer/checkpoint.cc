#include "trainer/checkpoint.h"

#include <unistd.h>

#include <bit>
#include <cstring>
#include <map>
#include <string_view>
#include <utility>
#include <vector>

#include "base/json.h"
#include "base/sha256.h"
#include "tensor/safetensors.h"

namespace tare::trainer {
namespace {

constexpr char kSchema[] = "tare.trainer-checkpoint/1";

// A directory that is filled beside `dir` and renamed to it.
class Staged {
 public:
  Staged(Env* env, std::string dir)
      : env_(env),
        dir_(std::move(dir)),
        temporary_(fmt::format("{}.partial-{}", dir_, ::getpid())) {}
  ~Staged() {
    if (done_) return;
    if (const auto names = env_->List(temporary_); names.ok()) {
      for (const std::string& name : *names) (void)env_->Remove(temporary_ + "/" + name).ok();
    }
    (void)env_->Remove(temporary_).ok();
  }
  // With `previous` that directory takes the temporary name, and what is in it stays.
  Status Begin(const std::string& previous = "") {
    if (env_->Exists(dir_))
      return Error(Code::kAlreadyExists, "{}: exists; a checkpoint is never overwritten", dir_);
    if (!previous.empty() && env_->Rename(previous, temporary_).ok()) return Ok();
    return env_->CreateDirs(temporary_);
  }
  const std::string& path() const { return temporary_; }
  Status Commit() {
    TARE_RETURN_IF_ERROR(env_->SyncDir(temporary_));
    TARE_RETURN_IF_ERROR(env_->Rename(temporary_, dir_));
    done_ = true;
    const size_t slash = dir_.rfind('/');
    return env_->SyncDir(slash == std::string::npos ? "."
                         : slash == 0               ? "/"
                                                    : dir_.substr(0, slash));
  }

 private:
  Env* env_;
  std::string dir_, temporary_;
  bool done_ = false;
};

std::string Word(float value) { return fmt::format("0x{:08x}", std::bit_cast<uint32_t>(value)); }

// Everything that decides the next step's bits beside the tensors.
Json Settings(const Trainer& trainer) {
  const ops::adamw::Params& a = trainer.options().adamw;
  return Json{{"optimizer", "adamw"},
              {"beta1", Word(a.beta1)},
              {"beta2", Word(a.beta2)},
              {"eps", Word(a.eps)},
              {"weight_decay", Word(a.weight_decay)},
              {"bias_correction", a.bias_correction},
              {"max_gradient_norm", Word(trainer.options().max_gradient_norm)}};
}

}  // namespace

Status PublishWeights(Env* env, const Trainer& trainer, const std::string& source,
                      const std::string& dir, const std::string& previous) {
  Staged staged(env, dir);
  TARE_RETURN_IF_ERROR(staged.Begin(env == Env::Real() ? previous : ""));
  for (const char* name : {"config.json", "generation_config.json", "tokenizer.json",
                           "tokenizer_config.json", "chat_template.jinja"}) {
    const std::string from = source + "/" + name, to = staged.path() + "/" + name;
    if (std::string_view(name) != "config.json" && !env->Exists(from)) continue;
    TARE_ASSIGN_OR_RETURN(const auto text, env->OpenReadable(from));
    if (env->Exists(to)) {
      TARE_ASSIGN_OR_RETURN(const auto there, env->OpenReadable(to));
      if (there->bytes() == text->bytes()) continue;
    }
    TARE_RETURN_IF_ERROR(env->WriteFileAtomic(to, text->bytes()));
  }
  TARE_ASSIGN_OR_RETURN(const auto tensors, trainer.model().NamedTensors());
  const std::string file = staged.path() + "/model.safetensors";
  const std::vector<std::pair<std::string, std::string>> metadata = {{"format", "pt"}};
  if (env->Exists(file)) {
    Status over = OverwriteSafetensors(file, tensors, metadata);
    if (over.ok()) return staged.Commit();
    // With a second name the old bytes are still somebody's.
    if (over.code() != Code::kPrecondition) return over;
    TARE_RETURN_IF_ERROR(env->Remove(file));
  }
  TARE_RETURN_IF_ERROR(WriteSafetensors(env, file, tensors, metadata));
  return staged.Commit();
}

Status SaveState(Env* env, Trainer* trainer, const Progress& progress, const std::string& dir) {
  Staged staged(env, dir);
  TARE_RETURN_IF_ERROR(staged.Begin());
  std::vector<std::pair<std::string, Tensor>> tensors;
  const auto& parameters = trainer->model().parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    tensors.emplace_back("master/" + parameters[i].name, trainer->masters()[i]);
    tensors.emplace_back("m/" + parameters[i].name, trainer->first_moments()[i]);
    tensors.emplace_back("v/" + parameters[i].name, trainer->second_moments()[i]);
  }
  const std::string file = staged.path() + "/state.safetensors";
  TARE_RETURN_IF_ERROR(WriteSafetensors(env, file, tensors));
  TARE_ASSIGN_OR_RETURN(const auto bytes, env->OpenReadable(file));
  TARE_ASSIGN_OR_RETURN(const std::string deployed, trainer->DeployedHash());
  const Json json{{"schema", kSchema},
                  {"step", trainer->step()},
                  {"data_position", progress.data_position},
                  {"seed", progress.seed},
                  {"settings", Settings(*trainer)},
                  {"state_sha256", Hex(Sha256Of(bytes->bytes()))},
                  {"deployed_weights", deployed}};
  TARE_RETURN_IF_ERROR(env->WriteFileAtomic(staged.path() + "/trainer.json", json.dump(1) + "\n"));
  return staged.Commit();
}

Result<Progress> LoadState(Env* env, const std::string& dir, Trainer* trainer) {
  TARE_ASSIGN_OR_RETURN(const std::string text, env->ReadFile(dir + "/trainer.json"));
  Result<Json> parsed = ParseJson(text);
  if (!parsed.ok()) return DataLoss("{}/trainer.json: {}", dir, parsed.status().message());
  const Json& json = *parsed;
  Progress progress;
  std::string state_sha256, deployed;
  int64_t step = 0;
  try {
    if (json.at("schema") != kSchema) {
      return InvalidArgument("{}/trainer.json: schema is {}; {}", dir, json.at("schema").dump(),
                             kSchema);
    }
    step = json.at("step").get<int64_t>();
    progress.data_position = json.at("data_position").get<int64_t>();
    progress.seed = json.at("seed").get<uint64_t>();
    state_sha256 = json.at("state_sha256").get<std::string>();
    deployed = json.at("deployed_weights").get<std::string>();
    if (step < 0 || progress.data_position < 0)
      return DataLoss("{}/trainer.json: a negative step or position", dir);
    if (json.at("settings") != Settings(*trainer)) {
      return InvalidArgument("{}/trainer.json: saved with {}; this run has {}", dir,
                             json.at("settings").dump(), Settings(*trainer).dump());
    }
  } catch (const nlohmann::json::exception& e) {
    return DataLoss("{}/trainer.json: {}", dir, e.what());
  }
  const std::string path = dir + "/state.safetensors";
  TARE_ASSIGN_OR_RETURN(const auto bytes, env->OpenReadable(path));
  if (const std::string found = Hex(Sha256Of(bytes->bytes())); found != state_sha256) {
    return DataLoss("{}: SHA-256 is {}; trainer.json says {}", path, found, state_sha256);
  }
  TARE_ASSIGN_OR_RETURN(const SafetensorsFile file, SafetensorsFile::Open(env, path));
  const auto& parameters = trainer->model().parameters();
  if (file.entries().size() != 3 * parameters.size()) {
    return InvalidArgument("{}: {} tensors; this model has {} parameters with master, m and v",
                           path, file.entries().size(), parameters.size());
  }
  // All are checked before one is written.
  std::vector<std::pair<Tensor, Tensor*>> copies;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const std::pair<const char*, Tensor*> kinds[] = {{"master/", &trainer->masters()[i]},
                                                     {"m/", &trainer->first_moments()[i]},
                                                     {"v/", &trainer->second_moments()[i]}};
    for (const auto& [prefix, into] : kinds) {
      TARE_ASSIGN_OR_RETURN(Tensor from, file.Get(prefix + parameters[i].name));
      if (from.dtype() != DType::kF32 || from.shape() != into->shape()) {
        return InvalidArgument("{}: {}{} is {} {}; this model wants f32 {}", path, prefix,
                               parameters[i].name, DTypeName(from.dtype()),
                               ShapeToString(from.shape()), ShapeToString(into->shape()));
      }
      copies.emplace_back(std::move(from), into);
    }
  }
  for (auto& [from, into] : copies) {
    std::memcpy(into->mutable_data(), from.data(), static_cast<size_t>(from.size_bytes()));
  }
  trainer->set_step(step);
  TARE_RETURN_IF_ERROR(trainer->DeployMasters());
  TARE_ASSIGN_OR_RETURN(const std::string held, trainer->DeployedHash());
  if (held != deployed)
    return DataLoss("{}: the masters give deployed weights {}; trainer.json says {}", dir, held,
                    deployed);
  return progress;
}

}  // namespace tare::trainer
