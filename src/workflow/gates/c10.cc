// C10: the delivery. Manifest, hot spots and their kernels, regressions, the loop on the delivery
// image and the paired benchmark; the set of gates is closed (C10-11).

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "workflow/gates/loop_check.h"
#include "workflow/gates/pairing.h"
#include "workflow/gates/recipe_diff.h"

namespace tare::workflow {
namespace {

constexpr int64_t kMax = int64_t{1} << 50;
constexpr std::string_view kStatement =
    "This is a delivery agreement for the named model, recipe, precision, hardware and image; it "
    "is "
    "no claim about all RL systems.";
// RL-12.
const std::map<std::string, std::string> kTargets = {
    {"NVIDIA/Megatron-LM", "dev"}, {"verl-project/verl", "main"}, {"vllm-project/vllm", "main"}};
const std::vector<std::string> kGates = {"delivery manifest", "pairing results", "loop receipt"};
const std::set<std::string> kScanned = {"kernel caches", "loaded modules", "sources", "wheels"};
const std::map<std::string, std::string> kImpact = {
    {"inference", "C3"}, {"training forward", "C5"}, {"gradients", "C7"}};

struct ChangedFile {
  std::string path, file_class, justification;
};
struct PullRequest {
  std::string repository, branch, head, merge_base, diff_base;
  std::vector<ChangedFile> files;
  std::vector<std::string> diff;
};
struct HotSpot {
  std::string kernel, shape, dtype, layout;
  int64_t calls = 0, ns_per_call = 0, share_ppm = 0;
  std::string Key() const { return fmt::format("{} {} {} {}", kernel, shape, dtype, layout); }
};
struct Micro {
  HotSpot at;
  int64_t compared = 0, mismatches = 0;
  Series before, after;
};
struct KernelRecord {
  std::string name, technology, source;
  std::vector<std::string> arms;
  bool is_new = false;
};
struct Regression {
  std::string change;
  std::vector<std::string> touches;
  std::map<std::string, std::string> ran;  // gate -> evidence
};
struct Evidence {
  Subject subject;
  std::string kind;
  Recipe agreement, formal;
  std::string entry_verdict, entry_image, entry_evidence;
  std::string baseline_id, baseline_image, baseline_person;
  Recipe baseline;
  bool baseline_confirmed = false, baseline_patched = false;
  bool has_manifest = false;  // null: nothing was delivered to anybody
  int parts = 0;              // of profile, kernels, scan, micro, regressions: all five, or none
  std::string commits;        // what the pairs ran, where no manifest says it
  std::vector<PullRequest> pulls;
  std::string image, manifest_baseline, manifest_recipe, statement;
  std::map<std::string, std::string> built_from, in_image, commit_tree;
  bool dirty = false;
  std::vector<std::string> overlay, receipts;
  std::string profile_arm;
  std::vector<HotSpot> spots;
  int64_t other_ns = 0, other_ppm = 0;
  std::vector<KernelRecord> kernels;
  std::set<std::string> scanned;
  std::vector<std::string> hits;
  std::vector<Micro> micro;
  std::vector<Regression> regressions;
  std::vector<std::string> gates;
  std::map<std::string, std::string> acceptance;
  Loop loop;
  Pairing pairing;
};

PullRequest ReadPull(const Field& item) {
  PullRequest p;
  p.repository = item.At("repository").Str();
  p.branch = item.At("branch").Str();
  p.head = item.At("head").Commit();
  p.merge_base = item.At("merge_base").Commit();
  p.diff_base = item.At("diff_base").Commit();
  for (const Field& f : item.At("files").Items(1)) {
    p.files.push_back(
        {f.At("path").Str(),
         f.At("class").OneOf({"source", "recipe", "image script", "observability", "other"}),
         f.At("justification").Text()});
  }
  p.diff = item.At("diff").Strings(1);
  return p;
}

HotSpot ReadSpot(const Field& item) {
  return {item.At("kernel").Str(), item.At("shape").Str(), item.At("dtype").Str(),
          item.At("layout").Str()};
}

void ReadManifest(const Field& manifest, Evidence* e) {
  for (const Field& item : manifest.At("pull_requests").Items()) e->pulls.push_back(ReadPull(item));
  const Field image = manifest.At("image");
  e->image = image.At("digest").Digest();
  for (const auto& [repo, c] : image.At("built_from").Members()) e->built_from[repo] = c.Commit();
  for (const auto& [repo, h] : image.At("in_image").Members()) e->in_image[repo] = h.Hash();
  for (const auto& [repo, h] : image.At("commit_tree").Members()) e->commit_tree[repo] = h.Hash();
  e->dirty = image.At("dirty").Bool();
  e->overlay = image.At("overlay").Strings();
  e->manifest_baseline = manifest.At("baseline").Hash();
  e->manifest_recipe = manifest.At("recipe").Hash();
  e->receipts = manifest.At("receipts").Strings(1);
  e->statement = manifest.At("statement").Str();
  // What its receiver is told beside it; JudgeTask asks for it where the arithmetic was changed.
  if (const std::optional<Field> notes = manifest.MaybeAt("notes")) notes->Strings();
}

void ReadKernels(const Field& root, Evidence* e) {
  const Field profile = root.At("profile");
  e->profile_arm = profile.At("arm").Str();
  for (const Field& item : profile.At("hot_spots").Items(1, 64)) {
    HotSpot s = ReadSpot(item);
    s.calls = item.At("calls").Int(1, 1 << 26);
    s.ns_per_call = item.At("ns_per_call").Int(1, 1 << 30);
    s.share_ppm = item.At("share_ppm").Int(0, 1'000'000);
    e->spots.push_back(std::move(s));
  }
  e->other_ns = profile.At("other_ns").Int(0, kMax);
  e->other_ppm = profile.At("other_ppm").Int(0, 1'000'000);
  for (const Field& item : root.At("kernels").Items(1)) {
    KernelRecord k;
    k.name = item.At("name").Str();
    k.technology = item.At("technology").Str();
    k.source = item.At("source").Str();
    k.arms = item.At("arms").Strings(1);
    k.is_new = item.At("new").Bool();
    e->kernels.push_back(std::move(k));
  }
  e->scanned = root.At("scan").At("scanned").StringSet();
  e->hits = root.At("scan").At("triton").Strings();
  for (const Field& item : root.At("micro").Items()) {
    Micro m;
    m.at = ReadSpot(item);
    m.compared = item.At("compared").Int(0, kMax);
    m.mismatches = item.At("mismatches").Int(0, kMax);
    m.before = ReadSeries(item.At("before_ns"), 3);
    m.after = ReadSeries(item.At("after_ns"), 3);
    e->micro.push_back(std::move(m));
  }
  for (const Field& item : root.At("regressions").Items()) {
    Regression r;
    r.change = item.At("change").Commit();
    r.touches = item.At("touches").Strings(1);
    for (const auto& [gate, hash] : item.At("ran").Members()) r.ran[gate] = hash.Hash();
    e->regressions.push_back(std::move(r));
  }
}

Evidence Read(const Field& root) {
  Evidence e;
  e.subject = ReadSubject(root);
  e.kind = root.At("kind").Str();
  e.agreement = ReadAgreement(root.At("agreement"));
  const Field inputs = root.At("inputs");
  const Field entry = inputs.At("entry_gate");
  e.entry_verdict = entry.At("verdict").Str();
  e.entry_image = entry.At("image").Digest();
  e.entry_evidence = entry.At("evidence").Hash();
  e.formal = ReadRecipe(inputs.At("recipe"));
  const Field baseline = inputs.At("baseline");
  e.baseline_id = baseline.At("id").Hash();
  e.baseline = ReadRecipe(baseline.At("recipe"));
  e.baseline_image = baseline.At("image").Digest();
  e.baseline_patched = baseline.At("patched").Bool();
  const Field person = baseline.At("confirmed_by");
  e.baseline_confirmed = !person.IsNull();
  if (e.baseline_confirmed) e.baseline_person = person.Str();
  const Field manifest = root.At("manifest");
  e.has_manifest = !manifest.IsNull();
  if (const std::optional<Field> commits = root.MaybeAt("commits")) e.commits = commits->Hash();
  if (e.has_manifest) ReadManifest(manifest, &e);
  const Field profile = root.At("profile"), kernels = root.At("kernels"), scan = root.At("scan"),
              micro = root.At("micro"), regressions = root.At("regressions");
  const Field* parts[] = {&profile, &kernels, &scan, &micro, &regressions};
  for (const Field* part : parts) e.parts += !part->IsNull();
  if (e.parts == std::ssize(parts)) {
    ReadKernels(root, &e);
  } else {
    for (const Field* part : parts) (void)part->Any();  // some of them: the judge says so
  }
  e.gates = root.At("gates").Strings();
  for (const auto& [name, state] : root.At("acceptance").Members()) {
    e.acceptance[name] = state.OneOf({"pass", "not-covered"});
  }
  e.loop = ReadLoop(root.At("loop"));
  e.pairing = ReadPairing(root.At("pairing"));
  return e;
}

// Elements of "16x576"; 0 for what is no such shape.
int64_t Elements(const std::string& shape) {
  int64_t product = 1;
  size_t at = 0;
  while (true) {
    int64_t n = 0;
    const size_t begin = at;
    while (at < shape.size() && shape[at] >= '0' && shape[at] <= '9' && n < (1 << 30))
      n = n * 10 + (shape[at++] - '0');
    if (at == begin || n == 0 || product > kMax / n) return 0;
    product *= n;
    if (at == shape.size()) return product;
    if (shape[at++] != 'x') return 0;
  }
}

class Judge10 {
 public:
  Judge10(Judging* judging, const Evidence& evidence) : j_(*judging), e_(evidence) {}

