#pragma once

// Recovery of missing configuration from files that exist (GEN-09, GEN-10): a checkpoint's
// config.json and headers, and resolved configurations of other systems. Every value found names
// the file and key it came from. What cannot be found and matters becomes exactly one question and
// blocks the step that needs it; what does not matter is not asked.

#include <string>
#include <string_view>
#include <vector>

#include "base/env.h"
#include "workflow/task_config.h"

namespace tare::workflow {

struct Recovery {
  TaskConfig config;               // values found
  std::vector<std::string> notes;  // sources read; keys that one source disagrees with itself on
  // Values of later sources that differ from the one found first, with their origins.
  std::vector<std::pair<std::string, ConfigValue>> dropped;
};

// `model_path`: a Hugging Face folder (config.json, *.safetensors) or one .safetensors file, or
// empty. `config_files`: JSON, or TOML by extension. Nested keys are found by their last part; two
// different values for one key recover nothing and are noted.
Result<Recovery> RecoverConfig(Env* env, const std::string& model_path,
                               const std::vector<std::string>& config_files);

struct Question {
  std::string key;
  std::string text;    // for a person: what is asked, where it was looked for, what it blocks
  std::string blocks;  // step
};
// One per key that is unset, needed and relevant to this task.
std::vector<Question> OpenQuestions(const TaskConfig& config);

}  // namespace tare::workflow
