#pragma once

// Golden tiles: answers of a real Hopper tensor core, recorded once, against which an emulation of
// the sm90-mma step is checked. The format (docs/formats/golden_tiles.md) is a safetensors file
// with, per family NAME, `NAME.a` [T, M, K], `NAME.b` [T, N, K] (raw bits), `NAME.c_bits` and
// `NAME.d_bits` [T, M, N] (int32 holding f32 bits): d[t,m,n] = one step of c[t,m,n] and a[t,m,:] .
// b[t,n,:].

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/env.h"
#include "base/status.h"
#include "numerics/mma.h"

namespace tare::numerics {

struct GoldenWrong {
  int64_t tile = 0, m = 0, n = 0;
  uint32_t c_bits = 0, got = 0, want = 0;
};

struct GoldenFamily {
  std::string name;
  int64_t checked = 0;
  int64_t wrong = 0;
  std::optional<GoldenWrong> first;
};

struct GoldenReport {
  MmaType type = MmaType::kBF16;
  MmaKernel kernel = MmaKernel::kPlain;
  std::vector<GoldenFamily> families;
  int64_t checked = 0;
  int64_t wrong = 0;
};

// Recomputes every element of the file with `kernel`. The operand type comes from the dtype of the
// tensors (bf16, f16, e4m3, e5m2) or, for files that hold raw int16 or uint8, from `type` or else
// the file's name ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"). A file that lacks a
// tensor of a family, or holds another shape or dtype, is kDataLoss and named; one without families
// too.
Result<GoldenReport> CheckGolden(Env* env, const std::string& path, std::optional<MmaType> type,
                                 MmaKernel kernel);

std::string_view MmaTypeName(MmaType type);  // "bf16", "f16", "e4m3", "e5m2"
std::optional<MmaType> ParseMmaType(std::string_view name);

}  // namespace tare::numerics
