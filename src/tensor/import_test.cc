#include "tensor/import.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/fault_env.h"
#include "tensor/convert.h"
#include "tensor/safetensors.h"

namespace tare {
namespace {

using ::testing::HasSubstr;

std::string DataPath(const std::string& name) {
  return std::string(TARE_SOURCE_DIR) + "/tests/data/formats/" + name;
}

// An Env in memory that holds the test data, so that imports run beside planted faults.
void CopyIn(FaultEnv* env, const std::string& name, const std::string& to) {
  ASSERT_TRUE(env->WriteFileAtomic(to, Env::Real()->ReadFile(DataPath(name)).value()).ok());
}
Checkpoint OpenIn(FaultEnv* env, const std::string& path) {
  CheckpointOptions options;
  options.env = env;
  auto r = Checkpoint::Open(path, options);
  TARE_CHECK(r.ok()) << r.status().ToString();
  return std::move(r).value();
}

// GGUF, one file or shards: the imported directory has the hash of the source, and can be imported
// again.
TEST(Import, KeepsTheHash) {
  const Sha256Digest want = HashWeights(Checkpoint::Open(DataPath("tiny_sharded")).value())->digest;
  for (const char* name : {"tiny_sharded", "tiny.gguf", "tiny.safetensors"}) {
    const auto checkpoint = Checkpoint::Open(DataPath(name)).value();
    const std::string dir = ::testing::TempDir() + "import_test_" + name;
    ImportOptions options;
    options.max_shard_bytes = 8000;
    const auto report = ImportCheckpoint(checkpoint, dir, options);
    ASSERT_TRUE(report.ok()) << report.status().ToString();
    EXPECT_EQ(report->hash.digest, want) << name;
    const auto again = Checkpoint::Open(dir).value();
    EXPECT_EQ(HashWeights(again)->digest, want);
    EXPECT_TRUE(Env::Real()->Exists(dir + "/model.safetensors.index.json"));
    EXPECT_THAT(Env::Real()->List(dir).value(),
                ::testing::Contains(::testing::StartsWith("model-00004-of-")));
    EXPECT_EQ(ImportCheckpoint(checkpoint, dir, options).status().code(), Code::kAlreadyExists);
    const Json record = ParseJson(Env::Real()->ReadFile(dir + "/import.json").value()).value();
    EXPECT_EQ(record["weight_hash"], Hex(want));
    for (const auto& file : Env::Real()->List(dir).value()) {
      ASSERT_TRUE(Env::Real()->Remove(dir + "/" + file).ok());
    }
    ASSERT_TRUE(Env::Real()->Remove(dir).ok());
  }
}

// Another dtype is one rounding of each value, and the config says so.
TEST(Import, ConvertsTheDtype) {
  FaultEnv env;
  CopyIn(&env, "tiny.gguf", "/tiny.gguf");
  ImportOptions options;
  options.env = &env;
  options.dtype = DType::kF16;
  CheckpointOptions wide;
  wide.env = &env;
  wide.gguf_dtype = DType::kF32;
  const auto source = Checkpoint::Open("/tiny.gguf", wide).value();
  ASSERT_TRUE(ImportCheckpoint(source, "/out", options).ok());
  const auto out = OpenIn(&env, "/out");
  EXPECT_EQ(out.config().dtype, DType::kF16);
  for (const auto& name : out.names()) {
    const Tensor a = source.Get(name).value();
    const Tensor b = out.Get(name).value();
    ASSERT_EQ(b.dtype(), DType::kF16);
    for (int64_t i = 0; i < a.elements(); ++i) {
      ASSERT_EQ(b.as<uint16_t>()[i], F32ToF16(a.as<float>()[i])) << name;
    }
  }
}

// A crash or a full disk at any step leaves no directory under the target's name, or the whole one.
TEST(Import, SurvivesEveryCrash) {
  int whole = 0;
  const auto check = [&](FaultEnv* env) {
    if (!env->Exists("/out")) return;
    ++whole;
    const auto out = OpenIn(env, "/out");
    EXPECT_EQ(HashWeights(out)->tensors.size(), 20u);
    EXPECT_TRUE(env->Exists("/out/import.json") && env->Exists("/out/tokenizer.json"));
  };
  const auto work = [](FaultEnv* env) {
    CheckpointOptions open;
    open.env = env;
    ImportOptions options;
    options.env = env;
    (void)ImportCheckpoint(Checkpoint::Open("/tiny.gguf", open).value(), "/out", options);
  };
  const auto prepare = [](FaultEnv* env) { CopyIn(env, "tiny.gguf", "/tiny.gguf"); };
  EXPECT_GT(ExploreCrashes(prepare, work, check, 2), 200);
  EXPECT_GT(whole, 0);
  for (uint64_t room = 0; room < 45000; room += 1500) {
    FaultEnv env;
    prepare(&env);
    env.SetDiskBytes(36480 + room);
    work(&env);
    check(&env);
  }
}

// A disk that gives back other bytes than were written is caught by reading them.
class ChangedFile : public ReadableFile {
 public:
  explicit ChangedFile(std::string_view bytes) : bytes_(bytes) {
    bytes_.back() = static_cast<char>(bytes_.back() ^ 1);
  }
  std::string_view bytes() const override { return bytes_; }

