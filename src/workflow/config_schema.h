#pragma once

// Every key that task.toml may hold, as data: type, class, meaning, the steps that need it. The
// template that `tare init` writes, the parser's checks, the recovery of missing values and the
// classes by which a change makes evidence stale all read this one table.

#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/json.h"
#include "base/status.h"

namespace tare::workflow {

enum class ValueType { kString, kInt, kFloat, kBool, kStringList, kIntList };
std::string_view ValueTypeName(ValueType type);

// What a change of the key means (STOP-12, STOP-13, GEN-04). Only kCosmetic leaves evidence alone.
enum class ConfigClass {
  kContract,  // model, precision, parallelism, consistency target: amended only on record
  kWorkload,
  kNumeric,  // decides arithmetic
  kUpdate,   // optimizer, loss, clipping
  kHardware,
  kAuthority,  // requester and reviewers
  kCosmetic,   // names, output paths, log level
};
std::string_view ConfigClassName(ConfigClass c);

struct KeySpec {
  std::string_view key;  // "model.hidden_size"
  ValueType type;
  ConfigClass config_class;
  std::string_view needed_by;  // first step that cannot run without it, empty when none
  std::string_view choices;    // "a|b|c", empty when free
  std::string_view doc;        // one sentence
  std::string_view example;    // as TOML
  // Keys of config.json and of resolved configurations that hold it, "|" between, best first; empty
  // when it cannot be recovered.
  std::string_view sources;
};

std::span<const KeySpec> AllKeys();  // in the order of the template
const KeySpec* FindKey(std::string_view key);
// The known key that looks most like `key`, for error messages.
std::string_view NearestKey(std::string_view key);
// True for a class whose change makes dependent evidence stale.
bool IsSemantic(ConfigClass c);

// The one spelling of a value under its key's type ("8", "\"bf16\"", "100000.0", "[1,2]"), from
// JSON; kInvalidArgument when type, range or choice do not fit.
Result<std::string> CanonicalValue(const KeySpec& spec, const Json& value);

}  // namespace tare::workflow
