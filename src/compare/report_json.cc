// The complete machine form, written in pieces.

#include <fmt/format.h>

#include "base/json.h"
#include "base/reasons.h"
#include "compare/report.h"

namespace tare::compare {
namespace {

std::string Dump(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

Json MismatchJson(DType dtype, const Mismatch& m) {
  Json j = {{"index", m.index}, {"a", WordHex(dtype, m.word_a)}, {"b", WordHex(dtype, m.word_b)}};
  const auto ulp = UlpDistance(dtype, m.word_a, m.word_b);
  j["ulp"] = ulp ? Json(*ulp) : Json(nullptr);
  return j;
}

Json CountsJson(const BitCounts& c, const std::vector<Tier>& tiers) {
  Json j = {{"compared", c.compared},
            {"masked", c.masked},
            {"mismatches", c.mismatches},
            {"sign_of_zero", c.sign_of_zero},
            {"non_finite", c.non_finite},
            {"non_finite_equal", c.non_finite_equal},
            {"finite_compared", c.finite_compared()},
            {"max_ulp", c.max_ulp},
            {"max_abs", c.max_abs},
            {"sum_abs", c.sum_abs}};
  if (!tiers.empty()) {
    Json t = Json::object();
    for (size_t i = 0; i < tiers.size(); ++i) t[tiers[i].name] = {{"outside", c.outside[i]}};
    j["tiers"] = std::move(t);
  }
  return j;
}

Json UnitJson(const Unit& u, const std::vector<Tier>& tiers) {
  Json j = {{"name", u.name}, {"role", TapRoleName(u.role)}, {"verdict", VerdictName(u.verdict)}};
  j["reason"] = u.reason.empty() ? Json(nullptr) : Json(u.reason);
  if (u.on_a) {
    j["dtype_a"] = DTypeName(u.dtype_a);
    j["shape_a"] = u.shape_a;
  }
  if (u.on_b) {
    j["dtype_b"] = DTypeName(u.dtype_b);
    j["shape_b"] = u.shape_b;
  }
  if (!u.on_a) j["missing_on"] = "a";
  if (!u.on_b) j["missing_on"] = "b";
  j["elements"] = u.elements;
  if (u.on_a && u.on_b) {
    j["counts"] = CountsJson(u.counts, tiers);
    j["by_digest"] = u.by_digest;
    if (u.counts.first.index >= 0) j["first_mismatch"] = MismatchJson(u.dtype_a, u.counts.first);
    if (u.counts.first_non_finite.index >= 0) {
      j["first_non_finite"] = MismatchJson(u.dtype_a, u.counts.first_non_finite);
    }
    if (u.counts.max_ulp_index >= 0) j["max_ulp_index"] = u.counts.max_ulp_index;
    if (!u.first_coordinate.empty()) j["first_coordinate"] = u.first_coordinate;
    if (!u.first_at.empty()) j["first_at"] = u.first_at;
    if (u.first_position >= 0) {
      j["first_sequence"] = u.first_sequence;
      j["first_position"] = u.first_position;
    }
  }
  if (u.role == TapRole::kDiscrete) {
    j["discrete"] = {{"set_differs", u.set_differs},
                     {"order_differs", u.order_differs},
                     {"duplicates", u.duplicates}};
  }
  if (u.rows > 0) j["rows"] = u.rows;
  if (u.padding_dropped > 0) j["padding_dropped"] = u.padding_dropped;
  if (u.digest_a) j["sha256_a"] = Hex(*u.digest_a);
  if (u.digest_b) j["sha256_b"] = Hex(*u.digest_b);
  if (!u.diagnosis.empty()) {
    j["diagnosis"] = {{"kind", u.diagnosis}, {"counts", CountsJson(u.diagnosis_counts, tiers)}};
  }
  if (!u.note.empty()) j["note"] = u.note;
  return j;
}

Json PlaceJson(const TokenPlace& t) {
  return {{"side", t.on_a ? "a" : "b"}, {"sequence", t.sequence}, {"position", t.position},
          {"index", t.index},           {"token", t.token},       {"weights", t.weights}};
}

}  // namespace

void WriteJson(const Report& r, const std::function<void(std::string_view)>& out) {
  const Reason* known = r.reason.empty() ? nullptr : FindReason(r.reason);
  Json head = {{"schema", "tare.diff/1"},
               {"kind", r.kind},
               {"a", r.a},
               {"b", r.b},
               {"verdict", VerdictName(r.verdict)}};
  head["reason"] = r.reason.empty() ? Json(nullptr) : Json(r.reason);
  head["why"] = r.why;
  if (known != nullptr) head["next"] = known->next;
  head["scope"] = {{"only", r.scope.only},
                   {"ignore", r.scope.ignore},
                   {"excluded", r.scope.excluded},
                   {"paired_only", r.scope.paired_only},
                   {"mask", r.scope.mask}};
  Json tiers = Json::array();
  for (const Tier& t : r.tiers) {
    Json j = {{"name", t.name}};
    if (t.max_ulp) j["max_ulp"] = *t.max_ulp;
    if (t.abs) j["abs"] = *t.abs;
    if (t.rel) j["rel"] = *t.rel;
    tiers.push_back(std::move(j));
  }
  head["tiers"] = std::move(tiers);
  head["totals"] = CountsJson(r.totals, r.tiers);
  head["tensors_compared"] = r.compared_units;
  head["tensors_differing"] = r.differing_units;
  if (!r.first_failing.empty()) head["first_failing"] = r.first_failing;
  head["cut"] = r.cut;
  head["notes"] = r.notes;
  if (r.tokens_a > 0 || r.tokens_b > 0) {
    head["tokens"] = {{"paired", r.paired_tokens},
                      {"a", r.tokens_a},
                      {"b", r.tokens_b},
                      {"sequences_a", r.sequences_a},
                      {"sequences_b", r.sequences_b},
                      {"same_sequences", r.same_sequences},
                      {"self_inconsistent", r.self_inconsistent}};
  }
  std::string text = Dump(head);
  text.pop_back();
  out(text);
  const auto list = [&](const char* key, const auto& items, const auto& to_json) {
    out(fmt::format(",\n\"{}\":[", key));
    bool first = true;
    for (const auto& item : items) {
      out((first ? "\n" : ",\n") + Dump(to_json(item)));
      first = false;
    }
    out("]");
  };
  list("tensors", r.units, [&](const Unit& u) { return UnitJson(u, r.tiers); });
  if (!r.by_position.empty()) {
    list("by_position", r.by_position, [](const PositionBucket& p) {
      return Json{{"begin", p.begin},           {"end", p.end},         {"compared", p.compared},
                  {"mismatches", p.mismatches}, {"max_abs", p.max_abs}, {"sum_abs", p.sum_abs}};
    });
  }
  list("unpaired", r.unpaired, PlaceJson);
  list("divergences", r.divergences, PlaceJson);
  out("}\n");
}

}  // namespace tare::compare
