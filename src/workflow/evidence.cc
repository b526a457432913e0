#include "workflow/evidence.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "base/sha256.h"

namespace tare::workflow {
namespace {

constexpr std::array<EvidenceKind, 10> kKinds = {
    EvidenceKind::kE1, EvidenceKind::kE2, EvidenceKind::kE3, EvidenceKind::kE4, EvidenceKind::kE5,
    EvidenceKind::kE6, EvidenceKind::kE7, EvidenceKind::kE8, EvidenceKind::kE9, EvidenceKind::kE10};
constexpr std::array<std::string_view, 10> kKindNames = {"E1", "E2", "E3", "E4", "E5",
                                                         "E6", "E7", "E8", "E9", "E10"};
constexpr std::array<std::string_view, 10> kKindTexts = {
    "source or config reading",
    "host arithmetic",
    "single operator",
    "frozen or offline replay",
    "inference batch invariance, prefill against decode",
    "train-inference dual path",
    "gradient conformance",
    "real update loop",
    "quality evaluation",
    "performance"};
constexpr std::array<std::string_view, 6> kRoleNames = {"config",     "identity", "raw",
                                                        "conclusion", "material", "review"};
constexpr std::array<std::string_view, 10> kDependencyNames = {
    "code",   "contract", "config", "image",     "weights",
    "tokens", "hardware", "tool",   "threshold", "artifact"};

template <size_t N>
std::optional<size_t> IndexOf(const std::array<std::string_view, N>& names, std::string_view name) {
  const auto at = std::find(names.begin(), names.end(), name);
  if (at == names.end()) return std::nullopt;
  return static_cast<size_t>(at - names.begin());
}

bool OneByteThroughout(std::string_view bytes) {
  return bytes.empty() || bytes.find_first_not_of(bytes[0]) == std::string_view::npos;
}

std::optional<std::string> EmptySafetensors(std::string_view bytes) {
  uint64_t header_bytes = 0;
  if (bytes.size() < 8) return "is shorter than a safetensors header";
  std::memcpy(&header_bytes, bytes.data(), 8);
  if (header_bytes > bytes.size() - 8) return "ends inside its safetensors header";
  const std::string_view data = bytes.substr(8 + header_bytes);
  auto header = ParseJson(bytes.substr(8, header_bytes));
  if (!header.ok() || !header->is_object()) return "has a malformed safetensors header";
  if (data.empty()) return "holds a header and no data";
  if (data.find_first_not_of('\0') == std::string_view::npos) {
    return "holds only zeros: a buffer that nothing was written to";
  }
  for (const auto& [name, tensor] : header->items()) {
    if (!name.ends_with("mask") || !tensor.is_object() || !tensor.contains("data_offsets"))
      continue;
    const Json& offsets = tensor.at("data_offsets");
    if (!offsets.is_array() || offsets.size() != 2 || !offsets[0].is_number_unsigned() ||
        !offsets[1].is_number_unsigned()) {
      return "has malformed data_offsets";
    }
    const uint64_t begin = offsets[0].get<uint64_t>();
    const uint64_t end = offsets[1].get<uint64_t>();
    if (begin > end || end > data.size()) return "has data_offsets outside of the file";
    if (end > begin &&
        data.substr(begin, end - begin).find_first_not_of('\0') == std::string_view::npos) {
      return "has a mask that excludes every position";
    }
  }
  return std::nullopt;
}

}  // namespace

std::span<const EvidenceKind> AllEvidenceKinds() { return kKinds; }
std::string_view EvidenceKindName(EvidenceKind kind) {
  return kKindNames[static_cast<size_t>(kind) - 1];
}
std::string_view EvidenceKindText(EvidenceKind kind) {
  return kKindTexts[static_cast<size_t>(kind) - 1];
}
std::optional<EvidenceKind> ParseEvidenceKind(std::string_view name) {
  const auto index = IndexOf(kKindNames, name);
  if (!index) return std::nullopt;
  return kKinds[*index];
}
bool NeedsNormalExit(EvidenceKind kind) {
  return kind == EvidenceKind::kE8 || kind == EvidenceKind::kE10;
}

std::string_view RoleName(Role role) { return kRoleNames[static_cast<size_t>(role)]; }
std::optional<Role> ParseRole(std::string_view name) {
  const auto index = IndexOf(kRoleNames, name);
  if (!index) return std::nullopt;
  return static_cast<Role>(*index);
}

std::string_view DependencyTypeName(DependencyType type) {
  return kDependencyNames[static_cast<size_t>(type)];
}
std::optional<DependencyType> ParseDependencyType(std::string_view name) {
  const auto index = IndexOf(kDependencyNames, name);
  if (!index) return std::nullopt;
  return static_cast<DependencyType>(*index);
}

std::string DependencyId(DependencyType type, std::string_view name) {
  return fmt::format("{}:{}", DependencyTypeName(type), name);
}

Json DependenciesToJson(const std::vector<Dependency>& dependencies) {
  Json out = Json::array();
  for (const Dependency& d : dependencies) {
    out.push_back({{"type", DependencyTypeName(d.type)}, {"name", d.name}, {"sha256", d.digest}});
  }
  return out;
}

Result<std::vector<Dependency>> DependenciesFromJson(const Json& json) {
  if (!json.is_array()) return InvalidArgument("dependencies: a list is needed");
  std::vector<Dependency> out;
  for (const Json& item : json) {
    if (!item.is_object() || item.size() != 3 || !item.contains("type") || !item.contains("name") ||
        !item.contains("sha256") || !item.at("type").is_string() || !item.at("name").is_string() ||
        !item.at("sha256").is_string()) {
      return InvalidArgument("dependency: strings `type`, `name` and `sha256` are needed");
    }
    const auto type = ParseDependencyType(item.at("type").get_ref<const std::string&>());
    if (!type) {
      return InvalidArgument("dependency type {} is unknown",
                             Printable(item.at("type").get<std::string>()));
    }
    Dependency d{*type, item.at("name").get<std::string>(), item.at("sha256").get<std::string>()};
    if (d.name.empty() || d.name.size() > 1000 || Printable(d.name) != d.name) {
      return InvalidArgument("dependency name `{}` must be 1 to 1,000 printable bytes",
                             Printable(d.name));
    }
    TARE_RETURN_IF_ERROR(ParseSha256(d.digest).status().Annotate("dependency " + d.name));
    out.push_back(std::move(d));
  }
  return out;
}

Result<Conclusion> Conclusion::FromJson(const Json& json) {
  if (!json.is_object()) return InvalidArgument("conclusion: an object is needed");
  Conclusion out;
  bool has_schema = false, has_verdict = false;
  for (const auto& [key, value] : json.items()) {
    if (key == "schema") {
      if (value != "tare-conclusion-1") {
        return InvalidArgument("conclusion: schema must be tare-conclusion-1");
      }
      has_schema = true;
    } else if (key == "verdict") {
      const auto verdict =
          value.is_string() ? ParseVerdict(value.get_ref<const std::string&>()) : std::nullopt;
      if (!verdict) return InvalidArgument("conclusion: verdict is not one of the seven verdicts");
      out.verdict = *verdict;
      has_verdict = true;
    } else if (key == "reason") {
      if (!value.is_string()) return InvalidArgument("conclusion: reason must be a string");
      out.reason = value.get<std::string>();
      if (out.reason.size() > 64 || !std::all_of(out.reason.begin(), out.reason.end(), [](char c) {
            return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '-';
          })) {
        return InvalidArgument("conclusion: reason must be a code of [a-z0-9-]");
      }
    } else if (key == "scope") {
      TARE_ASSIGN_OR_RETURN(out.scope, Scope::FromJson(value));
    } else if (key == "inferences") {
      if (!value.is_array()) return InvalidArgument("conclusion: inferences must be a list");
      for (const Json& item : value) {
        if (!item.is_object() || item.size() != 2 || !item.contains("id") ||
            !item.contains("text") || !item.at("id").is_string() || !item.at("text").is_string()) {
          return InvalidArgument("conclusion: an inference has strings `id` and `text`");
        }
        out.inferences.push_back(
            {item.at("id").get<std::string>(), item.at("text").get<std::string>()});
      }
    } else if (key != "detail") {  // `detail` is free-form, for people and for the gate's reader
      return InvalidArgument("conclusion: unknown key {}", Printable(key));
    }
  }
  if (!has_schema || !has_verdict)
    return InvalidArgument("conclusion: schema or verdict is missing");
  if (out.verdict == Verdict::kPass && out.scope.empty()) {
    return InvalidArgument("conclusion: a pass without scope would be read as universal");
  }
  if (out.verdict == Verdict::kPass && !out.reason.empty()) {
    return InvalidArgument("conclusion: a pass carries no reason code");
  }
  if (out.verdict != Verdict::kPass && out.reason.empty()) {
    return InvalidArgument("conclusion: a verdict other than pass needs a reason code");
  }
  return out;
}

Result<Conclusion> Conclusion::Parse(std::string_view bytes) {
  JsonLimits limits;
  limits.max_bytes = size_t{16} << 20;
  TARE_ASSIGN_OR_RETURN(const Json json, ParseJson(bytes, limits));
  return FromJson(json);
}

Json Conclusion::ToJson() const {
  Json out = {{"schema", "tare-conclusion-1"}, {"verdict", VerdictName(verdict)}};
  if (!reason.empty()) out["reason"] = reason;
  out["scope"] = scope.ToJson();
  if (!inferences.empty()) {
    Json list = Json::array();
    for (const Inference& i : inferences) list.push_back({{"id", i.id}, {"text", i.text}});
    out["inferences"] = std::move(list);
  }
  return out;
}

std::optional<std::string> EmptinessOf(std::string_view name, std::string_view bytes) {
  if (bytes.empty()) return "is empty";
  if (name.ends_with(".safetensors")) return EmptySafetensors(bytes);
  if (bytes.find_first_not_of(" \t\r\n") == std::string_view::npos) return "holds only white space";
  if (bytes.size() > 1 && OneByteThroughout(bytes)) return "holds one byte value throughout";
  if (name.ends_with(".json")) {
    auto json = ParseJson(bytes);
    if (json.ok() &&
        (json->is_null() || ((json->is_object() || json->is_array()) && json->empty()))) {
      return "holds an empty JSON value";
    }
  }
  return std::nullopt;
}

}  // namespace tare::workflow
