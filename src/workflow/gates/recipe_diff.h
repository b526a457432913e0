#pragma once

// Two resolved configurations against each other: what changed and of which class the change is, so
// that a change of workload or of numerical or update semantics is reviewed again and one of a path
// or a log level is not (C9-02, STOP-12, STOP-13).

#include <string>
#include <string_view>
#include <vector>

#include "workflow/gates/evidence_parts.h"

namespace tare::workflow {

// "path" (where files lie, what is logged), "workload", "update" or "numeric". A key that no list
// names is numeric: the class that is always reviewed.
std::string_view RecipeKeyClass(std::string_view key);

struct RecipeDifference {
  std::string key;
  std::string change;  // "added", "removed", "changed", seen from the reference
  std::string key_class;
  std::string reference, ours;  // "" where there is none
  friend bool operator==(const RecipeDifference&, const RecipeDifference&) = default;
};
// By key.
std::vector<RecipeDifference> DiffRecipes(const Recipe& reference, const Recipe& ours);

// True if a confirmation of `confirmed` still holds for `ours`: only keys of class path differ.
bool StillConfirmed(const Recipe& confirmed, const Recipe& ours);

}  // namespace tare::workflow
