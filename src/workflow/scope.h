#pragma once

// Scope: what a pass was shown for. A pass proves its own points and nothing beside them (GEN-31):
// the question outside a recorded scope is answered `not-covered`, never `pass`.
//
// A scope is a list of boxes. A box lists, per axis, values whose whole cross product was run; what
// was not run together stands in separate boxes, so that (batch 1, bf16) and (batch 64, fp8) never
// add up to (batch 64, bf16). There is no wildcard and no range.

#include <string>
#include <vector>

#include "base/json.h"
#include "base/status.h"

namespace tare::workflow {

struct ScopePoint {
  std::string shape;     // as the tool that measured it names it: "batch=64,len=33"
  std::string topology;  // "tp2.pp1", "1 process"
  std::string dtype;     // "bf16"
  std::string model;     // weight hash
  std::string path;      // code path: "decode", "prefill.chunked", ...
};

struct ScopeBox {
  std::vector<std::string> shape, topology, dtype, model, path;
  std::vector<std::string> contracts;  // contract IDs in force; not an axis of the question
};

class Scope {
 public:
  Scope() = default;
  // [{"shape":[..],"topology":[..],"dtype":[..],"model":[..],"path":[..],"contract":[..]}, ...].
  // Every axis of every box needs at least one value; unknown keys are errors. `contract` may lack.
  static Result<Scope> FromJson(const Json& json);
  // "shape=a|b;topology=..;dtype=..;model=..;path=.." with `|` between values: one box.
  static Result<Scope> FromText(std::string_view text);

  Json ToJson() const;
  bool empty() const { return boxes_.empty(); }
  const std::vector<ScopeBox>& boxes() const { return boxes_; }
  void Add(ScopeBox box) { boxes_.push_back(std::move(box)); }
  // True only if one box lists all five values. An empty value in `point` is never covered.
  bool Covers(const ScopePoint& point) const;

 private:
  std::vector<ScopeBox> boxes_;
};

}  // namespace tare::workflow
