#include "workflow/task_config.h"

#include <toml++/toml.h>

#include <algorithm>
#include <charconv>
#include <cmath>

#include "base/sha256.h"
#include "workflow/layout.h"

namespace tare::workflow {
namespace {

// A document in ASCII for the parser, and back. toml++ 3.3 asks of characters beyond ASCII whether
// they are blanks by a function that is undefined for most of them (U+00A1 to U+0499, for one).
// Each byte of them becomes a mark and two digits. The mark begins with a character that TOML knows
// in strings and comments alone, as it does these, and holds the text's own digest, so that no text
// can hold it, nor spell it in escapes.
class Ascii {
 public:
  explicit Ascii(std::string_view text) {
    constexpr std::string_view kOrder = "\xef\xbb\xbf";  // a byte order mark: the parser skips it
    size_t i = text.starts_with(kOrder) ? kOrder.size() : 0;
    text_ = text.substr(0, i);
    for (; i < text.size(); ++i) {
      const auto byte = static_cast<uint8_t>(text[i]);
      if (byte < 0x80) {
        text_ += text[i];
        continue;
      }
      if (mark_.empty()) mark_ = "@" + Hex(Sha256Of(text)).substr(0, 24);
      text_ += fmt::format("{}{:02x}", mark_, byte);
    }
  }

  const std::string& text() const { return text_; }

  // Of a part that the parser gave back, or of its message.
  std::string Plain(std::string_view part) const {
    std::string out;
    while (!mark_.empty()) {
      const size_t at = part.find(mark_);
      if (at == std::string_view::npos || at + mark_.size() + 2 > part.size()) break;
      out += part.substr(0, at);
      unsigned byte = 0;
      const char* digits = part.data() + at + mark_.size();
      std::from_chars(digits, digits + 2, byte, 16);
      out += static_cast<char>(byte);
      part.remove_prefix(at + mark_.size() + 2);
    }
    return out += part;
  }

  // In characters of the document, from 1, as the parser counts them in its own.
  size_t Column(size_t line, size_t column) const {
    size_t begin = 0;
    for (; line > 1 && begin < text_.size(); --line) {
      const size_t end = text_.find('\n', begin);
      if (end == std::string::npos) return column;
      begin = end + 1;
    }
    if (column == 0 || column - 1 > text_.size() - begin) return column;
    const std::string before = Plain(std::string_view(text_).substr(begin, column - 1));
    return 1 + std::count_if(before.begin(), before.end(),
                             [](char c) { return (static_cast<uint8_t>(c) & 0xc0) != 0x80; });
  }

