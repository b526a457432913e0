#include "tensor/dump.h"

#include <gtest/gtest.h>

#include <bit>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>

#include "tensor/digest.h"

namespace tare {
namespace {

namespace fs = std::filesystem;

class DumpTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "dump_test_XXXXXX";
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    root_ = pattern;
  }
  void TearDown() override { fs::remove_all(root_); }

  static Tensor Values(DType dtype, Shape shape, uint32_t seed) {
    Tensor t = Tensor::Allocate(dtype, std::move(shape)).value();
    for (int64_t i = 0; i < t.size_bytes(); ++i) {
      static_cast<uint8_t*>(t.mutable_data())[i] = static_cast<uint8_t>((i * 37 + seed) & 0x3b);
    }
    return t;
  }

  // Two frames, five tensors of different element sizes, one without payload, shards of 64 bytes.
  std::string Write(const std::string& name, bool finish = true) {
    const std::string path = root_ + "/" + name;
    DumpOptions options;
    options.manifest.side = "rollout";
    options.manifest.weights = {{"theta0", Sha256Of("weights")}};
    options.manifest.contracts = {"c1"};
    options.manifest.identity["cpu"] = "some";
    options.shard_bytes = 64;
    options.sync = false;
    options.keep_payload = [](const TapPoint& p) { return p.name != "logits"; };
    auto writer = DumpWriter::Create(Env::Real(), path, std::move(options)).value();
    for (int step = 0; step < 2; ++step) {
      TapFrame frame{.phase = TapPhase::kPrefill,
                     .side = fault::Side::kRollout,
                     .weight_version = "theta0",
                     .step = step,
                     .runs = {{.sequence = "s0", .position = 0, .row = 0, .tokens = {5, 6, 7}},
                              {.sequence = "s1",
                               .history = ExtendTokenHash({}, std::vector<int32_t>{9}),
                               .position = 1,
                               .row = 3,
                               .tokens = {8}}}};
      writer->BeginFrame(frame);
      writer->Emit({.name = "embed.out", .op = "embedding", .role = TapRole::kSentinel},
                   Values(DType::kBF16, {5, 3}, step));
      writer->Emit({.name = "layers.0.out",
                    .layer = 0,
                    .op = "linear",
                    .inputs = {"embed.out"},
                    .shards = {{.axis = "tp", .dim = 1, .index = 1, .count = 2}}},
                   Values(DType::kF32, {5, 4}, 10 + step));
      writer->Emit({.name = "logits", .op = "head", .inputs = {"layers.0.out"}},
                   Values(DType::kF32, {5, 2}, 3));
      writer->EndFrame();
    }
    if (finish) {
      EXPECT_TRUE(writer->Finish().ok()) << writer->status().ToString();
    } else {
      EXPECT_TRUE(writer->Flush().ok());
    }
    return path;
  }

  static std::string ReadAll(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
  }
  static void WriteAll(const std::string& path, const std::string& bytes) {
    fs::remove(path);  // ext4 syncs a file that is truncated and written again: 3 ms each
    std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
  }

  std::string root_;
};

TEST_F(DumpTest, WhatWasEmittedIsRead) {
  const Dump dump = Dump::Open(Env::Real(), Write("a")).value();
  EXPECT_EQ(dump.cut(), "");
  EXPECT_EQ(dump.manifest().side, "rollout");
  EXPECT_TRUE(dump.manifest().complete);
  ASSERT_EQ(dump.manifest().weights.size(), 1u);
  EXPECT_EQ(dump.manifest().weights[0].sha256, Sha256Of("weights"));
  ASSERT_EQ(dump.frames().size(), 2u);
  EXPECT_TRUE(dump.frames()[1].ended);
  EXPECT_EQ(dump.frames()[1].frame.runs[1].tokens, std::vector<int32_t>{8});
  EXPECT_EQ(dump.frames()[1].frame.runs[1].row, 3);
  ASSERT_EQ(dump.records().size(), 6u);
  const DumpRecord& r = dump.records()[4];
  EXPECT_EQ(r.point.name, "layers.0.out");
  EXPECT_EQ(r.point.layer, 0);
  EXPECT_EQ(r.point.inputs, std::vector<std::string>{"embed.out"});
  EXPECT_EQ(r.point.shards.at(0).count, 2);
  EXPECT_EQ(r.frame, 1);
  const Tensor want = Values(DType::kF32, {5, 4}, 11);
  const Tensor got = dump.Payload(r).value();
  EXPECT_EQ(got.shape(), want.shape());
  EXPECT_EQ(std::memcmp(got.data(), want.data(), static_cast<size_t>(want.size_bytes())), 0);
  EXPECT_EQ(r.digest, TensorDigest(want));
  for (const DumpRecord& record : dump.records()) {
    if (record.shard < 0) {
      EXPECT_EQ(record.point.name, "logits");
      EXPECT_EQ(dump.Payload(record).status().code(), Code::kNotFound);
    } else {
      EXPECT_TRUE(dump.Verify(record).ok());
    }
  }
}

