#include "workflow/scope.h"

#include <algorithm>
#include <array>

namespace tare::workflow {
namespace {

struct Axis {
  const char* name;
  std::vector<std::string> ScopeBox::*values;
  std::string ScopePoint::*value;
};
constexpr std::array<Axis, 5> kAxes = {{
    {"shape", &ScopeBox::shape, &ScopePoint::shape},
    {"topology", &ScopeBox::topology, &ScopePoint::topology},
    {"dtype", &ScopeBox::dtype, &ScopePoint::dtype},
    {"model", &ScopeBox::model, &ScopePoint::model},
    {"path", &ScopeBox::path, &ScopePoint::path},
}};

Status CheckValue(std::string_view axis, std::string_view value) {
  if (value.empty() || value.size() > 1000 || Printable(value) != value) {
    return InvalidArgument("scope: axis {}: `{}` must be 1 to 1,000 printable bytes", axis,
                           Printable(value));
  }
  return Ok();
}

}  // namespace

Result<Scope> Scope::FromJson(const Json& json) {
  if (!json.is_array()) return InvalidArgument("scope: a list of boxes is needed");
  Scope scope;
  for (const Json& item : json) {
    if (!item.is_object()) return InvalidArgument("scope: a box must be an object");
    ScopeBox box;
    for (const auto& [key, values] : item.items()) {
      std::vector<std::string>* into = key == "contract" ? &box.contracts : nullptr;
      for (const Axis& axis : kAxes) {
        if (key == axis.name) into = &(box.*axis.values);
      }
      if (into == nullptr) {
        return InvalidArgument(
            "scope: unknown axis {}; known are shape, topology, dtype, model, path, contract",
            Printable(key));
      }
      if (!values.is_array()) return InvalidArgument("scope: axis {} must be a list", key);
      for (const Json& value : values) {
        if (!value.is_string()) return InvalidArgument("scope: axis {}: values are strings", key);
        TARE_RETURN_IF_ERROR(CheckValue(key, value.get_ref<const std::string&>()));
        into->push_back(value.get<std::string>());
      }
    }
    for (const Axis& axis : kAxes) {
      if ((box.*axis.values).empty()) {
        return InvalidArgument("scope: a box names no value for axis {}", axis.name);
      }
    }
    scope.Add(std::move(box));
  }
  return scope;
}

Result<Scope> Scope::FromText(std::string_view text) {
  Json box = Json::object();
  while (!text.empty()) {
    const size_t end = std::min(text.find(';'), text.size());
    const std::string_view part = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    const size_t equals = part.find('=');
    if (equals == std::string_view::npos) {
      return InvalidArgument("scope: `{}`: axis=value is needed", Printable(part));
    }
    const std::string key(part.substr(0, equals));
    if (box.contains(key)) return InvalidArgument("scope: axis {} twice", Printable(key));
    Json values = Json::array();
    std::string_view rest = part.substr(equals + 1);
    while (true) {
      const size_t bar = std::min(rest.find('|'), rest.size());
      values.push_back(std::string(rest.substr(0, bar)));
      if (bar == rest.size()) break;
      rest.remove_prefix(bar + 1);
    }
    box[key] = std::move(values);
  }
  return FromJson(Json::array({box}));
}

Json Scope::ToJson() const {
  Json out = Json::array();
  for (const ScopeBox& box : boxes_) {
    Json item = Json::object();
    for (const Axis& axis : kAxes) item[axis.name] = box.*axis.values;
    if (!box.contracts.empty()) item["contract"] = box.contracts;
    out.push_back(std::move(item));
  }
  return out;
}

bool Scope::Covers(const ScopePoint& point) const {
  return std::any_of(boxes_.begin(), boxes_.end(), [&](const ScopeBox& box) {
    return std::all_of(kAxes.begin(), kAxes.end(), [&](const Axis& axis) {
      const auto& values = box.*axis.values;
      return std::find(values.begin(), values.end(), point.*axis.value) != values.end();
    });
  });
}

}  // namespace tare::workflow