 private:
  std::string text_, mark_;
};

// TOML as JSON, so that both go through one check. Dates are not used by any key.
Result<Json> ToJson(const toml::node& node, int depth, const Ascii& ascii) {
  if (depth > 8) return InvalidArgument("nested too deeply");
  if (const auto* v = node.as_string()) return Json(ascii.Plain(v->get()));
  if (const auto* v = node.as_integer()) return Json(v->get());
  if (const auto* v = node.as_boolean()) return Json(v->get());
  if (const auto* v = node.as_floating_point()) {
    if (!std::isfinite(v->get())) return InvalidArgument("a finite number is needed");
    return Json(v->get());
  }
  if (const auto* list = node.as_array()) {
    Json out = Json::array();
    for (const toml::node& item : *list) {
      TARE_ASSIGN_OR_RETURN(Json value, ToJson(item, depth + 1, ascii));
      out.push_back(std::move(value));
    }
    return out;
  }
  return InvalidArgument("a string, number, boolean or list is needed");
}

bool IsSecondsTime(std::string_view t) {
  constexpr std::string_view kShape = "dddd-dd-ddTdd:dd:ddZ";
  if (t.size() != kShape.size()) return false;
  for (size_t i = 0; i < t.size(); ++i) {
    if (kShape[i] == 'd' ? (t[i] < '0' || t[i] > '9') : t[i] != kShape[i]) return false;
  }
  return true;
}

// A reviewer from JSON; used for the file and for the log.
Result<Reviewer> ParseReviewer(const Json& json) {
  if (!json.is_object()) return InvalidArgument("reviewer: a table is needed");
  Reviewer r;
  for (const auto& [key, value] : json.items()) {
    if (key == "person" || key == "key" || key == "valid_from" || key == "valid_until") {
      if (!value.is_string()) return InvalidArgument("reviewer.{}: a string is needed", key);
      const auto& text = value.get_ref<const std::string&>();
      if (text.empty() || text.size() > 1000 || Printable(text) != text) {
        return InvalidArgument("reviewer.{}: 1 to 1,000 printable bytes are needed", key);
      }
      if (key == "person") r.person = text;
      if (key == "key") r.key = text;
      if (key == "valid_from") r.valid_from = text;
      if (key == "valid_until") r.valid_until = text;
      if (key.starts_with("valid_") && !IsSecondsTime(text)) {
        return InvalidArgument("reviewer.{}: a time like 2027-01-31T00:00:00Z is needed", key);
      }
    } else if (key == "steps") {
      if (!value.is_array()) return InvalidArgument("reviewer.steps: a list is needed");
      for (const Json& step : value) {
        if (!step.is_string() || !IsStep(step.get_ref<const std::string&>())) {
          return InvalidArgument("reviewer.steps: each must be C0 to C10 or task");
        }
        r.steps.push_back(step.get<std::string>());
      }
    } else if (key == "revoked") {
      if (!value.is_boolean()) return InvalidArgument("reviewer.revoked: true or false is needed");
      r.revoked = value.get<bool>();
    } else {
      return InvalidArgument(
          "reviewer.{}: unknown key; known are person, key, steps, valid_from, valid_until, "
          "revoked",
          Printable(key));
    }
  }
  if (r.person.empty() || r.key.empty() || r.steps.empty()) {
    return InvalidArgument("reviewer: person, key and steps are needed");
  }
  auto key = ParsePublicKey(r.key);
  if (!key.ok()) return key.status().Annotate("reviewer " + r.person);
  r.public_key = *key;
  return r;
}

Json ReviewerToJson(const Reviewer& r) {
  Json out = {{"person", r.person}, {"key", r.key}, {"steps", r.steps}, {"revoked", r.revoked}};
  if (!r.valid_from.empty()) out["valid_from"] = r.valid_from;
  if (!r.valid_until.empty()) out["valid_until"] = r.valid_until;
  return out;
}

class Collector {
 public:
  Collector(std::string_view name, std::string_view kind, const Ascii& ascii)
      : name_(name), kind_(kind), ascii_(ascii) {}

  void Table(const toml::table& table, const std::string& prefix, int depth) {
    if (depth > 8) return Fail(table, prefix, "nested too deeply");
    for (const auto& [k, node] : table) {
      const std::string key =
          prefix.empty() ? ascii_.Plain(k.str()) : prefix + "." + ascii_.Plain(k.str());
      if (prefix.empty() && key == "schema") {
        const auto* text = node.as_string();
        if (text == nullptr || text->get() != "tare-task-1") {
          Fail(node, key, "must be \"tare-task-1\"");
        }
        has_schema_ = true;
        continue;
      }
      if (prefix.empty() && key == "reviewer") {
        Reviewers(node);
        continue;
      }
      const KeySpec* spec = FindKey(key);
      if (spec != nullptr) {
        auto json = ToJson(node, 0, ascii_);
        auto text = json.ok() ? CanonicalValue(*spec, *json) : Result<std::string>(json.status());
        if (!text.ok()) {
          Fail(node, json.ok() ? "" : key, text.status().message());
        } else {
          config_.values[key] = {*text, fmt::format("{}: {} line {}", kind_, name_, Line(node))};
        }
      } else if (node.is_table()) {
        Table(*node.as_table(), key, depth + 1);
      } else {
        Fail(node, key, fmt::format("unknown key; the nearest known one is {}", NearestKey(key)));
      }
    }
  }

