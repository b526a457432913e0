#include "tensor/logprobs.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <unordered_set>

#include "base/json.h"
#include "tensor/convert.h"

namespace tare {
namespace {

constexpr std::string_view kSchema = "tare.logprobs/1";

Status ReadTokens(const Json& line, const char* key, std::vector<int32_t>* out) {
  const auto at = line.find(key);
  if (at == line.end() || !at->is_array())
    return DataLoss("'{}' is not an array of token IDs", key);
  out->reserve(at->size());
  for (const Json& t : *at) {
    if (!t.is_number_integer() || t < std::numeric_limits<int32_t>::min() ||
        t > std::numeric_limits<int32_t>::max()) {
      return DataLoss("'{}'[{}] is {}, not a 32-bit token ID", key, out->size(), t.dump());
    }
    out->push_back(t.get<int32_t>());
  }
  return Ok();
}

Status ReadString(const Json& line, const char* key, std::string* out) {
  const auto at = line.find(key);
  if (at == line.end() || !at->is_string()) return DataLoss("'{}' is not a string", key);
  *out = at->get<std::string>();
  return Ok();
}

// Exactly `digits` lower-case hex digits.
bool ParseHex(std::string_view text, size_t digits, uint64_t* word) {
  if (text.size() != digits) return false;
  *word = 0;
  for (const char c : text) {
    const int v = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
    if (v < 0) return false;
    *word = *word << 4 | static_cast<uint64_t>(v);
  }
  return true;
}

Status ReadBits(const Json& bits, LogprobSequence* s) {
  const size_t digits = 2 * static_cast<size_t>(SizeOf(s->dtype));
  for (size_t i = 0; i < bits.size(); ++i) {
    uint64_t word = 0;
    const bool present = !bits[i].is_null();
    if (present &&
        (!bits[i].is_string() || !ParseHex(bits[i].get_ref<const std::string&>(), digits, &word))) {
      return DataLoss("'bits'[{}] is {}, expected {} lower-case hex digits of {} or null", i,
                      Printable(bits[i].dump(-1, ' ', false, Json::error_handler_t::replace)),
                      digits, DTypeName(s->dtype));
    }
    s->words.push_back(word);
    s->present.push_back(present ? 1 : 0);
  }
  return Ok();
}

Status ReadDecimals(const Json& values, LogprobSequence* s) {
  if (s->dtype != DType::kF32) return DataLoss("decimal 'logprobs' are read as f32 only");
  s->decimal = true;
  for (size_t i = 0; i < values.size(); ++i) {
    if (!values[i].is_number() && !values[i].is_null()) {
      return DataLoss("'logprobs'[{}] is neither a number nor null", i);
    }
    const bool present = !values[i].is_null();
    const uint64_t f64 = present ? std::bit_cast<uint64_t>(values[i].get<double>()) : 0;
    s->words.push_back(ConvertFloatBits<DType::kF64, DType::kF32>(f64));
    s->present.push_back(present ? 1 : 0);
  }
  return Ok();
}

}  // namespace

Result<LogprobSequence> ParseLogprobLine(std::string_view text) {
  Result<Json> parsed = ParseJson(text);
  if (!parsed.ok()) return DataLoss("{}", parsed.status().message());
  const Json& line = *parsed;
  if (!line.is_object()) return DataLoss("not an object");
  static constexpr std::string_view kKnown[] = {"schema",   "sequence", "weights", "kind",
                                                "prompt",   "tokens",   "dtype",   "bits",
                                                "logprobs", "mask"};
  for (const auto& [key, value] : line.items()) {
    if (std::find(std::begin(kKnown), std::end(kKnown), key) == std::end(kKnown)) {
      return DataLoss("unknown key '{}'; known are {}", Printable(key), fmt::join(kKnown, ", "));
    }
  }
  const auto schema = line.find("schema");
  if (schema == line.end() || *schema != kSchema) return DataLoss("'schema' is not {}", kSchema);
  LogprobSequence s;
  TARE_RETURN_IF_ERROR(ReadString(line, "sequence", &s.sequence));
  TARE_RETURN_IF_ERROR(ReadString(line, "weights", &s.weights));
  TARE_RETURN_IF_ERROR(ReadString(line, "kind", &s.kind));
  if (s.kind != "raw" && s.kind != "processed") {
    return DataLoss("'kind' is '{}', allowed are raw and processed", Printable(s.kind));
  }
  TARE_RETURN_IF_ERROR(ReadTokens(line, "prompt", &s.prompt));
  TARE_RETURN_IF_ERROR(ReadTokens(line, "tokens", &s.tokens));
  std::string dtype;
  TARE_RETURN_IF_ERROR(ReadString(line, "dtype", &dtype));
  const std::optional<DType> parsed_dtype = ParseDType(dtype);
  if (!parsed_dtype || !IsFloat(*parsed_dtype))
    return DataLoss("'dtype' is '{}', not a float dtype", Printable(dtype));
  s.dtype = *parsed_dtype;
  const auto bits = line.find("bits");
  const auto decimals = line.find("logprobs");
  if ((bits == line.end()) == (decimals == line.end())) {
    return DataLoss(
        "exactly one of 'bits' (hex) and 'logprobs' (decimal, diagnostic-only) is needed");
  }
  const Json& values = bits != line.end() ? *bits : *decimals;
  if (!values.is_array() || values.size() != s.tokens.size()) {
    return DataLoss("'{}' is not an array of {} values, one per token",
                    bits != line.end() ? "bits" : "logprobs", s.tokens.size());
  }
  TARE_RETURN_IF_ERROR(bits != line.end() ? ReadBits(values, &s) : ReadDecimals(values, &s));
  if (const auto mask = line.find("mask"); mask != line.end()) {
    if (!mask->is_array() || mask->size() != s.tokens.size()) {
      return DataLoss("'mask' is not an array of {} values, one per token", s.tokens.size());
    }
    for (const Json& m : *mask) {
      if (m != 0 && m != 1)
        return DataLoss("'mask'[{}] is {}, allowed are 0 and 1", s.mask.size(),
                        Printable(m.dump()));
      s.mask.push_back(m == 1 ? 1 : 0);
    }
  }
  return s;
}

std::string FormatLogprobLine(const LogprobSequence& s) {
  TARE_CHECK(!s.decimal && s.words.size() == s.tokens.size());
  TARE_CHECK(s.present.empty() || s.present.size() == s.tokens.size());
  TARE_CHECK(s.mask.empty() || s.mask.size() == s.tokens.size());
  Json bits = Json::array();
  for (size_t i = 0; i < s.words.size(); ++i) {
    if (!s.present.empty() && !s.present[i]) {
      bits.push_back(nullptr);
    } else {
      bits.push_back(fmt::format("{:0{}x}", s.words[i], 2 * SizeOf(s.dtype)));
    }
  }
  Json line = {{"schema", kSchema},           {"sequence", s.sequence},
               {"weights", s.weights},        {"kind", s.kind},
               {"prompt", s.prompt},          {"tokens", s.tokens},
               {"dtype", DTypeName(s.dtype)}, {"bits", std::move(bits)}};
  if (!s.mask.empty()) line["mask"] = s.mask;
  return line.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

Result<std::vector<LogprobSequence>> ParseLogprobs(std::string_view text) {
  std::vector<LogprobSequence> out;
  std::unordered_set<std::string> names;
  while (!text.empty()) {
    const size_t end = text.find('\n');
    if (end == std::string_view::npos) {
      return DataLoss("line {} has no newline: the file was cut", out.size() + 1);
    }
    Result<LogprobSequence> s = ParseLogprobLine(text.substr(0, end));
    if (!s.ok()) return s.status().Annotate(fmt::format("line {}", out.size() + 1));
    if (!names.insert(s->weights + "\n" + s->sequence).second) {
      return DataLoss("line {}: sequence '{}' at weights '{}' is there twice", out.size() + 1,
                      Printable(s->sequence), Printable(s->weights));
    }
    out.push_back(*std::move(s));
    text.remove_prefix(end + 1);
  }
  return out;
}

Result<std::vector<LogprobSequence>> ReadLogprobs(Env* env, const std::string& path) {
  TARE_ASSIGN_OR_RETURN(const auto file, env->OpenReadable(path));
  Result<std::vector<LogprobSequence>> parsed = ParseLogprobs(file->bytes());
  if (!parsed.ok()) return parsed.status().Annotate(Printable(path));
  return parsed;
}

Status WriteLogprobs(Env* env, const std::string& path,
                     const std::vector<LogprobSequence>& sequences) {
  std::string text;
  for (const LogprobSequence& s : sequences) text += FormatLogprobLine(s);
  return env->WriteFileAtomic(path, text);
}

}  // namespace tare