TEST_F(DumpTest, BufferMayBeOverwrittenAfterEmit) {
  const std::string path = root_ + "/o";
  DumpOptions options;
  options.sync = false;
  auto writer = DumpWriter::Create(Env::Real(), path, options).value();
  writer->BeginFrame({.runs = {{.tokens = {1}}}});
  Tensor reused = Values(DType::kF32, {1, 4}, 1);
  const Tensor before = reused.Clone().value();
  writer->Emit({.name = "x"}, reused);
  std::memset(reused.mutable_data(), 0xee, 16);  // SHAPE-16: the aliasing mutation
  writer->Emit({.name = "y"}, reused);
  writer->EndFrame();
  ASSERT_TRUE(writer->Finish().ok());
  const Dump dump = Dump::Open(Env::Real(), path).value();
  EXPECT_EQ(std::memcmp(dump.Payload(dump.records()[0])->data(), before.data(), 16), 0);
  EXPECT_TRUE(dump.Verify(dump.records()[0]).ok());
}

TEST_F(DumpTest, NonFiniteValuesAreCountedAtWriting) {
  const std::string path = root_ + "/n";
  DumpOptions options;
  options.sync = false;
  auto writer = DumpWriter::Create(Env::Real(), path, options).value();
  writer->BeginFrame({});
  Tensor t = Tensor::Allocate(DType::kF32, {4}).value();
  t.mutable_as<uint32_t>()[1] = 0x7fc00001;
  t.mutable_as<uint32_t>()[3] = 0xff800000;
  writer->Emit({.name = "x", .per_row = false}, t);
  Tensor e = Tensor::Allocate(DType::kE4M3, {3}).value();
  e.mutable_as<uint8_t>()[0] = 0x7e;  // 448, finite
  e.mutable_as<uint8_t>()[1] = 0xff;
  writer->Emit({.name = "e", .per_row = false}, e);
  writer->EndFrame();
  ASSERT_TRUE(writer->Finish().ok());
  const Dump dump = Dump::Open(Env::Real(), path).value();
  EXPECT_EQ(dump.records()[0].non_finite, 2);
  EXPECT_EQ(dump.records()[1].non_finite, 1);
}

// Every file cut at every byte: readable, a true prefix, every payload whole, and it says so.
TEST_F(DumpTest, CutAtAnyByteOfAnyFileIsReadableAndSaysSo) {
  const std::string path = Write("whole");
  const Dump whole = Dump::Open(Env::Real(), path).value();
  int cuts = 0;
  for (const auto& entry : fs::directory_iterator(path)) {
    const std::string file = entry.path();
    const std::string bytes = ReadAll(file);
    for (size_t keep = 0; keep < bytes.size(); ++keep) {
      WriteAll(file, bytes.substr(0, keep));
      const Result<Dump> cut = Dump::Open(Env::Real(), path);
      ASSERT_TRUE(cut.ok()) << file << " cut at " << keep << ": " << cut.status().ToString();
      ASSERT_NE(cut->cut(), "") << file << " cut at " << keep;
      ASSERT_LE(cut->records().size(), whole.records().size());
      for (size_t i = 0; i < cut->records().size(); ++i) {
        const DumpRecord& r = cut->records()[i];
        ASSERT_EQ(r.digest, whole.records()[i].digest);
        ASSERT_EQ(r.point.name, whole.records()[i].point.name);
        if (r.shard >= 0 && keep % 7 == 0) {
          ASSERT_TRUE(cut->Verify(r).ok()) << file << " cut at " << keep;
        }
      }
      ++cuts;
    }
    WriteAll(file, bytes);
  }
  EXPECT_GT(cuts, 3000);
  EXPECT_EQ(Dump::Open(Env::Real(), path)->cut(), "");
}

