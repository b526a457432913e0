#pragma once

// Dumps: what a run computed, on disk (docs/formats/dump.md). `DumpWriter` is a Tap; `Dump` reads.
//
//   NAME.dump/manifest.json           who ran, under which contracts and weights; counts at the end
//   NAME.dump/records.jsonl           one line a frame, a tensor, or the end of a frame
//   NAME.dump/tensors-NNNNN.safetensors   payloads
//
// A line is appended only after the shard that holds its payload is complete, synced and renamed.
// So a dump cut at any byte of any file is readable up to the last whole record, and `cut()` says
// so. What is not promised: that a payload still matches its digest (ask Verify), or durability of
// records that were not flushed.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/env.h"
#include "base/json.h"
#include "base/sha256.h"
#include "base/status.h"
#include "base/thread_pool.h"
#include "tensor/tap.h"
#include "tensor/tensor.h"

namespace tare {

struct DumpWeights {
  std::string version;    // as in TapFrame::weight_version
  Sha256Digest sha256{};  // canonical weight hash
};

// Goes into manifest.json.
struct DumpManifest {
  std::string side;  // "rollout", "trainer", or a name of the caller's
  std::vector<DumpWeights> weights;
  std::vector<std::string> contracts;  // contract IDs in force
  Json identity = Json::object();      // execution identity: strings, integers, objects of them
  // Set by the reader.
  bool complete = false;
};

struct DumpRecord {
  int64_t seq = 0;    // position among all lines
  int64_t frame = 0;  // index into frames()
  TapPoint point;
  DType dtype = DType::kF32;
  Shape shape;
  Sha256Digest digest{};   // tensor/digest.h
  int64_t non_finite = 0;  // NaN and infinities among the elements
  int64_t shard = -1;      // -1: no payload was kept
  int64_t offset = 0;      // in the shard's file, bytes
};

struct DumpFrame {
  TapFrame frame;
  bool ended = false;  // its end line is there
};

struct DumpOptions {
  DumpManifest manifest;
  // Which points are recorded at all, and which keep their payload. Null: all.
  std::function<bool(const TapPoint&)> record;
  std::function<bool(const TapPoint&)> keep_payload;
  int64_t shard_bytes = int64_t{64} << 20;  // payload held in memory before a shard is written
  bool sync = true;                         // fsync shards and records as they are written
  ThreadPool* pool = nullptr;               // for digests; null: the caller's thread
};

class DumpWriter : public Tap {
 public:
  // Makes the directory `path` (kAlreadyExists if it is there) and its first manifest.
  static Result<std::unique_ptr<DumpWriter>> Create(Env* env, const std::string& path,
                                                    DumpOptions options);
  ~DumpWriter() override;  // without Finish the dump stays cut, and says so

  void BeginFrame(const TapFrame& frame) override;
  void Emit(const TapPoint& point, const Tensor& value) override;
  void EndFrame() override;

  // Writes out everything emitted so far.
  Status Flush();
  // Flushes and marks the dump complete. The first error of any call, else ok. No call may follow.
  Status Finish();
  const Status& status() const { return status_; }
  int64_t records() const { return records_; }

 private:
  struct Pending;
  DumpWriter(Env* env, std::string path, DumpOptions options);
  void Line(const Json& line);
  Status WriteShard();
  Status DoBeginFrame(const TapFrame& frame);
  Status DoEmit(const TapPoint& point, const Tensor& value);
  Status WriteManifest(bool complete);

  Env* env_;
  std::string path_;
  DumpOptions options_;
  Status status_;
  std::unique_ptr<WritableFile> records_file_;
  Sha256 records_hash_;
  std::vector<Pending> pending_;
  int64_t pending_bytes_ = 0;
  std::vector<Json> lines_;
  int64_t seq_ = 0;
  int64_t frames_ = 0;
  int64_t records_ = 0;
  int64_t shards_ = 0;
  int64_t records_bytes_ = 0;
  bool in_frame_ = false;
  bool finished_ = false;
  std::vector<std::string> frame_names_;
};

// Builds frames and records from lines, checking each in full. Separate from files, for fuzzing.
class DumpIndex {
 public:
  // One line without its newline. kDataLoss with what was wrong, where, and what would be right.
  Status AddLine(std::string_view line);
  // Drops records with seq >= `seq`, and frames that began there.
  void CutAt(int64_t seq);

  const std::vector<DumpFrame>& frames() const { return frames_; }
  const std::vector<DumpRecord>& records() const { return records_; }
  int64_t lines() const { return lines_; }

 private:
  Status AddFrame(const Json& line);
  Status AddTensor(const Json& line);
  Status AddEnd(const Json& line);

  std::vector<DumpFrame> frames_;
  std::vector<int64_t> frame_seq_;  // of each frame's first line
  std::vector<int64_t> end_seq_;    // of each ended frame's last line
  std::vector<DumpRecord> records_;
  std::vector<std::string> names_;  // of the open frame, sorted: duplicates are errors
  int64_t lines_ = 0;
};

class Dump {
 public:
  // kNotFound when `path` holds no dump; kDataLoss when a whole line is malformed or bytes changed.
  // A cut is no error: see cut().
  static Result<Dump> Open(Env* env, const std::string& path);
  static bool IsDump(Env* env, const std::string& path);

  const DumpManifest& manifest() const { return manifest_; }
  const std::vector<DumpFrame>& frames() const { return index_.frames(); }
  const std::vector<DumpRecord>& records() const { return index_.records(); }
  // Empty for a whole dump, else where it ends and why.
  const std::string& cut() const { return cut_; }
  const std::string& path() const { return path_; }

  // The payload, mapped from its shard. kNotFound when none was kept. One thread at a time.
  Result<Tensor> Payload(const DumpRecord& record) const;
  // kDataLoss when the payload does not match the recorded digest.
  Status Verify(const DumpRecord& record, ThreadPool* pool = nullptr) const;

 private:
  Env* env_ = nullptr;
  std::string path_;
  DumpManifest manifest_;
  DumpIndex index_;
  std::string cut_;
  mutable std::vector<std::shared_ptr<ReadableFile>> shards_;
};

std::string DumpShardName(int64_t shard);  // "tensors-00000.safetensors"
// How many elements of a CPU tensor are NaN or infinite; 0 for integers.
int64_t CountNonFinite(const Tensor& tensor, ThreadPool* pool = nullptr);

}  // namespace tare