  void Run() {
    j_.Require("C10-01", e_.kind == "E8", reason::kWrongEvidenceKind,
               fmt::format("evidence of kind {}; delivery rests on the loop, E8, with its paired "
                           "performance, E10",
                           e_.kind));
    Inputs();
    if (j_.Require("RL-11", e_.has_manifest, reason::kOutsideScope,
                   "no delivery manifest: three pull requests and an image are made by people, and "
                   "were not handed in",
                   "hand in the manifest of the delivery with the evidence")) {
      Manifest();
    }
    j_.Require(
        "C10-12", e_.parts == 0 || e_.parts == 5, reason::kManifestIncomplete,
        fmt::format("{} of profile, kernels, scan, micro and regressions; all or none", e_.parts));
    if (j_.Require("C10-02", e_.parts == 5, reason::kOutsideScope,
                   "no profile of BI=1 with its hot spots, kernels, scan and regressions: a device "
                   "profile was not handed in",
                   "profile the delivery run on the target device")) {
      HotSpots();
      Kernels();
      Regressions();
    }
    j_.Require(
        "C10-11", e_.gates == kGates, reason::kExtraGate,
        fmt::format("gates {}; the set is {}", fmt::join(e_.gates, ", "), fmt::join(kGates, ", ")));
    CheckLoop(&j_, e_.subject, e_.loop);
    j_.Require("C10-11", e_.loop.updates.size() == 2, reason::kExtraGate,
               fmt::format("{} updates; the agreement has two", e_.loop.updates.size()));
    CheckPairing(&j_, e_.subject, e_.agreement,
                 e_.has_manifest ? RecipeId(e_.built_from) : e_.commits, e_.pairing);
    Acceptance();
  }