TEST_F(DumpTest, MissingFilesAreACutToo) {
  const std::string path = Write("missing");
  fs::remove(path + "/tensors-00001.safetensors");
  Dump dump = Dump::Open(Env::Real(), path).value();
  EXPECT_NE(dump.cut().find("tensors-00001.safetensors is missing"), std::string::npos)
      << dump.cut();
  fs::remove(path + "/manifest.json");
  dump = Dump::Open(Env::Real(), path).value();
  EXPECT_NE(dump.cut().find("manifest.json is missing"), std::string::npos);
  fs::remove(path + "/records.jsonl");
  EXPECT_EQ(Dump::Open(Env::Real(), path).status().code(), Code::kNotFound);
}

TEST_F(DumpTest, UnfinishedDumpSaysSo) {
  const Dump dump = Dump::Open(Env::Real(), Write("u", false)).value();
  EXPECT_NE(dump.cut().find("did not finish"), std::string::npos);
  EXPECT_EQ(dump.records().size(), 6u);
}

// Planted damage that is no cut: refused, with the place.
TEST_F(DumpTest, ChangedBytesAreNotACut) {
  const std::string path = Write("changed");
  const std::string records = ReadAll(path + "/records.jsonl");
  std::string other = records;
  other[other.find("theta0")] = 'T';
  WriteAll(path + "/records.jsonl", other);
  EXPECT_NE(Dump::Open(Env::Real(), path).status().message().find("changed after the end"),
            std::string::npos);
  WriteAll(path + "/records.jsonl", records + "{}\n");
  EXPECT_NE(Dump::Open(Env::Real(), path).status().message().find("lines were added"),
            std::string::npos);
  WriteAll(path + "/records.jsonl", records);
  const std::string shard = path + "/" + DumpShardName(0);
  std::string bytes = ReadAll(shard);
  bytes.back() ^= 1;
  WriteAll(shard, bytes);
  const Dump dump = Dump::Open(Env::Real(), path).value();
  int bad = 0;
  for (const DumpRecord& r : dump.records()) bad += r.shard == 0 && !dump.Verify(r).ok();
  EXPECT_EQ(bad, 1);
}

TEST_F(DumpTest, MisuseOfTheTapIsKeptAsError) {
  DumpOptions options;
  options.sync = false;
  const auto run = [&](const std::string& name, auto body) {
    auto writer = DumpWriter::Create(Env::Real(), root_ + "/" + name, options).value();
    body(*writer);
    const Status status = writer->Finish();
    EXPECT_FALSE(status.ok()) << name;
    return status.message();
  };
  EXPECT_NE(
      run("m0", [](DumpWriter& w) { w.Emit({.name = "x"}, Tensor()); }).find("outside a frame"),
      std::string::npos);
  EXPECT_NE(run("m1",
                [](DumpWriter& w) {
                  w.BeginFrame({.runs = {{.tokens = {1, 2}}, {.row = 1, .tokens = {3}}}});
                })
                .find("share row 1"),
            std::string::npos);
  EXPECT_NE(run("m2",
                [](DumpWriter& w) {
                  w.BeginFrame({.runs = {{.tokens = {1}}}});
                  w.Emit({.name = "x"}, Values(DType::kF32, {1}, 0));
                  w.Emit({.name = "x"}, Values(DType::kF32, {1}, 0));
                })
                .find("already emitted"),
            std::string::npos);
  EXPECT_NE(run("m3",
                [](DumpWriter& w) {
                  w.BeginFrame({.runs = {{.tokens = {1, 2, 3}}}});
                  w.Emit({.name = "x"}, Values(DType::kF32, {}, 0));
                })
                .find("is a scalar"),
            std::string::npos);
  EXPECT_NE(run("m4", [](DumpWriter& w) { w.BeginFrame({}); }).find("inside a frame"),
            std::string::npos);
  EXPECT_EQ(DumpWriter::Create(Env::Real(), root_ + "/m4", options).status().code(),
            Code::kAlreadyExists);
}

