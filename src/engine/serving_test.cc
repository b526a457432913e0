// The server on MINI, over real sockets: answers, exact bits, updates, faults.

#include "engine/serving.h"

#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <set>
#include <thread>

#include "base/env.h"
#include "engine/client/client.h"
#include "models/mini.h"

namespace tare::engine {
namespace {

using client::CompletionRequest;
using client::Endpoint;
using client::Sample;

// A MINI directory, and a second one whose final norm is scaled: other weights, same shape.
class ServingTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    root_ = new std::string(std::filesystem::temp_directory_path() /
                            fmt::format("tare-serving-{}", ::getpid()));
    std::filesystem::create_directories(*root_);
    ASSERT_TRUE(models::WriteMini(Env::Real(), *root_ + "/mini").ok());
  }
  static void TearDownTestSuite() {
    std::filesystem::remove_all(*root_);
    delete root_;
  }

  std::unique_ptr<Serving> Serve(const std::function<void(ServingConfig*)>& edit = nullptr) {
    ServingConfig c;
    c.model_path = *root_ + "/mini";
    c.engine.batch_invariant = *ParseSwitch("1");
    c.engine.kv_cache_bytes = 16 << 20;
    c.engine.threads = 2;
    if (edit) edit(&c);
    Result<std::unique_ptr<Serving>> s = Serving::Start(c);
    EXPECT_TRUE(s.ok()) << s.status().ToString();
    return s.ok() ? std::move(s).value() : nullptr;
  }
  static Endpoint At(const Serving& s) { return {.port = s.port(), .timeout_seconds = 60}; }

  static std::vector<int32_t> Prompt(int32_t seed, int count) {
    std::vector<int32_t> ids;
    uint32_t x = static_cast<uint32_t>(seed) * 2654435761u + 1;
    for (int i = 0; i < count; ++i) {
      x = x * 1664525u + 1013904223u;
      ids.push_back(static_cast<int32_t>((x >> 16) % 500));
    }
    return ids;
  }

  static std::string* root_;
};
std::string* ServingTest::root_ = nullptr;

void ExpectSame(const Sample& a, const Sample& b, const std::string& what) {
  EXPECT_EQ(a.tokens, b.tokens) << what;
  EXPECT_EQ(a.raw_logprob, b.raw_logprob) << what;
  EXPECT_EQ(a.processed_logprob, b.processed_logprob) << what;
}