 private:
  void Inputs() {
    j_.Require("C10-01", e_.entry_verdict == "pass" && e_.entry_image == e_.subject.image,
               reason::kGateNotPassed,
               fmt::format("C9 is {} on image {}", e_.entry_verdict, e_.entry_image.substr(0, 19)));
    // STOP-08, C1-12, TRACK-02, TRACK-07: the denominator.
    j_.Require("STOP-08", e_.baseline_confirmed && e_.baseline_image == e_.subject.image,
               reason::kBaselineUnconfirmed,
               fmt::format("baseline {}: {}, image {}", e_.baseline_id.substr(0, 12),
                           e_.baseline_confirmed ? "confirmed" : "no person confirmed it",
                           e_.baseline_image.substr(0, 19)));
    j_.Require("GEN-18",
               e_.baseline_id == RecipeId(e_.baseline) &&
                   (!e_.has_manifest || e_.manifest_baseline == e_.baseline_id),
               reason::kBaselineUnconfirmed,
               "the baseline's ID is not that of its configuration, or not the manifest's");
    std::vector<std::string> keys;
    for (const RecipeDifference& d : DiffRecipes(e_.formal, e_.baseline)) keys.push_back(d.key);
    j_.Require("C1-12", keys == std::vector<std::string>{"VLLM_BATCH_INVARIANT"},
               reason::kServingOnlyOptimum,
               fmt::format("the baseline differs from the formal recipe in {}; in the switch alone "
                           "is right",
                           keys.empty() ? "nothing" : fmt::format("{}", fmt::join(keys, ", "))));
    const auto value = [](const Recipe& r) {
      const auto it = r.find("VLLM_BATCH_INVARIANT");
      return it == r.end() ? std::string() : it->second;
    };
    j_.Require("GEN-29", value(e_.formal) == "1" && value(e_.baseline) == "0",
               reason::kServingOnlyOptimum,
               fmt::format("VLLM_BATCH_INVARIANT: formal `{}`, baseline `{}`", value(e_.formal),
                           value(e_.baseline)));
    j_.Require("TRACK-07", !e_.baseline_patched, reason::kConsistencyHandicap,
               "the baseline ran with consistency patches");
    Recipe formal = e_.formal;  // the loop ran it with two steps
    formal["steps"] = "2";
    j_.Require(
        "C10-01",
        formal == e_.loop.recipe && (!e_.has_manifest || RecipeId(e_.formal) == e_.manifest_recipe),
        reason::kConfigDiffers, "loop, manifest and reviewed recipe are not one recipe");
  }

