#pragma once

// task.toml: parsed, checked in full, merged from user, recipe, recovered values and defaults, and
// written with every key explained. Errors name file, line and key.

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "workflow/config_schema.h"
#include "workflow/evidence.h"
#include "workflow/signature.h"

namespace tare::workflow {

// Someone who may sign off. A [[reviewer]] table of task.toml.
struct Reviewer {
  std::string person;
  std::string key;  // as written
  PublicKey public_key;
  std::vector<std::string> steps;  // "C1", "C9", "task"
  std::string valid_from;          // RFC 3339 UTC, seconds; empty: no bound
  std::string valid_until;
  bool revoked = false;  // voids every signature by this key
};

struct ConfigValue {
  std::string text;    // canonical (CanonicalValue)
  std::string origin;  // "user: task.toml line 12", "recovered: config.json hidden_size", ...
};

struct TaskConfig {
  std::map<std::string, ConfigValue> values;  // by key
  std::vector<Reviewer> reviewers;

  // The canonical text of a key, empty when unset; String gives a string value without quotes.
  std::string_view Text(std::string_view key) const;
  std::string String(std::string_view key) const;
  std::vector<std::string> StringList(std::string_view key) const;
  // SHA-256 of the value's text; of "unset" when it is not there, so that adding a key is a change.
  std::string KeyDigest(std::string_view key) const;
  // SHA-256 over requester and reviewers: what a sign-off of step `task` is about.
  std::string AuthorityDigest() const;
  // A config dependency per semantic key that is set.
  std::vector<Dependency> SemanticDependencies() const;
};

inline constexpr size_t kMaxTaskFileBytes = size_t{1} << 20;

// `name` stands in errors and origins. Every unknown, duplicate or malformed key is an error; all
// are listed in one message.
Result<TaskConfig> ParseTaskConfig(std::string_view toml, std::string_view name,
                                   std::string_view origin_kind = "user");
// A recipe or answers in the same keys; may not hold requester or reviewers.
Result<TaskConfig> ParseRecipe(std::string_view toml, std::string_view name);

// Two layers disagree: both values and origins, and which one holds.
struct ConfigConflict {
  std::string key;
  ConfigValue kept;
  ConfigValue dropped;
};
struct MergedConfig {
  TaskConfig config;
  std::vector<ConfigConflict> conflicts;
};
// Layers by falling precedence: user, recipe, recovered, defaults.
MergedConfig MergeConfigs(const std::vector<const TaskConfig*>& layers);
// Values that may be assumed without asking (log level, output folder, training route).
TaskConfig DefaultConfig();

// The file `tare init` writes: every key with its meaning; unset ones commented out; values with
// their origin.
std::string RenderTaskToml(const TaskConfig& config);

// What the log keeps of a configuration (event `config`), and back.
Json ConfigToJson(const TaskConfig& config);
Result<TaskConfig> ConfigFromJson(const Json& json);

}  // namespace tare::workflow
