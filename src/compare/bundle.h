#pragma once

// Replay bundle: the first divergence cut down to what shows it, in a directory that stands alone
// (docs/formats/bundle.md): tokens up to the differing one, the operator's inputs at these rows
// from both sides, both outputs, the sequences that were computed with it, who ran, and by which
// commands.

#include <string>
#include <vector>

#include "base/env.h"
#include "base/json.h"
#include "base/status.h"
#include "compare/locate.h"
#include "compare/replay_input.h"

namespace tare::compare {

// Makes the directory `path` (kAlreadyExists if it is there). REQUIRES: report.found, of these
// dumps. kUnsupported when the site has no rows or its payloads were not kept. A side whose dump
// does not name the tokens from position 0 on gets no input to replay.
Status WriteBundle(Env* env, const std::string& path, const Dump& a, const Dump& b,
                   const LocateReport& report);

struct Bundle {
  std::string path;
  Json description;                     // bundle.json
  Sha256Digest output_a{}, output_b{};  // of the recorded output rows
  TokenHash history{};                  // key of the row, its own token included
  int64_t position = 0;
};

// kDataLoss (reason bundle-altered) when a file does not match the digest in bundle.json.
Result<Bundle> OpenBundle(Env* env, const std::string& path);

// The recorded command of one side ("a", "b"): arguments after the program, "{dump}" standing for
// the dump to write and "{tokens}" for the file of sequences. Empty when none was recorded.
std::vector<std::string> ReplayCommand(const Bundle& bundle, const std::string& side);

// The sequences of one side's batch. kNotFound when none were kept, kDataLoss when they do not hold
// the row.
Result<ReplayBatch> ReplayInput(Env* env, const Bundle& bundle, const std::string& side);

// Looks the site's row up in a fresh dump and compares its output with the recorded one of `side`.
// pass, or fail with replay-differs; refused with weight-hash-mismatch when the fresh dump ran on
// other weights; inconclusive with missing-capture when the row is not there.
struct ReplayResult {
  Verdict verdict = Verdict::kInconclusive;
  std::string_view reason;
  std::string detail;
};
Result<ReplayResult> CheckReplay(const Bundle& bundle, const std::string& side, const Dump& fresh);

}  // namespace tare::compare
