#pragma once

// Changes to a JSON document at a pointer, for tests that break one place of an honest one.

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>

#include "base/json.h"

namespace tare::workflow {

inline Json& At(Json& doc, const std::string& pointer) { return doc[Json::json_pointer(pointer)]; }

inline Json With(Json doc, const std::string& pointer, Json value) {
  At(doc, pointer) = std::move(value);
  return doc;
}
inline Json Without(Json doc, const std::string& pointer) {
  const Json::json_pointer at(pointer);
  Json& parent = doc[at.parent_pointer()];
  if (parent.is_array()) {
    parent.erase(std::stoul(at.back()));
  } else {
    EXPECT_EQ(parent.erase(at.back()), 1u) << pointer;
  }
  return doc;
}

inline std::function<void(Json&)> Set(const std::string& pointer, Json value) {
  return [pointer, value](Json& d) { At(d, pointer) = value; };
}
inline std::function<void(Json&)> Erase(const std::string& pointer) {
  return [pointer](Json& d) { d = Without(std::move(d), pointer); };
}

}  // namespace tare::workflow
