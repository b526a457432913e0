// task.toml and recovery. Rows GEN-08, GEN-09, GEN-10; hostile configuration.

#include <gtest/gtest.h>

#include <fstream>
#include <random>

#include "workflow/recover.h"
#include "workflow/testing_task.h"

namespace tare::workflow {
namespace {

Result<TaskConfig> Parse(const std::string& body) {
  return ParseTaskConfig("schema = \"tare-task-1\"\n" + body, "task.toml");
}

TEST(TaskConfig, UnknownAndMalformedKeysAreErrorsThatSayWhere) {
  EXPECT_TRUE(Parse("[model]\nhidden_size = 64\n").ok());
  const std::vector<std::pair<std::string, std::string>> bad = {
      {"[model]\nhiden_size = 64\n",
       "line 3: model.hiden_size: unknown key; the nearest known one is model.hidden_size"},
      {"[model]\nhidden_size = \"64\"\n", "line 3: model.hidden_size: a whole number"},
      {"[model]\nhidden_size = -1\n", "model.hidden_size"},
      {"[model]\nhidden_size = 1.5\n", "model.hidden_size"},
      {"[model]\nhidden_size = 99999999999999999999\n", "line 3"},
      {"[model]\nrope_theta = nan\n", "a finite number"},
      {"[task]\nscope = \"everything\"\n", "not one of full|inference-only"},
      {"[task]\nname = \"\"\n", "task.name"},
      {"[task]\nname = \"a\\u001b[31m\"\n", "task.name"},
      {"[task]\nname = 2026-01-01\n", "task.name"},
      {"[model]\nhidden_size = 64\nhidden_size = 65\n", "line 4"},
      {"[workload]\nconcurrency = [1, \"2\"]\n", "workload.concurrency"},
      {"model = 3\n", "model: unknown key"},
      {"[requester]\nkeys = [\"rsa\"]\n", "requester.keys"},
      {"[[reviewer]]\nperson = \"bob\"\n", "person, key and steps are needed"},
      {"[[reviewer]]\nperson = \"bob\"\nkey = \"" + kBob.RawText() + "\"\nsteps = [\"C99\"]\n",
       "reviewer.steps"},
      {"[[reviewer]]\nperson = \"bob\"\nkey = \"" + kBob.RawText() +
           "\"\nsteps = [\"C1\"]\nforce = true\n",
       "reviewer.force: unknown key"},
      {"[[reviewer]]\nperson = \"bob\"\nkey = \"" + kBob.RawText() +
           "\"\nsteps = [\"C1\"]\nvalid_until = \"tomorrow\"\n",
       "valid_until"},
      {"[reviewer]\nperson = \"bob\"\n", "[[reviewer]] tables are needed"},
      {"x = " + std::string(1000, '[') + "\n", "nested too deeply"},
      {"\xff\xfe = 1\n", "utf-8"},
      {"[task]\nname = \xcf\x9b\n", "line 3 column 8: "},
      {"[task]\nname = \"\xc3\xa9\xc3\xa9\" \xc2\xa0\n", "line 3 column 13: "},
      {"[task]\nname = '\\' \xc3\xa9\n", "line 3 column 12: "},
      {"[task]\nname = 9'a\xc3\xa9'\n", "line 3 column 9: "},
      {"[task]\nname = \"\"\"a\"\"\"\"\"\"\xc3\xa9\n", "line 3"},
      {"[task]\nn\xc3\xa9 = 1\n", "line 3 column 2: "},
      {"[task]\nname = \"a\\\xc3\xa9\"\n", "line 3"},
      {"[task]\n\"n\xc3\xa9\" = 1\n", "unknown key"},
      {"a = 1", "unknown key"},
  };
  for (const auto& [text, expected] : bad) {
    auto config = Parse(text);
    ASSERT_FALSE(config.ok()) << text.substr(0, 80);
    EXPECT_NE(config.status().message().find(expected), std::string::npos)
        << config.status().message() << "\nexpected: " << expected;
    EXPECT_EQ(Printable(config.status().message()), config.status().message());
  }
  // Characters beyond ASCII come back as they were, wherever a document may hold them.
  const std::pair<std::string, std::string> good[] = {
      {"[task] # \xc3\xa9\nname = \"\xcf\x9b\" # \xc2\xa0\n", "\xcf\x9b"},
      {"[task]\nname = '\xc3\xa9\\'\n", "\xc3\xa9\\"},
      {"[task]\nname = \"\\\"\xc3\xa9\\u00e9\"\n", "\"\xc3\xa9\xc3\xa9"},
      {"[task]\nname = \"\"\"\xc3\xa9\\\n \xc3\xa9\"\"\"\n", "\xc3\xa9\xc3\xa9"},
      {"[task]\nname = '''\xc3\xa9\\''''\n", "\xc3\xa9\\'"},
      {"\"task\".'name' = \"\xf0\x9f\x8e\x88@\"\n", "\xf0\x9f\x8e\x88@"},
  };
  for (const auto& [text, expected] : good) {
    const auto config = Parse(text);
    ASSERT_TRUE(config.ok()) << config.status().message() << "\n" << text;
    EXPECT_EQ(config->String("task.name"), expected) << text;
  }
  EXPECT_FALSE(ParseTaskConfig("[model]\n", "x").ok());  // no schema
  EXPECT_FALSE(ParseTaskConfig("schema = \"tare-task-2\"\n", "x").ok());
  EXPECT_FALSE(Parse("# " + std::string(2 << 20, 'x') + "\n").ok());
  // Two keys for one reviewer are fine; one key for two reviewers is not.
  EXPECT_FALSE(Parse(fmt::format("[[reviewer]]\nperson = \"a\"\nkey = \"{0}\"\nsteps = [\"C1\"]\n"
                                 "[[reviewer]]\nperson = \"b\"\nkey = \"{0}\"\nsteps = [\"C1\"]\n",
                                 kBob.RawText()))
                   .ok());
}

TEST(TaskConfig, TheTemplateParsesBackAndNamesEveryKey) {
  auto config = ParseTaskConfig(TestToml(), "x");
  ASSERT_TRUE(config.ok()) << config.status().ToString();
  const std::string text = RenderTaskToml(*config);
  auto back = ParseTaskConfig(text, "x");
  ASSERT_TRUE(back.ok()) << back.status().ToString();
  ASSERT_EQ(back->values.size(), config->values.size());
  for (const auto& [key, value] : config->values) EXPECT_EQ(back->Text(key), value.text) << key;
  EXPECT_EQ(back->AuthorityDigest(), config->AuthorityDigest());
  for (const KeySpec& spec : AllKeys()) {
    const std::string name(spec.key.substr(spec.key.find('.') + 1));
    EXPECT_NE(text.find(name + " = "), std::string::npos) << spec.key;
    EXPECT_NE(text.find(spec.doc), std::string::npos) << spec.key;
  }
  auto logged = ConfigFromJson(ConfigToJson(*config));
  ASSERT_TRUE(logged.ok());
  EXPECT_EQ(logged->AuthorityDigest(), config->AuthorityDigest());
}

// 200 random conflicts: the user's value holds, and both values with their origins are listed.
TEST(TaskConfig, UserOverRecipeOverRecoveredOverDefault) {  // GEN-08
  std::mt19937 random(1);
  std::vector<std::string> ints;
  for (const KeySpec& spec : AllKeys()) {
    if (spec.type == ValueType::kInt) ints.emplace_back(spec.key);
  }
  const char* names[4] = {"user", "recipe", "recovered", "default"};
  for (int round = 0; round < 200; ++round) {
    TaskConfig layers[4];
    for (int l = 0; l < 4; ++l) {
      for (int k = 0; k < 6; ++k) {
        layers[l].values[ints[random() % ints.size()]] = {fmt::format("{}", random() % 3),
                                                          names[l]};
      }
    }
    const MergedConfig merged = MergeConfigs({&layers[0], &layers[1], &layers[2], &layers[3]});
    for (const std::string& key : ints) {
      int first = -1;
      size_t differing = 0;
      for (int l = 0; l < 4; ++l) {
        const auto at = layers[l].values.find(key);
        if (at == layers[l].values.end()) continue;
        if (first < 0) first = l;
        differing += at->second.text != layers[first].values[key].text;
      }
      if (first < 0) {
        EXPECT_EQ(merged.config.Text(key), "");
        continue;
      }
      EXPECT_EQ(merged.config.Text(key), layers[first].values[key].text);
      EXPECT_EQ(merged.config.values.at(key).origin, names[first]);
      size_t listed = 0;
      for (const ConfigConflict& c : merged.conflicts) {
        if (c.key != key) continue;
        ++listed;
        EXPECT_EQ(c.kept.origin, names[first]);
        EXPECT_NE(c.dropped.text, c.kept.text);
        EXPECT_NE(c.dropped.origin, c.kept.origin);
      }
      EXPECT_EQ(listed, differing) << "a silent override of " << key;
    }
  }
}

void WriteModel(const std::string& dir) {
  std::filesystem::create_directory(dir);
  std::ofstream(dir + "/config.json")
      << R"({"architectures":["LlamaForCausalLM"],"hidden_size":576,"num_hidden_layers":30,)"
         R"("num_attention_heads":9,"num_key_value_heads":3,"vocab_size":49152,"rope_theta":100000,)"
         R"("rms_norm_eps":1e-05,"tie_word_embeddings":true,"intermediate_size":1536,"torch_dtype":"float32"})";
  const std::string header =
      R"({"__metadata__":{"format":"pt"},"w":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]}})";
  std::string bytes(8, '\0');
  bytes[0] = static_cast<char>(header.size());
  std::ofstream(dir + "/model.safetensors", std::ios::binary) << bytes << header << "ab";
}

TEST(Recover, TenFieldsComeBackWithFileAndKey) {  // GEN-09
  TempDir dir;
  TestEnv env;
  WriteModel(dir / "m");
  std::ofstream(dir / "vllm.json")
      << R"({"rollout":{"tensor_model_parallel_size":2,"block_size":16,"kv_cache_dtype":"auto"},)"
         R"("trainer":{"optimizer":"adamw","lr":1e-6,"tensor_model_parallel_size":2}})";
  auto r = RecoverConfig(&env, dir / "m", {dir / "vllm.json"});
  ASSERT_TRUE(r.ok()) << r.status().ToString();
  const auto expect = [&](const char* key, const std::string& text, const std::string& from) {
    ASSERT_EQ(r->config.values.count(key), 1u) << key;
    EXPECT_EQ(r->config.values.at(key).text, text) << key;
    EXPECT_EQ(r->config.values.at(key).origin, "recovered: " + from) << key;
  };
  expect("model.hidden_size", "576", "config.json hidden_size");
  expect("model.num_layers", "30", "config.json num_hidden_layers");
  expect("model.num_attention_heads", "9", "config.json num_attention_heads");
  expect("model.num_key_value_heads", "3", "config.json num_key_value_heads");
  expect("model.head_dim", "64", "config.json hidden_size / num_attention_heads");
  expect("model.rope_theta", "100000.0", "config.json rope_theta");
  expect("model.tie_embeddings", "true", "config.json tie_word_embeddings");
  expect("model.architecture", "\"LlamaForCausalLM\"", "config.json architectures");
  // The checkpoint's header, and not the configuration that says float32.
  expect("weights.dtype", "\"bf16\"", "model.safetensors header dtype");
  expect("parallelism.tp", "2", "vllm.json rollout.tensor_model_parallel_size");
  expect("inference.block_size", "16", "vllm.json rollout.block_size");
  expect("training.optimizer", "\"adamw\"", "vllm.json trainer.optimizer");
  for (const auto& [key, value] : r->config.values) {
    EXPECT_EQ(value.origin.find("default"), std::string::npos) << key;
  }
  EXPECT_EQ(r->config.values.count("precision.kv_cache"), 0u);  // "auto" says nothing
  // Sources that disagree recover nothing and are named.
  std::ofstream(dir / "two.json") << R"({"a":{"tp_size":1},"b":{"tp_size":2}})";
  auto two = RecoverConfig(&env, "", {dir / "two.json"});
  EXPECT_EQ(two->config.values.count("parallelism.tp"), 0u);
  ASSERT_FALSE(two->notes.empty());
  EXPECT_NE(two->notes[0].find("a.tp_size=1"), std::string::npos);
  EXPECT_FALSE(RecoverConfig(&env, dir / "no-such", {}).ok());
  EXPECT_FALSE(RecoverConfig(&env, "", {dir / "x.yaml"}).ok());
}

// Between files of one layer too: the value that holds, the one that does not, and where each is
// from.
TEST(Recover, EveryConflictIsListed) {  // GEN-08
  TempDir dir;
  TestEnv env;
  WriteModel(dir / "m");
  std::ofstream(dir / "a.json") << R"({"tensor_parallel_size":2,"hidden_size":576})";
  std::ofstream(dir / "b.json") << R"({"tensor_parallel_size":4,"hidden_size":64})";
  std::ofstream(dir / "c.toml") << "[parallelism]\ntp = 8\n";
  ASSERT_TRUE(env.WriteFileAtomic(dir / "user.toml", TestToml()).ok());
  InitOptions options;
  options.model_path = dir / "m";
  options.config_files = {dir / "a.json", dir / "b.json", dir / "c.toml"};
  const auto conflicts = [&](const std::string& name) {
    InitReport report;
    auto task = Task::Init(&env, dir / name, "ann", options, &report);
    EXPECT_TRUE(task.ok()) << task.status().ToString();
    std::vector<std::string> out;
    for (const ConfigConflict& c : report.conflicts) {
      out.push_back(fmt::format("{}: {} ({}) over {} ({})", c.key, c.kept.text, c.kept.origin,
                                c.dropped.text, c.dropped.origin));
    }
    std::sort(out.begin(), out.end());
    return out;
  };
  EXPECT_EQ(conflicts("t"),
            (std::vector<std::string>{
                "model.hidden_size: 576 (recovered: a.json hidden_size) over 64 (recovered: b.json "
                "hidden_size)",
                "parallelism.tp: 2 (recovered: a.json tensor_parallel_size) over 4 (recovered: "
                "b.json tensor_parallel_size)",
                "parallelism.tp: 2 (recovered: a.json tensor_parallel_size) over 8 (recovered: "
                "c.toml line 2)",
                "weights.dtype: \"bf16\" (recovered: model.safetensors header dtype) over \"f32\" "
                "(recovered: config.json torch_dtype)"}));
  // A single value of the user's stands over his own file and over all of them.
  options.model_path.clear();
  options.user_toml = dir / "user.toml";
  options.user_values = {{"parallelism.tp", "4"}};
  EXPECT_EQ(conflicts("u"),
            (std::vector<std::string>{
                "model.hidden_size: 64 (user: user.toml line 6) over 576 (recovered: a.json "
                "hidden_size)",
                "parallelism.tp: 4 (user: --set parallelism.tp) over 1 (user: user.toml line 32)",
                "parallelism.tp: 4 (user: --set parallelism.tp) over 2 (recovered: a.json "
                "tensor_parallel_size)",
                "parallelism.tp: 4 (user: --set parallelism.tp) over 8 (recovered: c.toml line "
                "2)",
                "training.route: \"tare\" (user: user.toml line 16) over \"mlite\" (default: the "
                "usual consistency implementation)"}));
}

TEST(Recover, OneQuestionOnlyForWhatMattersAndCannotBeFound) {  // GEN-10
  auto full = ParseTaskConfig(TestToml(), "x");
  ASSERT_TRUE(full.ok());
  EXPECT_TRUE(OpenQuestions(*full).empty());
  TaskConfig irrelevant = *full;
  irrelevant.values.erase("log.level");
  irrelevant.values.erase("model.rope_theta");
  EXPECT_TRUE(OpenQuestions(irrelevant).empty());
  TaskConfig inference = *full;
  inference.values["task.scope"] = {"\"inference-only\"", "user"};
  inference.values.erase("training.optimizer");
  EXPECT_TRUE(OpenQuestions(inference).empty());
  TaskConfig relevant = *full;
  relevant.values.erase("precision.kv_cache");
  const auto questions = OpenQuestions(relevant);
  ASSERT_EQ(questions.size(), 1u);
  EXPECT_EQ(questions[0].key, "precision.kv_cache");
  EXPECT_EQ(questions[0].blocks, "C0");
}

TEST(Recover, AQuestionBlocksItsStepUntilItIsAnswered) {
  TempDir dir;
  TestEnv env;
  std::string toml = TestToml();
  toml.replace(toml.find("kv_cache = \"bf16\"\n"), 18, "");
  auto task = InitTask(&env, dir / "t", toml);
  ASSERT_EQ(task->state().questions.size(), 1u);
  std::string text = *env.ReadFile(dir / "t/task.toml");
  const size_t at = text.find("# kv_cache = ");
  ASSERT_NE(at, std::string::npos);
  text.erase(at, 2);
  ASSERT_TRUE(env.WriteFileAtomic(dir / "t/task.toml", text).ok());
  ASSERT_TRUE(task->Amend("the cache is bf16").ok());
  EXPECT_TRUE(task->state().questions.empty());
}

}  // namespace
}  // namespace tare::workflow
