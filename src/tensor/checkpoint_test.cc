#include "tensor/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>

#include "base/fault_env.h"
#include "tensor/convert.h"
#include "tensor/digest.h"
#include "tensor/safetensors.h"
#include "tensor/testing_gguf.h"
#include "tensor/weight_hash.h"

namespace tare {
namespace {

using ::testing::HasSubstr;

std::string DataPath(const std::string& name) {
  return std::string(TARE_SOURCE_DIR) + "/tests/data/formats/" + name;
}

// The same small Llama, three times: shards with index, one safetensors file, GGUF with interleaved
// q, k.
TEST(Checkpoint, ThreeFormatsHoldTheSameBits) {
  const auto sharded = Checkpoint::Open(DataPath("tiny_sharded/"));
  const auto single = Checkpoint::Open(DataPath("tiny.safetensors"));
  const auto gguf = Checkpoint::Open(DataPath("tiny.gguf"));
  ASSERT_TRUE(sharded.ok()) << sharded.status().ToString();
  ASSERT_TRUE(single.ok()) << single.status().ToString();
  ASSERT_TRUE(gguf.ok()) << gguf.status().ToString();
  EXPECT_EQ(sharded->format(), Checkpoint::Format::kHuggingFace);
  EXPECT_EQ(single->format(), Checkpoint::Format::kSafetensors);
  EXPECT_EQ(gguf->format(), Checkpoint::Format::kGguf);
  ASSERT_EQ(sharded->names().size(), 20u);
  EXPECT_EQ(sharded->names(), single->names());
  EXPECT_EQ(sharded->names(), gguf->names());
  for (const std::string& name : sharded->names()) {
    const Tensor a = sharded->Get(name).value();
    for (const Checkpoint* other : {&*single, &*gguf}) {
      const Tensor b = other->Get(name).value();
      ASSERT_EQ(a.dtype(), b.dtype());
      ASSERT_EQ(a.shape(), b.shape()) << name;
      ASSERT_EQ(std::memcmp(a.data(), b.data(), static_cast<size_t>(a.size_bytes())), 0) << name;
    }
  }
  ThreadPool pool(2);
  const auto hash = HashWeights(*sharded, &pool).value();
  EXPECT_EQ(hash.digest, HashWeights(*single).value().digest);
  EXPECT_EQ(hash.digest, HashWeights(*gguf, &pool).value().digest);
  EXPECT_EQ(hash.total_bytes, 33600);  // total_size of the index
}

TEST(Checkpoint, ConfigAndTokenizer) {
  const auto sharded = Checkpoint::Open(DataPath("tiny_sharded")).value();
  EXPECT_EQ(sharded.config().model_type, "llama");
  EXPECT_TRUE(sharded.config().tie_word_embeddings);
  EXPECT_EQ(sharded.config().dtype, DType::kBF16);
  EXPECT_EQ(sharded.config().eos_token_ids,
            (std::vector<int64_t>{2, 3}));  // generation_config wins
  const auto gguf = Checkpoint::Open(DataPath("tiny.gguf")).value();
  EXPECT_EQ(gguf.config().eos_token_ids, (std::vector<int64_t>{2}));
  for (const char* key : {"hidden_size",
                          "num_hidden_layers",
                          "num_attention_heads",
                          "model_type",
                          "num_key_value_heads",
                          "head_dim",
                          "intermediate_size",
                          "vocab_size",
                          "max_position_embeddings",
                          "rms_norm_eps",
                          "rope_theta",
                          "rope_scaling",
                          "tie_word_embeddings",
                          "hidden_act",
                          "attention_bias",
                          "mlp_bias",
                          "architectures",
                          "torch_dtype",
                          "bos_token_id",
                          "eos_token_id"}) {
    EXPECT_EQ(gguf.config().raw.value(key, Json("absent")),
              sharded.config().raw.value(key, Json("absent")))
        << key;
  }
  EXPECT_EQ(gguf.tokenizer().gguf_model, "gpt2");
  EXPECT_EQ(gguf.tokenizer().gguf_pre, "smollm");
  EXPECT_EQ(gguf.tokenizer().tokens.size(), 40u);
  EXPECT_EQ(gguf.tokenizer().token_types[2], 3);
  EXPECT_EQ(gguf.tokenizer().merges[0], "! \"");
  EXPECT_EQ(gguf.tokenizer().bos, 1);
}

// The head of a tied model is its embedding, stored or not; another stored head is an error.
TEST(Checkpoint, TiedHead) {
  const auto tiny = Checkpoint::Open(DataPath("tiny_sharded")).value();
  const Tensor head = tiny.Get("lm_head.weight").value();
  EXPECT_EQ(head.data(), tiny.Get("model.embed_tokens.weight")->data());
  EXPECT_EQ(tiny.Find("lm_head.weight"), nullptr);

  FaultEnv env;
  ASSERT_TRUE(env.CreateDirs("/m").ok());
  ASSERT_TRUE(env.WriteFileAtomic("/m/config.json", "{\"tie_word_embeddings\": true}").ok());
  std::vector<std::pair<std::string, Tensor>> tensors;
  for (const auto& name : tiny.names()) tensors.emplace_back(name, tiny.Get(name).value());
  tensors.emplace_back("lm_head.weight", head);
  ASSERT_TRUE(WriteSafetensors(&env, "/m/model.safetensors", tensors).ok());
  CheckpointOptions options;
  options.env = &env;
  const auto both = Checkpoint::Open("/m", options).value();
  EXPECT_EQ(both.names().size(), 21u);
  EXPECT_EQ(HashWeights(both)->digest, HashWeights(tiny)->digest)
      << "tied is tied, stored once or twice";

  Tensor other = head.Clone().value();
  other.mutable_as<uint16_t>()[5] ^= 1;
  tensors.back().second = other;
  ASSERT_TRUE(WriteSafetensors(&env, "/m/model.safetensors", tensors).ok());
  const auto differ = Checkpoint::Open("/m", options).value();
  EXPECT_THAT(HashWeights(differ).status().ToString(), HasSubstr("both are stored and differ"));
  // Not tied: two tensors, two lines of the hash.
  ASSERT_TRUE(env.WriteFileAtomic("/m/config.json", "{}").ok());
  EXPECT_EQ(HashWeights(Checkpoint::Open("/m", options).value())->tensors.size(), 21u);
}

// One flipped bit, one renamed tensor, another dtype or shape: another hash.
TEST(WeightHash, EveryPartCounts) {
  const Tensor t = Tensor::Allocate(DType::kBF16, {2, 3}).value();
  const auto hash = [](std::vector<std::pair<std::string, Tensor>> tensors) {
    std::vector<WeightHashItem> items;
    for (const auto& [name, value] : tensors) {
      items.push_back({name, value.dtype(), value.shape(), TensorDigest(value), {}});
    }
    return HashOfItems(items).value();
  };
  const auto base = hash({{"a", t}, {"b", t}});
  // By a few lines of Python from docs/formats/weight_hash.md; `t` holds zeros.
  EXPECT_EQ(Hex(base), "a86d3f10ac03d07df75f1a3a985b8e9f600e53ee619f7c7a7fa48eb86b78d456");
  EXPECT_EQ(base, hash({{"b", t}, {"a", t}}));
  Tensor flipped = t.Clone().value();
  flipped.mutable_as<uint16_t>()[5] = 0x8000;
  EXPECT_NE(base, hash({{"a", t}, {"b", flipped}}));
  EXPECT_NE(base, hash({{"a", t}, {"c", t}}));
  EXPECT_NE(base, hash({{"a", t}}));
  EXPECT_NE(base, hash({{"a", t}, {"b", t.Reshape({3, 2}).value()}}));
  EXPECT_NE(base, hash({{"a", t}, {"b", t.BitCast(DType::kF16).value()}}));
  EXPECT_FALSE(
      HashOfItems({{"a", DType::kF32, {1}, {}, {}}, {"a", DType::kF32, {1}, {}, {}}}).ok());
}

class Broken : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(env_.CreateDirs("/m").ok());
    for (const char* name :
         {"config.json", "generation_config.json", "model.safetensors.index.json",
          "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}) {
      Copy(name, name);
    }
    options_.env = &env_;
  }
  void Copy(const std::string& from, const std::string& to) {
    Write(to, Env::Real()->ReadFile(DataPath("tiny_sharded/" + from)).value());
  }
  void Write(const std::string& name, const std::string& text) {
    ASSERT_TRUE(env_.WriteFileAtomic("/m/" + name, text).ok());
  }
  void Replace(const std::string& name, const std::string& from, const std::string& to) {
    std::string text = env_.ReadFile("/m/" + name).value();
    const size_t at = text.find(from);
    ASSERT_NE(at, std::string::npos);
    Write(name, text.replace(at, from.size(), to));
  }
  std::string Error() {
    const auto r = Checkpoint::Open("/m", options_);
    return r.ok() ? "ok" : r.status().ToString();
  }

