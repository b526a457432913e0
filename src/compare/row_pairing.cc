// Which rows of two dumps hold the same tokens.

#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "compare/dump_diff.h"

namespace tare::compare {
namespace {

struct Occurrence {
  int64_t frame = 0;
  int64_t row = 0;
  const TapRun* run = nullptr;
  int64_t index = 0;  // of the token in its run
  TapPhase phase = TapPhase::kScore;
};

struct Group {
  std::vector<Occurrence> a, b;
  bool done = false;
};

struct Key {
  TokenHash hash;
  std::string_view weights;
  int64_t position;
  bool backward;
  bool operator==(const Key& o) const {
    return hash == o.hash && weights == o.weights && position == o.position &&
           backward == o.backward;
  }
};
struct KeyHash {
  size_t operator()(const Key& k) const {
    size_t h;
    std::memcpy(&h, k.hash.data(), sizeof(h));  // already uniform
    return h ^ std::hash<std::string_view>()(k.weights) ^ static_cast<size_t>(k.backward) ^
           static_cast<size_t>(k.position) << 1;
  }
};

template <typename F>
void ForEachRow(const Dump& dump, const std::vector<int64_t>& frames, F f) {
  for (const int64_t n : frames) {
    const TapFrame& frame = dump.frames()[static_cast<size_t>(n)].frame;
    const bool backward = frame.phase == TapPhase::kBackward;
    for (const TapRun& run : frame.runs) {
      TokenHash hash = run.history;
      for (size_t i = 0; i < run.tokens.size(); ++i) {
        hash = ExtendTokenHash(hash, {&run.tokens[i], 1});
        const int64_t index = static_cast<int64_t>(i);
        f(Key{hash, frame.weight_version, run.position + index, backward},
          Occurrence{n, run.row + index, &run, index, frame.phase});
      }
    }
  }
}

TokenPlace Place(const Dump& dump, const Occurrence& o, bool on_a) {
  return {.sequence = o.run->sequence,
          .position = o.run->position + o.index,
          .index = -1,
          .weights = dump.frames()[static_cast<size_t>(o.frame)].frame.weight_version,
          .on_a = on_a,
          .token = o.run->tokens[static_cast<size_t>(o.index)]};
}

// Of one phase first, of one sequence name next, then in order.
void Couple(const Group& g, std::vector<std::pair<Occurrence, Occurrence>>* out) {
  std::vector<bool> used_a(g.a.size()), used_b(g.b.size());
  for (int rule = 0; rule < 4; ++rule) {
    for (size_t i = 0; i < g.a.size(); ++i) {
      for (size_t k = 0; k < g.b.size() && !used_a[i]; ++k) {
        const bool phase = g.a[i].phase == g.b[k].phase;
        const bool name = g.a[i].run->sequence == g.b[k].run->sequence;
        const bool fits = rule == 0 ? phase && name : rule == 1 ? name : rule == 2 ? phase : true;
        if (used_b[k] || !fits) continue;
        used_a[i] = used_b[k] = true;
        out->emplace_back(g.a[i], g.b[k]);
      }
    }
  }
  for (size_t i = 0; i < g.a.size(); ++i) {
    if (!used_a[i]) out->emplace_back(g.a[i], g.b[0]);
  }
  for (size_t k = 0; k < g.b.size(); ++k) {
    if (!used_b[k]) out->emplace_back(g.a[0], g.b[k]);
  }
}

}  // namespace

RowPairing PairRows(const Dump& a, const std::vector<int64_t>& frames_a, const Dump& b,
                    const std::vector<int64_t>& frames_b) {
  RowPairing out;
  std::unordered_map<Key, Group, KeyHash> groups;
  ForEachRow(a, frames_a, [&](const Key& key, const Occurrence& o) {
    groups[key].a.push_back(o);
    ++out.tokens_a;
  });
  ForEachRow(b, frames_b, [&](const Key& key, const Occurrence& o) {
    groups[key].b.push_back(o);
    ++out.tokens_b;
  });
  std::vector<std::pair<Occurrence, Occurrence>> pairs;
  ForEachRow(a, frames_a, [&](const Key& key, const Occurrence& o) {
    Group& g = groups.at(key);
    if (g.b.empty()) {
      out.unpaired.push_back(Place(a, o, true));
    } else if (!g.done) {
      g.done = true;
      ++out.keys;
      Couple(g, &pairs);
    }
  });
  ForEachRow(b, frames_b, [&](const Key& key, const Occurrence& o) {
    if (groups.at(key).a.empty()) out.unpaired.push_back(Place(b, o, false));
  });
  std::stable_sort(pairs.begin(), pairs.end(), [](const auto& x, const auto& y) {
    return std::tie(x.first.frame, x.first.row) < std::tie(y.first.frame, y.first.row);
  });
  for (const auto& [x, y] : pairs) {
    if (x.row != y.row) out.displaced.emplace(x.frame, y.frame);
    if (!out.ranges.empty()) {
      RowRange& last = out.ranges.back();
      const bool follows = last.frame_a == x.frame && last.frame_b == y.frame &&
                           last.row_a + last.rows == x.row && last.row_b + last.rows == y.row &&
                           last.sequence == x.run->sequence &&
                           last.position + last.rows == x.run->position + x.index;
      if (follows) {
        ++last.rows;
        continue;
      }
    }
    out.ranges.push_back(
        {x.frame, x.row, y.frame, y.row, 1, x.run->sequence, x.run->position + x.index});
  }
  return out;
}

}  // namespace tare::compare
