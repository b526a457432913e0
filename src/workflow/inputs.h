#pragma once

// What a run depends on, named on a command line, as digests.

#include <functional>
#include <string>
#include <vector>

#include "base/env.h"
#include "workflow/state.h"

namespace tare::workflow {

// Inputs ("TYPE:PATH"), named dependencies ("TYPE:NAME=SHA256", "artifact:STEP/NAME") and keys of
// task.toml (none: all with meaning; "none": none of them) in the form that a run keeps.
Result<std::vector<Dependency>> ResolveDependencies(Env* env, const State& state,
                                                    const std::vector<std::string>& inputs,
                                                    const std::vector<std::string>& depends,
                                                    const std::vector<std::string>& config_keys);

// SHA-256 of a file; of a folder: of the sorted lines "<sha256>  <relative path>\n" of its plain
// files. A link inside is an error.
Result<std::string> HashPath(Env* env, const std::string& path);

// An input by path. ParseInput leaves the digest empty.
struct Input {
  Dependency dependency;
  std::string path;
};
Result<Input> ParseInput(const std::string& text);
// Those that have another digest now, with it; one that cannot be read any more has the digest of
// `unset`. Calls `between` after each.
std::vector<Dependency> ChangedInputs(Env* env, const std::vector<Input>& inputs,
                                      const std::function<void()>& between);

}  // namespace tare::workflow