 private:
  std::string bytes_;
};
class FlippingEnv : public FaultEnv {
 public:
  Result<std::unique_ptr<ReadableFile>> OpenReadable(const std::string& path) override {
    TARE_ASSIGN_OR_RETURN(auto file, FaultEnv::OpenReadable(path));
    if (path.find("importing/model.safetensors") == std::string::npos) return file;
    return std::unique_ptr<ReadableFile>(new ChangedFile(file->bytes()));
  }
};

TEST(Import, ReadsBackWhatItWrote) {
  FlippingEnv env;
  ImportOptions options;
  options.env = &env;
  const auto tiny = Checkpoint::Open(DataPath("tiny.gguf")).value();
  EXPECT_THAT(ImportCheckpoint(tiny, "/out", options).status().ToString(), HasSubstr("read back"));
  EXPECT_FALSE(env.Exists("/out"));
}

TEST(Import, RefusesByName) {
  const auto types = Checkpoint::Open(DataPath("types.gguf")).value();
  FaultEnv env;
  ImportOptions options;
  options.env = &env;
  EXPECT_THAT(ImportCheckpoint(types, "/out", options).status().ToString(),
              HasSubstr("no Hugging Face name for \"bf16.weight\", \"f16.weight\""));
  EXPECT_FALSE(env.Exists("/out"));
  ASSERT_TRUE(env.CreateDir("/out.importing").ok());
  const auto tiny = Checkpoint::Open(DataPath("tiny.safetensors")).value();
  EXPECT_THAT(ImportCheckpoint(tiny, "/out", options).status().ToString(),
              HasSubstr("/out.importing is left over"));
}

// The vocabulary becomes a tokenizer.json, or is refused by name.
TEST(Import, Tokenizer) {
  const auto tiny = Checkpoint::Open(DataPath("tiny.gguf")).value();
  TokenizerSource t = tiny.tokenizer();
  const Json json = TokenizerJsonFromGguf(t).value();
  EXPECT_EQ(json["added_tokens"].size(), 3u);
  EXPECT_EQ(json["model"]["vocab"].size(), 40u);
  EXPECT_EQ(json["model"]["vocab"]["</s>"], 2);
  EXPECT_EQ(json["pre_tokenizer"]["pretokenizers"][0]["type"], "Digits");
  t.gguf_pre = "falcon";
  EXPECT_EQ(TokenizerJsonFromGguf(t).status().code(), Code::kUnsupported);
  t.gguf_pre = "gpt-2";
  t.merges.push_back("a");
  EXPECT_THAT(TokenizerJsonFromGguf(t).status().ToString(), HasSubstr("merge 1 \"a\""));
  t.merges.pop_back();
  t.tokens[3] = "<s>";
  EXPECT_THAT(TokenizerJsonFromGguf(t).status().ToString(),
              HasSubstr("token 3 \"<s>\" is there twice"));
  t.gguf_model = "llama";
  EXPECT_THAT(TokenizerJsonFromGguf(t).status().ToString(), HasSubstr("\"llama\"; byte-level BPE"));
}

}  // namespace
}  // namespace tare