// C3-02 to C3-06, SYS-31: the victim's tokens and bits do not depend on neighbours, chunks, page
// size, cache state, preemption, threads or a fresh engine; the counters prove that each of these
// happened.
TEST_F(ServingTest, VictimBitsDependOnNothingElse) {
  const CompletionRequest victim{.prompt = Prompt(1, 45),
                                 .n = 2,
                                 .max_tokens = 24,
                                 .top_p = 0.95f,
                                 .seed = 7,
                                 .ignore_eos = true};
  std::vector<Sample> alone;
  {
    const auto s = Serve();
    ASSERT_NE(s, nullptr);
    auto r = client::Complete(At(*s), {victim});
    ASSERT_TRUE(r[0].ok()) << r[0].status().ToString();
    alone = *r[0];
    ASSERT_EQ(alone.size(), 2u);
    ASSERT_EQ(alone[0].tokens.size(), 24u);
    EXPECT_NE(alone[0].tokens, alone[1].tokens);
  }
  struct Variant {
    const char* name;
    std::function<void(ServingConfig*)> edit;
    int neighbours;
    bool twice;
  };
  const std::vector<Variant> variants = {
      // A step smaller than the prompts together: whenever they arrive, some decode while others
      // are still being prefilled.
      {"neighbours", [](ServingConfig* c) { c->engine.scheduler.max_num_batched_tokens = 64; }, 15,
       false},
      {"chunks of 1", [](ServingConfig* c) { c->engine.scheduler.max_num_batched_tokens = 1; }, 0,
       false},
      {"chunks of block - 1",
       [](ServingConfig* c) { c->engine.scheduler.max_num_batched_tokens = 15; }, 3, false},
      {"chunks of block", [](ServingConfig* c) { c->engine.scheduler.max_num_batched_tokens = 16; },
       3, false},
      {"chunks of block + 1",
       [](ServingConfig* c) { c->engine.scheduler.max_num_batched_tokens = 17; }, 3, false},
      {"page 1", [](ServingConfig* c) { c->engine.scheduler.block_size = 1; }, 2, false},
      {"page 7", [](ServingConfig* c) { c->engine.scheduler.block_size = 7; }, 2, false},
      {"page 64", [](ServingConfig* c) { c->engine.scheduler.block_size = 64; }, 2, true},
      {"warm cache", nullptr, 0, true},
      {"cache off", [](ServingConfig* c) { c->engine.scheduler.prefix_caching = false; }, 4, true},
      {"few blocks", [](ServingConfig* c) { c->engine.scheduler.num_blocks = 11; }, 6, false},
      {"one thread", [](ServingConfig* c) { c->engine.threads = 1; }, 3, false},
      {"three threads", [](ServingConfig* c) { c->engine.threads = 3; }, 3, false},
  };
  for (const Variant& v : variants) {
    const auto s = Serve(v.edit);
    ASSERT_NE(s, nullptr);
    std::vector<CompletionRequest> requests;
    for (int i = 0; i < v.neighbours; ++i) {
      requests.push_back({.prompt = Prompt(100 + i, 3 + 11 * i % 60),
                          .max_tokens = 5 + 7 * i % 40,
                          .seed = 1000u + static_cast<uint64_t>(i)});
    }
    requests.insert(requests.begin() + v.neighbours / 2, victim);
    if (v.twice) (void)client::Complete(At(*s), {victim});
    const auto r = client::Complete(At(*s), requests);
    const auto& mine = r[static_cast<size_t>(v.neighbours / 2)];
    ASSERT_TRUE(mine.ok()) << v.name << ": " << mine.status().ToString();
    for (size_t i = 0; i < 2; ++i) ExpectSame((*mine)[i], alone[i], v.name);
    // The last answer goes out before its step is booked.
    Stats stats = s->engine().GetStats();
    for (int i = 0; i < 1000 && stats.free_blocks != stats.num_blocks; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      stats = s->engine().GetStats();
    }
    const std::string name = v.name;
    if (name == "neighbours") {
      EXPECT_GT(stats.scheduler.mixed_steps, 0);
    }
    if (name.starts_with("chunks")) {
      EXPECT_GT(stats.scheduler.chunked_runs, 0) << name;
    }
    if (name == "warm cache" || name == "page 64") {
      EXPECT_EQ(stats.scheduler.prefix_hits > 0, name == "warm cache") << name;
    }
    if (name == "few blocks") {
      EXPECT_GT(stats.scheduler.preemptions, 0);
    }
    EXPECT_EQ(stats.free_blocks, stats.num_blocks) << name << ": blocks leaked";
  }
}

// C3-03: logprobs of forced tokens by one prefill equal those that decode gave.
TEST_F(ServingTest, PrefillEqualsDecode) {
  const auto s = Serve();
  const CompletionRequest request{
      .prompt = Prompt(2, 30), .max_tokens = 40, .seed = 3, .ignore_eos = true};
  const auto sampled = client::Complete(At(*s), {request});
  ASSERT_TRUE(sampled[0].ok());
  CompletionRequest forced{
      .prompt = request.prompt, .max_tokens = 1, .seed = 1, .prompt_logprobs = true};
  forced.prompt.insert(forced.prompt.end(), (*sampled[0])[0].tokens.begin(),
                       (*sampled[0])[0].tokens.end());
  const auto scored = client::Complete(At(*s), {forced});
  ASSERT_TRUE(scored[0].ok()) << scored[0].status().ToString();
  const auto& rows = (*scored[0])[0].prompt_raw_logprob;
  ASSERT_EQ(rows.size(), 69u);
  const std::vector<uint32_t> tail(rows.begin() + 29, rows.end());
  EXPECT_EQ(tail, (*sampled[0])[0].raw_logprob);
}

