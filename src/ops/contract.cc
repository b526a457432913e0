#include "ops/contract.h"

#include <bit>

#include "base/check.h"
#include "ops/units.h"

namespace tare::ops {
namespace {

Json Tensors(const std::vector<ContractTensor>& tensors) {
  Json list = Json::array();
  for (const ContractTensor& t : tensors) {
    list.push_back({{"name", t.name}, {"dtype", t.dtype}, {"shape", t.shape}});
  }
  return list;
}

Json ToleranceJson(const Tolerance& t) {
  return {
      {"relative_log2", t.relative_log2}, {"absolute_log2", t.absolute_log2}, {"reason", t.reason}};
}

}  // namespace

Json Contract::ToJson() const {
  Json json;
  json["name"] = op;
  json["variant"] = variant;
  json["version"] = version;
  json["profile"] = profile;
  json["formula"] = formula;
  json["backward"] = backward;
  const auto number = [&](const char* name, int64_t value) {
    if (value != 0) json[name] = value;
  };
  number("segments", segments);
  number("batch_segments", batch_segments);
  number("lanes", lanes);
  number("token_lanes", token_lanes);
  number("unit_rows", unit_rows);
  number("leaves", leaves);
  number("block", block);
  number("kv_tile", kv_tile);
  number("kv_split", kv_split);
  Json values = Json::object();
  for (const auto& [name, value] : constants) values[name] = value;
  json["constants"] = values;
  json["inputs"] = Tensors(inputs);
  json["outputs"] = Tensors(outputs);
  json["rounding_points"] = rounding_points;
  json["saved_for_backward"] = saved_for_backward;
  json["errors"] = errors;
  json["invariant_over"] = invariant_over;
  json["forward_tolerance"] = ToleranceJson(forward_tolerance);
  json["gradient_tolerance"] = ToleranceJson(gradient_tolerance);
  return json;
}

std::string Contract::Canonical() const {
  Result<std::string> text = CanonicalJson(ToJson());
  TARE_CHECK(text.ok()) << text.status().ToString();
  return *std::move(text);
}

Sha256Digest Contract::Id() const { return Sha256Of(Canonical()); }

std::string HexWord(float value) {
  return fmt::format("f32:0x{:08x}", std::bit_cast<uint32_t>(value));
}
std::string HexWord(double value) {
  return fmt::format("f64:0x{:016x}", std::bit_cast<uint64_t>(value));
}

int64_t OpKey::dim(std::string_view name) const {
  for (const auto& [key, value] : dims) {
    if (key == name) return value;
  }
  TARE_CHECK(false) << "no dimension " << std::string(name) << " in " << ToString();
  return 0;
}

std::string OpKey::ToString() const {
  std::string text = fmt::format("profile={} dtype={} out={}", ProfileName(profile),
                                 DTypeName(dtype), DTypeName(out_dtype));
  if (!variant.empty()) text += fmt::format(" variant={}", variant);
  for (const auto& [name, value] : dims) text += fmt::format(" {}={}", name, value);
  return text;
}

std::vector<std::string> RowInvariance() {
  return {"batch", "cache", "chunk", "device", "position", "repeat", "simd", "threads"};
}

Status CheckUnits(std::span<const TokenUnit> units, int64_t rows) {
  int64_t end = 0;
  for (size_t i = 0; i < units.size(); ++i) {
    const TokenUnit& u = units[i];
    if (u.rows < 1 || u.rows > kUnitRows) {
      return InvalidArgument("unit {}: {} rows; a unit has 1 to {}", i, u.rows, kUnitRows);
    }
    if (u.begin < end || u.begin > rows - u.rows) {
      return InvalidArgument("unit {}: rows [{}, {}) must lie at or after {} and within {} rows", i,
                             u.begin, u.begin + u.rows, end, rows);
    }
    end = u.begin + u.rows;
  }
  return Ok();
}

}  // namespace tare::ops
