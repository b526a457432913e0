#include "models/packed.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "numerics/mma.h"
#include "ops/linear/gemm.h"
#include "ops/linear/linear.h"
#include "tensor/convert.h"
#include "tensor/digest_many.h"
#include "tensor/weight_hash.h"

namespace tare::models {
namespace {

using ops::linear::PackedWeight;

Status Differs(const PackedWeight& held, int64_t row, int64_t column) {
  return DataLoss("the packed copy of [{}, {}] differs from the weight at row {}, column {}",
                  held.n(), held.k(), row, column);
}

// Panel j packed again into `want` and compared.
Status VerifyPanel(ThreadPool* pool, const PackedWeight& held, const void* w, int64_t j,
                   std::vector<uint8_t>* want) {
  constexpr int64_t kPanel = ops::gemm::kPanel;
  const int64_t item = SizeOf(held.dtype()), bytes = held.k() * kPanel * item;
  want->resize(static_cast<size_t>(bytes));
  const char* rows = static_cast<const char*>(w) + j * kPanel * held.k() * item;
  ops::gemm::PackPanels(*pool, rows, held.dtype(), std::min(kPanel, held.n() - j * kPanel),
                        held.k(), want->data());
  const auto* have = static_cast<const uint8_t*>(held.panels()) + j * bytes;
  if (std::memcmp(have, want->data(), static_cast<size_t>(bytes)) == 0) return Ok();
  // Back from the place in the panel ([k][32], 16-bit elements in pairs) to the element.
  const int64_t at = (std::mismatch(have, have + bytes, want->data()).first - have) / item;
  const int64_t slot = at % kPanel;
  const int64_t column = item == 2 ? slot % 2 * 16 + slot / 2 : slot;
  return Differs(held, j * kPanel + column, at / kPanel);
}

// Where the weight of one of a parameter's experts begins.
const char* ExpertData(const Parameter& p, size_t expert, size_t experts) {
  return static_cast<const char*>(p.value.data()) +
         static_cast<int64_t>(expert) * (p.value.size_bytes() / static_cast<int64_t>(experts));
}

std::string Place(const Parameter& p, size_t expert, size_t experts) {
  return experts == 1 ? p.name : fmt::format("{} expert {}", p.name, expert);
}

Status VerifyCodes(const PackedWeight& held, const void* w) {
  const numerics::MmaB* codes = held.mma();
  if (codes == nullptr) return Ok();  // f32 has none
  const numerics::MmaB again =
      numerics::MmaB::Pack(codes->type(), w, held.n(), held.k(), held.k(), 1);
  const auto &have = codes->packed(), &want = again.packed();
  if (have.halves.size() == want.halves.size() && have.halves != want.halves) {
    constexpr int64_t kPanel = numerics::kMmaPanel;
    const int64_t at =
        std::mismatch(have.halves.begin(), have.halves.end(), want.halves.begin()).first -
        have.halves.begin();
    return Differs(held, at / (have.padded_k * kPanel) * kPanel + at % kPanel,
                   at / kPanel % have.padded_k);
  }
  const auto same = [](const numerics::internal::MmaGroup& a,
                       const numerics::internal::MmaGroup& b) {
    return a.base == b.base && a.special == b.special && a.zero == b.zero &&
           a.has_zero == b.has_zero;
  };
  if (have.halves.size() != want.halves.size() || have.exponents != want.exponents ||
      have.signs != want.signs ||
      !std::equal(have.groups.begin(), have.groups.end(), want.groups.begin(), want.groups.end(),
                  same)) {
    return DataLoss("the sm90-mma copy of [{}, {}] has other exponents than the weight", held.n(),
                    held.k());
  }
  return Ok();
}

}  // namespace

void MakeCodes(ThreadPool* pool, const Model& model) {
  std::vector<const PackedWeight*> all;
  for (size_t i = 0; i < model.parameters().size(); ++i) {
    for (const PackedWeight& p : model.packed_experts(static_cast<int>(i))) all.push_back(&p);
  }
  pool->ParallelFor(std::ssize(all), [&](int64_t i) { (void)all[static_cast<size_t>(i)]->mma(); });
}

namespace {

// One panel of a parameter's packed copies.
struct Panel {
  size_t parameter = 0, expert = 0;
  int64_t index = 0;
};

// The walk over a model's parameters in about equal runs: chunks to hash, and the panels whose
// first row lies in them, so that both find the bytes in a cache.
class Walk {
 public:
  Walk(const Model& model, bool hash) : model_(model), hash_(hash) {
    size_t parts = 0;
    for (const Parameter& p : model.parameters()) parts += p.parts.size();
    items_.resize(parts);
    digests_.resize(parts);
    size_t part = 0;
    for (size_t i = 0; i < model.parameters().size(); ++i) {
      const Parameter& p = model.parameters()[i];
      const size_t before = chunks_.size();
      int64_t at = 0;  // bytes
      for (const ParameterPart& one : p.parts) {
        items_[part].name = one.name;
        items_[part].dtype = p.value.dtype();
        items_[part].shape = one.shape;
        const int64_t bytes = ElementCount(one.shape).value() * SizeOf(p.value.dtype());
        AddChunks(static_cast<const char*>(p.value.data()) + at, bytes, &digests_[part++],
                  &chunks_);
        at += bytes;
      }
      TARE_CHECK(at == p.value.size_bytes()) << p.name << ": parts and value";
      AddPanels(i, before);
    }
    runs_ = CutChunks(chunks_);
  }

