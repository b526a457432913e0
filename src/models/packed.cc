#include "models/packed.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "numerics/mma.h"
#include "ops/linear/gemm.h"
#include "ops/linear/linear.h"
#include "tensor/convert.h"

namespace tare::models {
namespace {

using ops::linear::PackedWeight;

Status Differs(const PackedWeight& held, int64_t row, int64_t column) {
  return DataLoss("the packed copy of [{}, {}] differs from the weight at row {}, column {}",
                  held.n(), held.k(), row, column);
}

Status VerifyPanels(ThreadPool* pool, const PackedWeight& held, const void* w) {
  if (held.panels() == nullptr) return Ok();  // packed for the sm90-mma step alone
  TARE_ASSIGN_OR_RETURN(const PackedWeight again,
                        PackedWeight::Pack(pool, w, held.dtype(), held.n(), held.k()));
  const auto* have = static_cast<const uint8_t*>(held.panels());
  const auto* want = static_cast<const uint8_t*>(again.panels());
  const int64_t bytes = again.size_bytes(), item = SizeOf(held.dtype());
  if (std::memcmp(have, want, static_cast<size_t>(bytes)) == 0) return Ok();
  // Back from the place in the panels ([panel][k][32], 16-bit elements in pairs) to the element.
  constexpr int64_t kPanel = ops::gemm::kPanel;
  const int64_t at = (std::mismatch(have, have + bytes, want).first - have) / item;
  const int64_t slot = at % kPanel;
  const int64_t column = item == 2 ? slot % 2 * 16 + slot / 2 : slot;
  return Differs(held, at / (kPanel * held.k()) * kPanel + column, at / kPanel % held.k());
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

Status VerifyPacked(ThreadPool* pool, const Model& model, bool codes) {
  for (size_t i = 0; i < model.parameters().size(); ++i) {
    const std::vector<PackedWeight>& list = model.packed_experts(static_cast<int>(i));
    const Parameter& p = model.parameters()[i];
    const int64_t bytes = list.empty() ? 0 : p.value.size_bytes() / std::ssize(list);
    for (size_t e = 0; e < list.size(); ++e) {
      const char* w = static_cast<const char*>(p.value.data()) + static_cast<int64_t>(e) * bytes;
      Status s = VerifyPanels(pool, list[e], w);
      if (s.ok() && codes) s = VerifyCodes(list[e], w);
      if (!s.ok())
        return s.Annotate(list.size() == 1 ? p.name : fmt::format("{} expert {}", p.name, e));
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

}  // namespace tare::models
