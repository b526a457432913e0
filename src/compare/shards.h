#pragma once

// Dumps of several ranks put together into one whole dump, so that a run over many processes
// compares with one over another number, or with a single one.
//
// A rank's frame names the tokens that it holds, so rows find their place by token: what context or
// data parallelism cut needs no rule. Every other cut is told by the record's `shards`: each entry
// says that this rank holds part `index` of `count` of dimension `dim`, laid out
//
//   contiguous   elements [index * n, (index + 1) * n)
//   zigzag       of 2 * count parts the parts `index` and `2 * count - 1 - index`
//   interleaved  elements i with i mod count = index
//
// with several entries of one dimension from the outermost in. Records with equal entries are
// replicas: their bits must agree. Two records with other entries that hold one element are an
// overlap, an element that none holds is a gap; both are errors, as is a row of an axis `cp` that
// lies elsewhere than its layout says (each sequence cut by itself, its length rounded up).

#include <memory>
#include <string>
#include <vector>

#include "base/env.h"
#include "base/status.h"
#include "base/thread_pool.h"
#include "tensor/dump.h"

namespace tare::compare {

struct RankReport {
  std::vector<std::string> ranks;  // their paths, in order
  // Two replicas that differ, the first that was met: who, where, both words. Empty: none.
  std::string replica_difference;
  int64_t replicas_checked = 0;  // elements that a second rank held, too
};

// Writes the whole dump to the new directory `out` of `out_env`. Frame i of the result is frame i
// of every rank, which must agree on phase, side, weights and step. kDataLoss says which tensor and
// which ranks do not fit; kUnsupported when a payload was not kept. The result is cut (no Finish)
// when a rank's dump is.
Result<RankReport> AssembleRanks(Env* env, const std::vector<std::string>& ranks, Env* out_env,
                                 const std::string& out, ThreadPool* pool = nullptr);

// A dump, or a directory of the dumps of its ranks (`*.dump`, in the order of their names).
struct OpenedDump {
  std::unique_ptr<Dump> dump;
  RankReport ranks;            // empty for a plain dump
  std::shared_ptr<void> keep;  // the directory of an assembled dump, removed at the end
};
bool IsRankSet(Env* env, const std::string& path);
Result<OpenedDump> OpenDumpOrRanks(Env* env, const std::string& path);

}  // namespace tare::compare
