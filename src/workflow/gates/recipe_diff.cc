#include "workflow/gates/recipe_diff.h"

#include <algorithm>
#include <set>

namespace tare::workflow {
namespace {

// The last dotted part of a key decides, whole words between underscores.
const std::set<std::string_view> kPath = {"path", "dir",     "directory", "file",
                                          "log",  "logger",  "level",     "output",
                                          "out",  "project", "experiment"};
const std::set<std::string_view> kWorkload = {
    "task", "data",      "dataset", "prompts", "prompt", "group",       "samples",
    "n",    "batch",     "length",  "tokens",  "max",    "concurrency", "temperature",
    "top",  "questions", "epochs",  "seed",    "same"};
const std::set<std::string_view> kUpdate = {
    "lr",     "loss",  "clip",     "optimizer", "betas", "beta",    "eps",    "decay",
    "warmup", "steps", "schedule", "advantage", "kl",    "entropy", "horizon"};

}  // namespace

std::string_view RecipeKeyClass(std::string_view key) {
  const size_t dot = key.rfind('.');
  if (dot != std::string_view::npos) key.remove_prefix(dot + 1);
  bool path = false, workload = false, update = false, other = false;
  while (!key.empty()) {
    const size_t end = std::min(key.find('_'), key.size());
    const std::string_view word = key.substr(0, end);
    path = path || kPath.contains(word);
    workload = workload || kWorkload.contains(word);
    update = update || kUpdate.contains(word);
    other = other || word == "dtype" || word == "precision" || word == "profile";
    key.remove_prefix(std::min(end + 1, key.size()));
  }
  // A key that names a file of data is workload: what is in doubt is reviewed.
  if (other) return "numeric";
  if (update) return "update";
  if (workload) return "workload";
  return path ? "path" : "numeric";
}

std::vector<RecipeDifference> DiffRecipes(const Recipe& reference, const Recipe& ours) {
  std::vector<RecipeDifference> out;
  std::set<std::string> keys;
  for (const auto& [key, value] : reference) keys.insert(key);
  for (const auto& [key, value] : ours) keys.insert(key);
  for (const std::string& key : keys) {
    const auto a = reference.find(key), b = ours.find(key);
    const std::string key_class(RecipeKeyClass(key));
    if (a == reference.end()) {
      out.push_back({key, "added", key_class, "", b->second});
    } else if (b == ours.end()) {
      out.push_back({key, "removed", key_class, a->second, ""});
    } else if (a->second != b->second) {
      out.push_back({key, "changed", key_class, a->second, b->second});
    }
  }
  return out;
}

bool StillConfirmed(const Recipe& confirmed, const Recipe& ours) {
  for (const RecipeDifference& d : DiffRecipes(confirmed, ours)) {
    if (d.key_class != "path") return false;
  }
  return true;
}

}  // namespace tare::workflow