// H06: prompt logprobs do not depend on who came first or on the cache; the planted fault shows
// that the test would see it.
TEST_F(ServingTest, PromptLogprobsIgnoreTheCache) {
  const std::vector<int32_t> a = Prompt(3, 40);
  std::vector<int32_t> b(a.begin(), a.begin() + 32);
  for (int32_t t : Prompt(4, 8)) b.push_back(t);
  const auto score = [&](bool cache, bool b_first) {
    const auto s = Serve([&](ServingConfig* c) { c->engine.scheduler.prefix_caching = cache; });
    std::map<bool, std::vector<uint32_t>> rows;
    for (const bool is_b : {b_first, !b_first}) {
      const auto r = client::Complete(
          At(*s), {{.prompt = is_b ? b : a, .max_tokens = 1, .seed = 1, .prompt_logprobs = true}});
      EXPECT_TRUE(r[0].ok());
      rows[is_b] = (*r[0])[0].prompt_raw_logprob;
    }
    return rows;
  };
  const auto reference = score(false, false);
  ASSERT_EQ(reference.at(false).size(), 39u);
  for (const bool cache : {false, true}) {
    for (const bool b_first : {false, true}) EXPECT_EQ(score(cache, b_first), reference);
  }
  // Rows that a hit skipped are an error with the first position, never a number.
  fault::Scoped fault("engine.dirty_prompt_logprobs@rollout");
  const auto s = Serve();
  ASSERT_TRUE(client::Complete(At(*s), {{.prompt = a, .max_tokens = 1}})[0].ok());
  const auto r = client::Complete(
      At(*s), {{.prompt = b, .max_tokens = 1, .seed = 1, .prompt_logprobs = true}});
  ASSERT_FALSE(r[0].ok());
  EXPECT_NE(r[0].status().message().find("position 1 was never computed"), std::string::npos)
      << r[0].status().ToString();
}

// H16, FIND-18: without a seed the samples differ; equal seeds repeat; greedy repeats are expected;
// the trap of a default seed makes all samples of a group the same.
TEST_F(ServingTest, SeedsAndGroups) {
  const auto s = Serve();
  const auto unique = [&](const CompletionRequest& r) {
    const auto result = client::Complete(At(*s), {r});
    EXPECT_TRUE(result[0].ok());
    std::set<std::vector<int32_t>> all;
    for (const Sample& sample : *result[0]) all.insert(sample.tokens);
    return all;
  };
  const CompletionRequest group{
      .prompt = Prompt(5, 12), .n = 8, .max_tokens = 16, .ignore_eos = true};
  EXPECT_EQ(unique(group).size(), 8u);
  CompletionRequest seeded = group;
  seeded.seed = 11;
  const auto first = unique(seeded);
  EXPECT_EQ(first.size(), 8u);
  EXPECT_EQ(unique(seeded), first);
  // All 64 bits of a seed count.
  seeded.seed = 11 + (uint64_t{1} << 40);
  EXPECT_NE(unique(seeded), first);
  CompletionRequest greedy = group;
  greedy.temperature = 0.0f;
  EXPECT_EQ(unique(greedy).size(), 1u);
  fault::Scoped fault("engine.default_seed_42@rollout");
  EXPECT_EQ(unique(group).size(), 1u);
}

