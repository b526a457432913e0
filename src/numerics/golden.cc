#include "numerics/golden.h"

#include <cstring>
#include <set>

#include "numerics/sm90.h"
#include "tensor/safetensors.h"

namespace tare::numerics {
namespace {

std::optional<MmaType> TypeOfName(std::string_view path) {
  const size_t slash = path.rfind('/');
  const std::string_view file = slash == std::string_view::npos ? path : path.substr(slash + 1);
  const auto has = [&](std::string_view s) { return file.find(s) != std::string_view::npos; };
  if (has("bfloat16")) return MmaType::kBF16;
  if (has("float16")) return MmaType::kF16;
  if (has("float8_e4m3fn")) return MmaType::kE4M3;
  if (has("float8_e5m2")) return MmaType::kE5M2;
  return std::nullopt;
}

std::optional<MmaType> TypeOfDType(DType dtype) {
  switch (dtype) {
    case DType::kBF16:
      return MmaType::kBF16;
    case DType::kF16:
      return MmaType::kF16;
    case DType::kE4M3:
      return MmaType::kE4M3;
    case DType::kE5M2:
      return MmaType::kE5M2;
    default:
      return std::nullopt;
  }
}

// One tensor of a family, with its shape checked.
Result<Tensor> GetPart(const SafetensorsFile& file, const std::string& name, const Shape& shape,
                       int64_t element_bytes, bool operand) {
  const SafetensorsEntry* entry = file.Find(name);
  if (entry == nullptr) return DataLoss("{}: has no tensor {}", file.where(), name);
  const bool dtype_right =
      operand ? SizeOf(entry->dtype) == element_bytes && entry->dtype != DType::kBool
              : entry->dtype == DType::kI32;
  if (!dtype_right) {
    return DataLoss("{}: tensor {} is {}, not {}", file.where(), name, DTypeName(entry->dtype),
                    operand ? fmt::format("{}-byte codes", element_bytes) : "i32 holding f32 bits");
  }
  if (entry->shape != shape) {
    return DataLoss("{}: tensor {} is {}, not {}", file.where(), name, ShapeToString(entry->shape),
                    ShapeToString(shape));
  }
  return file.View(*entry);
}

Result<GoldenFamily> CheckFamily(const SafetensorsFile& file, const std::string& name, MmaType type,
                                 MmaKernel kernel) {
  const MmaFormat format = FormatOf(type);
  const SafetensorsEntry* entry = file.Find(name + ".a");
  const SafetensorsEntry* entry_b = file.Find(name + ".b");
  if (entry == nullptr || entry_b == nullptr) {
    return DataLoss("{}: family {} lacks its tensor {}", file.where(), name,
                    entry == nullptr ? ".a" : ".b");
  }
  if (entry->shape.size() != 3 || entry_b->shape.size() != 3) {
    return DataLoss("{}: family {}: a is {} and b is {}, not [tiles, rows, {}]", file.where(), name,
                    ShapeToString(entry->shape), ShapeToString(entry_b->shape), format.group);
  }
  const int64_t tiles = entry->shape[0], m = entry->shape[1], n = entry_b->shape[1];
  TARE_ASSIGN_OR_RETURN(const Tensor a,
                        GetPart(file, name + ".a", {tiles, m, format.group}, format.bytes, true));
  TARE_ASSIGN_OR_RETURN(const Tensor b,
                        GetPart(file, name + ".b", {tiles, n, format.group}, format.bytes, true));
  TARE_ASSIGN_OR_RETURN(const Tensor c, GetPart(file, name + ".c_bits", {tiles, m, n}, 4, false));
  TARE_ASSIGN_OR_RETURN(const Tensor d, GetPart(file, name + ".d_bits", {tiles, m, n}, 4, false));
  GoldenFamily family;
  family.name = name;
  const uint8_t* ab = static_cast<const uint8_t*>(a.data());
  const uint8_t* bb = static_cast<const uint8_t*>(b.data());
  std::vector<float> acc(static_cast<size_t>(m * n));
  const int64_t k = format.group;
  for (int64_t t = 0; t < tiles; ++t) {
    const uint32_t* cb = c.as<uint32_t>() + t * m * n;
    const uint32_t* db = d.as<uint32_t>() + t * m * n;
    if (m * n > 0) std::memcpy(acc.data(), cb, static_cast<size_t>(m * n) * 4);
    const MmaA pa = MmaA::Pack(type, ab + t * m * k * format.bytes, m, k, k, 1);
    const MmaB pb = MmaB::Pack(type, bb + t * n * k * format.bytes, n, k, k, 1);
    MmaTile(pa, 0, m, pb, 0, n, 0, k, acc.data(), n, kernel);
    for (int64_t i = 0; i < m * n; ++i) {
      ++family.checked;
      const uint32_t got = BitsOf(acc[static_cast<size_t>(i)]);
      if (got == db[i]) continue;
      if (family.wrong++ == 0) family.first = GoldenWrong{t, i / n, i % n, cb[i], got, db[i]};
    }
  }
  return family;
}

}  // namespace

std::string_view MmaTypeName(MmaType type) {
  switch (type) {
    case MmaType::kBF16:
      return "bf16";
    case MmaType::kF16:
      return "f16";
    case MmaType::kE4M3:
      return "e4m3";
    case MmaType::kE5M2:
      return "e5m2";
  }
  return "";
}

std::optional<MmaType> ParseMmaType(std::string_view name) {
  for (const MmaType t : {MmaType::kBF16, MmaType::kF16, MmaType::kE4M3, MmaType::kE5M2}) {
    if (MmaTypeName(t) == name) return t;
  }
  return std::nullopt;
}

Result<GoldenReport> CheckGolden(Env* env, const std::string& path, std::optional<MmaType> type,
                                 MmaKernel kernel) {
  TARE_ASSIGN_OR_RETURN(const SafetensorsFile file, SafetensorsFile::Open(env, path));
  std::set<std::string> names;
  for (const SafetensorsEntry& e : file.entries()) {
    bool part = false;
    for (const std::string_view suffix : {".a", ".b", ".c_bits", ".d_bits"}) {
      if (e.name.size() > suffix.size() && e.name.ends_with(suffix)) {
        names.insert(e.name.substr(0, e.name.size() - suffix.size()));
        part = true;
        break;
      }
    }
    if (!part) {
      return DataLoss("{}: tensor {} is no part of a family (NAME.a, .b, .c_bits, .d_bits)", path,
                      e.name);
    }
    if (const auto from_dtype = TypeOfDType(e.dtype)) {
      if (type && *type != *from_dtype) {
        return InvalidArgument("{}: tensor {} is {}, not the {} asked for", path, e.name,
                               DTypeName(e.dtype), MmaTypeName(*type));
      }
      type = from_dtype;
    }
  }
  if (names.empty()) return DataLoss("{}: holds no golden tiles", path);
  if (!type) type = TypeOfName(path);
  if (!type) {
    return InvalidArgument(
        "{}: raw codes of an unknown type; name it (bf16, f16, e4m3, e5m2), or call the file "
        "..._bfloat16, _float16, _float8_e4m3fn or _float8_e5m2",
        path);
  }
  if (kernel == MmaKernel::kAuto) kernel = MmaBestKernel(*type);
  if (!MmaKernelSupported(kernel, *type)) {
    return Unsupported("this CPU does not run the kernel {}", MmaKernelName(kernel));
  }
  GoldenReport report;
  report.type = *type;
  report.kernel = kernel;
  for (const std::string& name : names) {
    TARE_ASSIGN_OR_RETURN(GoldenFamily family, CheckFamily(file, name, *type, kernel));
    report.checked += family.checked;
    report.wrong += family.wrong;
    report.families.push_back(std::move(family));
  }
  return report;
}

}  // namespace tare::numerics
