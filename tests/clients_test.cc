// Programs that others wrote, against our server over a real socket: curl, the `openai` Python
// package, and vLLM's own bench client.

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "base/env.h"
#include "base/json.h"
#include "engine/serving.h"
#include "models/mini.h"

namespace tare::engine {
namespace {

struct Ran {
  int status = -1;
  std::string out;
};
Ran Shell(const std::string& command) {
  Ran ran;
  FILE* pipe = ::popen((command + " 2>&1").c_str(), "r");
  if (pipe == nullptr) return ran;
  std::array<char, 4096> buffer;
  for (size_t n = 0; (n = std::fread(buffer.data(), 1, buffer.size(), pipe)) > 0;)
    ran.out.append(buffer.data(), n);
  const int status = ::pclose(pipe);
  ran.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128;
  return ran;
}

class Clients : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = std::filesystem::temp_directory_path() / fmt::format("tare-clients-{}", ::getpid());
    std::filesystem::create_directories(root_);
    ASSERT_TRUE(models::WriteMini(Env::Real(), (root_ / "mini").string()).ok());
    Start((root_ / "mini").string());
  }
  void TearDown() override {
    serving_.reset();
    std::filesystem::remove_all(root_);
  }
  void Start(const std::string& model) {
    ServingConfig c;
    c.model_path = model;
    c.engine.batch_invariant = *ParseSwitch("1");
    c.engine.kv_cache_bytes = 256 << 20;
    Result<std::unique_ptr<Serving>> s = Serving::Start(c);
    ASSERT_TRUE(s.ok()) << s.status().ToString();
    serving_ = *std::move(s);
    url_ = fmt::format("http://127.0.0.1:{}", serving_->port());
  }
  static std::string Model() {
    const char* path = std::getenv("TARE_SMOLLM2");
    return path != nullptr ? path : std::string(TARE_SOURCE_DIR) + "/models/smollm2";
  }

  std::filesystem::path root_;
  std::unique_ptr<Serving> serving_;
  std::string url_;
};

// curl: keep-alive over two calls, a stream as it comes, a body that curl sends only after
// 100-continue, and status codes as -f sees them.
TEST_F(Clients, Curl) {
  if (Shell("curl --version").status != 0) GTEST_SKIP() << "no curl";
  const std::string curl = "curl --silent --show-error --max-time 60 ";
  const Ran two = Shell(curl + "--verbose " + url_ + "/health " + url_ + "/v1/models");
  EXPECT_EQ(two.status, 0) << two.out;
  EXPECT_NE(two.out.find("Re-using existing connection"), std::string::npos) << two.out;

  const std::string request =
      R"({"prompt": [1, 2, 3], "max_tokens": 5, "seed": 4, "ignore_eos": true, "return_token_ids": true)";
  const Ran whole = Shell(curl + url_ + "/v1/completions -d '" + request + "}'");
  ASSERT_EQ(whole.status, 0) << whole.out;
  const Result<Json> answer = ParseJson(whole.out);
  ASSERT_TRUE(answer.ok()) << whole.out;
  EXPECT_EQ((*answer)["usage"]["completion_tokens"], 5);

  const Ran stream = Shell(curl + "--no-buffer " + url_ + "/v1/completions -d '" + request +
                           ", \"stream\": true}'");
  ASSERT_EQ(stream.status, 0) << stream.out;
  Json ids = Json::array();
  for (size_t at = 0; (at = stream.out.find("data: {", at)) != std::string::npos; ++at) {
    const size_t end = stream.out.find('\n', at);
    const Json chunk = Json::parse(stream.out.substr(at + 6, end - at - 6));
    const Json choices = chunk.value("choices", Json::array());
    if (choices.empty()) continue;  // the last one has usage alone
    for (const Json& id : choices[0].value("token_ids", Json::array())) ids.push_back(id);
  }
  EXPECT_EQ(ids, (*answer)["choices"][0]["token_ids"]);
  EXPECT_NE(stream.out.find("data: [DONE]"), std::string::npos);

  // Above 1 MB curl waits for 100 Continue.
  {
    std::string big =
        R"({"user": ")" + std::string(2 << 20, 'x') + R"(", "prompt": [1], "max_tokens": 1})";
    ASSERT_TRUE(Env::Real()->WriteFileAtomic((root_ / "big.json").string(), big).ok());
    const Ran sent = Shell(curl + "--verbose -H 'Expect: 100-continue' " + url_ +
                           "/v1/completions --data-binary @" + (root_ / "big.json").string());
    EXPECT_NE(sent.out.find("HTTP/1.1 100 Continue"), std::string::npos)
        << sent.out.substr(0, 2000);
    EXPECT_NE(sent.out.find("HTTP/1.1 200"), std::string::npos) << sent.out.substr(0, 2000);
  }
  EXPECT_EQ(Shell(curl + "--fail " + url_ + "/v1/completions -d '{\"prompt\": []}'").status, 22);
  const Ran head = Shell(curl + "--head " + url_ + "/v1/models");
  EXPECT_EQ(head.status, 0) << head.out;
  EXPECT_EQ(head.out.find('{'), std::string::npos) << head.out;
}