  // RL-10 to RL-16.
  void Manifest() {
    std::map<std::string, std::string> heads;
    for (const PullRequest& p : e_.pulls) {
      const auto target = kTargets.find(p.repository);
      j_.Require("RL-12", target != kTargets.end() && target->second == p.branch,
                 reason::kWrongBranch, fmt::format("{}:{}", p.repository, p.branch));
      j_.Require("RL-11", heads.emplace(p.repository, p.head).second, reason::kManifestIncomplete,
                 fmt::format("{} has two pull requests", p.repository));
      Diff(p);
    }
    j_.Require("RL-11", heads.size() == kTargets.size(), reason::kManifestIncomplete,
               fmt::format("{} pull requests; one for each of three repositories", heads.size()));
    j_.Require("RL-15", e_.built_from == heads, reason::kDirtyBuild,
               "the image is not built from the heads of the pull requests");
    j_.Require("RL-16",
               !e_.dirty && e_.overlay.empty() && e_.in_image == e_.commit_tree &&
                   e_.in_image.size() == heads.size(),
               reason::kDirtyBuild,
               fmt::format("dirty tree: {}, overlay files: {}, files in the image {} those of the "
                           "commits",
                           e_.dirty, e_.overlay.size(),
                           e_.in_image == e_.commit_tree ? "are" : "are not"));
    for (const auto& [repo, hash] : e_.in_image) {
      j_.Require("RL-16", heads.contains(repo), reason::kDirtyBuild,
                 fmt::format("{} is in the image and in no pull request", repo));
    }
    j_.Require("C10-08", e_.image == e_.subject.image, reason::kManifestIncomplete,
               "the manifest's image is not the one that ran");
    j_.Require("C10-12", AllDifferent(e_.receipts) && e_.receipts.size() == 2,
               reason::kManifestIncomplete,
               fmt::format("{} receipts; dual path and two-step loop", e_.receipts.size()));
    j_.Require("RL-10", e_.statement == kStatement, reason::kUniversalClaim,
               fmt::format("the statement is `{}`; `{}` is wanted", e_.statement, kStatement));
  }

