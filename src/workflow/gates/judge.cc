#include "workflow/gates/judge.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/check.h"

namespace tare::workflow {
namespace {

constexpr size_t kMaxStringBytes = 4096;
constexpr size_t kMaxMalformed = 20;  // further ones are counted only: one cause makes many

bool IsHex(std::string_view text) {
  return text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

// "2026-11-29T10:00:00Z", with any fraction of the second. Calendar days are checked to the month.
bool IsTime(std::string_view t) {
  static constexpr std::string_view kForm = "dddd-dd-ddTdd:dd:dd";
  if (t.size() < kForm.size() + 1 || t.back() != 'Z') return false;
  const auto digit = [](char c) { return c >= '0' && c <= '9'; };
  for (size_t i = 0; i < kForm.size(); ++i) {
    if (kForm[i] == 'd' ? !digit(t[i]) : t[i] != kForm[i]) return false;
  }
  const std::string_view fraction = t.substr(kForm.size(), t.size() - kForm.size() - 1);
  if (!fraction.empty() && (fraction.size() < 2 || fraction.size() > 10 || fraction[0] != '.' ||
                            !std::all_of(fraction.begin() + 1, fraction.end(), digit))) {
    return false;
  }
  const auto two = [&](size_t at) { return (t[at] - '0') * 10 + (t[at + 1] - '0'); };
  const int month = two(5), day = two(8);
  static constexpr int kDays[] = {31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31};
  return month >= 1 && month <= 12 && day >= 1 && day <= kDays[month - 1] && two(11) < 24 &&
         two(14) < 60 && two(17) < 61;
}

const Json& NullJson() {
  static const Json null;
  return null;
}

}  // namespace

int Gravity(Verdict verdict) {
  switch (verdict) {
    case Verdict::kPass:
      return 0;
    case Verdict::kDiagnosticOnly:
      return 1;
    case Verdict::kNotCovered:
      return 2;
    case Verdict::kWaitingHuman:
      return 3;
    case Verdict::kInconclusive:
      return 4;
    case Verdict::kRefused:
      return 5;
    case Verdict::kFail:
      return 6;
  }
  return 6;
}

const GateFinding* GateJudgement::Gravest() const {
  const GateFinding* worst = nullptr;
  for (const GateFinding& f : findings) {
    if (worst == nullptr || Gravity(f.verdict) > Gravity(worst->verdict)) worst = &f;
  }
  return worst;
}

Json GateJudgement::ToJson() const {
  Json json = {{"schema", "tare.gate_judgement/1"}, {"gate", gate},
               {"verdict", VerdictName(verdict)},   {"reason", reason},
               {"findings", Json::array()},         {"scope", scope}};
  for (const GateFinding& f : findings) {
    json["findings"].push_back({{"row", f.row},
                                {"verdict", VerdictName(f.verdict)},
                                {"reason", f.reason},
                                {"detail", f.detail},
                                {"next", f.next}});
  }
  return json;
}

// ---- Field

const Json* Field::Need(bool right, std::string_view what) const {
  if (value_ == nullptr) return nullptr;  // noted when it was looked for
  if (!right) {
    Malformed(what);
    return nullptr;
  }
  return value_;
}

void Field::Malformed(std::string_view what) const { judging_->Malformed(path_, what); }

std::optional<Field> Field::MaybeAt(std::string_view key) const {
  if (Need(value_ != nullptr && value_->is_object(), "is not an object") == nullptr) return {};
  judging_->read_members_[value_].emplace(key);
  const auto it = value_->find(key);
  if (it == value_->end()) return {};
  return Field(judging_, &*it, fmt::format("{}.{}", path_, key));
}

Field Field::At(std::string_view key) const {
  std::optional<Field> field = MaybeAt(key);
  if (field) return *field;
  std::string path = fmt::format("{}.{}", path_, key);
  if (value_ != nullptr && value_->is_object()) judging_->Malformed(path, "is missing");
  return Field(judging_, nullptr, std::move(path));
}

std::vector<Field> Field::Items(size_t min, size_t max) const {
  std::vector<Field> out;
  if (Need(value_ != nullptr && value_->is_array(), "is not a list") == nullptr) return out;
  judging_->read_lists_.insert(value_);
  if (value_->size() < min || value_->size() > max) {
    Malformed(fmt::format("has {} entries, not {} to {}", value_->size(), min, max));
    judging_->MarkAll(*value_);
    return out;
  }
  out.reserve(value_->size());
  for (size_t i = 0; i < value_->size(); ++i) {
    out.push_back(Field(judging_, &(*value_)[i], fmt::format("{}[{}]", path_, i)));
  }
  return out;
}

std::vector<std::pair<std::string, Field>> Field::Members(size_t min) const {
  std::vector<std::pair<std::string, Field>> out;
  if (Need(value_ != nullptr && value_->is_object(), "is not an object") == nullptr) return out;
  if (value_->size() < min) Malformed(fmt::format("has {} members, not {}", value_->size(), min));
  std::set<std::string, std::less<>>& read = judging_->read_members_[value_];
  for (const auto& [key, item] : value_->items()) {
    read.insert(key);
    if (key.empty() || key.size() > kMaxStringBytes) Malformed("has a name that is empty or long");
    out.emplace_back(key, Field(judging_, &item, fmt::format("{}[\"{}\"]", path_, Printable(key))));
  }
  return out;
}

bool Field::IsNull() const { return value_ != nullptr && value_->is_null(); }

bool Field::Bool() const {
  const Json* v = Need(value_ != nullptr && value_->is_boolean(), "is not true or false");
  return v != nullptr && v->get<bool>();
}

int64_t Field::Int(int64_t min, int64_t max) const {
  TARE_CHECK(min <= max);
  const bool whole =
      value_ != nullptr && value_->is_number_integer() &&
      !(value_->is_number_unsigned() && value_->get<uint64_t>() > static_cast<uint64_t>(INT64_MAX));
  const Json* v = Need(whole && value_->get<int64_t>() >= min && value_->get<int64_t>() <= max,
                       fmt::format("is not a whole number from {} to {}", min, max));
  return v == nullptr ? min : v->get<int64_t>();
}

double Field::Real(double min, double max) const {
  const bool number = value_ != nullptr && value_->is_number();
  const double x = number ? value_->get<double>() : 0;
  const Json* v = Need(number && std::isfinite(x) && x >= min && x <= max,
                       fmt::format("is not a number from {} to {}", min, max));
  return v == nullptr ? min : x;
}

std::string Field::Text() const {
  const Json* v = Need(value_ != nullptr && value_->is_string() &&
                           value_->get_ref<const std::string&>().size() <= kMaxStringBytes,
                       "is not a text of at most 4096 bytes");
  return v == nullptr ? std::string() : v->get<std::string>();
}

std::string Field::Str() const {
  const Json* v = Need(value_ != nullptr && value_->is_string() &&
                           !value_->get_ref<const std::string&>().empty() &&
                           value_->get_ref<const std::string&>().size() <= kMaxStringBytes,
                       "is not a text of 1 to 4096 bytes");
  return v == nullptr ? std::string() : v->get<std::string>();
}

std::string Field::OneOf(std::initializer_list<std::string_view> values) const {
  std::string text = Text();
  for (std::string_view value : values) {
    if (text == value) return text;
  }
  if (value_ != nullptr && value_->is_string()) {
    Malformed(fmt::format("is `{}`, not one of {}", Printable(text), fmt::join(values, ", ")));
  }
  return std::string(*values.begin());
}

std::string Field::Hex(std::string_view prefix, std::initializer_list<size_t> digits,
                       std::string_view what) const {
  bool right = value_ != nullptr && value_->is_string();
  if (right) {
    std::string_view text = value_->get_ref<const std::string&>();
    right = text.starts_with(prefix);
    if (right) text.remove_prefix(prefix.size());
    right = right && IsHex(text) &&
            std::find(digits.begin(), digits.end(), text.size()) != digits.end();
  }
  const Json* v = Need(right, what);
  return v == nullptr ? std::string() : v->get<std::string>();
}

std::string Field::Hash() const {
  return Hex("", {64}, "is not a SHA-256 (64 lower-case hex digits)");
}

std::string Field::Digest() const {
  return Hex("sha256:", {64}, "is not a digest (sha256: and 64 lower-case hex digits)");
}

std::string Field::Commit() const {
  return Hex("", {40, 64}, "is not a full commit (40 or 64 lower-case hex digits)");
}

uint32_t Field::Bits32() const {
  const std::string text = Hex("0x", {8}, "is not 0x and 8 lower-case hex digits");
  return text.empty() ? 0 : static_cast<uint32_t>(std::stoul(text.substr(2), nullptr, 16));
}

std::string Field::Time() const {
  const Json* v = Need(
      value_ != nullptr && value_->is_string() && IsTime(value_->get_ref<const std::string&>()),
      "is not a UTC time like 2026-11-29T10:00:00Z");
  return v == nullptr ? std::string() : v->get<std::string>();
}

std::vector<std::string> Field::Strings(size_t min) const {
  std::vector<std::string> out;
  for (const Field& item : Items(min)) out.push_back(item.Str());
  return out;
}

std::vector<int64_t> Field::Ints(int64_t min, int64_t max, size_t min_size) const {
  std::vector<int64_t> out;
  for (const Field& item : Items(min_size)) out.push_back(item.Int(min, max));
  return out;
}

std::set<std::string> Field::StringSet(size_t min) const {
  std::set<std::string> out;
  for (const Field& item : Items(min)) {
    if (!out.insert(item.Str()).second) item.Malformed("stands in the list twice");
  }
  return out;
}

const Json& Field::Any() const {
  if (value_ == nullptr) return NullJson();
  judging_->MarkAll(*value_);
  return *value_;
}

Subject ReadSubject(const Field& root) {
  const Field f = root.At("subject");
  return {f.At("model").Str(), f.At("weights").Hash(), f.At("recipe").Hash(),
          f.At("image").Digest(), f.At("contracts").Hash()};
}

// ---- Judging

Judging::Judging(std::string_view gate, const Json& evidence)
    : Judging(gate, evidence, fmt::format("tare.gate.{}/v1", gate)) {}

Judging::Judging(std::string_view name, const Json& evidence, std::string_view schema)
    : gate_(name), evidence_(evidence) {
  const Field at = root().At("schema");
  const std::string got = at.Text();
  if (at.value_ != nullptr && got != schema) {
    at.Malformed(fmt::format("is `{}`, not {}", Printable(got), schema));
  }
}

Field Judging::root() { return Field(this, &evidence_, "evidence"); }

void Judging::Malformed(const std::string& path, std::string_view what) {
  malformed_ = true;
  const auto same = std::count_if(findings_.begin(), findings_.end(), [](const GateFinding& f) {
    return f.reason == reason::kMalformedEvidence;
  });
  if (static_cast<size_t>(same) >= kMaxMalformed) return;
  Find(Verdict::kRefused, gate_, reason::kMalformedEvidence, fmt::format("{}: {}", path, what));
}

void Judging::MarkAll(const Json& value) {
  if (value.is_object()) {
    for (const auto& [key, item] : value.items()) {
      read_members_[&value].insert(key);
      MarkAll(item);
    }
  } else if (value.is_array()) {
    read_lists_.insert(&value);
    for (const Json& item : value) MarkAll(item);
  }
}

void Judging::FindUnread(const Json& value, const std::string& path) {
  if (value.is_object()) {
    const auto read = read_members_.find(&value);
    for (const auto& [key, item] : value.items()) {
      std::string at = fmt::format("{}.{}", path, Printable(key));
      if (read == read_members_.end() || !read->second.contains(key)) {
        Malformed(at, "is a key that this schema does not have");
      } else {
        FindUnread(item, at);
      }
    }
  } else if (value.is_array()) {
    if (!read_lists_.contains(&value)) return Malformed(path, "is a list where none may stand");
    for (size_t i = 0; i < value.size(); ++i) {
      FindUnread(value[i], fmt::format("{}[{}]", path, i));
    }
  }
}

bool Judging::WellFormed() {
  TARE_CHECK(!checked_) << "WellFormed() twice in the judge of " << gate_;
  checked_ = true;
  // A malformed value may have kept its neighbours from being read: those are no second fault.
  if (!malformed_) FindUnread(evidence_, "evidence");
  return !malformed_;
}

bool Judging::Require(std::string_view row, bool holds, std::string_view reason, std::string detail,
                      std::string next) {
  if (holds) {
    Pass(row, {});
    return true;
  }
  const Reason* known = FindReason(reason);
  TARE_CHECK(known != nullptr) << "no reason " << reason;
  Find(known->verdict, row, reason, std::move(detail), std::move(next));
  return false;
}

void Judging::Find(Verdict verdict, std::string_view row, std::string_view reason,
                   std::string detail, std::string next) {
  const Reason* known = FindReason(reason);
  TARE_CHECK(known != nullptr && verdict != Verdict::kPass) << "reason " << reason;
  if (next.empty()) next = known->next;
  findings_.push_back(
      {verdict, std::string(reason), std::string(row), std::move(detail), std::move(next)});
}

void Judging::Pass(std::string_view row, std::string_view detail) {
  auto it = passes_.find(row);
  if (it == passes_.end()) {
    it = passes_.emplace(std::string(row), std::pair<size_t, std::string>{}).first;
    pass_order_.emplace_back(row);
  }
  ++it->second.first;
  if (detail.empty()) return;
  std::string& text = it->second.second;
  if (!text.empty()) text += "; ";
  text += detail;
}

void Judging::NotCovered(std::string_view row, std::string what, std::string next) {
  not_covered_.push_back({{"row", row}, {"what", std::move(what)}, {"next", std::move(next)}});
}

void Judging::Cover(ScopeBox box) { covers_.Add(std::move(box)); }

void Judging::Provisional(std::string_view why) {
  if (!provisional_.empty()) provisional_ += "; ";
  provisional_ += why;
}

void Judging::Note(std::string text) { notes_.push_back(std::move(text)); }

GateJudgement Judging::Finish() {
  TARE_CHECK(checked_) << "the judge of " << gate_ << " did not call WellFormed()";
  GateJudgement out;
  out.gate = gate_;
  const bool faults = !findings_.empty();
  if (!faults && passes_.empty()) {
    Find(Verdict::kInconclusive, gate_, reason::kNothingCompared,
         "no obligation of the gate was looked at");
  } else if (!faults && (covers_.empty() || !Scope::FromJson(covers_.ToJson()).ok())) {
    Find(Verdict::kInconclusive, gate_, reason::kNothingCompared,
         "the evidence names no shape, topology, dtype, model and path that a pass would cover");
  }
  out.findings = std::move(findings_);
  for (const std::string& row : pass_order_) {
    const auto& [count, text] = passes_.find(row)->second;
    // A row that also has a fault is not shown as passed.
    if (std::any_of(out.findings.begin(), out.findings.end(),
                    [&](const GateFinding& f) { return f.row == row; })) {
      continue;
    }
    std::string detail = fmt::format("{} check{}", count, count == 1 ? "" : "s");
    if (!text.empty()) detail += ": " + text;
    out.findings.push_back({Verdict::kPass, "", row, std::move(detail), ""});
  }
  const GateFinding* worst = out.Gravest();
  out.verdict = worst->verdict;
  out.reason = worst->reason;
  const bool could_open = out.verdict == Verdict::kPass || out.verdict == Verdict::kWaitingHuman;
  out.scope = {{"covers", could_open ? covers_.ToJson() : Json::array()},
               {"not_covered", not_covered_}};
  if (!provisional_.empty()) out.scope["provisional"] = provisional_;
  if (!notes_.empty()) out.scope["notes"] = notes_;
  return out;
}

bool GateJudgement::WaitsForPersonAlone() const {
  return verdict == Verdict::kWaitingHuman &&
         std::none_of(findings.begin(), findings.end(),
                      [](const GateFinding& f) { return f.reason == reason::kSignoffVoid; });
}

GateFinding FindingOf(std::string_view row, std::string_view reason, std::string detail) {
  const Reason* known = FindReason(reason);
  TARE_CHECK(known != nullptr) << "no reason " << reason;
  return {known->verdict, std::string(reason), std::string(row), std::move(detail),
          std::string(known->next)};
}

void GateJudgement::Add(std::vector<GateFinding> more) {
  for (GateFinding& f : more) {
    if (Gravity(f.verdict) > Gravity(verdict)) {
      verdict = f.verdict;
      reason = f.reason;
      scope["covers"] = Json::array();
    }
    findings.push_back(std::move(f));
  }
}

GateJudge FindJudge(std::string_view gate) {
  struct Row {
    std::string_view gate;
    GateJudge judge;
  };
  static constexpr Row kRows[] = {
#define TARE_GATE_JUDGE(gate, function) {gate, function},
#include "workflow/gates/judges.inc"
#undef TARE_GATE_JUDGE
  };
  for (const Row& row : kRows) {
    if (row.gate == gate) return row.judge;
  }
  return nullptr;
}

}  // namespace tare::workflow
