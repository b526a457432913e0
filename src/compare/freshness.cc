// Is a captured frame the one that ran? The sentinel, a value that the tokens alone determine,
// says.

#include <fmt/format.h>

#include <cstring>
#include <map>

#include "base/json.h"
#include "compare/dump_diff.h"

namespace tare::compare {
namespace {

// Bytes of one row, or null when the tensor does not reach it.
const char* Row(const Tensor& t, int64_t row, int64_t* bytes) {
  if (t.rank() < 1 || row >= t.dim(0)) return nullptr;
  *bytes = t.size_bytes() / t.dim(0);
  return static_cast<const char*>(t.data()) + row * *bytes;
}

std::string FirstDifference(DType dtype, const char* got, const char* want, int64_t bytes) {
  for (int64_t i = 0; i < bytes / SizeOf(dtype); ++i) {
    const uint64_t x = LoadWord(dtype, got, i), y = LoadWord(dtype, want, i);
    if (x != y)
      return fmt::format("element {} is {}, the tokens give {}", i, WordHex(dtype, x),
                         WordHex(dtype, y));
  }
  return "equal";
}

// Checks one sentinel against rows that `expected` gives for (row, token).
template <typename F>
Status Check(const DumpFrame& frame, const DumpRecord& sentinel, const Tensor& got, F expected,
             std::vector<StaleFrame>* stale) {
  for (const TapRun& run : frame.frame.runs) {
    for (size_t i = 0; i < run.tokens.size(); ++i) {
      const int64_t row = run.row + static_cast<int64_t>(i);
      int64_t bytes = 0, want_bytes = 0;
      const char* have = Row(got, row, &bytes);
      const char* want = expected(row, run.tokens[i], &want_bytes);
      std::string detail;
      if (have == nullptr) {
        detail = fmt::format("row {} is missing", row);
      } else if (want == nullptr) {
        detail = fmt::format("token {} has no expected row", run.tokens[i]);
      } else if (bytes != want_bytes) {
        detail = fmt::format("rows hold {} bytes, expected are {}", bytes, want_bytes);
      } else if (std::memcmp(have, want, static_cast<size_t>(bytes)) != 0) {
        detail = FirstDifference(sentinel.dtype, have, want, bytes);
      } else {
        continue;
      }
      stale->push_back({sentinel.frame, sentinel.point.name,
                        fmt::format("sequence {} position {}: {}", Printable(run.sequence),
                                    run.position + static_cast<int64_t>(i), detail)});
      return Ok();
    }
  }
  return Ok();
}

}  // namespace

Result<std::vector<StaleFrame>> FindStaleFrames(const Dump& dump, const Tensor* embedding,
                                                int64_t* with_sentinel) {
  std::vector<StaleFrame> stale;
  if (with_sentinel != nullptr) *with_sentinel = 0;
  const std::vector<DumpRecord>& records = dump.records();
  std::map<std::pair<int64_t, std::string>, const DumpRecord*> expectations;
  for (const DumpRecord& r : records) {
    if (r.point.role == TapRole::kExpected) expectations[{r.frame, r.point.name}] = &r;
  }
  for (const DumpRecord& s : records) {
    if (s.point.role != TapRole::kSentinel || !s.point.per_row) continue;
    const DumpFrame& frame = dump.frames()[static_cast<size_t>(s.frame)];
    const DumpRecord* expected = nullptr;
    if (embedding == nullptr) {
      const auto at = expectations.find({s.frame, s.point.name});
      if (at != expectations.end()) expected = at->second;
    }
    if (expected == nullptr && embedding == nullptr) continue;
    if (with_sentinel != nullptr) ++*with_sentinel;
    const DType want_dtype = embedding != nullptr ? embedding->dtype() : expected->dtype;
    if (want_dtype != s.dtype) {
      stale.push_back({s.frame, s.point.name,
                       fmt::format("dtype {} where the tokens give {}", DTypeName(s.dtype),
                                   DTypeName(want_dtype))});
      continue;
    }
    if (embedding == nullptr && expected->digest == s.digest) continue;
    if (s.shard < 0 || (expected != nullptr && expected->shard < 0)) {
      if (embedding != nullptr) {
        stale.push_back(
            {s.frame, s.point.name, "its payload was not kept, so it cannot be checked"});
      } else {
        stale.push_back({s.frame, s.point.name, "digest differs from the expected one"});
      }
      continue;
    }
    TARE_ASSIGN_OR_RETURN(const Tensor got, dump.Payload(s));
    if (embedding != nullptr) {
      TARE_RETURN_IF_ERROR(Check(
          frame, s, got,
          [&](int64_t, int32_t token, int64_t* bytes) {
            return token < 0 ? nullptr : Row(*embedding, token, bytes);
          },
          &stale));
    } else {
      TARE_ASSIGN_OR_RETURN(const Tensor want, dump.Payload(*expected));
      TARE_RETURN_IF_ERROR(Check(
          frame, s, got,
          [&](int64_t row, int32_t, int64_t* bytes) { return Row(want, row, bytes); }, &stale));
    }
  }
  return stale;
}

}  // namespace tare::compare