  Status Run(ThreadPool* pool) {
    std::mutex mutex;
    size_t bad = panels_.size();  // the first panel that differs
    Status failed;
    pool->ParallelFor(std::ssize(runs_), [&](int64_t run) {
      const auto [begin, end] = runs_[static_cast<size_t>(run)];
      std::vector<uint8_t> want;
      const auto first = std::lower_bound(chunk_of_.begin(), chunk_of_.end(), begin);
      const auto last = std::lower_bound(first, chunk_of_.end(), end);
      for (auto at = first; at != last; ++at) {
        const size_t i = static_cast<size_t>(at - chunk_of_.begin());
        Status s = Verify(pool, panels_[i], &want);
        if (s.ok()) continue;
        const std::lock_guard<std::mutex> hold(mutex);
        if (i < bad) bad = i, failed = std::move(s);
      }
      if (hash_) HashChunks(std::span(chunks_).subspan(begin, end - begin));
    });
    return failed;
  }

  Result<Sha256Digest> Digest() {
    for (size_t i = 0; i < items_.size(); ++i)
      items_[i].digest = JoinChunkDigests(items_[i].dtype, items_[i].shape, digests_[i]);
    return HashOfItems(std::move(items_));
  }

 private:
  // Of parameter `i`, whose chunks begin at `chunk`.
  void AddPanels(size_t i, size_t chunk) {
    const Parameter& p = model_.parameters()[i];
    const std::vector<PackedWeight>& list = model_.packed_experts(static_cast<int>(i));
    for (size_t e = 0; e < list.size(); ++e) {
      if (list[e].panels() == nullptr) continue;  // packed for the sm90-mma step alone
      constexpr int64_t kPanel = ops::gemm::kPanel;
      const int64_t row = list[e].k() * SizeOf(list[e].dtype());
      for (int64_t j = 0; j * kPanel < list[e].n(); ++j) {
        const char* at = ExpertData(p, e, list.size()) + j * kPanel * row;
        while (static_cast<const char*>(chunks_[chunk].data) + chunks_[chunk].size_bytes <= at)
          ++chunk;
        panels_.push_back({i, e, j});
        chunk_of_.push_back(chunk);
      }
    }
  }

  Status Verify(ThreadPool* pool, const Panel& panel, std::vector<uint8_t>* want) const {
    const Parameter& p = model_.parameters()[panel.parameter];
    const std::vector<PackedWeight>& list =
        model_.packed_experts(static_cast<int>(panel.parameter));
    const Status s = VerifyPanel(pool, list[panel.expert], ExpertData(p, panel.expert, list.size()),
                                 panel.index, want);
    return s.ok() ? s : s.Annotate(Place(p, panel.expert, list.size()));
  }

  const Model& model_;
  bool hash_;
  std::vector<WeightHashItem> items_;
  std::vector<std::vector<Sha256Digest>> digests_;  // by part
  std::vector<DigestChunk> chunks_;
  std::vector<ChunkRun> runs_;
  std::vector<Panel> panels_;     // in the order of the chunks
  std::vector<size_t> chunk_of_;  // by panel, where its first row lies
};

Status VerifyTheRest(const Model& model, bool codes) {
  for (size_t i = 0; codes && i < model.parameters().size(); ++i) {
    const Parameter& p = model.parameters()[i];
    const std::vector<PackedWeight>& list = model.packed_experts(static_cast<int>(i));
    for (size_t e = 0; e < list.size(); ++e) {
      const Status s = VerifyCodes(list[e], ExpertData(p, e, list.size()));
      if (!s.ok()) return s.Annotate(Place(p, e, list.size()));
    }
  }
  for (int64_t l = 0; l < std::ssize(model.config().layers); ++l) {
    if (model.layer(l).sink < 0) continue;
    const Parameter& p = model.parameters()[static_cast<size_t>(model.layer(l).sink)];
    TARE_ASSIGN_OR_RETURN(const Tensor host, p.value.To(Device::kCpu));
    TARE_ASSIGN_OR_RETURN(const Tensor wide, Convert(host, DType::kF32));
    TARE_ASSIGN_OR_RETURN(const Tensor held, model.sink_f32(l).To(Device::kCpu));
    if (held.size_bytes() != wide.size_bytes() ||
        std::memcmp(held.data(), wide.data(), static_cast<size_t>(wide.size_bytes())) != 0) {
      return DataLoss("{}: the f32 sinks that attention reads are of other weights", p.name);
    }
  }
  return Ok();
}

}  // namespace

Status VerifyPacked(ThreadPool* pool, const Model& model, bool codes) {
  if (model.device() == Device::kCpu) TARE_RETURN_IF_ERROR(Walk(model, /*hash=*/false).Run(pool));
  return VerifyTheRest(model, codes);
}

Result<Sha256Digest> HashHeld(ThreadPool* pool, const Model& model, bool codes) {
  if (model.device() != Device::kCpu) {
    TARE_RETURN_IF_ERROR(VerifyTheRest(model, codes));
    TARE_ASSIGN_OR_RETURN(const auto tensors, model.NamedTensors());
    return HashOfTensors(tensors, pool);
  }
  Walk walk(model, /*hash=*/true);
  TARE_RETURN_IF_ERROR(walk.Run(pool));
  TARE_RETURN_IF_ERROR(VerifyTheRest(model, codes));
  return walk.Digest();
}

}  // namespace tare::models
