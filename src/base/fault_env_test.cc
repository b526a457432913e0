// The test twin must itself be right: each fault does what its comment says, and what must survive
// does.

#include "base/fault_env.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

namespace tare {
namespace {

using ::testing::ElementsAre;

std::unique_ptr<WritableFile> Open(Env* env, const std::string& path, Env::Mode mode) {
  return env->OpenWritable(path, mode).value();
}

std::string TextOf(FaultEnv* env) {
  const auto text = env->ReadFile("/f");
  return text.ok() ? *text : "(absent)";
}

// Without faults it is a file system.
TEST(FaultEnv, BehavesWithoutFaults) {
  FaultEnv env;
  ASSERT_TRUE(env.CreateDirs("/a/b").ok());
  ASSERT_TRUE(env.WriteFileAtomic("/a/b/f", "one").ok());
  EXPECT_EQ(env.ReadFile("/a//b/./f").value(), "one");
  auto file = Open(&env, "/a/b/f", Env::Mode::kAppend);
  ASSERT_TRUE(file->Append("two").ok());
  EXPECT_EQ(env.ReadFile("/a/b/f").value(), "onetwo");
  ASSERT_TRUE(env.Truncate("/a/b/f", 2).ok());
  EXPECT_EQ(env.Stat("/a/b/f")->size_bytes, 2u);
  ASSERT_TRUE(env.Rename("/a/b", "/a/c").ok());
  EXPECT_EQ(env.ReadFile("/a/c/f").value(), "on");
  EXPECT_THAT(env.List("/a").value(), ElementsAre("c"));
  EXPECT_EQ(env.Remove("/a").code(), Code::kIo);
  EXPECT_EQ(env.OpenWritable("/x/y", Env::Mode::kAppend).status().code(), Code::kNotFound);
  EXPECT_EQ(env.OpenWritable("/a/c/f", Env::Mode::kExclusive).status().code(),
            Code::kAlreadyExists);
  EXPECT_EQ(env.OpenReadable("/a").status().code(), Code::kIo);
  auto lock = env.Lock("/lock").value();
  EXPECT_EQ(env.Lock("/lock").status().code(), Code::kPrecondition);
  lock.reset();
  EXPECT_TRUE(env.Lock("/lock").ok());
}

// Bytes need Sync, names need SyncDir; each alone is not enough.
TEST(FaultEnv, OnlySyncedOperationsMustSurvive) {
  FaultEnv env;
  auto file = Open(&env, "/f", Env::Mode::kTruncate);
  ASSERT_TRUE(file->Append("abc").ok());
  ASSERT_TRUE(file->Sync().ok());
  EXPECT_FALSE(env.CrashLosingAll()->Exists("/f")) << "the name was never synced";
  ASSERT_TRUE(env.SyncDir("/").ok());
  EXPECT_EQ(env.CrashLosingAll()->ReadFile("/f").value(), "abc");
  ASSERT_TRUE(file->Append("def").ok());
  EXPECT_EQ(env.CrashLosingAll()->ReadFile("/f").value(), "abc");
  EXPECT_EQ(env.CrashKeepingAll()->ReadFile("/f").value(), "abcdef");
  const auto torn = env.Crash([](const FaultEnv::Pending&) { return size_t{2}; });
  EXPECT_EQ(torn->ReadFile("/f").value(), "abcde");
}

// A write that outlives the one before it leaves zeros.
TEST(FaultEnv, ReorderedWritesLeaveZeros) {
  FaultEnv env;
  auto file = Open(&env, "/f", Env::Mode::kTruncate);
  ASSERT_TRUE(env.SyncDir("/").ok());
  ASSERT_TRUE(file->Append("abc").ok());
  ASSERT_TRUE(file->Append("def").ok());
  const auto after =
      env.Crash([](const FaultEnv::Pending& op) { return op.bytes == "abc" ? 0 : FaultEnv::kAll; });
  EXPECT_EQ(after->ReadFile("/f").value(), std::string("\0\0\0def", 6));
}

TEST(FaultEnv, FullDiskWritesWhatFits) {
  FaultEnv env;
  env.SetDiskBytes(5);
  auto file = Open(&env, "/f", Env::Mode::kTruncate);
  EXPECT_TRUE(file->Append("abc").ok());
  EXPECT_EQ(file->Append("def").code(), Code::kExhausted);
  EXPECT_EQ(env.ReadFile("/f").value(), "abcde");
  EXPECT_EQ(file->Sync().code(), Code::kExhausted) << "the first failure sticks";
}

TEST(FaultEnv, ShortWritesFailedStepsAndLostSyncs) {
  FaultEnv env;
  env.FailStep(0, Error(Code::kIo, "planted"));
  EXPECT_EQ(env.OpenWritable("/f", Env::Mode::kTruncate).status().message(),
            "open for writing /f: planted");
  auto file = Open(&env, "/f", Env::Mode::kTruncate);
  env.ShortWriteAt(2, 1);
  EXPECT_EQ(file->Append("abc").code(), Code::kIo);
  EXPECT_EQ(env.ReadFile("/f").value(), "a");
  env.LoseSyncs(true);
  file = Open(&env, "/f", Env::Mode::kAppend);
  EXPECT_TRUE(file->Sync().ok());
  EXPECT_TRUE(env.SyncDir("/").ok());
  EXPECT_FALSE(env.CrashLosingAll()->Exists("/f"));
}

// A torn rename may lose both names of the target; an atomic one never does.
TEST(FaultEnv, TornRename) {
  for (const bool tear : {false, true}) {
    FaultEnv env;
    ASSERT_TRUE(env.WriteFileAtomic("/f", "old").ok());
    auto file = Open(&env, "/g", Env::Mode::kTruncate);
    ASSERT_TRUE(file->Append("new").ok() && file->Sync().ok() && env.SyncDir("/").ok());
    env.TearRenames(tear);
    ASSERT_TRUE(env.Rename("/g", "/f").ok());
    EXPECT_EQ(env.ReadFile("/f").value(), "new");
    std::set<std::string> found;
    const size_t ops = env.pending().size();
    for (size_t subset = 0; subset < size_t{1} << ops; ++subset) {
      size_t i = 0;
      const auto after = env.Crash(
          [&](const FaultEnv::Pending&) { return subset >> i++ & 1 ? FaultEnv::kAll : 0; });
      const auto text = after->ReadFile("/f");
      found.insert(text.ok() ? *text : "(absent)");
    }
    if (tear) {
      EXPECT_THAT(found, ElementsAre("(absent)", "new", "old"));
    } else {
      EXPECT_THAT(found, ElementsAre("new", "old"));
    }
  }
}

// WriteFileAtomic keeps its promise at every crash: the old content or the new, whole.
TEST(FaultEnv, WriteFileAtomicSurvivesEveryCrash) {
  std::set<std::string> found;
  const int64_t checked =
      ExploreCrashes([](FaultEnv* env) { ASSERT_TRUE(env->WriteFileAtomic("/f", "old").ok()); },
                     [](FaultEnv* env) { (void)env->WriteFileAtomic("/f", "new content"); },
                     [&](FaultEnv* env) { found.insert(TextOf(env)); }, 16);
  EXPECT_THAT(found, ElementsAre("new content", "old"));
  EXPECT_GT(checked, 50);
}

// The control: the same without fsync is caught.
TEST(FaultEnv, ExploreCrashesCatchesAMissingSync) {
  std::set<std::string> found;
  ExploreCrashes([](FaultEnv* env) { ASSERT_TRUE(env->WriteFileAtomic("/f", "old").ok()); },
                 [](FaultEnv* env) {
                   auto file = env->OpenWritable("/t", Env::Mode::kTruncate);
                   if (!file.ok() || !(*file)->Append("new content").ok()) return;
                   (void)env->Rename("/t", "/f");
                 },
                 [&](FaultEnv* env) { found.insert(TextOf(env)); });
  EXPECT_TRUE(found.count("")) << "the rename outlived the bytes";
}

// Every error of the device on the way leaves the old content, and no temporary behind.
TEST(FaultEnv, WriteFileAtomicReportsEveryFailure) {
  for (int64_t step = 0; step < 5; ++step) {
    FaultEnv env;
    ASSERT_TRUE(env.WriteFileAtomic("/f", "old").ok());
    env.FailStep(env.steps() + step, Error(Code::kIo, "planted"));
    const Status status = env.WriteFileAtomic("/f", "new");
    EXPECT_EQ(status.code(), Code::kIo) << step;
    EXPECT_EQ(env.ReadFile("/f").value(), step < 4 ? "old" : "new") << step;
    EXPECT_THAT(env.List("/").value(), ElementsAre("f"));
  }
}

// What is in memory can be laid out for a real program to read.
TEST(FaultEnv, Exports) {
  FaultEnv env;
  ASSERT_TRUE(env.CreateDirs("/d/e").ok());
  ASSERT_TRUE(env.WriteFileAtomic("/d/e/f", "x").ok());
  FaultEnv other;
  ASSERT_TRUE(env.ExportTo(&other, "/root").ok());
  EXPECT_EQ(other.ReadFile("/root/d/e/f").value(), "x");
}

}  // namespace
}  // namespace tare