TEST(DumpIndex, HostileLinesGetTheirOwnError) {
  const std::string hex(64, '0');
  const std::string frame =
      R"({"seq":0,"kind":"frame","frame":0,"phase":"score","side":"none","weights":"w","step":0,"runs":[{"sequence":"a","history":")" +
      hex + R"(","position":0,"row":0,"tokens":[1,2]}]})";
  const std::string tensor =
      R"({"seq":1,"kind":"tensor","frame":0,"name":"x","layer":-1,"op":"","role":"value","inputs":[],"reads_history":false,"per_row":true,"mask":"","shards":[],"dtype":"f32","shape":[2,2],"sha256":")" +
      hex + R"(","non_finite":0,"payload":{"shard":0,"offset":64}})";
  {
    DumpIndex good;
    ASSERT_TRUE(good.AddLine(frame).ok());
    ASSERT_TRUE(good.AddLine(tensor).ok()) << good.AddLine(tensor).ToString();
  }
  const auto swap = [](std::string text, const std::string& from, const std::string& to) {
    const size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    return at == std::string::npos ? text : text.replace(at, from.size(), to);
  };
  struct Case {
    std::string line, want;
  };
  for (const Case& c : std::vector<Case>{
           {"", "line 2"},
           {"[]", "not an object"},
           {swap(tensor, "\"seq\":1", "\"seq\":2"), "a line was lost"},
           {swap(tensor, "\"tensor\"", "\"tensr\""), "none of frame, tensor, end"},
           {swap(tensor, "\"name\":\"x\"", "\"name\":\"\""), "without a name"},
           {swap(tensor, "\"name\":\"x\"", "\"name\":3"), "not a string"},
           {swap(tensor, "\"op\":\"\"", "\"oq\":\"\""), "unknown key 'oq'"},
           {swap(tensor, "\"layer\":-1", "\"layer\":-2"), "'layer' is -2"},
           {swap(tensor, "\"layer\":-1", "\"layer\":18446744073709551615"),
            "'layer' is 18446744073709551615"},
           {swap(tensor, "\"layer\":-1", "\"layer\":1.5"), "not an integer"},
           {swap(tensor, "f32", "f31"), "dtype 'f31'"},
           {swap(tensor, "[2,2]", "[2,-2]"), "other than sizes"},
           {swap(tensor, "[2,2]", "[9007199254740992,9007199254740992]"), "too large"},
           {swap(tensor, "[2,2]", "[]"), "is a scalar"},
           {swap(tensor, "\"non_finite\":0", "\"non_finite\":5"), "allowed is 0 to 4"},
           {swap(tensor, "\"offset\":64", "\"offset\":66"), "not aligned"},
           {swap(tensor, "\"offset\":64", "\"offset\":9007199254740992"), "'offset'"},
           {swap(tensor, "\"sha256\":\"0", "\"sha256\":\"G"), "64 lower-case hex"},
           {swap(tensor, "\"shards\":[]",
                 R"("shards":[{"axis":"xp","dim":0,"index":0,"count":1,"layout":"contiguous"}])"),
            "axis 'xp'"},
           {swap(tensor, "\"shards\":[]",
                 R"("shards":[{"axis":"tp","dim":0,"index":2,"count":2,"layout":"contiguous"}])"),
            "'index' is 2"},
           {swap(tensor, "\"role\":\"value\"", "\"role\":\"values\""), "role 'values'"},
           {swap(tensor, "\"inputs\":[]", "\"inputs\":[1]"), "other than names"},
           {swap(frame, "\"seq\":0", "\"seq\":1"), "begins inside frame"},
           {R"({"seq":1,"kind":"end","frame":1})", "'frame' is 1"}}) {
    DumpIndex index;
    ASSERT_TRUE(index.AddLine(frame).ok());
    const Status status = index.AddLine(c.line);
    EXPECT_EQ(status.code(), Code::kDataLoss) << c.line;
    EXPECT_NE(status.message().find(c.want), std::string::npos)
        << status.message() << "\n wanted: " << c.want;
  }
  for (const Case& c :
       std::vector<Case>{{swap(frame, "score", "scores"), "phase 'scores'"},
                         {swap(frame, "\"side\":\"none\"", "\"side\":\"nine\""), "side 'nine'"},
                         {swap(frame, "[1,2]", "[]"), "at least one token"},
                         {swap(frame, "[1,2]", "[2147483648]"), "32-bit"},
                         {swap(frame, "\"row\":0", "\"row\":-1"), "'row' is -1"},
                         {R"({"seq":0,"kind":"end","frame":0})", "outside a frame"},
                         {swap(tensor, "\"seq\":1", "\"seq\":0"), "outside a frame"}}) {
    DumpIndex index;
    const Status status = index.AddLine(c.line);
    EXPECT_NE(status.message().find(c.want), std::string::npos)
        << status.message() << "\n wanted: " << c.want;
  }
}

}  // namespace
}  // namespace tare