// The shapes of vLLM's answers (tests/data/serving): every key of ours that vLLM has is of its
// type, and the keys a client reads are there.
TEST_F(ServingTest, AnswersLookLikeVllm) {
  const auto s = Serve();
  const Json body{
      {"prompt", Prompt(6, 5)},   {"max_tokens", 6}, {"temperature", 1.0},   {"seed", 11},
      {"return_token_ids", true}, {"logprobs", 2},   {"prompt_logprobs", 0}, {"ignore_eos", true}};
  const Result<Json> r = client::SendJson(At(*s), "POST", "/v1/completions", body);
  ASSERT_TRUE(r.ok()) << r.status().ToString();
  EXPECT_EQ((*r)["object"], "text_completion");
  EXPECT_EQ((*r)["usage"]["prompt_tokens"], 5);
  EXPECT_EQ((*r)["usage"]["completion_tokens"], 6);
  EXPECT_EQ((*r)["usage"]["total_tokens"], 11);
  const Json& c = (*r)["choices"][0];
  EXPECT_EQ(c["finish_reason"], "length");
  EXPECT_TRUE(c["stop_reason"].is_null());
  EXPECT_EQ(c["token_ids"].size(), 6u);
  EXPECT_EQ(c["prompt_token_ids"].size(), 5u);
  const Json& l = c["logprobs"];
  for (const char* key : {"text_offset", "token_logprobs", "tokens", "top_logprobs"})
    ASSERT_EQ(l[key].size(), 6u) << key;
  // By text, as vLLM has it: two tokens that print alike (half of a character) share one entry.
  size_t entries = 0;
  for (const Json& top : l["top_logprobs"]) {
    EXPECT_GE(top.size(), 1u);
    EXPECT_LE(top.size(), 3u);
    entries += top.size();
  }
  EXPECT_GE(entries, 9u);
  ASSERT_EQ(c["prompt_logprobs"].size(), 5u);
  EXPECT_TRUE(c["prompt_logprobs"][0].is_null());
  EXPECT_TRUE(c["prompt_logprobs"][1].begin().value().contains("logprob"));

  // Streamed: the same ids and logprobs as printed, usage at the end, [DONE] last.
  Json streamed = body;
  streamed.erase("prompt_logprobs");
  streamed["stream"] = true;
  streamed["stream_options"] = Json{{"include_usage", true}};
  const auto raw = client::Send(At(*s), {"POST", "/v1/completions", streamed.dump()});
  ASSERT_TRUE(raw.ok());
  EXPECT_EQ(raw->headers.at("content-type").substr(0, 17), "text/event-stream");
  Json ids = Json::array(), values = Json::array();
  std::string text;
  Json usage;
  bool done = false;
  for (size_t at = 0; at < raw->body.size();) {
    const size_t end = raw->body.find("\n\n", at);
    ASSERT_NE(end, std::string::npos);
    const std::string line = raw->body.substr(at, end - at);
    at = end + 2;
    ASSERT_TRUE(line.starts_with("data: "));
    if (line == "data: [DONE]") {
      done = true;
      continue;
    }
    ASSERT_FALSE(done);
    const Json event = Json::parse(line.substr(6));
    if (event["choices"].empty()) {
      usage = event["usage"];
      continue;
    }
    text += event["choices"][0]["text"].get<std::string>();
    for (const Json& id : event["choices"][0]["token_ids"]) ids.push_back(id);
    for (const Json& v : event["choices"][0]["logprobs"]["token_logprobs"]) values.push_back(v);
  }
  EXPECT_TRUE(done);
  EXPECT_EQ(ids, c["token_ids"]);
  EXPECT_EQ(values, l["token_logprobs"]);
  EXPECT_EQ(text, c["text"].get<std::string>());
  EXPECT_EQ(usage["completion_tokens"], 6);

  const auto models = client::SendJson(At(*s), "GET", "/v1/models");
  ASSERT_TRUE(models.ok());
  EXPECT_EQ((*models)["data"][0]["id"], "mini");
  const auto metrics = client::Send(At(*s), {"GET", "/metrics", ""});
  ASSERT_TRUE(metrics.ok());
  for (const char* name :
       {"vllm:num_requests_running{", "vllm:prefix_cache_queries_total{",
        "vllm:prefix_cache_hits_total{", "vllm:generation_tokens_total{",
        "vllm:time_to_first_token_seconds_bucket{", "vllm:request_success_total{"}) {
    EXPECT_NE(metrics->body.find(name), std::string::npos) << name;
  }
  const auto version = client::SendJson(At(*s), "GET", "/version");
  ASSERT_TRUE(version.ok());
  EXPECT_EQ((*version)["batch_invariant"], true);
}