  Result<TaskConfig> Finish(bool needs_schema) {
    if (needs_schema && !has_schema_)
      errors_.push_back("line 1: schema = \"tare-task-1\" is missing");
    for (const std::string& text : config_.StringList("requester.keys")) {
      auto key = ParsePublicKey(text);
      if (!key.ok()) errors_.push_back("requester.keys: " + key.status().message());
    }
    if (errors_.empty()) return std::move(config_);
    std::string all;
    for (const std::string& e : errors_) all += (all.empty() ? "" : "; ") + e;
    return InvalidArgument("{}: {}", name_, all);
  }

 private:
  static uint32_t Line(const toml::node& node) { return node.source().begin.line; }

  void Fail(const toml::node& node, std::string_view key, std::string_view what) {
    if (errors_.size() == 20) errors_.push_back("and more");
    if (errors_.size() > 20) return;
    errors_.push_back(fmt::format("line {}: {}{}{}", Line(node), Printable(key.substr(0, 100)),
                                  key.empty() ? "" : ": ", what));
  }

  void Reviewers(const toml::node& node) {
    const auto* list = node.as_array();
    if (list == nullptr) return Fail(node, "reviewer", "[[reviewer]] tables are needed");
    for (const toml::node& item : *list) {
      const auto* table = item.as_table();
      if (table == nullptr) {
        Fail(item, "reviewer", "a table is needed");
        continue;
      }
      Json json = Json::object();
      bool fits = true;
      for (const auto& [k, value] : *table) {
        auto converted = ToJson(value, 0, ascii_);
        if (!converted.ok()) {
          Fail(value, fmt::format("reviewer.{}", ascii_.Plain(k.str())),
               converted.status().message());
          fits = false;
        } else {
          json[ascii_.Plain(k.str())] = *converted;
        }
      }
      if (!fits) continue;
      auto reviewer = ParseReviewer(json);
      if (!reviewer.ok()) {
        Fail(item, "", reviewer.status().message());
        continue;
      }
      for (const Reviewer& other : config_.reviewers) {
        if (other.public_key == reviewer->public_key) {
          Fail(item, "",
               fmt::format("reviewer {}: the key of {} again", reviewer->person, other.person));
        }
      }
      config_.reviewers.push_back(*std::move(reviewer));
    }
  }

