// Weight updates, the meaning of each logprob, the two arms and hostile clients, on MINI over real
// sockets.

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <bit>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <functional>
#include <future>
#include <thread>
#include <utility>

#include "base/env.h"
#include "engine/client/client.h"
#include "engine/serving.h"
#include "models/mini.h"
#include "ops/sampling/sampling.h"
#include "tensor/checkpoint.h"
#include "tensor/safetensors.h"
#include "tensor/weight_hash.h"

namespace tare::engine {
namespace {

using client::CompletionRequest;
using client::Endpoint;
using client::Sample;

std::string HashOf(const std::string& dir) {
  const Result<Checkpoint> checkpoint = Checkpoint::Open(dir);
  EXPECT_TRUE(checkpoint.ok()) << checkpoint.status().ToString();
  const Result<WeightHash> hash = HashWeights(*checkpoint);
  EXPECT_TRUE(hash.ok()) << hash.status().ToString();
  return Hex(hash->digest);
}

// Until `done`, or half a minute.
void WaitFor(const std::function<bool()>& done) {
  for (int i = 0; i < 15000 && !done(); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  EXPECT_TRUE(done());
}

class EngineUpdate : public ::testing::Test {
 protected:
  // a: MINI. b: the last bit of every third weight flipped. other: b's tensors, another window.
  static void SetUpTestSuite() {
    root_ = new std::string(std::filesystem::temp_directory_path() /
                            fmt::format("tare-update-{}", ::getpid()));
    for (const char* name : {"a", "b", "other"}) {
      ASSERT_TRUE(models::WriteMini(Env::Real(), Dir(name)).ok());
    }
    auto tensors = models::MiniTensors();
    ASSERT_TRUE(tensors.ok());
    for (auto& [name, tensor] : *tensors) {
      auto* words = tensor.mutable_as<uint16_t>();
      for (int64_t i = 0; i < tensor.elements(); i += 3) words[i] ^= 1;
    }
    ASSERT_TRUE(WriteSafetensors(Env::Real(), Dir("b") + "/model.safetensors", *tensors).ok());
    Json config = Json::parse(models::MiniConfigJson());
    config["sliding_window"] = 32;
    ASSERT_TRUE(Env::Real()->WriteFileAtomic(Dir("other") + "/config.json", config.dump()).ok());
    hash_a_ = new std::string(HashOf(Dir("a")));
    hash_b_ = new std::string(HashOf(Dir("b")));
    ASSERT_NE(*hash_a_, *hash_b_);
  }
  static void TearDownTestSuite() {
    std::filesystem::remove_all(*root_);
    delete root_;
    delete hash_a_;
    delete hash_b_;
  }
  static std::string Dir(const std::string& name) { return *root_ + "/" + name; }

  static std::unique_ptr<Serving> Serve(const std::string& model = "a", const char* arm = "1") {
    ServingConfig c;
    c.model_path = Dir(model);
    c.engine.batch_invariant = *ParseSwitch(arm);
    c.engine.kv_cache_bytes = 16 << 20;
    c.engine.threads = 2;
    Result<std::unique_ptr<Serving>> s = Serving::Start(c);
    EXPECT_TRUE(s.ok()) << s.status().ToString();
    return s.ok() ? std::move(s).value() : nullptr;
  }
  static Endpoint At(const Serving& s) { return {.port = s.port(), .timeout_seconds = 60}; }

  static std::vector<int32_t> Prompt(uint32_t seed, int count) {
    std::vector<int32_t> ids;
    uint32_t x = seed * 2654435761u + 1;
    for (int i = 0; i < count; ++i) {
      x = x * 1664525u + 1013904223u;
      ids.push_back(static_cast<int32_t>((x >> 16) % 500));
    }
    return ids;
  }
  static CompletionRequest Ask(uint32_t seed, int prompt = 48, int tokens = 8) {
    return {.prompt = Prompt(seed, prompt), .max_tokens = tokens, .seed = seed, .ignore_eos = true};
  }
  static Sample One(const Serving& s, const CompletionRequest& request) {
    const auto r = client::Complete(At(s), {request});
    EXPECT_TRUE(r[0].ok()) << r[0].status().ToString();
    return r[0].ok() ? r[0]->at(0) : Sample{};
  }
  static Json Update(int64_t version, const std::string& model, const std::string& sha256,
                     const char* in_flight = "finish") {
    return Json{
        {"version", version}, {"path", Dir(model)}, {"sha256", sha256}, {"in_flight", in_flight}};
  }
  static client::Response Post(const Serving& s, const std::string& path, const Json& body) {
    const auto r = client::Send(At(s), {"POST", path, body.dump()});
    EXPECT_TRUE(r.ok()) << r.status().ToString();
    return r.ok() ? *r : client::Response{};
  }
  static Json Weights(const Serving& s) { return *client::SendJson(At(s), "GET", "/weights"); }

  static std::string* root_;
  static std::string* hash_a_;
  static std::string* hash_b_;
};
std::string* EngineUpdate::root_ = nullptr;
std::string* EngineUpdate::hash_a_ = nullptr;
std::string* EngineUpdate::hash_b_ = nullptr;

void ExpectVersion(const Sample& s, int64_t version) {
  EXPECT_EQ(s.weight_version, std::vector<int64_t>(s.tokens.size(), version));
}
void ExpectSame(const Sample& a, const Sample& b) {
  EXPECT_EQ(a.tokens, b.tokens);
  EXPECT_EQ(a.raw_logprob, b.raw_logprob);
}

// H13, H14: after an update the held hash is the new one, the cache is gone, every token carries
// its version, and the bits are those of a server that started on the new weights.
TEST_F(EngineUpdate, NewWeightsServe) {
  const auto fresh_b = Serve("b");
  const Sample want = One(*fresh_b, Ask(1));
  const auto s = Serve();
  const Sample old = One(*s, Ask(1));
  ExpectVersion(old, 0);
  EXPECT_EQ(Weights(*s), (Json{{"version", 0}, {"sha256", *hash_a_}}));
  EXPECT_NE(old.raw_logprob, want.raw_logprob);
  const auto r = Post(*s, "/update_weights", Update(1, "b", *hash_b_));
  ASSERT_EQ(r.status, 200) << r.body;
  const Json report = Json::parse(r.body);
  EXPECT_EQ(report["version"], 1);
  EXPECT_EQ(report["sha256"], *hash_b_);
  EXPECT_GT(report["dropped_blocks"], 0);
  EXPECT_EQ(Weights(*s), (Json{{"version", 1}, {"sha256", *hash_b_}}));
  const Sample now = One(*s, Ask(1));
  ExpectSame(now, want);
  ExpectVersion(now, 1);
}

// C8: every refused update names its reason, and the old weights go on serving, bit for bit.
TEST_F(EngineUpdate, RefusedUpdatesChangeNothing) {
  const auto s = Serve();
  const Sample before = One(*s, Ask(2));
  std::filesystem::create_directories(Dir("cut"));
  std::filesystem::copy(Dir("b"), Dir("cut"), std::filesystem::copy_options::recursive);
  std::filesystem::resize_file(Dir("cut") + "/model.safetensors",
                               std::filesystem::file_size(Dir("b") + "/model.safetensors") - 10);
  Json unknown = Update(1, "b", *hash_b_);
  unknown["force"] = true;
  Json no_path = Update(1, "b", *hash_b_);
  no_path.erase("path");
  const struct {
    const char* story;
    Json body;
    int status;
    std::string says;
  } cases[] = {
      {"the hash of other weights", Update(1, "b", *hash_a_), 409, "old weights go on serving"},
      {"a version that does not grow", Update(0, "b", *hash_b_), 400, "version"},
      {"a version below", Update(-7, "b", *hash_b_), 400, "version"},
      {"a version that is no integer", Json{{"version", "1"}}, 400, "version"},
      {"no hash", Json{{"version", 1}, {"path", Dir("b")}}, 400, "sha256"},
      {"half a hash", Update(1, "b", hash_b_->substr(0, 32)), 400, "sha256"},
      {"no path", no_path, 400, "path"},
      {"no such rule", Update(1, "b", *hash_b_, "later"), 400, "in_flight"},
      {"an unknown field", unknown, 400, "force"},
      {"nothing there", Update(1, "nowhere", *hash_b_), 404, "nowhere"},
      {"a torn file", Update(1, "cut", *hash_b_), 409, "model.safetensors"},
      {"equal tensors, another window", Update(1, "other", *hash_a_), 400, "window"},
  };
  for (const auto& c : cases) {
    const auto r = Post(*s, "/update_weights", c.body);
    EXPECT_EQ(r.status, c.status) << c.story << ": " << r.body;
    EXPECT_NE(r.body.find(c.says), std::string::npos) << c.story << ": " << r.body;
    EXPECT_EQ(Weights(*s), (Json{{"version", 0}, {"sha256", *hash_a_}})) << c.story;
  }
  const Sample after = One(*s, Ask(2));
  ExpectSame(after, before);
  ExpectVersion(after, 0);
}

// C8: good updates, refused ones and ones of which a byte changed on the way, in turn: each loads
// into the memory that the one before left, and what serves afterwards are always whole weights.
TEST_F(EngineUpdate, ManyUpdatesInTurn) {
  const auto s = Serve();
  const auto fresh_b = Serve("b");
  const Sample a = One(*s, Ask(2)), b = One(*fresh_b, Ask(2));
  const auto damage = [&](const std::string& name,
                          const std::function<void(std::string*)>& change) {
    std::filesystem::create_directories(Dir(name));
    std::filesystem::copy(Dir("b"), Dir(name), std::filesystem::copy_options::overwrite_existing);
    std::string bytes = *Env::Real()->ReadFile(Dir("b") + "/model.safetensors");
    change(&bytes);
    ASSERT_TRUE(Env::Real()->WriteFileAtomic(Dir(name) + "/model.safetensors", bytes).ok());
  };
  damage("flipped", [](std::string* bytes) { (*bytes)[bytes->size() * 2 / 3] ^= 1; });
  damage("last", [](std::string* bytes) { bytes->back() ^= 1; });
  damage("half", [](std::string* bytes) { bytes->resize(bytes->size() / 2); });
  int64_t version = 0;
  for (int round = 0; round < 3; ++round) {
    for (const std::string good : {"b", "a"}) {
      const std::string before = good == "a" ? *hash_b_ : *hash_a_;
      for (const char* bad : {"flipped", "last", "half", "other"}) {
        const auto r = Post(*s, "/update_weights", Update(version + 1, bad, *hash_b_));
        EXPECT_EQ(r.status / 100, 4) << bad << ": " << r.body;
        EXPECT_EQ(Weights(*s), (Json{{"version", version}, {"sha256", before}})) << bad;
        EXPECT_EQ(client::Send(At(*s), {"GET", "/health", ""})->status, 200) << bad;
      }
      ExpectSame(One(*s, Ask(2)), good == "a" ? b : a);
      const std::string hash = good == "a" ? *hash_a_ : *hash_b_;
      const auto r = Post(*s, "/update_weights", Update(++version, good, hash));
      ASSERT_EQ(r.status, 200) << r.body;
      EXPECT_EQ(Json::parse(r.body)["sha256"], hash);
      EXPECT_EQ(Weights(*s), (Json{{"version", version}, {"sha256", hash}}));
      const Sample now = One(*s, Ask(2));
      ExpectSame(now, good == "a" ? a : b);
      ExpectVersion(now, version);
    }
  }
}

// The three rules for what is in flight.
TEST_F(EngineUpdate, InFlightRules) {
  const auto s = Serve();
  const CompletionRequest request = Ask(3, 20, 1500);
  Sample whole;
  int64_t version = 0;
  for (const std::string rule : {"refuse", "finish", "abort"}) {
    SCOPED_TRACE(rule);
    auto running = std::async(std::launch::async, [&] { return One(*s, request); });
    const int64_t before = s->engine().GetStats().generated_tokens;
    WaitFor([&] { return s->engine().GetStats().generated_tokens > before + 4; });
    const std::string next = version % 2 == 0 ? "b" : "a";
    const auto r = Post(*s, "/update_weights",
                        Update(version + 1, next, next == "b" ? *hash_b_ : *hash_a_, rule.c_str()));
    const Sample sample = running.get();
    ExpectVersion(sample, version);  // never a token of the new weights in an old sample
    if (rule == "refuse") {
      EXPECT_EQ(r.status, 409) << r.body;
      whole = sample;
      EXPECT_EQ(sample.finish_reason, "length");
      continue;
    }
    ASSERT_EQ(r.status, 200) << r.body;
    const Json report = Json::parse(r.body);
    if (rule == "finish") {
      EXPECT_EQ(report["finished"], 1);
      EXPECT_EQ(report["aborted"], 0);
      EXPECT_EQ(sample.finish_reason, "length");
      ExpectSame(sample, whole);  // the update that waited moved no bit of it
    } else {
      EXPECT_EQ(report["aborted"], 1);
      EXPECT_EQ(sample.finish_reason, "abort");
      EXPECT_LT(sample.tokens.size(), 1500u);
    }
    ++version;
    ExpectVersion(One(*s, Ask(4)), version);
  }
}

// H13: a cache that outlives the weights is seen on the old prompt and only there; "0 blocks
// dropped" is in the report, and a real reset heals it.
TEST_F(EngineUpdate, StaleCacheIsSeen) {
  const auto fresh = Serve("b");
  const Sample p = One(*fresh, Ask(5)), q = One(*fresh, Ask(6));
  const fault::Scoped fault("engine.keep_prefix_cache@rollout");
  const auto s = Serve();
  (void)One(*s, Ask(5));
  const auto r = Post(*s, "/update_weights", Update(1, "b", *hash_b_));
  ASSERT_EQ(r.status, 200) << r.body;
  EXPECT_EQ(Json::parse(r.body)["dropped_blocks"], 0);
  EXPECT_NE(One(*s, Ask(5)).raw_logprob, p.raw_logprob);
  ExpectSame(One(*s, Ask(6)), q);
  WaitFor([&] { return s->engine().GetStats().running == 0; });
  EXPECT_GT(Json::parse(Post(*s, "/reset_prefix_cache", Json::object()).body)["dropped_blocks"], 0);
  ExpectSame(One(*s, Ask(5)), p);
}

// H14: an update that is acknowledged and not made: the hash is over what is held and contradicts.
TEST_F(EngineUpdate, StaleWeightsAreSeen) {
  const fault::Scoped fault("engine.stale_weights@rollout");
  const auto s = Serve();
  const auto r = Post(*s, "/update_weights", Update(1, "b", *hash_b_));
  ASSERT_EQ(r.status, 200) << r.body;
  EXPECT_EQ(Json::parse(r.body)["sha256"], *hash_a_);
  EXPECT_EQ(Weights(*s)["sha256"], *hash_a_);
}

// H14: an update that leaves the packed copies, from which the kernels compute, on the old weights:
// the parameters alone would hash as the new ones. The answer is an error and the server says that
// it is not well.
TEST_F(EngineUpdate, StalePackedCopiesAreSeen) {
  for (const Profile profile : {Profile::kIeeeF32, Profile::kSm90Mma}) {
    SCOPED_TRACE(std::string(ProfileName(profile)));
    ServingConfig c;
    c.model_path = Dir("a");
    c.engine.batch_invariant = *ParseSwitch("1");
    c.engine.profile = profile;
    c.engine.kv_cache_bytes = 16 << 20;
    const auto s = Serving::Start(c);
    ASSERT_TRUE(s.ok()) << s.status().ToString();
    const fault::Scoped fault("engine.stale_packed@rollout");
    const auto r = Post(**s, "/update_weights", Update(1, "b", *hash_b_));
    EXPECT_EQ(r.status, 409) << r.body;
    EXPECT_NE(r.body.find("the packed copy of"), std::string::npos) << r.body;
    EXPECT_NE(r.body.find("layers.0.qkv"), std::string::npos) << r.body;
    EXPECT_EQ(client::Send(At(**s), {"GET", "/health", ""})->status, 503);
    EXPECT_EQ(client::Send(At(**s), {"GET", "/weights", ""})->status, 409);
  }
}

// H01, H02: what each logprob means, by computing it again from the model's logits: raw at T = 1,
// tempered at the request's T, processed over the kept set at T.
TEST_F(EngineUpdate, EachLogprobIsWhatItSays) {
  const auto s = Serve();
  ThreadPool pool(2);
  const auto model = models::MiniModel(&pool);
  ASSERT_TRUE(model.ok());
  const int64_t vocab = model->config().vocab;
  ops::Ctx ctx{.pool = &pool};
  for (const float t : {1.0f, 0.5f}) {
    for (const float top_p : {1.0f, 0.7f}) {
      SCOPED_TRACE(fmt::format("T {} top_p {}", t, top_p));
      CompletionRequest request = Ask(7, 30, 24);
      request.temperature = t;
      request.top_p = top_p;
      request.candidates = true;
      const Sample sample = One(*s, request);
      const size_t n = sample.tokens.size();
      ASSERT_EQ(n, 24u);
      std::vector<int32_t> all = request.prompt, targets;
      all.insert(all.end(), sample.tokens.begin(), sample.tokens.end());
      targets.assign(29, -1);
      targets.insert(targets.end(), sample.tokens.begin(), sample.tokens.end());
      targets.push_back(-1);
      std::vector<uint32_t> raw, tempered;
      models::Scratch scratch;
      for (auto* out : {&raw, &tempered}) {
        models::Batch batch;
        models::TokenRun run;
        run.tokens = all;
        run.targets = targets;
        run.temperature = out == &raw ? 1.0f : t;
        run.logit_rows = static_cast<int64_t>(n) + 1;
        batch.runs = {run};
        const auto f = models::Forward(ctx, *model, batch, &scratch);
        ASSERT_TRUE(f.ok()) << f.status().ToString();
        for (const float v : f->logprob) out->push_back(std::bit_cast<uint32_t>(v));
        if (out == &raw) continue;
        // Replay of the kept sets, and their sizes.
        std::vector<uint8_t> bitmaps;
        for (size_t i = 0; i < n; ++i) {
          int kept = 0;
          for (const uint8_t byte : sample.candidates[i]) kept += std::popcount(byte);
          EXPECT_EQ(kept, sample.kept[i]);
          bitmaps.insert(bitmaps.end(), sample.candidates[i].begin(), sample.candidates[i].end());
        }
        std::vector<float> temperature(n, t), replayed(n);
        ASSERT_EQ(f->logits.dtype(), DType::kF32);
        const ops::sampling::ReplayArgs args{.rows = static_cast<int64_t>(n),
                                             .logits = f->logits.data(),
                                             .temperature = temperature.data(),
                                             .candidates = bitmaps.data(),
                                             .targets = sample.tokens.data(),
                                             .logprob = replayed.data()};
        ASSERT_TRUE(ops::sampling::Replay(ctx, {.vocab = vocab}, args).ok());
        for (size_t i = 0; i < n; ++i)
          EXPECT_EQ(std::bit_cast<uint32_t>(replayed[i]), sample.processed_logprob[i]) << i;
      }
      EXPECT_EQ(sample.raw_logprob, raw);
      EXPECT_EQ(sample.tempered_logprob, tempered);
      EXPECT_EQ(sample.raw_logprob == sample.tempered_logprob, t == 1.0f);
      EXPECT_EQ(sample.processed_logprob == sample.tempered_logprob, top_p == 1.0f);
    }
  }
  // T = 0 is greedy by rule: the set is one token, and the logprobs are those at T = 1.
  CompletionRequest greedy = Ask(7, 30, 8);
  greedy.temperature = 0.0f;
  const Sample sample = One(*s, greedy);
  EXPECT_EQ(sample.raw_logprob, sample.tempered_logprob);
  EXPECT_EQ(sample.kept, std::vector<int32_t>(8, 1));
}

// H07: the native arm's bits follow the batch, the invariant arm's do not; repeats of the same
// shape agree in both, which is why repeating proves nothing.
TEST_F(EngineUpdate, OnlyTheNativeArmFollowsTheBatch) {
  for (const char* arm : {"0", "1"}) {
    SCOPED_TRACE(arm);
    const auto s = Serve("a", arm);
    const std::vector<int32_t> prompt = Prompt(8, 40);
    // One HTTP request with many prompts is queued at once: they share the first step.
    const auto score = [&](int neighbours) {
      Json prompts = Json::array({prompt});
      for (int i = 0; i < neighbours; ++i)
        prompts.push_back(Prompt(100 + static_cast<uint32_t>(i), 1));
      const auto r = client::SendJson(At(*s), "POST", "/v1/completions",
                                      Json{{"prompt", prompts},
                                           {"max_tokens", 24},
                                           {"temperature", 0},
                                           {"ignore_eos", true},
                                           {"return_logprob_bits", true}});
      EXPECT_TRUE(r.ok()) << r.status().ToString();
      return (*r)["choices"][0]["tare"]["raw_logprob_bits"];
    };
    const Json alone = score(0), again = score(0), batched = score(15);
    EXPECT_EQ(alone, again);
    EXPECT_EQ(alone == batched, std::string(arm) == "1");
  }
}

// SYS-03: each value of the switch over a real process: what runs, what is refused.
TEST_F(EngineUpdate, SwitchOverAProcess) {
  const auto spawn = [&](std::optional<std::string> value, const std::string& port_file) {
    std::vector<std::string> env;
    if (value) env.push_back(std::string(kSwitchName) + "=" + *value);
    const std::vector<std::string> args = {"tare", "serve",          Dir("a"),  "--port",
                                           "0",    "--port-file",    port_file, "--threads",
                                           "1",    "--kv-cache-mib", "4"};
    std::vector<char*> argv, envp;
    for (const auto& a : args) argv.push_back(const_cast<char*>(a.c_str()));
    for (const auto& e : env) envp.push_back(const_cast<char*>(e.c_str()));
    argv.push_back(nullptr);
    envp.push_back(nullptr);
    pid_t pid = -1;
    EXPECT_EQ(
        ::posix_spawn(&pid, TARE_BINARY_DIR "/tare", nullptr, nullptr, argv.data(), envp.data()),
        0);
    return pid;
  };
  const auto status_of = [](pid_t pid) {
    int status = 0;
    EXPECT_EQ(::waitpid(pid, &status, 0), pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  };
  for (const char* bad : {"false", "", "2", "true", " 1"})
    EXPECT_EQ(status_of(spawn(bad, Dir("none"))), 64) << "'" << bad << "'";
  // Set in this parent alone: the child, started without it, says off.
  ::setenv(kSwitchName, "1", 1);
  const struct {
    std::optional<std::string> value;
    bool on;
  } good[] = {{std::nullopt, false}, {"0", false}, {"1", true}};
  for (const auto& g : good) {
    const std::string port_file = Dir("port-" + g.value.value_or("unset"));
    const pid_t pid = spawn(g.value, port_file);
    WaitFor([&] { return Env::Real()->Exists(port_file); });
    const auto port = Env::Real()->ReadFile(port_file);
    ASSERT_TRUE(port.ok());
    const Endpoint at{.port = static_cast<uint16_t>(std::stoi(*port)), .timeout_seconds = 30};
    ASSERT_TRUE(client::WaitHealthy(at, 30).ok());
    const Json version = *client::SendJson(at, "GET", "/version");
    EXPECT_EQ(version["batch_invariant"], g.on);
    EXPECT_EQ(version[kSwitchName], g.value ? Json(*g.value) : Json(nullptr));
    const Json id = *client::SendJson(at, "GET", "/identity");
    EXPECT_TRUE(id["switch"]["changed_since_start"].is_null()) << id.dump();
    EXPECT_EQ(id["switch"]["effective"], g.on ? 1 : 0);
    EXPECT_EQ(id["workers"], (Json{{"threads", 1}, {"checked", 1}, {"saw_another_switch", 0}}));
    EXPECT_TRUE(client::SendJson(at, "POST", "/shutdown", Json::object()).ok());
    EXPECT_EQ(status_of(pid), 0);
  }
  ::unsetenv(kSwitchName);
  // Set after the start: nothing changes, and the identity says so.
  const auto s = Serve("a", "0");
  ::setenv(kSwitchName, "1", 1);
  const Json id = *client::SendJson(At(*s), "GET", "/identity");
  ::unsetenv(kSwitchName);
  EXPECT_EQ(id["switch"]["effective"], 0);
  EXPECT_TRUE(id["switch"]["changed_since_start"].is_string());
  // A thread that starts after a change sees another value than the process read, and says so.
  const Json late = *client::SendJson(At(*Serve("a", "1")), "GET", "/identity");
  EXPECT_EQ(late["workers"], (Json{{"threads", 2}, {"checked", 2}, {"saw_another_switch", 2}}));
}

// A bare client that says what it is given and goes when it likes.
class RawClient {
 public:
  RawClient(uint16_t port, const std::string& bytes) : fd_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    ok_ = fd_ >= 0 && ::connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0 &&
          ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL) == std::ssize(bytes);
  }
  RawClient(RawClient&& other) noexcept : fd_(std::exchange(other.fd_, -1)), ok_(other.ok_) {}
  RawClient& operator=(RawClient&&) = delete;
  ~RawClient() {
    if (fd_ >= 0) ::close(fd_);
  }
  bool ok() const { return ok_; }

 private:
  int fd_;
  bool ok_ = false;
};

// 1,000 clients that never finish their request and 50 that leave a stream: their blocks come
// back, and a victim among them gets its own bits.
TEST_F(EngineUpdate, VanishedClients) {
  const auto s = Serve();
  const Sample alone = One(*s, Ask(9, 40, 40));
  std::vector<RawClient> slow;
  for (int i = 0; i < 1000; ++i) {
    slow.emplace_back(s->port(), "POST /v1/completions HTTP/1.1\r\nContent-Le");
    ASSERT_TRUE(slow.back().ok()) << i;
  }
  {
    std::vector<RawClient> gone;
    for (int i = 0; i < 50; ++i) {
      const std::string body = Json{
          {"prompt", Prompt(200 + static_cast<uint32_t>(i), 20)},
          {"max_tokens", 4000},
          {"ignore_eos", true},
          {"stream", true}}.dump();
      gone.emplace_back(s->port(),
                        fmt::format("POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: "
                                    "{}\r\n\r\n{}",
                                    body.size(), body));
      ASSERT_TRUE(gone.back().ok());
    }
    WaitFor([&] { return s->engine().GetStats().generated_tokens > 400; });
    ExpectSame(One(*s, Ask(9, 40, 40)), alone);
  }
  WaitFor([&] {
    const Stats stats = s->engine().GetStats();
    return stats.finished_abort == 50 && stats.running + stats.waiting == 0 &&
           stats.free_blocks == stats.num_blocks;
  });
  ExpectSame(One(*s, Ask(9, 40, 40)), alone);
}

// The same at full size, with requests that run: of 1,000 clients that ask for a stream a third
// leaves at once, a third in the middle, and a third never reads a byte. Every block comes back, no
// sequence is lost, and a victim asked again and again among them has its own bits each time.
TEST_F(EngineUpdate, SlowThousandVanishedAndSlowClients) {
  ServingConfig c;
  c.model_path = Dir("a");
  c.engine.batch_invariant = *ParseSwitch("1");
  c.engine.kv_cache_bytes = 512 << 20;
  c.engine.scheduler.max_num_seqs = 2000;  // all of them run: nobody waits for a place
  const auto started = Serving::Start(c);
  ASSERT_TRUE(started.ok()) << started.status().ToString();
  const auto& s = *started;
  const auto victim = [&] {
    const auto r = client::Complete({.port = s->port(), .timeout_seconds = 1800}, {Ask(9, 40, 40)});
    EXPECT_TRUE(r[0].ok()) << r[0].status().ToString();
    return r[0].ok() ? r[0]->at(0) : Sample{};
  };
  const Sample alone = victim();
  const int64_t before = s->engine().GetStats().generated_tokens;
  int victims = 0;
  {
    std::vector<RawClient> deaf, leaving;
    for (int i = 0; i < 1000; ++i) {
      const std::string body = Json{
          {"prompt", Prompt(3000 + static_cast<uint32_t>(i), 5 + i % 40)},
          {"max_tokens", i % 3 == 2 ? 64 : 7000},
          {"seed", i},
          {"ignore_eos", true},
          {"return_logprob_bits", true},
          {"stream", true}}.dump();
      RawClient client(s->port(),
                       fmt::format("POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: "
                                   "{}\r\n\r\n{}",
                                   body.size(), body));
      ASSERT_TRUE(client.ok()) << i;
      if (i % 3 == 1)
        leaving.push_back(std::move(client));
      else if (i % 3 == 2)
        deaf.push_back(std::move(client));
      if (i % 100 == 50) {
        ExpectSame(victim(), alone);
        ++victims;
      }
    }
    // Those in the middle go in groups, while others decode.
    while (!leaving.empty()) {
      for (int i = 0; i < 67 && !leaving.empty(); ++i) leaving.pop_back();
      ExpectSame(victim(), alone);
      ++victims;
    }
    for (int i = 0; i < 60; ++i) {
      const Stats stats = s->engine().GetStats();
      if (stats.running + stats.waiting == 0 && stats.free_blocks == stats.num_blocks) break;
      std::this_thread::sleep_for(std::chrono::seconds(1));
    }
  }
  const Stats stats = s->engine().GetStats();
  // 333 or 334 of each kind; the deaf ones' answers were short enough to be computed to their end.
  EXPECT_EQ(stats.running + stats.waiting, 0);
  EXPECT_EQ(stats.free_blocks, stats.num_blocks);
  EXPECT_EQ(stats.finished_abort, 667);
  EXPECT_EQ(stats.finished_error, 0);
  EXPECT_EQ(stats.finished_length, 333 + victims + 1);
  ExpectSame(victim(), alone);
  std::printf(
      "1,000 clients: %lld tokens computed, %lld aborted, %lld finished, %lld of %lld blocks "
      "free, %d victims with their own bits\n",
      static_cast<long long>(stats.generated_tokens - before),
      static_cast<long long>(stats.finished_abort), static_cast<long long>(stats.finished_length),
      static_cast<long long>(stats.free_blocks), static_cast<long long>(stats.num_blocks), victims);
}

// Nothing that a client sends ends the server: each is a 4xx, or a plain answer.
TEST_F(EngineUpdate, HostileBodies) {
  const auto s = Serve();
  const Sample before = One(*s, Ask(10));
  const std::string valid = Json{
      {"prompt", Prompt(11, 6)},
      {"max_tokens", 2},
      {"temperature", 0.7},
      {"stop", "x"}}.dump();
  std::vector<std::string> bodies = {
      std::string(100000, '['),
      R"({"prompt":)" + std::string(5000, '[') + std::string(5000, ']') + "}",
      R"({"prompt":[1],"max_tokens":1e309})",
      R"({"prompt":[1],"seed":99999999999999999999999999})",
      R"({"prompt":[2147483648]})",
      std::string("{\"prompt\":\"\0\"}", 13),
      "{\"prompt\":\"\xff\xfe\"}",
      "{\"\xc3\x28\":1}",
      R"({"prompt":[1],"logit_bias":{"99999999999":1}})",
      R"({"prompt":[1],"stop":[1]})",
      "null",
      std::string(1, '\0'),
  };
  uint32_t x = 12345;
  const auto next = [&x] { return (x = x * 1664525u + 1013904223u) >> 8; };
  for (int i = 0; i < 300; ++i) {
    std::string body = valid;
    for (uint32_t k = 1 + next() % 3; k > 0; --k) {
      const size_t at = next() % body.size();
      switch (next() % 3) {
        case 0:
          body[at] = static_cast<char>(next());
          break;
        case 1:
          body.erase(at, 1 + next() % 4);
          break;
        default:
          body.insert(at, 1, "{}[]\",:0-"[next() % 9]);
      }
      if (body.empty()) body = "{";
    }
    bodies.push_back(body);
  }
  int refused = 0;
  for (size_t i = 0; i < bodies.size(); ++i) {
    const auto r = client::Send(At(*s), {"POST", "/v1/completions", bodies[i]});
    ASSERT_TRUE(r.ok()) << i << " " << r.status().ToString();
    EXPECT_TRUE(r->status == 200 || r->status / 100 == 4)
        << i << " " << r->status << " " << r->body;
    if (i < 12) {
      EXPECT_EQ(r->status, 400) << i << " " << r->body;
    }
    refused += r->status != 200;
  }
  EXPECT_GT(refused, 100);
  const auto huge = client::Send(At(*s), {"POST", "/v1/completions", std::string(33 << 20, ' ')});
  if (huge.ok()) {
    EXPECT_EQ(huge->status, 413);
  }
  ExpectSame(One(*s, Ask(10)), before);
}

}  // namespace
}  // namespace tare::engine