// Stop strings end the text before them, also when they straddle tokens; stop ids and EOS end too.
TEST_F(ServingTest, StopsWhereTold) {
  const auto s = Serve();
  const Json base{{"prompt", Prompt(7, 8)},
                  {"max_tokens", 40},
                  {"seed", 5},
                  {"ignore_eos", true},
                  {"return_token_ids", true}};
  const auto whole = client::SendJson(At(*s), "POST", "/v1/completions", base);
  ASSERT_TRUE(whole.ok());
  const std::string text = (*whole)["choices"][0]["text"];
  ASSERT_GT(text.size(), 12u);
  // A stop string from the middle, by bytes that are characters.
  size_t from = text.size() / 2;
  while ((static_cast<uint8_t>(text[from]) & 0xC0) == 0x80) ++from;
  size_t to = from + 3;
  while (to < text.size() && (static_cast<uint8_t>(text[to]) & 0xC0) == 0x80) ++to;
  const std::string stop = text.substr(from, to - from);
  Json body = base;
  body["stop"] = stop;
  const auto cut = client::SendJson(At(*s), "POST", "/v1/completions", body);
  ASSERT_TRUE(cut.ok());
  EXPECT_EQ((*cut)["choices"][0]["text"], text.substr(0, text.find(stop)));
  EXPECT_EQ((*cut)["choices"][0]["finish_reason"], "stop");
  EXPECT_EQ((*cut)["choices"][0]["stop_reason"], stop);
  const int32_t id = (*whole)["choices"][0]["token_ids"][10];
  Json by_id = base;
  by_id["stop_token_ids"] = Json::array({id});
  const auto ended = client::SendJson(At(*s), "POST", "/v1/completions", by_id);
  ASSERT_TRUE(ended.ok());
  EXPECT_EQ((*ended)["choices"][0]["stop_reason"], id);
  by_id["min_tokens"] = 20;
  const auto later = client::SendJson(At(*s), "POST", "/v1/completions", by_id);
  ASSERT_TRUE(later.ok());
  EXPECT_GE((*later)["choices"][0]["token_ids"].size(), 20u);
}

// A stop string of two whole tokens: the first is held back until the second decides, so that no
// client ever sees a part of it, streamed or not.
TEST_F(ServingTest, StopStringsOfTwoTokensNeverShow) {
  const auto s = Serve();
  Json body{{"prompt", Prompt(7, 8)},
            {"max_tokens", 40},
            {"seed", 5},
            {"ignore_eos", true},
            {"logprobs", 0}};
  const auto whole = client::SendJson(At(*s), "POST", "/v1/completions", body);
  ASSERT_TRUE(whole.ok());
  const std::string text = (*whole)["choices"][0]["text"];
  const Json& tokens = (*whole)["choices"][0]["logprobs"]["tokens"];
  std::string stop;
  for (size_t i = 5; i + 1 < tokens.size() && stop.empty(); ++i) {
    const std::string first = tokens[i], both = first + tokens[i + 1].get<std::string>();
    const size_t at = text.find(both);
    // Tokens that are whole characters, met here for the first time.
    if (both.size() > first.size() && at != std::string::npos && at > 0 &&
        both.find("\xef\xbf\xbd") == std::string::npos) {
      stop = both;
    }
  }
  ASSERT_FALSE(stop.empty());
  const std::string want = text.substr(0, text.find(stop));
  body["stop"] = Json::array({"never here", stop});
  const auto cut = client::SendJson(At(*s), "POST", "/v1/completions", body);
  ASSERT_TRUE(cut.ok());
  EXPECT_EQ((*cut)["choices"][0]["text"], want);
  body["stream"] = true;
  const auto raw = client::Send(At(*s), {"POST", "/v1/completions", body.dump()});
  ASSERT_TRUE(raw.ok());
  std::string streamed;
  for (size_t at = 0; at < raw->body.size();) {
    const size_t end = raw->body.find("\n\n", at);
    ASSERT_NE(end, std::string::npos);
    const std::string line = raw->body.substr(at, end - at);
    at = end + 2;
    if (line == "data: [DONE]") continue;
    const Json event = Json::parse(line.substr(6));
    if (!event["choices"].empty()) streamed += event["choices"][0]["text"].get<std::string>();
  }
  EXPECT_EQ(streamed, want);
}

