#include "workflow/inputs.h"

#include <set>

#include "base/sha256.h"
#include "workflow/layout.h"
#include "workflow/verify.h"

namespace tare::workflow {
namespace {

Result<Dependency> ParseDepends(const State& state, const std::string& text) {
  const size_t colon = text.find(':');
  const auto type = ParseDependencyType(text.substr(0, colon));
  if (colon == std::string::npos || !type) {
    return InvalidArgument("--depends {}: TYPE:NAME=SHA256 or artifact:STEP/NAME is needed",
                           Printable(text));
  }
  std::string name = text.substr(colon + 1);
  const size_t equals = name.rfind('=');
  if (*type == DependencyType::kArtifact && equals == std::string::npos) {
    // The latest artifact of that name.
    for (auto a = state.artifacts.rbegin(); a != state.artifacts.rend(); ++a) {
      auto path = ParseArtifactPath(a->path);
      if (path.ok() && LogicalName(*path) == name) return Dependency{*type, name, a->sha256};
    }
    return Error(Code::kNotFound, "--depends {}: no artifact of that name is recorded",
                 Printable(text));
  }
  if (equals == std::string::npos) {
    return InvalidArgument("--depends {}: =SHA256 is missing", Printable(text));
  }
  const std::string digest = name.substr(equals + 1);
  TARE_RETURN_IF_ERROR(ParseSha256(digest).status().Annotate("--depends " + Printable(text)));
  return Dependency{*type, name.substr(0, equals), digest};
}

}  // namespace

Result<Input> ParseInput(const std::string& text) {
  const size_t colon = text.find(':');
  const auto type = ParseDependencyType(text.substr(0, colon));
  if (colon == std::string::npos || !type || *type == DependencyType::kConfig ||
      *type == DependencyType::kArtifact) {
    return InvalidArgument(
        "--input {}: TYPE:PATH or TYPE:NAME=PATH is needed, TYPE one of code, contract, image, "
        "weights, tokens, hardware, tool, threshold",
        Printable(text));
  }
  std::string name = text.substr(colon + 1), path = name;
  const size_t equals = name.find('=');
  if (equals != std::string::npos) {
    path = name.substr(equals + 1);
    name = name.substr(0, equals);
  }
  return Input{{*type, name, ""}, path};
}

std::vector<Dependency> ChangedInputs(Env* env, const std::vector<Input>& inputs,
                                      const std::function<void()>& between) {
  std::vector<Dependency> out;
  for (const Input& input : inputs) {
    const auto digest = HashPath(env, input.path);
    // What cannot be read any more has changed, and a digest of its own says so.
    const std::string now = digest.ok() ? *digest : Hex(Sha256Of("unset"));
    if (now != input.dependency.digest)
      out.push_back({input.dependency.type, input.dependency.name, now});
    between();
  }
  return out;
}

Result<std::vector<Dependency>> ResolveDependencies(Env* env, const State& state,
                                                    const std::vector<std::string>& inputs,
                                                    const std::vector<std::string>& depends,
                                                    const std::vector<std::string>& config_keys) {
  std::vector<Dependency> out;
  for (const std::string& text : inputs) {
    TARE_ASSIGN_OR_RETURN(Input input, ParseInput(text));
    TARE_ASSIGN_OR_RETURN(input.dependency.digest, HashPath(env, input.path));
    out.push_back(std::move(input.dependency));
  }
  for (const std::string& text : depends) {
    TARE_ASSIGN_OR_RETURN(Dependency d, ParseDepends(state, text));
    out.push_back(std::move(d));
  }
  if (state.config() != nullptr) {
    const TaskConfig& config = state.config()->config;
    if (config_keys.empty()) {
      for (Dependency& d : config.SemanticDependencies()) out.push_back(std::move(d));
    }
    for (const std::string& key : config_keys) {
      if (key == "none") continue;
      if (FindKey(key) == nullptr) {
        return InvalidArgument("--config-key {}: unknown; the nearest known one is {}",
                               Printable(key), NearestKey(key));
      }
      out.push_back({DependencyType::kConfig, key, config.KeyDigest(key)});
    }
  }
  std::set<std::string> seen;
  for (const Dependency& d : out) {
    if (!seen.insert(DependencyId(d.type, d.name)).second) {
      return InvalidArgument("dependency {} is given twice", DependencyId(d.type, d.name));
    }
  }
  return out;
}

Result<std::string> HashPath(Env* env, const std::string& path) {
  TARE_ASSIGN_OR_RETURN(const FileInfo info, env->Stat(path));
  if (info.kind == FileInfo::Kind::kFile) {
    TARE_ASSIGN_OR_RETURN(const auto file, env->OpenReadable(path));
    return Hex(Sha256Of(file->bytes()));
  }
  if (info.kind != FileInfo::Kind::kDirectory) {
    return InvalidArgument("{}: a plain file or a folder is needed", Printable(path));
  }
  TARE_ASSIGN_OR_RETURN(const auto tree, ListTree(env, path));
  std::string lines;
  for (const TreeEntry& e : tree) {
    if (e.info.kind != FileInfo::Kind::kFile) {
      return InvalidArgument("{}: a link or device inside a folder has no digest",
                             Printable(e.path));
    }
    TARE_ASSIGN_OR_RETURN(const auto file, env->OpenReadable(JoinPath(path, e.path)));
    lines += Hex(Sha256Of(file->bytes())) + "  " + e.path + "\n";
  }
  return Hex(Sha256Of(lines));
}

}  // namespace tare::workflow