// The `openai` package. scripts/clients.sh makes an environment with it and sets TARE_TEST_PYTHON.
TEST_F(Clients, SlowOpenAiPackage) {
  const char* python = std::getenv("TARE_TEST_PYTHON");
  const std::string run = fmt::format("{} {}/tests/openai_client.py ",
                                      python != nullptr ? python : "python3", TARE_SOURCE_DIR);
  const Ran mini = Shell(run + fmt::format("{} mini", serving_->port()));
  if (mini.status == 77) GTEST_SKIP() << "no openai package: scripts/clients.sh brings one";
  EXPECT_EQ(mini.status, 0) << mini.out;
  std::printf("%s", mini.out.c_str());
  if (!Env::Real()->Exists(Model() + "/config.json")) return;
  Start(Model());
  const Ran real = Shell(run + fmt::format("{} {}", serving_->port(), serving_->model_name()));
  EXPECT_EQ(real.status, 0) << real.out;
  EXPECT_NE(real.out.find("ok   chat answers as the assistant"), std::string::npos) << real.out;
  std::printf("%s", real.out.c_str());
}

// `vllm-rs bench serve` at concurrency 1 to 64: every request completes, every length is exact, no
// error. TARE_VLLM_RS names the program (scripts/clients.sh fetches it).
TEST_F(Clients, SlowVllmBench) {
  const char* program = std::getenv("TARE_VLLM_RS");
  if (program == nullptr) GTEST_SKIP() << "TARE_VLLM_RS is not set: scripts/clients.sh sets it";
  if (!Env::Real()->Exists(Model() + "/config.json"))
    GTEST_SKIP() << Model() << " is absent; scripts/get_model.sh fetches it";
  Start(Model());
  std::printf(
      "| concurrency | completed | failed | input tokens | output tokens | output tok/s | mean "
      "TTFT, ms | "
      "mean TPOT, ms |\n|---|---|---|---|---|---|---|---|\n");
  for (const int c : {1, 2, 4, 8, 16, 32, 64}) {
    const int prompts = std::max(8, 2 * c);
    const Ran ran =
        Shell(fmt::format("{} bench serve --port {} --model {} --tokenizer {} --dataset-name "
                          "random --random-input-len 64 "
                          "--random-output-len 32 --num-prompts {} --max-concurrency {} "
                          "--prompt-token-ids --ignore-eos "
                          "--seed {} --save-result --save-detailed --result-dir {} "
                          "--result-filename r.json --disable-tqdm",
                          program, serving_->port(), serving_->model_name(), Model(), prompts, c,
                          30 + c, root_.string()));
    ASSERT_EQ(ran.status, 0) << ran.out;
    const auto text = Env::Real()->ReadFile((root_ / "r.json").string());
    ASSERT_TRUE(text.ok()) << ran.out;
    const Json r = Json::parse(*text);
    EXPECT_EQ(r["completed"], prompts) << ran.out;
    EXPECT_EQ(r["failed"], 0) << ran.out;
    EXPECT_EQ(r["total_output_tokens"], 32 * prompts);
    EXPECT_EQ(r["total_input_tokens"], 64 * prompts);
    for (const Json& n : r["output_lens"]) EXPECT_EQ(n, 32);
    for (const Json& n : r["input_lens"]) EXPECT_EQ(n, 64);
    for (const Json& e : r["errors"]) EXPECT_EQ(e, "");
    std::printf("| %d | %d | %d | %d | %d | %.1f | %.1f | %.2f |\n", c, r["completed"].get<int>(),
                r["failed"].get<int>(), r["total_input_tokens"].get<int>(),
                r["total_output_tokens"].get<int>(), r["output_throughput"].get<double>(),
                r["mean_ttft_ms"].get<double>(), r["mean_tpot_ms"].get<double>());
    std::fflush(stdout);
    std::filesystem::remove(root_ / "r.json");
  }
}

}  // namespace
}  // namespace tare::engine