// The second of two equal prompts takes its whole blocks from the cache, and usage says how many.
TEST_F(ServingTest, UsageCountsCachedTokens) {
  const auto s = Serve();
  const Json body{{"prompt", Prompt(8, 40)}, {"max_tokens", 2}, {"seed", 1}};
  for (const int64_t cached : {0, 32}) {
    const auto r = client::SendJson(At(*s), "POST", "/v1/completions", body);
    ASSERT_TRUE(r.ok()) << r.status().ToString();
    EXPECT_EQ((*r)["usage"]["prompt_tokens"], 40);
    EXPECT_EQ((*r)["usage"]["prompt_tokens_details"]["cached_tokens"], cached);
  }
}

// Every malformed field is a 400 that names it, and nothing of it reaches the engine.
TEST_F(ServingTest, RefusalsNameTheField) {
  const auto s = Serve();
  const std::vector<std::pair<std::string, std::string>> cases = {
      {R"({"prompt":[]})", "prompt"},
      {R"({"prompt":[1,2],"temperature":-1})", "temperature"},
      {R"({"prompt":[1,2],"temperature":"hot"})", "temperature"},
      {R"({"prompt":[1,2],"top_p":0})", "top_p"},
      {R"({"prompt":[1,2],"top_p":1e400})", "body"},
      {R"({"prompt":[1,2],"min_p":2})", "min_p"},
      {R"({"prompt":[1,2],"n":0})", "n"},
      {R"({"prompt":[1,2],"n":100000})", "n"},
      {R"({"prompt":[1,2],"max_tokens":0})", "max_tokens"},
      {R"({"prompt":[1,2],"max_tokens":1000000})", "max_tokens"},
      {R"({"prompt":[1,999999]})", "prompt"},
      {R"({"prompt":[1,-5]})", "prompt"},
      {R"({"prompt":[1.5]})", "prompt"},
      {R"({"prompt":[1],"logit_bias":{"x":1}})", "logit_bias"},
      {R"({"prompt":[1],"logit_bias":{"1":1000}})", "logit_bias"},
      {R"({"prompt":[1],"stop":[""]})", "stop"},
      {R"({"prompt":[1],"stop_token_ids":[99999999]})", "stop_token_ids"},
      {R"({"prompt":[1],"stream_options":{"include_usage":true}})", "stream_options"},
      {R"({"prompt":[1],"stream":true,"prompt_logprobs":1})", "prompt_logprobs"},
      {R"({"prompt":[1],"presence_penalty":0.5})", "presence_penalty"},
      {R"({"prompt":[1],"temprature":0.5})", "temprature"},
      {R"({"prompt":[1],"prompt":[2]})", "body"},
      {R"({"prompt":[1],"response_format":{"type":7}})", "body"},
      {R"({"prompt":)", "body"},
      {R"([1])", "body"},
  };
  for (const auto& [body, field] : cases) {
    const auto r = client::Send(At(*s), {"POST", "/v1/completions", body});
    ASSERT_TRUE(r.ok()) << body;
    EXPECT_EQ(r->status, 400) << body << " " << r->body;
    const Json error = Json::parse(r->body)["error"];
    EXPECT_EQ(error["param"], field) << body << " " << r->body;
    EXPECT_EQ(error["type"], "BadRequestError");
  }
  EXPECT_EQ(s->engine().GetStats().generated_tokens, 0);
  const struct {
    client::Call call;
    int status;
    const char* param;
  } others[] = {
      {{"GET", "/v1/completions", ""}, 405, "method"},
      {{"GET", "/nowhere", ""}, 404, "path"},
      {{"POST", "/v1/completions", R"({"prompt":[1],"model":"other"})"}, 404, "model"},
      {{"POST", "/v1/chat/completions", R"({"messages":[]})"}, 400, "messages"},
      {{"POST", "/v1/chat/completions", R"({"messages":[{"role":"user"}]})"},
       400,
       "messages[0].content"},
      {{"POST", "/tokenize", R"({"prompt":["a","b"]})"}, 400, "prompt"},
      {{"POST", "/detokenize", R"({"tokens":[-1]})"}, 400, "tokens"},
      {{"POST", "/detokenize", "{}"}, 400, "tokens"},
  };
  for (const auto& o : others) {
    const auto r = client::Send(At(*s), o.call);
    ASSERT_TRUE(r.ok()) << o.call.path;
    EXPECT_EQ(r->status, o.status) << o.call.path << " " << r->body;
    EXPECT_EQ(Json::parse(r->body)["error"]["param"], o.param) << r->body;
  }
}