  void Diff(const PullRequest& p) {
    std::vector<std::string> listed, diff = p.diff;
    for (const ChangedFile& f : p.files) {
      listed.push_back(f.path);
      const bool verl = p.repository == "verl-project/verl";
      const std::string want =
          !verl                           ? "source"
          : f.path.starts_with("recipe/") ? "recipe"
          : f.path.starts_with("docker/") ? "image script"
          : f.path.find("metric") != std::string::npos || f.path.find("logg") != std::string::npos
              ? "observability"
              : "other";
      j_.Require("RL-13", f.file_class == want, reason::kUnlistedChange,
                 fmt::format("{} {}: classed {}, its path says {}", p.repository, f.path,
                             f.file_class, want));
      j_.Require("RL-13", want == "other" ? f.justification.size() >= 10 : f.justification.empty(),
                 reason::kUnlistedChange,
                 fmt::format("{} {}: justification `{}`", p.repository, f.path, f.justification));
      for (const std::string_view ending : {".so", ".whl", ".pyc", ".bin", ".o", ".orig", ".rej"}) {
        j_.Require("RL-14", !f.path.ends_with(ending), reason::kUnlistedChange,
                   fmt::format("{} {} is no source", p.repository, f.path));
      }
    }
    std::sort(listed.begin(), listed.end());
    std::sort(diff.begin(), diff.end());
    j_.Require("RL-14", listed == diff && AllDifferent(diff), reason::kUnlistedChange,
               fmt::format("{}: {} files are listed, the full diff has {}", p.repository,
                           listed.size(), diff.size()));
    j_.Require("RL-14", p.merge_base == p.diff_base && p.head != p.merge_base,
               reason::kUnlistedChange,
               fmt::format("{}: the diff is against {}, the merge base is {}", p.repository,
                           p.diff_base.substr(0, 12), p.merge_base.substr(0, 12)));
  }

  // C10-02 to C10-04.
  void HotSpots() {
    j_.Require("C10-02", e_.profile_arm == "BI=1", reason::kShapeUnmeasured,
               fmt::format("the profile is of {}, hot spots are those of BI=1", e_.profile_arm));
    int64_t total = e_.other_ns;
    for (const HotSpot& s : e_.spots) total += s.calls * s.ns_per_call;
    const auto ppm = [&](int64_t ns) {
      return static_cast<int64_t>(static_cast<double>(ns) * 1e6 / static_cast<double>(total));
    };
    std::vector<std::string> keys, measured;
    for (const HotSpot& s : e_.spots) {
      keys.push_back(s.Key());
      j_.Require("C10-02", s.share_ppm == ppm(s.calls * s.ns_per_call),
                 reason::kReceiptContradicted,
                 fmt::format("{}: share {} ppm, its time gives {}", s.Key(), s.share_ppm,
                             ppm(s.calls * s.ns_per_call)));
      j_.Require("C10-02", Elements(s.shape) > 0, reason::kShapeUnmeasured,
                 fmt::format("{}: no shape like 16x576", s.Key()));
    }
    j_.Require("C10-02", e_.other_ppm == ppm(e_.other_ns), reason::kReceiptContradicted,
               "shares and `other` are not all of the time");
    for (const Micro& m : e_.micro) {
      measured.push_back(m.at.Key());
      j_.Require("C10-03", std::count(keys.begin(), keys.end(), m.at.Key()) == 1,
                 reason::kShapeUnmeasured,
                 fmt::format("{} is measured and no hot spot", m.at.Key()));
      j_.Require("C10-04", m.mismatches == 0, reason::kBitMismatch,
                 fmt::format("{}: {} of {} elements", m.at.Key(), m.mismatches, m.compared));
      j_.Require("C10-04", m.compared > 0 && m.compared == Elements(m.at.shape),
                 reason::kCountMismatch,
                 fmt::format("{}: {} elements were compared", m.at.Key(), m.compared));
      j_.Require("C10-04", SeriesFollows(m.before) && SeriesFollows(m.after),
                 reason::kReceiptContradicted,
                 fmt::format("{}: a median or sum does not follow from its values", m.at.Key()));
      if (m.after.median > m.before.median) j_.Note(fmt::format("{} became slower", m.at.Key()));
    }
    for (const std::string& key : keys) {
      j_.Require("C10-04", std::count(measured.begin(), measured.end(), key) == 1,
                 reason::kShapeUnmeasured,
                 fmt::format("{} lacks its correctness and performance result", key));
    }
  }

