// Gate C0: is every tensor and every traced operator in exactly one row of the inventory, do the
// rows name what really ran, do both sides have the same mathematics, and does the route follow
// from its three answers. The decision table of the route is ChooseRoute below.

#include "workflow/gates/c0.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <tuple>

#include "base/sha256.h"
#include "workflow/gates/judge.h"

namespace tare::workflow {
namespace {

struct Launch {
  std::string phase, op, kernel, dtypes;
  auto operator<=>(const Launch&) const = default;
  std::string ToString() const { return fmt::format("{} {} {} {}", phase, op, kernel, dtypes); }
};

Launch ReadLaunch(const Field& f) {
  return {f.At("phase").OneOf({"prefill", "decode", "train-forward", "train-backward"}),
          f.At("op").Str(), f.At("kernel").Str(), f.At("dtypes").Str()};
}

struct Row {
  std::string id, module, backward;
  std::vector<std::string> tensors, ops;
  std::vector<Launch> kernels;
  std::map<std::string, std::string> inference, training;
  std::vector<std::string> quantized, choices;
};

std::map<std::string, std::string> ReadTerms(const Field& f) {
  std::map<std::string, std::string> out;
  for (const auto& [name, value] : f.Members()) out[name] = value.Str();
  return out;
}

Row ReadRow(const Field& f) {
  Row row;
  row.id = f.At("id").Str();
  row.module = f.At("module").Str();
  row.tensors = f.At("tensors").Strings();
  row.ops = f.At("ops").Strings();
  for (const Field& k : f.At("kernels").Items()) row.kernels.push_back(ReadLaunch(k));
  row.inference = ReadTerms(f.At("inference_terms"));
  row.training = ReadTerms(f.At("training_terms"));
  for (const Field& q : f.At("quantization").Items()) {
    row.quantized.push_back(q.At("what").Str());
    // Each of these has to be stated; which value is right is the recipe's matter.
    for (const char* key : {"format", "granularity", "scale_rule", "rounding", "saturation"}) {
      q.At(key).Str();
    }
  }
  for (const Field& c : f.At("choices").Items()) {
    row.choices.push_back(c.At("name").Str());
    c.At("tie_break").Str();
  }
  row.backward = f.At("backward").OneOf({"reuse", "glue", "new", "missing", "not-needed"});
  return row;
}

struct Route {
  std::string chosen, batch_invariance, missing_backwards, parallelism;
  std::vector<std::string> unsupported;  // routes that cannot run the model at all
  std::map<std::string, std::string> rejected;
  std::vector<std::string> rationale_rows;
  std::string rationale, inventory_sha256;
  std::string user;                                       // whose choice it was; empty: nobody's
  std::map<std::string, std::set<std::string>> features;  // needed -> routes that have it
};

Route ReadRoute(const Field& f) {
  Route r;
  r.chosen = f.At("chosen").OneOf({"mlite", "fsdp2", "megatron-bridge", "tare", "none"});
  const Field answers = f.At("answers");
  r.batch_invariance = answers.At("batch_invariance_needed").Text();
  r.missing_backwards = answers.At("missing_backwards").Text();
  r.parallelism = answers.At("parallelism").Text();
  for (const auto& [route, why] : f.At("unsupported").Members()) {
    why.Str();
    r.unsupported.push_back(route);
  }
  for (const auto& [route, why] : f.At("rejected").Members()) r.rejected[route] = why.Text();
  const Field rationale = f.At("rationale");
  r.rationale = rationale.At("text").Str();
  r.rationale_rows = rationale.At("rows").Strings();
  r.inventory_sha256 = rationale.At("inventory_sha256").Hash();
  if (const std::optional<Field> user = f.MaybeAt("user_choice"))
    r.user = user->OneOf({"mlite", "fsdp2", "megatron-bridge", "tare"});
  if (const std::optional<Field> features = f.MaybeAt("features")) {
    for (const auto& [name, routes] : features->Members()) r.features[name] = routes.StringSet();
  }
  return r;
}

bool Unanswered(std::string answer) {
  std::transform(answer.begin(), answer.end(), answer.begin(), [](char c) {
    return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  });
  return answer.find_first_not_of(" \t") == std::string::npos || answer == "unknown" ||
         answer == "?" || answer == "tbd";
}

// Every name of `all` in exactly one row, and no row naming what is not there.
void CheckOnce(Judging* j, const char* what, const std::vector<std::string>& all,
               const std::vector<Row>& rows, std::vector<std::string> Row::*names) {
  std::map<std::string, std::vector<std::string>> owners;
  for (const Row& row : rows) {
    for (const std::string& name : row.*names) owners[name].push_back(row.id);
  }
  for (const std::string& name : all) {
    const auto at = owners.find(name);
    const size_t count = at == owners.end() ? 0 : at->second.size();
    j->Require("C0-07", count == 1, reason::kInventoryIncomplete,
               count == 0 ? fmt::format("{} {} is in no row", what, name)
                          : fmt::format("{} {} is in {} rows: {}", what, name, count,
                                        fmt::join(at->second, ", ")));
  }
  for (const auto& [name, ids] : owners) {
    j->Require("C0-07", std::find(all.begin(), all.end(), name) != all.end(),
               reason::kInventoryIncomplete,
               fmt::format("row {} names {} {}, which is not there", ids[0], what, name),
               "take the row's names from the checkpoint and the trace");
  }
}

void CheckKernels(Judging* j, const std::vector<Launch>& trace, const std::vector<Row>& rows) {
  std::set<Launch> launched(trace.begin(), trace.end()), listed;
  std::set<std::string> phases;
  for (const Launch& l : trace) phases.insert(l.phase);
  for (const char* phase : {"prefill", "decode"}) {
    j->Require("C0-02", phases.contains(phase), reason::kConditionUnmet,
               fmt::format("the trace has no launch of the phase {}", phase));
  }
  for (const Row& row : rows) listed.insert(row.kernels.begin(), row.kernels.end());
  for (const Launch& l : launched) {
    j->Require("C0-02", listed.contains(l), reason::kKernelUnlisted,
               fmt::format("launched, and in no row: {}", l.ToString()));
  }
  for (const Launch& l : listed) {
    j->Require("C0-02", launched.contains(l), reason::kKernelUnlisted,
               fmt::format("in a row, and never launched: {}", l.ToString()),
               "a kernel read from source is no kernel that ran: take the trace's");
  }
}

void CheckTerms(Judging* j, const std::vector<Row>& rows) {
  for (const Row& row : rows) {
    if (row.backward == "not-needed" && row.training.empty()) continue;
    std::set<std::string> names;
    for (const auto& [name, value] : row.inference) names.insert(name);
    for (const auto& [name, value] : row.training) names.insert(name);
    bool same = true;
    for (const std::string& name : names) {
      const auto a = row.inference.find(name), b = row.training.find(name);
      const auto text = [&](auto it, const auto& map) {
        return it == map.end() ? std::string("absent") : it->second;
      };
      const std::string left = text(a, row.inference), right = text(b, row.training);
      if (left == right) continue;
      same = false;
      j->Require("C0-03", false, reason::kDifferentMath,
                 fmt::format("row {} ({}): {} is {} in inference and {} in training", row.id,
                             row.module, name, left, right));
    }
    if (same) j->Pass("C0-03", {});
  }
}

void CheckRoute(Judging* j, const Route& r, const std::vector<Row>& rows,
                const std::string& inventory_sha256) {
  bool answered = true;
  for (const auto& [name, answer] :
       {std::pair<const char*, std::string>{"batch_invariance_needed", r.batch_invariance},
        {"missing_backwards", r.missing_backwards},
        {"parallelism", r.parallelism}}) {
    answered &= j->Require("C0-08", !Unanswered(answer), reason::kAnswerMissing,
                           fmt::format("`{}` is answered `{}`", name, Printable(answer)));
  }
  if (!answered) return;
  j->Require("C0-08", r.batch_invariance == "yes" || r.batch_invariance == "no",
             reason::kAnswerMissing,
             fmt::format("`batch_invariance_needed` is answered `{}`; yes or no is needed",
                         Printable(r.batch_invariance)));
  const auto missing = std::count_if(rows.begin(), rows.end(),
                                     [](const Row& row) { return row.backward == "missing"; });
  int64_t stated = -1;
  const char* end = r.missing_backwards.data() + r.missing_backwards.size();
  const auto [stop, error] = std::from_chars(r.missing_backwards.data(), end, stated);
  j->Require("C0-08", error == std::errc() && stop == end && stated == missing,
             reason::kAnswerContradicted,
             fmt::format("missing backwards: the answer says `{}`, the inventory has {}",
                         Printable(r.missing_backwards), missing));
  const std::string right =
      ChooseRoute({.batch_invariance = r.batch_invariance == "yes",
                   .missing_backwards = missing,
                   .unsupported = {r.unsupported.begin(), r.unsupported.end()},
                   .user = r.user});
  j->Require("C0-06", r.chosen == right || (r.chosen == "tare" && r.user.empty()),
             reason::kRouteUnfounded,
             r.user.empty() ? fmt::format("{} was chosen; the answers lead to {}", r.chosen, right)
                            : fmt::format("{} was chosen; the user asks for {}", r.chosen, right));
  // The default is no excuse for what it lacks, and neither is a choice (GEN-25).
  j->Require("GEN-25",
             std::find(r.unsupported.begin(), r.unsupported.end(), r.chosen) == r.unsupported.end(),
             reason::kRouteLacksFeature, fmt::format("{} cannot run this model", r.chosen));
  for (const auto& [feature, routes] : r.features) {
    j->Require(
        "GEN-25", routes.contains(r.chosen), reason::kRouteLacksFeature,
        fmt::format("{} is needed and {} does not have it{}", feature, r.chosen,
                    routes.empty() ? "" : fmt::format(" ({} does)", fmt::join(routes, ", "))));
  }
  for (const char* route : {"mlite", "fsdp2", "megatron-bridge"}) {
    if (r.chosen == route) continue;
    const auto at = r.rejected.find(route);
    j->Require("C0-06", at != r.rejected.end() && !Unanswered(at->second), reason::kRouteUnfounded,
               fmt::format("{} was rejected without a reason", route));
  }
  j->Require("C0-06", !r.rejected.contains(r.chosen), reason::kRouteUnfounded,
             fmt::format("{} is chosen and rejected", r.chosen));
  j->Require("C0-09", !r.rationale_rows.empty(), reason::kRationaleUnlinked,
             "the rationale cites no row");
  for (const std::string& id : r.rationale_rows) {
    j->Require("C0-09",
               std::any_of(rows.begin(), rows.end(), [&](const Row& row) { return row.id == id; }),
               reason::kRationaleUnlinked, fmt::format("the rationale cites row {}", id));
  }
  j->Require("C0-09", r.inventory_sha256 == inventory_sha256, reason::kRationaleUnlinked,
             fmt::format("the rationale is about inventory {}, this one is {}",
                         r.inventory_sha256.substr(0, 12), inventory_sha256.substr(0, 12)));
}

}  // namespace

std::string InventoryDigest(const Json& rows) {
  const Result<std::string> text = CanonicalJson(rows);
  return text.ok() ? Hex(Sha256Of(*text)) : std::string();
}

std::string ChooseRoute(const RouteQuestion& q) {
  // mLite first (GEN-25): it reuses the inference forward and takes a backward per operator. The
  // others come in when it cannot run the model; FSDP2 keeps native modules, so a forward of its
  // own is wanted only where bits need not equal inference's and no backward has to be written.
  if (!q.user.empty()) return q.user;
  const auto fits = [&](const char* route) { return !q.unsupported.contains(route); };
  if (fits("mlite")) return "mlite";
  if (fits("megatron-bridge") && (q.batch_invariance || q.missing_backwards > 0)) {
    return "megatron-bridge";
  }
  if (fits("fsdp2")) return "fsdp2";
  if (fits("megatron-bridge")) return "megatron-bridge";
  return "none";
}

GateJudgement JudgeC0(const Json& evidence) {
  Judging j("C0", evidence);
  const Subject subject = ReadSubject(j.root());
  const Field inputs = j.root().At("inputs");
  const auto named = [&](const char* key, const char* id) {
    const Field f = inputs.At(key);
    f.At(id).Str();
    return f.At("sha256").Text();
  };
  const std::string checkpoint = named("checkpoint", "name");
  const std::string implementation = named("implementation", "name");
  const std::string hardware = named("hardware", "descriptor");
  const std::string commit = inputs.At("implementation").At("commit").Text();
  const std::string device = inputs.At("hardware").At("device").Str();
  const std::string target = inputs.At("target").At("batch_invariant").OneOf({"0", "1"});
  std::vector<std::string> tensors;
  for (const Field& t : j.root().At("tensors").Items(1)) {
    tensors.push_back(t.At("name").Str());
    t.At("dtype").Str();
    t.At("sha256").Hash();
    t.At("origin").OneOf({"checkpoint", "buffer", "tied"});
  }
  const Field trace = j.root().At("trace");
  std::vector<std::string> ops = trace.At("ops").Strings(1);
  std::vector<Launch> launches;
  for (const Field& l : trace.At("launches").Items(1)) {
    launches.push_back(ReadLaunch(l));
    l.At("count").Int(1, INT64_MAX);
  }
  const std::vector<std::string> quantized = trace.At("quantized").Strings();
  const std::vector<std::string> choices = trace.At("choices").Strings();
  std::vector<Row> rows;
  const Field inventory = j.root().At("rows");
  for (const Field& r : inventory.Items(1)) rows.push_back(ReadRow(r));
  const Route route = ReadRoute(j.root().At("route"));
  if (!j.WellFormed()) return j.Finish();

  for (const auto& [name, hash] :
       {std::pair<const char*, const std::string&>{"checkpoint", checkpoint},
        {"implementation", implementation},
        {"hardware", hardware}}) {
    j.Require("C0-01", ParseSha256(hash).ok(), reason::kInputMissing,
              fmt::format("{} has `{}` for a SHA-256", name, Printable(hash)));
  }
  j.Require("C0-01", !commit.empty(), reason::kInputMissing,
            "the implementation has a name and no commit");
  j.Require("C0-01", checkpoint == subject.weights, reason::kWeightHashMismatch,
            "the checkpoint is not the one that the subject names");

  CheckOnce(&j, "tensor", tensors, rows, &Row::tensors);
  CheckOnce(&j, "operator", ops, rows, &Row::ops);
  std::set<std::string> ids;
  for (const Row& row : rows) {
    j.Require("C0-07", ids.insert(row.id).second, reason::kDuplicateName,
              fmt::format("two rows are called {}", row.id));
  }
  CheckKernels(&j, launches, rows);
  CheckTerms(&j, rows);
  const auto listed = [&](const std::string& name, std::vector<std::string> Row::*names) {
    return std::any_of(rows.begin(), rows.end(), [&](const Row& row) {
      return std::find((row.*names).begin(), (row.*names).end(), name) != (row.*names).end();
    });
  };
  for (const std::string& q : quantized) {
    j.Require("C0-04", listed(q, &Row::quantized), reason::kQuantizerUndeclared,
              fmt::format("{} is quantised in the trace and in no row", q));
  }
  if (quantized.empty()) j.Pass("C0-04", "the trace has no quantiser");
  for (const std::string& c : choices) {
    j.Require("C0-05", listed(c, &Row::choices), reason::kChoiceUndeclared,
              fmt::format("{} was decided in the trace and is in no row", c));
  }
  j.Require("C0-05", !choices.empty(), reason::kChoiceUndeclared,
            "the trace has no discrete decision at all, and even sampling is one",
            "trace a generation, not a bare forward");
  const auto digest = InventoryDigest(inventory.Any());
  CheckRoute(&j, route, rows, digest);

  std::set<std::string> dtypes, paths;
  for (const Launch& l : launches) {
    dtypes.insert(l.dtypes);
    paths.insert(l.phase);
  }
  j.Cover({.shape = {"inventory"},
           .topology = {route.parallelism.empty() ? "unknown" : route.parallelism},
           .dtype = {dtypes.begin(), dtypes.end()},
           .model = {subject.weights},
           .path = {paths.begin(), paths.end()},
           .contracts = {subject.contracts}});
  j.Note(fmt::format("target: batch invariance {}; device {}", target, device));
  return j.Finish();
}

}  // namespace tare::workflow