// What can never fit the cache is the asker's fault, not a full server's.
TEST_F(ServingTest, RequestsBeyondTheCacheAreRefused) {
  const auto s = Serve([](ServingConfig* c) { c->engine.scheduler.num_blocks = 4; });
  const auto r = client::Send(At(*s), {"POST", "/v1/completions",
                                       Json{{"prompt", Prompt(1, 60)}, {"max_tokens", 5}}.dump()});
  ASSERT_TRUE(r.ok());
  EXPECT_EQ(r->status, 400) << r->body;
  EXPECT_EQ(Json::parse(r->body)["error"]["param"], "max_tokens") << r->body;
}

// The `tare serve` bits of sampled tokens are the `tare score` bits of the same tokens.
TEST_F(ServingTest, ServeEqualsScore) {
  for (const char* profile : {"ieee-f32", "sm90-mma"}) {
    SCOPED_TRACE(profile);
    const auto s = Serve([&](ServingConfig* c) { c->engine.profile = *ParseProfile(profile); });
    std::vector<CompletionRequest> requests;
    for (int i = 0; i < 5; ++i) {
      requests.push_back({.prompt = Prompt(30 + i, 3 + 13 * i),
                          .max_tokens = 20 - 3 * i,
                          .seed = static_cast<uint64_t>(i),
                          .ignore_eos = true});
    }
    const auto answers = client::Complete(At(*s), requests);
    std::string lines, want;
    const std::string tokens = *root_ + "/tokens.jsonl", out = *root_ + "/scored.jsonl";
    for (size_t i = 0; i < requests.size(); ++i) {
      ASSERT_TRUE(answers[i].ok()) << answers[i].status().ToString();
      lines +=
          Json{{"prompt", requests[i].prompt}, {"tokens", (*answers[i])[0].tokens}}.dump() + "\n";
    }
    ASSERT_TRUE(Env::Real()->WriteFileAtomic(tokens, lines).ok());
    for (const char* how : {"", "--batch-tokens 1", "--chunk 7 --page-size 5 --order length"}) {
      std::filesystem::remove(out);
      const std::string command =
          fmt::format("{}/tare score {}/mini --tokens {} --logprobs {} --profile {} {} > /dev/null",
                      TARE_BINARY_DIR, *root_, tokens, out, profile, how);
      ASSERT_EQ(std::system(command.c_str()), 0) << command;
      const auto scored = Env::Real()->ReadFile(out);
      ASSERT_TRUE(scored.ok());
      size_t at = 0;
      for (size_t i = 0; i < requests.size(); ++i) {
        const size_t end = scored->find('\n', at);
        ASSERT_NE(end, std::string::npos);
        const Json line = Json::parse(scored->substr(at, end - at));
        at = end + 1;
        EXPECT_EQ(line["tokens"], Json((*answers[i])[0].tokens));
        Json words = Json::array();
        for (const uint32_t w : (*answers[i])[0].raw_logprob)
          words.push_back(fmt::format("{:08x}", w));
        EXPECT_EQ(line["bits"], words) << how;
      }
    }
  }
}

TEST_F(ServingTest, ApiKey) {
  const auto s = Serve([](ServingConfig* c) { c->api_key = "secret"; });
  Endpoint at = At(*s);
  EXPECT_EQ(client::Send(at, {"GET", "/v1/models", ""})->status, 401);
  EXPECT_EQ(client::Send(at, {"GET", "/health", ""})->status, 200);
  at.api_key = "secret";
  EXPECT_EQ(client::Send(at, {"GET", "/v1/models", ""})->status, 200);
  at.api_key = "Secret";
  EXPECT_EQ(client::Send(at, {"GET", "/v1/models", ""})->status, 401);
}

}  // namespace
}  // namespace tare::engine