  // C10-05, C10-06.
  void Kernels() {
    static const std::set<std::string> kAllowed = {"cuda", "cutlass", "cute", "existing"};
    std::set<std::string> names;
    for (const KernelRecord& k : e_.kernels) {
      j_.Require("C10-06", names.insert(k.name).second, reason::kInventoryIncomplete,
                 fmt::format("{} has two records", k.name));
      const bool invariant = std::count(k.arms.begin(), k.arms.end(), "BI=1") > 0;
      j_.Require("C10-06",
                 AllDifferent(k.arms) &&
                     std::all_of(k.arms.begin(), k.arms.end(),
                                 [](const std::string& a) { return a == "BI=0" || a == "BI=1"; }),
                 reason::kInventoryIncomplete,
                 fmt::format("{}: runs in {}", k.name, fmt::join(k.arms, ", ")));
      if (k.technology == "triton") {
        j_.Require("C10-05", !k.is_new && !invariant, reason::kForbiddenTechnology,
                   fmt::format("{} is Triton, {}{}", k.name, k.is_new ? "new" : "not new",
                               invariant ? ", on the BI=1 path" : ""));
      } else {
        j_.Require("C10-06", kAllowed.contains(k.technology), reason::kForbiddenTechnology,
                   fmt::format("{}: technology {}", k.name, k.technology));
      }
      // "owner/repository@commit:path" of a repository that the image holds.
      const size_t at = k.source.find('@'), colon = k.source.find(':');
      const bool form = at != std::string::npos && colon != std::string::npos && at < colon &&
                        colon + 1 < k.source.size();
      const auto built = form ? e_.built_from.find(k.source.substr(0, at)) : e_.built_from.end();
      const bool traced =
          built != e_.built_from.end() && built->second == k.source.substr(at + 1, colon - at - 1);
      j_.Require("C10-06", traced, reason::kForbiddenTechnology,
                 fmt::format("{}: no source in the image ({})", k.name, k.source));
      // A new kernel stands in the diff that is delivered.
      bool in_diff = false;
      for (const PullRequest& p : e_.pulls) {
        in_diff =
            in_diff || (traced && p.repository == built->first &&
                        std::count(p.diff.begin(), p.diff.end(), k.source.substr(colon + 1)) > 0);
      }
      j_.Require("C10-06", k.is_new == in_diff && k.is_new == (k.technology != "existing"),
                 reason::kForbiddenTechnology,
                 fmt::format("{}: {}, technology {}, its file {} a delivered diff", k.name,
                             k.is_new ? "new" : "not new", k.technology,
                             in_diff ? "stands in" : "stands in no"));
    }
    std::set<std::string> hot;
    for (const HotSpot& s : e_.spots) {
      hot.insert(s.kernel);
      const auto k = std::find_if(e_.kernels.begin(), e_.kernels.end(),
                                  [&](const KernelRecord& r) { return r.name == s.kernel; });
      j_.Require("C10-06",
                 k != e_.kernels.end() && std::count(k->arms.begin(), k->arms.end(), "BI=1") > 0,
                 reason::kInventoryIncomplete,
                 fmt::format("hot spot {} has no record as running in BI=1", s.kernel));
    }
    for (const KernelRecord& k : e_.kernels) {
      j_.Require("C10-06", !k.is_new || hot.contains(k.name), reason::kShapeUnmeasured,
                 fmt::format("{} is new and in no hot spot of the profile", k.name));
    }
    j_.Require("C10-05", e_.scanned == kScanned && e_.hits.empty(), reason::kForbiddenTechnology,
               fmt::format("scanned {}; Triton found in {}", fmt::join(e_.scanned, ", "),
                           e_.hits.empty() ? "none" : fmt::format("{}", fmt::join(e_.hits, ", "))));
  }

