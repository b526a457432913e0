// The trainer on MINI: equal bits on both paths and for every cut, checkpoints that continue
// exactly, and the cases of updates that are none.

#include "trainer/trainer.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>

#include "models/mini.h"
#include "trainer/checkpoint.h"

namespace tare::trainer {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

ThreadPool& Pool() {
  static auto* pool = new ThreadPool(2);
  return *pool;
}

std::unique_ptr<Trainer> Make(Options options = {}) {
  models::ModelOptions model_options;
  model_options.side = fault::Side::kTrainer;
  Result<models::Model> model = models::MiniModel(&Pool(), model_options);
  EXPECT_TRUE(model.ok()) << model.status().ToString();
  Result<std::unique_ptr<Trainer>> t = Trainer::Create(&Pool(), std::move(model).value(), options);
  EXPECT_TRUE(t.ok()) << t.status().ToString();
  return std::move(t).value();
}

std::vector<Sequence> Sequences(int vocab) {
  std::vector<Sequence> list;
  for (int i = 0; i < 5; ++i) {
    Sequence s;
    s.name = fmt::format("s{}", i);
    s.prompt_tokens = 3 + i;
    for (int t = 0; t < 9 + 4 * i; ++t) s.tokens.push_back((i * 97 + t * 31 + 5) % vocab);
    s.advantage = i % 2 == 0 ? 1.0f : -0.5f;
    list.push_back(std::move(s));
  }
  return list;
}

std::vector<uint32_t> Bits(const Logprobs& p) {
  std::vector<uint32_t> bits;
  for (const auto& s : p.values) {
    for (const float v : s) bits.push_back(std::bit_cast<uint32_t>(v));
  }
  return bits;
}

// Scores, then accumulates with the scores as old logprobs.
LossReport Train(Trainer* t, std::vector<Sequence> s, Loss loss = Loss::kPolicy) {
  const Result<Logprobs> old = t->Score(s, "theta0");
  EXPECT_TRUE(old.ok()) << old.status().ToString();
  for (size_t i = 0; i < s.size(); ++i) s[i].old_logprob = old->values[i];
  const Result<LossReport> r = t->Accumulate(s, loss, {}, "theta0");
  EXPECT_TRUE(r.ok()) << r.status().ToString();
  return *r;
}

std::vector<std::vector<uint32_t>> GradientBits(const Trainer& t) {
  std::vector<std::vector<uint32_t>> all;
  for (size_t i = 0; i < t.model().parameters().size(); ++i) {
    const Tensor& g = t.gradient(static_cast<int>(i));
    std::vector<uint32_t> bits(static_cast<size_t>(g.elements()));
    std::memcpy(bits.data(), g.data(), static_cast<size_t>(g.size_bytes()));
    all.push_back(std::move(bits));
  }
  return all;
}

std::vector<std::string> StateHash(Trainer* t) {
  std::vector<std::string> hashes = {*t->MasterHash(), *t->DeployedHash()};
  for (auto* list : {&t->first_moments(), &t->second_moments()}) {
    Sha256 h;
    for (const Tensor& x : *list) h.Update(x.data(), static_cast<size_t>(x.size_bytes()));
    hashes.push_back(Hex(h.Finish()));
  }
  return hashes;
}

class Folder {
 public:
  explicit Folder(const std::string& name)
      : path_(std::filesystem::temp_directory_path() / fmt::format("{}-{}", name, ::getpid())) {
    std::filesystem::remove_all(path_);
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  std::string path() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

// C5-05, C5-06: the path with a tape gives the bits of the path without.
TEST(Trainer, BothPathsGiveTheSameBits) {
  const auto t = Make();
  const auto s = Sequences(static_cast<int>(t->model().config().vocab));
  const Result<Logprobs> score = t->Score(s, "theta0"), recorded = t->RecordedForward(s, "theta0");
  ASSERT_TRUE(score.ok() && recorded.ok());
  EXPECT_FALSE(score->recorded);
  EXPECT_TRUE(recorded->recorded);
  EXPECT_GT(score->launches, 0);
  EXPECT_EQ(Bits(*score), Bits(*recorded));
  EXPECT_FALSE(Bits(*score).empty());
}

// C5-04: neither packing nor micro-batch cuts nor recompute move a bit of logprob, loss or
// gradient.
TEST(Trainer, CutsAndRecomputeMoveNoBit) {
  Options whole;
  const auto a = Make(whole);
  const auto s = Sequences(static_cast<int>(a->model().config().vocab));
  const LossReport ra = Train(a.get(), s);
  EXPECT_EQ(ra.ratio_not_one, 0);
  EXPECT_GT(ra.valid_tokens, 0);
  Options cut;
  cut.micro_batch_tokens = 1;
  const auto b = Make(cut);
  const LossReport rb = Train(b.get(), s);
  EXPECT_EQ(rb.logprobs.forwards, static_cast<int64_t>(s.size()));
  EXPECT_EQ(ra.logprobs.forwards, 1);
  EXPECT_EQ(Bits(ra.logprobs), Bits(rb.logprobs));
  EXPECT_EQ(ra.loss, rb.loss);
  EXPECT_EQ(GradientBits(*a), GradientBits(*b));
  Options again;
  again.recompute = true;
  const auto c = Make(again);
  Train(c.get(), s);
  EXPECT_EQ(GradientBits(*a), GradientBits(*c));
}

// C8-03: the gradient is the policy loss': none without an advantage, the negative for its
// negative.
TEST(Trainer, GradientFollowsTheAdvantage) {
  const auto t = Make();
  auto s = Sequences(static_cast<int>(t->model().config().vocab));
  Train(t.get(), s);
  const auto plus = GradientBits(*t);
  for (Sequence& q : s) q.advantage = 0;
  Train(t.get(), s);
  for (const auto& g : GradientBits(*t)) {
    for (const uint32_t w : g) ASSERT_EQ(w << 1, 0u);
  }
  int64_t nonzero = 0;
  for (const auto& g : plus) {
    for (const uint32_t w : g) nonzero += (w << 1) != 0;
  }
  EXPECT_GT(nonzero, 0);
}

// H05: what stands in a masked slot reaches neither loss nor gradient.
TEST(Trainer, MaskedSlotsAreSelectedAway) {
  const auto a = Make();
  const auto b = Make();
  auto s = Sequences(static_cast<int>(a->model().config().vocab));
  for (Sequence& q : s) {
    q.mask.assign(static_cast<size_t>(q.targets()), 1);
    q.mask[1] = 0;
    q.old_logprob.assign(static_cast<size_t>(q.targets()), -1.0f);
  }
  const Result<LossReport> clean = a->Accumulate(s, Loss::kPolicy, {}, "theta0");
  ASSERT_TRUE(clean.ok()) << clean.status().ToString();
  for (Sequence& q : s) q.old_logprob[1] = q.prompt_tokens % 2 ? kNan : -100.0f;
  const Result<LossReport> dirty = b->Accumulate(s, Loss::kPolicy, {}, "theta0");
  ASSERT_TRUE(dirty.ok()) << dirty.status().ToString();
  EXPECT_TRUE(std::isfinite(dirty->loss));
  EXPECT_EQ(clean->loss, dirty->loss);
  EXPECT_EQ(GradientBits(*a), GradientBits(*b));
}

// T-01: no valid token is no loss.
TEST(Trainer, RefusesMalformedSequences) {
  const auto t = Make();
  auto s = Sequences(static_cast<int>(t->model().config().vocab));
  auto empty = s;
  for (Sequence& q : empty) q.mask.assign(static_cast<size_t>(q.targets()), 0);
  EXPECT_FALSE(t->Accumulate(empty, Loss::kCrossEntropy, {}, "theta0").ok());
  auto short_mask = s;
  short_mask[2].mask = {1};
  EXPECT_EQ(t->Score(short_mask, "theta0").status().code(), Code::kInvalidArgument);
  auto token = s;
  token[1].tokens[0] = static_cast<int32_t>(t->model().config().vocab);
  EXPECT_EQ(t->Score(token, "theta0").status().code(), Code::kInvalidArgument);
  auto prompt = s;
  prompt[0].prompt_tokens = static_cast<int64_t>(prompt[0].tokens.size());
  EXPECT_EQ(t->Score(prompt, "theta0").status().code(), Code::kInvalidArgument);
  EXPECT_FALSE(t->Score({}, "theta0").ok());
  EXPECT_EQ(t->Accumulate(s, Loss::kPolicy, {}, "theta0").status().code(),
            Code::kInvalidArgument);  // no old logprobs
}

// C8-04: learning rate 0 changes no master; a step changes masters and deployed bytes.
TEST(Trainer, LearningRateZeroChangesNothing) {
  const auto t = Make();
  Train(t.get(), Sequences(static_cast<int>(t->model().config().vocab)));
  const std::string master = *t->MasterHash(), deployed = *t->DeployedHash();
  ASSERT_TRUE(t->Apply(0.0f).ok());
  EXPECT_EQ(*t->MasterHash(), master);
  ASSERT_TRUE(t->Apply(1e-3f, /*deploy=*/false).ok());
  EXPECT_NE(*t->MasterHash(), master);
  EXPECT_EQ(*t->DeployedHash(), deployed);
  ASSERT_TRUE(t->Apply(1e-3f).ok());
  EXPECT_NE(*t->DeployedHash(), deployed);
}

// H15, T-08, A-09: steps of -3e-6 on 0.02001953125 move the f32 master at once, and the bf16 copy
// at step 21, when the sum passes half a spacing of 2^-13.
TEST(Trainer, SmallStepsReachTheDeployedCopyLate) {
  Options options;
  options.max_gradient_norm = 0;
  const auto t = Make(options);
  Train(t.get(), Sequences(static_cast<int>(t->model().config().vocab)));
  size_t at = 0;
  while (t->model().parameters()[at].name.find("layers.0.o") == std::string::npos) ++at;
  for (Tensor& g : t->gradients().all())
    std::memset(g.mutable_data(), 0, static_cast<size_t>(g.size_bytes()));
  Tensor& gradient = t->gradients().all()[at];
  for (int64_t i = 0; i < gradient.elements(); ++i) {
    gradient.mutable_as<float>()[i] = 1.0f;
    t->masters()[at].mutable_as<float>()[i] = 0.02001953125f;
  }
  ASSERT_TRUE(t->DeployMasters().ok());
  for (int step = 1; step <= 30; ++step) {
    const Result<StepReport> r = t->Apply(3e-6f);
    ASSERT_TRUE(r.ok());
    EXPECT_EQ(r->parameters[at].master_changed, gradient.elements()) << step;
    EXPECT_EQ(r->parameters[at].deployed_changed, step == 21 ? gradient.elements() : 0) << step;
  }
}

// A non-finite gradient skips the step and says so.
TEST(Trainer, NonFiniteGradientSkipsTheStep) {
  const auto t = Make();
  Train(t.get(), Sequences(static_cast<int>(t->model().config().vocab)));
  t->gradients().all()[3].mutable_as<float>()[0] = kNan;
  const std::string master = *t->MasterHash();
  const Result<StepReport> r = t->Apply(1e-3f);
  ASSERT_TRUE(r.ok());
  EXPECT_TRUE(r->skipped);
  EXPECT_EQ(r->parameters[3].gradient_non_finite, 1);
  EXPECT_EQ(*t->MasterHash(), master);
  EXPECT_EQ(t->step(), 0);
}

// H19: saved and restored, the next steps have the bits of the run that was not interrupted;
// restored without moments they have not.
TEST(Trainer, ContinuesFromACheckpointBitForBit) {
  Folder folder("tare-trainer-state");
  const auto a = Make();
  const auto s = Sequences(static_cast<int>(a->model().config().vocab));
  for (int i = 0; i < 2; ++i) {
    Train(a.get(), s);
    ASSERT_TRUE(a->Apply(1e-3f).ok());
  }
  const Status saved =
      SaveState(Env::Real(), a.get(), {.data_position = 10, .seed = 7}, folder.path());
  ASSERT_TRUE(saved.ok()) << saved.ToString();
  EXPECT_EQ(SaveState(Env::Real(), a.get(), {}, folder.path()).code(), Code::kAlreadyExists);
  const auto b = Make();
  const Result<Progress> progress = LoadState(Env::Real(), folder.path(), b.get());
  ASSERT_TRUE(progress.ok()) << progress.status().ToString();
  EXPECT_EQ(progress->data_position, 10);
  EXPECT_EQ(progress->seed, 7u);
  EXPECT_EQ(StateHash(a.get()), StateHash(b.get()));
  const auto c = Make();
  ASSERT_TRUE(LoadState(Env::Real(), folder.path(), c.get()).ok());
  for (Tensor& m : c->first_moments())
    std::memset(m.mutable_data(), 0, static_cast<size_t>(m.size_bytes()));
  for (Trainer* t : {a.get(), b.get(), c.get()}) {
    Train(t, s);
    ASSERT_TRUE(t->Apply(1e-3f).ok());
  }
  EXPECT_EQ(StateHash(a.get()), StateHash(b.get()));
  EXPECT_NE(*a->MasterHash(), *c->MasterHash());
}

// Published over the directory of the version before: the same bytes as into a new one, under the
// new name alone. A directory that is there keeps both; a changed text file comes right; old
// weights that have a second name stay as they are under it.
TEST(Trainer, PublishesOverAnOldVersion) {
  Folder folder("tare-trainer-publish");
  const std::string root = folder.path();
  ASSERT_TRUE(models::WriteMini(Env::Real(), root + "/mini").ok());
  const auto t = Make();
  const auto weights = [&](const std::string& name) {
    const auto bytes = Env::Real()->ReadFile(root + "/" + name + "/model.safetensors");
    return bytes.ok() ? Hex(Sha256Of(*bytes)) : bytes.status().ToString();
  };
  const auto publish = [&](const std::string& name, const std::string& previous) {
    return PublishWeights(Env::Real(), *t, root + "/mini", root + "/" + name,
                          previous.empty() ? "" : root + "/" + previous);
  };
  const auto step = [&] {
    Train(t.get(), Sequences(static_cast<int>(t->model().config().vocab)));
    ASSERT_TRUE(t->Apply(1e-2f).ok());
  };
  ASSERT_TRUE(publish("v0", "").ok());
  const std::string v0 = weights("v0");
  step();
  EXPECT_EQ(publish("v0", "v0").code(), Code::kAlreadyExists);
  EXPECT_EQ(weights("v0"), v0);
  ASSERT_TRUE(Env::Real()->WriteFileAtomic(root + "/v0/config.json", "{}").ok());
  ASSERT_TRUE(publish("v1", "v0").ok());
  EXPECT_FALSE(Env::Real()->Exists(root + "/v0"));
  ASSERT_TRUE(publish("fresh", "").ok());
  EXPECT_NE(weights("v1"), v0);
  EXPECT_EQ(weights("v1"), weights("fresh"));
  EXPECT_EQ(*Env::Real()->List(root + "/v1"), *Env::Real()->List(root + "/fresh"));
  for (const std::string& name : *Env::Real()->List(root + "/fresh")) {
    EXPECT_EQ(*Env::Real()->ReadFile(root + "/v1/" + name),
              *Env::Real()->ReadFile(root + "/fresh/" + name))
        << name;
  }
  std::filesystem::create_hard_link(root + "/v1/model.safetensors", root + "/kept");
  step();
  ASSERT_TRUE(publish("v2", "v1").ok());
  ASSERT_TRUE(publish("fresh2", "").ok());
  EXPECT_EQ(weights("v2"), weights("fresh2"));
  EXPECT_EQ(Hex(Sha256Of(*Env::Real()->ReadFile(root + "/kept"))), weights("fresh"));
  // A previous one that is not there is no error.
  ASSERT_TRUE(publish("v3", "nowhere").ok());
  EXPECT_EQ(weights("v3"), weights("fresh2"));
  for (const std::string& name : *Env::Real()->List(root))
    EXPECT_EQ(name.find("partial"), std::string::npos) << name;
}

TEST(Trainer, RefusesDamagedAndForeignCheckpoints) {
  Folder folder("tare-trainer-damage");
  const auto t = Make();
  ASSERT_TRUE(SaveState(Env::Real(), t.get(), {}, folder.path()).ok());
  const auto before = StateHash(t.get());
  const std::string file = folder.path() + "/state.safetensors";
  const std::string good = *Env::Real()->ReadFile(file);
  std::string bad = good;
  bad[bad.size() / 2] ^= 1;
  ASSERT_TRUE(Env::Real()->WriteFileAtomic(file, bad).ok());
  EXPECT_EQ(LoadState(Env::Real(), folder.path(), t.get()).status().code(), Code::kDataLoss);
  ASSERT_TRUE(Env::Real()->WriteFileAtomic(file, good.substr(0, good.size() - 5)).ok());
  EXPECT_EQ(LoadState(Env::Real(), folder.path(), t.get()).status().code(), Code::kDataLoss);
  ASSERT_TRUE(Env::Real()->Remove(file).ok());
  EXPECT_EQ(LoadState(Env::Real(), folder.path(), t.get()).status().code(), Code::kNotFound);
  ASSERT_TRUE(Env::Real()->WriteFileAtomic(file, good).ok());
  Options other;
  other.adamw.beta1 = 0.8f;
  EXPECT_EQ(LoadState(Env::Real(), folder.path(), Make(other).get()).status().code(),
            Code::kInvalidArgument);
  const std::string json = *Env::Real()->ReadFile(folder.path() + "/trainer.json");
  for (size_t n = 0; n < json.size() - 1; n += 40) {
    ASSERT_TRUE(
        Env::Real()->WriteFileAtomic(folder.path() + "/trainer.json", json.substr(0, n)).ok());
    EXPECT_FALSE(LoadState(Env::Real(), folder.path(), t.get()).ok()) << n;
  }
  EXPECT_EQ(StateHash(t.get()), before);
  ASSERT_TRUE(Env::Real()->WriteFileAtomic(folder.path() + "/trainer.json", json).ok());
  EXPECT_TRUE(LoadState(Env::Real(), folder.path(), t.get()).ok());
}

// Cross entropy on a repeated text goes down: the whole chain of loss, backward and optimizer
// works.
TEST(Trainer, FinetuningLowersTheLoss) {
  const auto t = Make();
  const auto s = Sequences(static_cast<int>(t->model().config().vocab));
  const double first = Train(t.get(), s, Loss::kCrossEntropy).loss;
  ASSERT_TRUE(t->Apply(2e-3f).ok());
  double last = first;
  for (int i = 0; i < 4; ++i) {
    last = Train(t.get(), s, Loss::kCrossEntropy).loss;
    ASSERT_TRUE(t->Apply(2e-3f).ok());
  }
  EXPECT_LT(last, first);
}

}  // namespace
}  // namespace tare::trainer
