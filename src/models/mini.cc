#include "models/mini.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>

#include "models/bpe.h"
#include "models/pretokenize.h"
#include "numerics/philox.h"
#include "tensor/convert.h"
#include "tensor/safetensors.h"

namespace tare::models {
namespace {

constexpr uint64_t kSeed = 0x6d696e692d310000;  // "mini-1"
constexpr int kVocabulary = 512;
constexpr std::array<const char*, 3> kSpecials = {"<|endoftext|>", "<|im_start|>", "<|im_end|>"};

// What the tokenizer's merges are learnt from: words that prompts about sums and small talk use.
constexpr char kText[] =
    "What is 17 plus 25? The answer is 42. What is the sum of three and four? The sum of three and "
    "four is seven. "
    "system user assistant You are a helpful assistant that answers in one short line. Please give "
    "only the number. "
    "Add the two numbers and write the result. Compute the product of six and seven. The result is "
    "forty two. "
    "Is nine larger than eight? Yes, nine is larger than eight. Write one word that starts with "
    "the letter a. "
    "Which number comes after nineteen? Twenty comes after nineteen. Count from one to ten: one, "
    "two, three, four, five, "
    "six, seven, eight, nine, ten. The first letter of the word answer is a. There is no other "
    "answer to this question. "
    "The model reads the tokens and gives the probability of the next token. Every layer adds to "
    "the residual stream. "
    "A short sentence is better than a long sentence when the question is short. Do not write more "
    "than you know. "
    "If you have three apples and you give one to another, how many apples are there? There are "
    "two apples. "
    "Subtract five from twelve and the result is seven. Half of eighteen is nine. Twice eleven is "
    "twenty two. "
    "The value of the sum depends on the order in which the numbers are added. The same order "
    "gives the same value. ";

// ChatML without a default system message.
constexpr char kTemplate[] =
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

// Learns merges by counting pairs: the most frequent pair first, the lowest ids among equals.
struct Vocabulary {
  std::vector<std::string> bytes;  // by id: 256 single bytes, then merges
  std::vector<std::pair<int, int>> merges;
};

Vocabulary Learn() {
  Vocabulary v;
  for (int b = 0; b < 256; ++b) v.bytes.push_back(std::string(1, static_cast<char>(b)));
  auto splitter = Splitter::Create({SplitRule::kDigits, SplitRule::kGpt2});
  TARE_CHECK(splitter.ok()) << splitter.status().ToString();
  auto pieces = splitter->Split(kText);
  TARE_CHECK(pieces.ok()) << pieces.status().ToString();
  std::vector<std::vector<int>> words;
  for (std::string_view piece : *pieces) {
    std::vector<int> word;
    for (char c : piece) word.push_back(static_cast<uint8_t>(c));
    words.push_back(std::move(word));
  }
  const int merges = kVocabulary - 256 - static_cast<int>(kSpecials.size());
  std::map<std::string, int> known;
  while (static_cast<int>(v.merges.size()) < merges) {
    std::map<std::pair<int, int>, int> counts;
    for (const auto& word : words) {
      for (size_t i = 0; i + 1 < word.size(); ++i) ++counts[{word[i], word[i + 1]}];
    }
    std::pair<int, int> best;
    int most = 0;
    for (const auto& [pair, count] : counts) {
      // A join that gives bytes some token already has would be a second token for them.
      if (count > most && known.count(v.bytes[pair.first] + v.bytes[pair.second]) == 0) {
        most = count;
        best = pair;
      }
    }
    TARE_CHECK(most > 0) << "the text is too short for the vocabulary";
    const int id = static_cast<int>(v.bytes.size());
    v.bytes.push_back(v.bytes[best.first] + v.bytes[best.second]);
    known[v.bytes.back()] = id;
    v.merges.push_back(best);
    for (auto& word : words) {
      size_t out = 0;
      for (size_t i = 0; i < word.size(); ++i) {
        if (i + 1 < word.size() && word[i] == best.first && word[i + 1] == best.second) {
          word[out++] = id;
          ++i;
        } else {
          word[out++] = word[i];
        }
      }
      word.resize(out);
    }
  }
  return v;
}

Json MiniConfigValue() {
  Json types = Json::array(), sinks = Json::array();
  // Layers 1 and 3 look back 16 tokens and have sink logits; layers 2 and 4 are mixtures of
  // experts.
  for (int l = 0; l < 6; ++l) {
    const bool local = l == 1 || l == 3;
    types.push_back(local ? "sliding_attention" : "full_attention");
    sinks.push_back(local);
  }
  return Json{{"architectures", Json::array({"TareMiniForCausalLM"})},
              {"model_type", "tare_mini"},
              {"tare_mini_version", kMiniVersion},
              {"vocab_size", kVocabulary},
              {"hidden_size", 128},
              {"intermediate_size", 256},
              {"num_hidden_layers", 6},
              {"num_attention_heads", 4},
              {"num_key_value_heads", 2},
              {"head_dim", 32},
              {"hidden_act", "silu"},
              {"max_position_embeddings", 8192},
              {"rms_norm_eps", 1e-6},
              {"rope_theta", 10000.0},
              {"tie_word_embeddings", false},
              {"attention_bias", false},
              {"sliding_window", 16},
              {"layer_types", types},
              {"attention_sinks", sinks},
              {"num_experts", 8},
              {"num_experts_per_tok", 2},
              {"moe_intermediate_size", 64},
              {"norm_topk_prob", true},
              {"mlp_only_layers", Json::array({0, 1, 3, 5})},
              {"bos_token_id", kVocabulary - 3},
              {"eos_token_id", kVocabulary - 1},
              {"torch_dtype", "bfloat16"}};
}

// 2^exponent * multiplier * s with s the sum of four 16-bit numbers less their mean: near a normal
// distribution with a standard deviation of 37,837 * multiplier * 2^exponent.
struct Scale {
  int multiplier;  // at most 63, so that the product has at most 24 bits
  int exponent;
  int offset_bits;  // value of an added constant: offset_bits * 2^-4
};

uint16_t Draw(uint32_t tensor, uint64_t element, Scale scale) {
  const numerics::PhiloxBlock block = numerics::RandomAt(kSeed, static_cast<uint32_t>(element / 2),
                                                         numerics::RandomPurpose::kInit, tensor);
  const uint32_t a = block.v[element % 2 * 2], b = block.v[element % 2 * 2 + 1];
  const int64_t sum =
      static_cast<int64_t>(a & 0xffff) + (a >> 16) + (b & 0xffff) + (b >> 16) - 2 * 65535;
  // In units of 2^exponent, the constant included; exponents are between -24 and -4.
  const int64_t value =
      sum * scale.multiplier + (static_cast<int64_t>(scale.offset_bits) << (-4 - scale.exponent));
  // Sign, magnitude and exponent to bf16 with one rounding to nearest even, in integers.
  const bool negative = value < 0;
  uint64_t magnitude = static_cast<uint64_t>(negative ? -value : value);
  if (magnitude == 0) return 0;
  int exponent = scale.exponent;
  const int top = 63 - __builtin_clzll(magnitude);
  if (top > 7) {
    const int drop = top - 7;
    const uint64_t rest = magnitude & ((uint64_t{1} << drop) - 1), half = uint64_t{1} << (drop - 1);
    magnitude >>= drop;
    exponent += drop;
    magnitude += rest > half || (rest == half && (magnitude & 1) != 0) ? 1 : 0;
    if (magnitude == 256) {
      magnitude = 128;
      ++exponent;
    }
  } else {
    magnitude <<= 7 - top;
    exponent -= 7 - top;
  }
  return static_cast<uint16_t>((negative ? 0x8000 : 0) | (exponent + 7 + 127) << 7 |
                               (magnitude & 0x7f));
}

// The scale by the kind of tensor. 37,837 * 2^-20 is 0.036, * 2^-16 is 0.58.
Scale ScaleOf(const std::string& name, bool tied) {
  const auto has = [&](const char* part) { return name.find(part) != std::string::npos; };
  // 1.15; a table that is the head too is spread like a head.
  if (has("embed_tokens") && !tied) return {1, -15, 0};
  if (has("embed_tokens")) return {7, -20, 0};
  if (has("lm_head")) return {7, -20, 0};                   // 0.25: logits spread by about 3
  if (has("q_norm") || has("k_norm")) return {2, -20, 24};  // 1.5 +- 0.07
  if (has("norm.weight") || has("layernorm")) return {3, -20, 16};  // 1 +- 0.11
  if (has("sinks")) return {1, -15, 0};                             // +- 1.15
  if (has("mlp.gate.weight")) return {3, -19, 0};  // 0.22: logits of the router spread by 2.4
  if (has(".bias")) return {3, -20, 0};
  if (has("down_proj")) return {3, -20, 0};  // 0.11
  if (has("o_proj")) return {3, -20, 0};
  return {5, -21, 0};  // 0.09, about 1 / sqrt(128)
}

// Experts whose router rows are the same bits, so that their scores tie for every token.
constexpr int64_t kTiedExpert = 5, kTiedWith = 2;

}  // namespace

std::string MiniConfigJson() { return MiniConfigValue().dump(2) + "\n"; }

std::string MiniGenerationConfigJson() {
  return Json{{"bos_token_id", kVocabulary - 3},
              {"eos_token_id", Json::array({kVocabulary - 1, kVocabulary - 3})}}
             .dump(2) +
         "\n";
}

std::string MiniTokenizerJson() {
  const Vocabulary v = Learn();
  Json vocab = Json::object(), merges = Json::array(), added = Json::array(),
       stages = Json::array();
  for (size_t id = 0; id < v.bytes.size(); ++id) vocab[BytesToByteLevel(v.bytes[id])] = id;
  for (const auto& [left, right] : v.merges) {
    merges.push_back(BytesToByteLevel(v.bytes[left]) + " " + BytesToByteLevel(v.bytes[right]));
  }
  for (size_t i = 0; i < kSpecials.size(); ++i) {
    added.push_back(Json{{"id", v.bytes.size() + i},
                         {"content", kSpecials[i]},
                         {"single_word", false},
                         {"lstrip", false},
                         {"rstrip", false},
                         {"normalized", false},
                         {"special", true}});
  }
  stages.push_back(Json{{"type", "Digits"}, {"individual_digits", true}});
  stages.push_back(Json{{"type", "ByteLevel"},
                        {"add_prefix_space", false},
                        {"trim_offsets", true},
                        {"use_regex", true}});
  const Json decoder{{"type", "ByteLevel"},
                     {"add_prefix_space", false},
                     {"trim_offsets", true},
                     {"use_regex", true}};
  const Json root{{"version", "1.0"},
                  {"truncation", nullptr},
                  {"padding", nullptr},
                  {"added_tokens", added},
                  {"normalizer", nullptr},
                  {"pre_tokenizer", {{"type", "Sequence"}, {"pretokenizers", stages}}},
                  {"post_processor", nullptr},
                  {"decoder", decoder},
                  {"model",
                   {{"type", "BPE"},
                    {"dropout", nullptr},
                    {"unk_token", nullptr},
                    {"continuing_subword_prefix", nullptr},
                    {"end_of_word_suffix", nullptr},
                    {"fuse_unk", false},
                    {"byte_fallback", false},
                    {"ignore_merges", false},
                    {"vocab", vocab},
                    {"merges", merges}}}};
  return root.dump(1) + "\n";
}

std::string MiniTokenizerConfigJson() {
  return Json{{"tokenizer_class", "PreTrainedTokenizerFast"},
              {"bos_token", kSpecials[0]},
              {"eos_token", kSpecials[2]},
              {"pad_token", kSpecials[2]},
              {"clean_up_tokenization_spaces", false},
              {"model_max_length", 8192},
              {"chat_template", kTemplate}}
             .dump(2) +
         "\n";
}

ModelConfig MiniConfig() {
  auto config = ParseConfig(MiniConfigValue());
  TARE_CHECK(config.ok()) << config.status().ToString();
  return *config;
}

Result<std::vector<std::pair<std::string, Tensor>>> MiniTensorsFor(const ModelConfig& config) {
  std::vector<std::pair<std::string, Tensor>> tensors;
  for (const auto& [name, shape] : Model::TensorShapes(config)) {
    // A tensor's numbers depend on its name, not on what other tensors a configuration has.
    const Sha256Digest digest = Sha256Of(name);
    const uint32_t stream =
        static_cast<uint32_t>(digest[0]) << 24 | digest[1] << 16 | digest[2] << 8 | digest[3];
    const Scale scale = ScaleOf(name, config.tied);
    TARE_ASSIGN_OR_RETURN(Tensor values, Tensor::Allocate(DType::kBF16, shape));
    uint16_t* out = values.mutable_as<uint16_t>();
    for (int64_t i = 0; i < values.elements(); ++i)
      out[i] = Draw(stream, static_cast<uint64_t>(i), scale);
    if (name.ends_with("mlp.gate.weight") && values.dim(0) > kTiedExpert) {
      const int64_t row = values.dim(1);
      std::memcpy(out + kTiedExpert * row, out + kTiedWith * row, row * sizeof(uint16_t));
    }
    tensors.emplace_back(name, std::move(values));
  }
  return tensors;
}

Result<std::vector<std::pair<std::string, Tensor>>> MiniTensors() {
  return MiniTensorsFor(MiniConfig());
}

Result<Model> MiniModel(ThreadPool* pool, const ModelOptions& options) {
  TARE_ASSIGN_OR_RETURN(const auto tensors, MiniTensors());
  return Model::FromTensors(pool, MiniConfig(), tensors, options);
}

Result<Tokenizer> MiniTokenizer() { return Tokenizer::FromJson(MiniTokenizerJson()); }

Status WriteMini(Env* env, const std::string& dir) {
  TARE_RETURN_IF_ERROR(env->CreateDirs(dir));
  const std::vector<std::pair<const char*, std::string>> files = {
      {"config.json", MiniConfigJson()},
      {"generation_config.json", MiniGenerationConfigJson()},
      {"tokenizer.json", MiniTokenizerJson()},
      {"tokenizer_config.json", MiniTokenizerConfigJson()}};
  for (const auto& [name, text] : files) {
    const std::string path = dir + "/" + name;
    if (env->Exists(path)) {
      TARE_ASSIGN_OR_RETURN(const std::string there, env->ReadFile(path));
      if (there == text) continue;
      return Error(Code::kAlreadyExists, "{} exists with other content; choose an empty directory",
                   path);
    }
    TARE_RETURN_IF_ERROR(env->WriteFileAtomic(path, text));
  }
  TARE_ASSIGN_OR_RETURN(const auto tensors, MiniTensors());
  return WriteSafetensors(env, dir + "/model.safetensors", tensors,
                          {{"format", "pt"}, {"tare_mini_version", kMiniVersion}});
}

}  // namespace tare::models