  // C10-07.
  void Regressions() {
    std::set<std::string> changes;
    for (const Regression& r : e_.regressions) {
      j_.Require("C10-07", changes.insert(r.change).second, reason::kRegressionMissing,
                 fmt::format("change {} stands there twice", r.change.substr(0, 12)));
      std::set<std::string> need, ran;
      for (const std::string& t : r.touches) {
        const auto it = kImpact.find(t);
        j_.Require("C10-07", it != kImpact.end() || t == "bench", reason::kRegressionMissing,
                   fmt::format("{}: {} is no impact", r.change.substr(0, 12), t));
        if (it != kImpact.end()) need.insert(it->second);
      }
      for (const auto& [gate, hash] : r.ran) ran.insert(gate);
      j_.Require(
          "C10-07", need == ran, reason::kRegressionMissing,
          fmt::format("{} touches {}: {} must run, {} ran", r.change.substr(0, 12),
                      fmt::join(r.touches, ", "), fmt::join(need, " "), fmt::join(ran, " ")));
    }
    std::set<std::string> heads;
    for (const PullRequest& p : e_.pulls) heads.insert(p.head);
    j_.Require("C10-07", heads == changes, reason::kRegressionMissing,
               "each delivered change needs its regression");
  }

  // CHEAP-10, GEN-07: five items apart, which four of five never make one.
  void Acceptance() {
    const std::set<std::string> kItems = {"agreed steps", "full model", "paired performance",
                                          "quality evaluation", "restore lifecycle"};
    std::set<std::string> items;
    const auto restore = e_.formal.find("checkpoint_restore");
    const bool restored = restore != e_.formal.end() && restore->second == "true";
    for (const auto& [name, state] : e_.acceptance) {
      items.insert(name);
      // What is judged here or in C9 has its state from there; quality is C7's (JudgeTask).
      const bool known = name == "quality evaluation" ||
                         (state == "pass") == (name == "restore lifecycle" ? restored : true);
      j_.Require("CHEAP-10", known, reason::kVerdictContradicted,
                 fmt::format("{} is given as {}", name, state));
      if (state != "pass")
        j_.NotCovered("CHEAP-10", name + ": production acceptance is not reached", "");
    }
    j_.Require("CHEAP-10", items == kItems, reason::kManifestIncomplete,
               fmt::format("acceptance of {}; {} are tracked apart", fmt::join(items, ", "),
                           fmt::join(kItems, ", ")));
  }

  Judging& j_;
  const Evidence& e_;
};

}  // namespace

GateJudgement JudgeC10(const Json& evidence) {
  Judging judging("C10", evidence);
  const Evidence e = Read(judging.root());
  if (judging.WellFormed()) Judge10(&judging, e).Run();
  return judging.Finish();
}

}  // namespace tare::workflow