  FaultEnv env_;
  CheckpointOptions options_;
};

// Index and shards must say the same; each way to differ has its own error.
TEST_F(Broken, Index) {
  EXPECT_EQ(Error(), "ok");
  ASSERT_TRUE(env_.Rename("/m/model-00002-of-00002.safetensors", "/m/x").ok());
  EXPECT_THAT(Error(),
              HasSubstr("names the shard model-00002-of-00002.safetensors, which is absent"));
  ASSERT_TRUE(env_.Rename("/m/x", "/m/model-00002-of-00002.safetensors").ok());
  Replace("model.safetensors.index.json", "model.norm.weight", "model.norm.other");
  EXPECT_THAT(Error(), HasSubstr("\"model.norm.weight\", which the index forgets"));
  Copy("model.safetensors.index.json", "model.safetensors.index.json");
  Replace("model.safetensors.index.json", "{", "{\"weight_map\":{},");
  EXPECT_THAT(Error(), HasSubstr("duplicate key \"weight_map\""));
  Copy("model.safetensors.index.json", "model.safetensors.index.json");
  Replace("model.safetensors.index.json", "\"model.norm.weight\"",
          "\"extra\": \"model-00001-of-00002.safetensors\", \"model.norm.weight\"");
  EXPECT_THAT(Error(),
              HasSubstr("\"extra\" is said to be in model-00001-of-00002.safetensors, and is not"));
  Copy("model.safetensors.index.json", "model.safetensors.index.json");
  Replace("model.safetensors.index.json", "\"model-00001-of-00002.safetensors\"",
          "\"../x.safetensors\"");
  EXPECT_THAT(Error(), HasSubstr("../x.safetensors"));
  Write("model.safetensors.index.json", "[]");
  EXPECT_THAT(Error(), HasSubstr("no object weight_map"));
  Copy("model.safetensors.index.json", "model.safetensors.index.json");
  Copy("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors");
  EXPECT_THAT(Error(), HasSubstr("data-loss"));
}

TEST_F(Broken, Directory) {
  Copy("model-00001-of-00002.safetensors", "model.safetensors");
  EXPECT_THAT(Error(), HasSubstr("has both"));
  ASSERT_TRUE(env_.Remove("/m/model.safetensors.index.json").ok());
  EXPECT_EQ(Error(), "ok");
  ASSERT_TRUE(env_.Remove("/m/model.safetensors").ok());
  EXPECT_THAT(Error(), HasSubstr("not-found: /m: neither model.safetensors nor"));
  Write("pytorch_model.bin", "x");
  EXPECT_THAT(Error(), HasSubstr("unsupported: /m: pytorch_model.bin is a pickle"));
  ASSERT_TRUE(env_.Remove("/m/config.json").ok());
  EXPECT_THAT(Error(), HasSubstr("not-found"));
  EXPECT_EQ(Checkpoint::Open("/nowhere", options_).status().code(), Code::kNotFound);
}

TEST_F(Broken, Config) {
  for (const auto& [text, error] : std::vector<std::pair<std::string, std::string>>{
           {"", "config.json: line 1"},
           {"[]", "config.json: is no JSON object"},
           {"{\"model_type\": 3}", "model_type is 3; a string expected"},
           {"{\"architectures\": \"x\"}", "architectures is \"x\""},
           {"{\"architectures\": [1]}", "a list of strings"},
           {"{\"tie_word_embeddings\": \"true\"}",
            "tie_word_embeddings is \"true\"; true or false"},
           {"{\"eos_token_id\": -1}", "eos_token_id is -1"},
           {"{\"eos_token_id\": [1, 2.5]}", "eos_token_id is [1,2.5]"},
           {"{\"eos_token_id\": 4294967296}", "eos_token_id is 4294967296"},
           {"{\"torch_dtype\": 16}", "torch_dtype is 16"}}) {
    Write("config.json", text);
    EXPECT_THAT(Error(), HasSubstr(error));
    EXPECT_THAT(Error(), HasSubstr("data-loss: /m: "));
  }
  Write("config.json", "{}");
  EXPECT_EQ(Error(), "ok");
  Write("generation_config.json", "{\"eos_token_id\": {}}");
  EXPECT_THAT(Error(), HasSubstr("generation_config.json: eos_token_id"));
}

// config.json, generation_config.json and the index cut at every byte: an error, except where only
// the closing newline is gone.
TEST_F(Broken, EveryCutOfTheJsonFilesIsAnError) {
  Write("generation_config.json", "{\"eos_token_id\": [1, 2],\n \"temperature\": 0.5}\n");
  ASSERT_EQ(Error(), "ok");
  for (const char* name :
       {"config.json", "generation_config.json", "model.safetensors.index.json"}) {
    const std::string whole = env_.ReadFile(std::string("/m/") + name).value();
    const size_t end = whole.rfind('}') + 1;
    ASSERT_GT(end, 40u);
    for (size_t n = 0; n < end; ++n) {
      if (n == 0 && std::string(name) == "generation_config.json")
        continue;  // as if it were absent
      Write(name, whole.substr(0, n));
      ASSERT_THAT(Error(), HasSubstr("data-loss")) << name << " cut at " << n;
    }
    Write(name, whole);
  }
  EXPECT_EQ(Error(), "ok");
}

// Row order by architecture: llama's q and k, weights and biases, are interleaved; qwen2's are not.
TEST(Checkpoint, RestoresRopeOrderWhereItWasChanged) {
  for (const bool llama : {true, false}) {
    const std::string arch = llama ? "llama" : "qwen2";
    std::string data;
    for (int i = 0; i < 8; ++i) {  // two heads of four rows; the value of a row is its number
      const float v = static_cast<float>(i);
      data.append(reinterpret_cast<const char*>(&v), 4);
    }
    const std::string file = GgufBuilder()
                                 .Start(2, 2)
                                 .String("general.architecture", arch)
                                 .U32(arch + ".attention.head_count", 2)
                                 .Tensor("blk.3.attn_q.weight", {1, 8}, 0, 0)
                                 .Tensor("blk.3.attn_v.weight", {1, 8}, 0, 32)
                                 .WithData(data + data);
    FaultEnv env;
    ASSERT_TRUE(env.WriteFileAtomic("/m.gguf", file).ok());
    CheckpointOptions options;
    options.env = &env;
    options.gguf_dtype = DType::kF32;
    const auto m = Checkpoint::Open("/m.gguf", options).value();
    const Tensor q = m.Get("model.layers.3.self_attn.q_proj.weight").value();
    const Tensor v = m.Get("model.layers.3.self_attn.v_proj.weight").value();
    const std::vector<float> restored = {0, 2, 1, 3, 4, 6, 5, 7};
    for (int i = 0; i < 8; ++i) {
      EXPECT_EQ(q.as<float>()[i], llama ? restored[static_cast<size_t>(i)] : static_cast<float>(i));
      EXPECT_EQ(v.as<float>()[i], static_cast<float>(i));
    }
  }
}

// Stacked experts become one tensor each; a llama file whose rows do not split into heads is
// refused.
TEST(Checkpoint, GgufExpertsAndBadHeads) {
  std::string data;
  for (int i = 0; i < 12; ++i) {
    const float v = static_cast<float>(i);
    data.append(reinterpret_cast<const char*>(&v), 4);
  }
  FaultEnv env;
  CheckpointOptions options;
  options.env = &env;
  options.gguf_dtype = DType::kF32;
  ASSERT_TRUE(
      env.WriteFileAtomic("/m.gguf", GgufBuilder()
                                         .Start(1, 1)
                                         .String("general.architecture", "qwen3moe")
                                         .Tensor("blk.0.ffn_up_exps.weight", {2, 2, 3}, 0, 0)
                                         .WithData(data))
          .ok());
  const auto m = Checkpoint::Open("/m.gguf", options).value();
  ASSERT_EQ(m.names().size(), 3u);
  const Tensor e = m.Get("model.layers.0.mlp.experts.2.up_proj.weight").value();
  EXPECT_EQ(e.shape(), (Shape{2, 2}));
  EXPECT_EQ(e.as<float>()[0], 8.0f);
  ASSERT_TRUE(env.WriteFileAtomic("/m.gguf", GgufBuilder()
                                                 .Start(1, 2)
                                                 .String("general.architecture", "llama")
                                                 .U32("llama.attention.head_count", 5)
                                                 .Tensor("blk.0.attn_q.weight", {1, 12}, 0, 0)
                                                 .WithData(data))
                  .ok());
  EXPECT_THAT(Checkpoint::Open("/m.gguf", options).status().ToString(),
              HasSubstr("does not split into 5 heads"));
  // Another architecture keeps its names.
  ASSERT_TRUE(env.WriteFileAtomic("/m.gguf", GgufBuilder()
                                                 .Start(1, 1)
                                                 .String("general.architecture", "mamba")
                                                 .Tensor("blk.0.attn_q.weight", {1, 12}, 0, 0)
                                                 .WithData(data))
                  .ok());
  EXPECT_EQ(Checkpoint::Open("/m.gguf", options)->names()[0], "blk.0.attn_q.weight");
}

// The f32 option gives the exact dequantised values, and bf16 is their rounding.
TEST(Checkpoint, GgufDtypeOption) {
  CheckpointOptions f32;
  f32.gguf_dtype = DType::kF32;
  const auto wide = Checkpoint::Open(DataPath("types.gguf"), f32).value();
  const auto narrow = Checkpoint::Open(DataPath("types.gguf")).value();
  const Tensor a = wide.Get("q6_k.weight").value();
  const Tensor b = narrow.Get("q6_k.weight").value();
  ASSERT_EQ(a.dtype(), DType::kF32);
  for (int64_t i = 0; i < a.elements(); ++i) {
    ASSERT_EQ(b.as<uint16_t>()[i], F32ToBf16(a.as<float>()[i]));
  }
  EXPECT_EQ(wide.Find("q6_k.weight")->stored_as, "Q6_K");
  f32.gguf_dtype = DType::kF16;
  EXPECT_EQ(Checkpoint::Open(DataPath("types.gguf"), f32).status().code(), Code::kInvalidArgument);
}

// Every tensor of the real model, imported from GGUF, has the hash that the reference gives. Needs
// the GGUF file: TARE_SMOLLM2_GGUF, or models/smollm2.gguf as scripts/get_model.sh leaves it.
TEST(Checkpoint, RealGgufHasTheReferenceHashes) {
  const char* named = std::getenv("TARE_SMOLLM2_GGUF");
  const std::string path =
      named != nullptr ? named : std::string(TARE_SOURCE_DIR) + "/models/smollm2.gguf";
  if (!Env::Real()->Exists(path))
    GTEST_SKIP() << path << " is absent; scripts/get_model.sh fetches it";
  const auto model = Checkpoint::Open(path);
  ASSERT_TRUE(model.ok()) << model.status().ToString();
  const Json reference =
      ParseJson(Env::Real()->ReadFile(DataPath("smollm2_bf16_sha256.json")).value()).value();
  ThreadPool pool;
  const auto hash = HashWeights(*model, &pool, true).value();
  ASSERT_EQ(hash.tensors.size(), reference.size());
  ASSERT_EQ(hash.tensors.size(), 272u);
  for (const WeightHashItem& item : hash.tensors) {
    ASSERT_TRUE(reference.contains(item.name)) << item.name;
    const Json& want = reference[item.name];
    EXPECT_EQ(Hex(*item.plain_sha256), want["sha256"].get<std::string>()) << item.name;
    EXPECT_EQ(Json(item.shape), want["shape"]) << item.name;
    EXPECT_EQ(SafetensorsName(item.dtype), want["dtype"].get<std::string>());
  }
}

}  // namespace
}  // namespace tare