  std::string name_;
  std::string kind_;
  const Ascii& ascii_;
  TaskConfig config_;
  std::vector<std::string> errors_;
  bool has_schema_ = false;
};

Result<TaskConfig> Parse(std::string_view text, std::string_view file, std::string_view kind,
                         bool needs_schema) {
  const std::string name = Printable(file);  // it stands in comments of task.toml
  if (text.size() > kMaxTaskFileBytes) {
    return InvalidArgument("{}: {} bytes; at most {} are read", name, text.size(),
                           kMaxTaskFileBytes);
  }
  // The parser reports long lines and control characters badly, and recursion is its weak spot.
  size_t depth = 0;
  for (const char c : text) {
    if (c == '[' || c == '{') ++depth;
    if (c == '\n' || c == ']' || c == '}') depth = 0;
    if (depth > 64) return InvalidArgument("{}: brackets nested too deeply", name);
  }
  if (!IsUtf8(text)) return InvalidArgument("{}: not valid utf-8", name);
  const Ascii ascii(text);
  try {
    const toml::table table = toml::parse(ascii.text());
    Collector collector(name, kind, ascii);
    collector.Table(table, "", 0);
    return collector.Finish(needs_schema);
  } catch (const toml::parse_error& error) {
    const toml::source_position at = error.source().begin;
    return InvalidArgument("{}: line {} column {}: {}", name, at.line,
                           ascii.Column(at.line, at.column),
                           Printable(ascii.Plain(error.description())));
  } catch (const std::exception& error) {
    return InvalidArgument("{}: {}", name, Printable(ascii.Plain(error.what())));
  }
}

}  // namespace

std::string_view TaskConfig::Text(std::string_view key) const {
  const auto at = values.find(std::string(key));
  return at == values.end() ? std::string_view() : std::string_view(at->second.text);
}

std::string TaskConfig::String(std::string_view key) const {
  const std::string_view text = Text(key);
  if (text.empty()) return "";
  auto json = ParseJson(text);
  return json.ok() && json->is_string() ? json->get<std::string>() : std::string(text);
}

std::vector<std::string> TaskConfig::StringList(std::string_view key) const {
  std::vector<std::string> out;
  auto json = ParseJson(Text(key));
  if (!json.ok() || !json->is_array()) return out;
  for (const Json& item : *json) {
    if (item.is_string()) out.push_back(item.get<std::string>());
  }
  return out;
}

std::string TaskConfig::KeyDigest(std::string_view key) const {
  const std::string_view text = Text(key);
  return Hex(Sha256Of(text.empty() ? std::string_view("unset") : text));
}

std::string TaskConfig::AuthorityDigest() const {
  Json json = {{"person", String("requester.person")}, {"keys", StringList("requester.keys")}};
  Json list = Json::array();
  for (const Reviewer& r : reviewers) list.push_back(ReviewerToJson(r));
  json["reviewers"] = std::move(list);
  return Hex(Sha256Of(*CanonicalJson(json)));
}

std::vector<Dependency> TaskConfig::SemanticDependencies() const {
  std::vector<Dependency> out;
  for (const KeySpec& spec : AllKeys()) {
    const std::string key(spec.key);
    if (IsSemantic(spec.config_class) && values.count(key) != 0) {
      out.push_back({DependencyType::kConfig, key, KeyDigest(key)});
    }
  }
  return out;
}

Result<TaskConfig> ParseTaskConfig(std::string_view toml, std::string_view name,
                                   std::string_view origin_kind) {
  return Parse(toml, name, origin_kind, true);
}

Result<TaskConfig> ParseRecipe(std::string_view toml, std::string_view name) {
  TARE_ASSIGN_OR_RETURN(TaskConfig config, Parse(toml, name, "recipe", false));
  if (!config.reviewers.empty() || config.values.count("requester.person") != 0 ||
      config.values.count("requester.keys") != 0) {
    return InvalidArgument("{}: a recipe may not name requester or reviewers", Printable(name));
  }
  return config;
}

MergedConfig MergeConfigs(const std::vector<const TaskConfig*>& layers) {
  MergedConfig out;
  for (const TaskConfig* layer : layers) {
    for (const auto& [key, value] : layer->values) {
      const auto [at, inserted] = out.config.values.emplace(key, value);
      if (!inserted && at->second.text != value.text) {
        out.conflicts.push_back({key, at->second, value});
      }
    }
    if (out.config.reviewers.empty()) out.config.reviewers = layer->reviewers;
  }
  return out;
}

TaskConfig DefaultConfig() {
  TaskConfig config;
  config.values["task.scope"] = {"\"full\"", "default"};
  config.values["log.level"] = {"\"info\"", "default"};
  config.values["paths.output"] = {"\"out\"", "default"};
  config.values["training.route"] = {"\"mlite\"", "default: the usual consistency implementation"};
  return config;
}

std::string RenderTaskToml(const TaskConfig& config) {
  std::string out =
      "# The configuration of one Tare task. Every key that exists is listed; unknown keys are "
      "errors.\n"
      "# After an edit, `tare init --amend \"why\"` records it; until then `tare verify` reports "
      "it.\n"
      "# Class says what a change means: all but `cosmetic` and `authority` make evidence that "
      "depends\n"
      "# on the key stale. Values given here win over recipes, recovered values and defaults.\n"
      "schema = \"tare-task-1\"\n";
  std::string section;
  for (const KeySpec& spec : AllKeys()) {
    const size_t dot = spec.key.find('.');
    const std::string here(spec.key.substr(0, dot));
    if (here != section) {
      section = here;
      out += fmt::format("\n[{}]\n", section);
    }
    out += fmt::format("# {} ({}", spec.doc, ConfigClassName(spec.config_class));
    if (!spec.needed_by.empty()) out += fmt::format(", needed by {}", spec.needed_by);
    if (!spec.choices.empty()) out += fmt::format(", one of {}", spec.choices);
    out += ")\n";
    const std::string_view name = spec.key.substr(dot + 1);
    const auto at = config.values.find(std::string(spec.key));
    if (at == config.values.end()) {
      out += fmt::format("# {} = {}\n", name, spec.example);
    } else {
      out += fmt::format("{} = {}  # {}\n", name, at->second.text, Printable(at->second.origin));
    }
  }
  out +=
      "\n# Who may sign off, one [[reviewer]] table each. The list counts only once one of its "
      "members\n"
      "# has signed it: `tare approve task`. A change of it needs a signature by a member of the "
      "list\n"
      "# before it. Keys are Ed25519: `ssh-ed25519 AAAA...` or `ed25519:<64 hex>`.\n"
      "# [[reviewer]]\n"
      "# person = \"bob\"\n"
      "# key = \"ssh-ed25519 AAAA...\"\n"
      "# steps = [\"task\", \"C1\", \"C9\"]\n"
      "# valid_from = \"2026-01-01T00:00:00Z\"\n"
      "# valid_until = \"2027-01-01T00:00:00Z\"\n"
      "# revoked = false\n";
  for (const Reviewer& r : config.reviewers) {
    const auto quoted = [](const std::string& text) { return Json(text).dump(); };
    out += fmt::format("\n[[reviewer]]\nperson = {}\nkey = {}\nsteps = {}\n", quoted(r.person),
                       quoted(r.key), Json(r.steps).dump());
    if (!r.valid_from.empty()) out += fmt::format("valid_from = {}\n", quoted(r.valid_from));
    if (!r.valid_until.empty()) out += fmt::format("valid_until = {}\n", quoted(r.valid_until));
    out += fmt::format("revoked = {}\n", r.revoked);
  }
  return out;
}

Json ConfigToJson(const TaskConfig& config) {
  Json values = Json::object(), origins = Json::object(), reviewers = Json::array();
  for (const auto& [key, value] : config.values) {
    values[key] = value.text;
    origins[key] = value.origin;
  }
  for (const Reviewer& r : config.reviewers) reviewers.push_back(ReviewerToJson(r));
  return {{"values", std::move(values)},
          {"origins", std::move(origins)},
          {"reviewers", std::move(reviewers)},
          {"authority", config.AuthorityDigest()}};
}

Result<TaskConfig> ConfigFromJson(const Json& json) {
  TaskConfig out;
  for (const char* key : {"values", "origins", "reviewers"}) {
    if (!json.contains(key)) return InvalidArgument("config: `{}` is missing", key);
  }
  if (!json.at("values").is_object() || !json.at("origins").is_object() ||
      !json.at("reviewers").is_array()) {
    return InvalidArgument("config: values, origins or reviewers are malformed");
  }
  for (const auto& [key, text] : json.at("values").items()) {
    const KeySpec* spec = FindKey(key);
    if (spec == nullptr || !text.is_string()) {
      return InvalidArgument("config: key {} is unknown or malformed", Printable(key));
    }
    const Json& origins = json.at("origins");
    if (!origins.contains(key) || !origins.at(key).is_string()) {
      return InvalidArgument("config: key {} has no origin", key);
    }
    out.values[key] = {text.get<std::string>(), origins.at(key).get<std::string>()};
  }
  for (const Json& item : json.at("reviewers")) {
    TARE_ASSIGN_OR_RETURN(Reviewer reviewer, ParseReviewer(item));
    out.reviewers.push_back(std::move(reviewer));
  }
  return out;
}

}  // namespace tare::workflow
