// Configurations of the known families, and refusal of what is not understood.

#include "models/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tare::models {
namespace {

using ::testing::HasSubstr;

Json Base(const char* architecture) {
  return Json{{"architectures", Json::array({architecture})},
              {"model_type", "x"},
              {"vocab_size", 1000},
              {"hidden_size", 64},
              {"intermediate_size", 128},
              {"num_hidden_layers", 4},
              {"num_attention_heads", 4},
              {"num_key_value_heads", 2},
              {"max_position_embeddings", 4096},
              {"rms_norm_eps", 1e-5},
              {"rope_theta", 100000.0},
              {"hidden_act", "silu"},
              {"tie_word_embeddings", true},
              {"torch_dtype", "bfloat16"},
              {"use_cache", true},
              {"transformers_version", "4.0"},
              {"bos_token_id", 1},
              {"eos_token_id", Json::array({2, 3})}};
}
ModelConfig Parsed(const Json& json) {
  auto c = ParseConfig(json);
  TARE_CHECK(c.ok()) << c.status().ToString();
  return *c;
}

TEST(ConfigTest, Llama) {
  Json j = Base("LlamaForCausalLM");
  j["rope_interleaved"] = false;
  j["pretraining_tp"] = 1;
  const ModelConfig c = Parsed(j);
  EXPECT_EQ(c.head_dim, 16);
  EXPECT_TRUE(c.tied);
  EXPECT_FALSE(c.qkv_bias || c.qk_norm || c.mlp_bias);
  EXPECT_EQ(c.rope.theta, 100000.0);
  EXPECT_EQ(c.eos, (std::vector<int32_t>{2, 3}));
  EXPECT_EQ(c.layers.size(), 4u);
  EXPECT_EQ(c.layers[0].window, 0);
  j["attention_bias"] = true;
  EXPECT_TRUE(Parsed(j).o_bias);
}

TEST(ConfigTest, RopeScalingInBothSpellings) {
  Json j = Base("LlamaForCausalLM");
  j["rope_scaling"] = Json{{"rope_type", "llama3"},
                           {"factor", 8.0},
                           {"low_freq_factor", 1.0},
                           {"high_freq_factor", 4.0},
                           {"original_max_position_embeddings", 8192}};
  ModelConfig c = Parsed(j);
  EXPECT_EQ(c.rope.scaling, ops::rope::Scaling::kLlama3);
  EXPECT_EQ(c.rope.factor, 8.0);
  j.erase("rope_scaling");
  j.erase("rope_theta");
  j["rope_parameters"] = Json{{"rope_type", "yarn"},
                              {"factor", 4.0},
                              {"rope_theta", 1e6},
                              {"original_max_position_embeddings", 32768}};
  c = Parsed(j);
  EXPECT_EQ(c.rope.scaling, ops::rope::Scaling::kYarn);
  EXPECT_EQ(c.rope.theta, 1e6);
  j["rope_parameters"]["mscale"] = 1.0;
  EXPECT_THAT(ParseConfig(j).status().message(), HasSubstr("mscale"));
}

TEST(ConfigTest, QwenKinds) {
  Json j = Base("Qwen2ForCausalLM");
  j["use_sliding_window"] = false;
  j["sliding_window"] = 128;
  j["max_window_layers"] = 2;
  ModelConfig c = Parsed(j);
  EXPECT_TRUE(c.qkv_bias);
  EXPECT_FALSE(c.o_bias);
  EXPECT_EQ(c.layers[3].window, 0) << "switched off";
  j["use_sliding_window"] = true;
  c = Parsed(j);
  EXPECT_EQ(c.layers[1].window, 0);
  EXPECT_EQ(c.layers[2].window, 128);

  j = Base("Qwen3ForCausalLM");
  j["head_dim"] = 32;
  j["attention_bias"] = false;
  c = Parsed(j);
  EXPECT_TRUE(c.qk_norm);
  EXPECT_EQ(c.q_width(), 128);

  j = Base("Qwen3MoeForCausalLM");
  j["num_experts"] = 8;
  j["num_experts_per_tok"] = 2;
  j["moe_intermediate_size"] = 48;
  j["norm_topk_prob"] = true;
  j["decoder_sparse_step"] = 1;
  j["mlp_only_layers"] = Json::array({1});
  c = Parsed(j);
  EXPECT_TRUE(c.layers[0].moe);
  EXPECT_FALSE(c.layers[1].moe);
  EXPECT_EQ(c.expert_intermediate, 48);
}

TEST(ConfigTest, MistralAndMixtral) {
  Json j = Base("MistralForCausalLM");
  j["sliding_window"] = 256;
  EXPECT_EQ(Parsed(j).layers[0].window, 256);
  j["sliding_window"] = nullptr;
  EXPECT_EQ(Parsed(j).layers[0].window, 0);
  j = Base("MixtralForCausalLM");
  j["num_local_experts"] = 4;
  j["num_experts_per_tok"] = 2;
  const ModelConfig c = Parsed(j);
  EXPECT_TRUE(c.layers[3].moe && c.renormalise);
  EXPECT_EQ(c.expert_intermediate, 128);
}

TEST(ConfigTest, RefusesByName) {
  const auto message = [](const char* key, Json value,
                          const char* architecture = "LlamaForCausalLM") {
    Json j = Base(architecture);
    j[key] = std::move(value);
    auto c = ParseConfig(j);
    EXPECT_FALSE(c.ok()) << key;
    return c.ok() ? std::string() : c.status().ToString();
  };
  EXPECT_THAT(message("architectures", Json::array({"GPT2LMHeadModel"})),
              HasSubstr("GPT2LMHeadModel"));
  EXPECT_THAT(message("quantization_config", Json{{"bits", 4}}), HasSubstr("quantization_config"));
  EXPECT_THAT(message("final_logit_softcapping", 30.0), HasSubstr("final_logit_softcapping"));
  EXPECT_THAT(message("hidden_act", "gelu"), HasSubstr("gelu"));
  EXPECT_THAT(message("num_key_value_heads", 3), HasSubstr("num_key_value_heads"));
  EXPECT_THAT(message("num_key_value_heads", 0), HasSubstr("num_key_value_heads"));
  EXPECT_THAT(message("hidden_size", "64"), HasSubstr("hidden_size"));
  EXPECT_THAT(message("hidden_size", -64), HasSubstr("hidden_size"));
  EXPECT_THAT(message("vocab_size", 1e30), HasSubstr("vocab_size"));
  EXPECT_THAT(message("rms_norm_eps", 0.0), HasSubstr("rms_norm_eps"));
  EXPECT_THAT(message("head_dim", 40), HasSubstr("head_dim"));
  EXPECT_THAT(message("torch_dtype", "int8"), HasSubstr("int8"));
  EXPECT_THAT(message("eos_token_id", 1000), HasSubstr("eos_token_id"));
  EXPECT_THAT(message("rope_scaling", Json{{"rope_type", "longrope"}, {"factor", 2.0}}),
              HasSubstr("longrope"));
  EXPECT_THAT(message("layer_types", Json::array({"full_attention"})), HasSubstr("layer_types"));
  EXPECT_THAT(message("rope_interleaved", true), HasSubstr("rope_interleaved"));
  EXPECT_THAT(message("attention_sinks", Json::array({true})), HasSubstr("attention_sinks"))
      << "only MINI has them";
  EXPECT_FALSE(ParseConfig(Json::array()).ok());
}

}  // namespace
}  // namespace tare::models
