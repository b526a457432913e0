#include "rl/picture.h"

#include <algorithm>
#include <cstring>
#include <map>

#include "tensor/dump.h"

namespace tare::rl {
namespace {

struct Place {
  const DumpRecord* record = nullptr;
  Tensor payload;
  int64_t row = 0;
  int32_t token = 0;
};
using Key = std::pair<std::string, int64_t>;  // name, position

// Every row of every value of a dump. Logprob frames, whose rows are target tokens, are left out.
Result<std::map<Key, Place>> Rows(const Dump& dump) {
  std::map<Key, Place> rows;
  for (const DumpRecord& record : dump.records()) {
    if (!record.point.per_row || record.point.role != TapRole::kValue || record.shard < 0) continue;
    if (record.point.op == "logprob" || record.point.name.starts_with("logprob")) continue;
    TARE_ASSIGN_OR_RETURN(const Tensor payload, dump.Payload(record));
    for (const TapRun& run : dump.frames()[static_cast<size_t>(record.frame)].frame.runs) {
      for (size_t i = 0; i < run.tokens.size(); ++i) {
        const int64_t row = run.row + static_cast<int64_t>(i);
        if (payload.rank() < 1 || row >= payload.dim(0)) continue;
        rows[{record.point.name, run.position + static_cast<int64_t>(i)}] = {&record, payload, row,
                                                                             run.tokens[i]};
      }
    }
  }
  return rows;
}

}  // namespace

Result<Picture> DrawPicture(Env* env, const std::string& a_path, const std::string& b_path) {
  TARE_ASSIGN_OR_RETURN(const Dump a, Dump::Open(env, a_path));
  TARE_ASSIGN_OR_RETURN(const Dump b, Dump::Open(env, b_path));
  TARE_ASSIGN_OR_RETURN(const auto rows_a, Rows(a));
  TARE_ASSIGN_OR_RETURN(const auto rows_b, Rows(b));
  int layers = 0;
  int64_t positions = 0;
  for (const auto& [key, place] : rows_a) {
    layers = std::max(layers, place.record->point.layer + 1);
    positions = std::max(positions, key.second + 1);
  }
  Picture p;
  p.rows.push_back("embedding");
  for (int l = 0; l < layers; ++l) p.rows.push_back(fmt::format("layer {}", l));
  p.rows.push_back("head");
  p.tokens.assign(static_cast<size_t>(positions), -1);
  p.compared.assign(p.rows.size(), std::vector<int64_t>(static_cast<size_t>(positions), 0));
  p.differing = p.compared;
  for (const auto& [key, x] : rows_a) {
    const auto found = rows_b.find(key);
    if (found == rows_b.end()) continue;
    const Place& y = found->second;
    const size_t at = static_cast<size_t>(key.second);
    if (x.token != y.token) {
      return InvalidArgument("position {}: token {} against {}; pictures are of one sequence", at,
                             x.token, y.token);
    }
    p.tokens[at] = x.token;
    const int64_t width = x.payload.size_bytes() / std::max<int64_t>(1, x.payload.dim(0));
    const int64_t other = y.payload.size_bytes() / std::max<int64_t>(1, y.payload.dim(0));
    if (width != other || x.payload.dtype() != y.payload.dtype()) {
      return InvalidArgument("{}: rows of {} and {} bytes", key.first, width, other);
    }
    const char* p_a = static_cast<const char*>(x.payload.data()) + x.row * width;
    const char* p_b = static_cast<const char*>(y.payload.data()) + y.row * width;
    const int64_t size = SizeOf(x.payload.dtype());
    // Outside the layers: the embedding comes first, all else after the last layer.
    const int layer = x.record->point.layer;
    const size_t row = layer >= 0                          ? static_cast<size_t>(layer) + 1
                       : x.record->point.op == "embedding" ? 0
                                                           : p.rows.size() - 1;
    for (int64_t i = 0; i < width; i += size) {
      ++p.compared[row][at];
      p.differing[row][at] += std::memcmp(p_a + i, p_b + i, static_cast<size_t>(size)) != 0;
    }
  }
  return p;
}

}  // namespace tare::rl
