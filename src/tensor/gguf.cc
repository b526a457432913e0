#include "tensor/gguf.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "base/json.h"

namespace tare {
namespace {

using Type = GgufValue::Type;

constexpr uint64_t kMaxStringBytes = uint64_t{64} << 20;  // a chat template has kilobytes
constexpr uint64_t kMaxNameBytes = 65535;
constexpr uint32_t kMaxDimensions = 4;

// Reads little-endian values; the first failure sticks and carries offset and what was asked for.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : bytes_(bytes) {}

  uint64_t at() const { return at_; }
  uint64_t left() const { return bytes_.size() - at_; }
  const Status& status() const { return status_; }
  bool ok() const { return status_.ok(); }

  template <typename T>
  T Number(const char* what) {
    T value{};
    if (!Need(sizeof(T), what)) return value;
    std::memcpy(&value, bytes_.data() + at_, sizeof(T));
    at_ += sizeof(T);
    return value;
  }

  std::string String(const char* what, uint64_t max_bytes) {
    const auto size = Number<uint64_t>(what);
    if (!ok()) return {};
    if (size > max_bytes) {
      Fail("{} claims {} bytes, at most {} are read", what, size, max_bytes);
      return {};
    }
    if (!Need(size, what)) return {};
    std::string text(bytes_.substr(at_, size));
    at_ += size;
    return text;
  }

  bool Need(uint64_t size, const char* what) {
    if (!ok()) return false;
    if (size <= left()) return true;
    Fail("{} needs {} bytes, the file ends after {}", what, size, left());
    return false;
  }

  template <typename... Args>
  void Fail(fmt::format_string<Args...> format, Args&&... args) {
    if (ok())
      status_ = DataLoss("at byte {}: {}", at_, fmt::format(format, std::forward<Args>(args)...));
  }
  void Refuse(Status status) {
    if (ok()) status_ = std::move(status);
  }

 private:
  std::string_view bytes_;
  uint64_t at_ = 0;
  Status status_;
};

// Bytes of one element; for a string the least it can take.
uint64_t MinBytes(Type type) {
  switch (type) {
    case Type::kU8:
    case Type::kI8:
    case Type::kBool:
      return 1;
    case Type::kU16:
    case Type::kI16:
      return 2;
    case Type::kU32:
    case Type::kI32:
    case Type::kF32:
      return 4;
    default:
      return 8;
  }
}

void ReadElement(Reader* r, Type type, GgufValue* out) {
  switch (type) {
    case Type::kU8:
      out->integers.push_back(r->Number<uint8_t>("a u8"));
      return;
    case Type::kI8:
      out->integers.push_back(r->Number<int8_t>("an i8"));
      return;
    case Type::kU16:
      out->integers.push_back(r->Number<uint16_t>("a u16"));
      return;
    case Type::kI16:
      out->integers.push_back(r->Number<int16_t>("an i16"));
      return;
    case Type::kU32:
      out->integers.push_back(r->Number<uint32_t>("a u32"));
      return;
    case Type::kI32:
      out->integers.push_back(r->Number<int32_t>("an i32"));
      return;
    case Type::kI64:
      out->integers.push_back(r->Number<int64_t>("an i64"));
      return;
    case Type::kU64:
      out->integers.push_back(static_cast<int64_t>(r->Number<uint64_t>("a u64")));
      return;
    case Type::kF32:
      out->floats.push_back(static_cast<double>(r->Number<float>("an f32")));
      return;
    case Type::kF64:
      out->floats.push_back(r->Number<double>("an f64"));
      return;
    case Type::kBool: {
      const auto v = r->Number<uint8_t>("a bool");
      if (v > 1) r->Fail("a bool is {}; 0 or 1 expected", v);
      out->integers.push_back(v);
      return;
    }
    case Type::kString:
      out->strings.push_back(r->String("a string", kMaxStringBytes));
      return;
    case Type::kArray:
      break;
  }
}

GgufValue ReadValue(Reader* r) {
  GgufValue value;
  const auto read_type = [&](const char* what) {
    const auto raw = r->Number<uint32_t>(what);
    if (r->ok() && raw > static_cast<uint32_t>(Type::kF64)) {
      r->Fail("{} is {}; the format defines 0 to 12", what, raw);
    }
    return static_cast<Type>(raw);
  };
  value.type = read_type("a value type");
  uint64_t count = 1;
  if (r->ok() && value.type == Type::kArray) {
    value.is_array = true;
    value.type = read_type("an array's element type");
    if (r->ok() && value.type == Type::kArray) r->Fail("an array of arrays is not read");
    count = r->Number<uint64_t>("an array's length");
    if (r->ok() && count > r->left() / MinBytes(value.type)) {
      r->Fail("an array claims {} elements of {}, the file has {} more bytes", count,
              GgufTypeName(value.type), r->left());
    }
  }
  // No reserve: memory follows the bytes that are really there.
  for (uint64_t i = 0; i < count && r->ok(); ++i) ReadElement(r, value.type, &value);
  return value;
}

struct RawTensor {
  GgufEntry entry;
  uint64_t offset = 0;
};

RawTensor ReadTensorInfo(Reader* r) {
  RawTensor t;
  t.entry.name = r->String("a tensor name", kMaxNameBytes);
  if (r->ok() && (t.entry.name.empty() || !IsUtf8(t.entry.name))) {
    r->Fail("tensor name \"{}\" is {}", Printable(t.entry.name),
            t.entry.name.empty() ? "empty" : "not UTF-8");
  }
  const std::string name = Printable(t.entry.name);
  const auto dimensions = r->Number<uint32_t>("a number of dimensions");
  if (r->ok() && dimensions > kMaxDimensions) {
    r->Fail("tensor \"{}\" has {} dimensions, at most {}", name, dimensions, kMaxDimensions);
  }
  for (uint32_t i = 0; i < dimensions && r->ok(); ++i) {
    const auto d = r->Number<uint64_t>("a dimension");
    if (d > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
      r->Fail("tensor \"{}\" has a dimension of {}", name, d);
    }
    t.entry.shape.insert(t.entry.shape.begin(), static_cast<int64_t>(d));
  }
  const auto type = r->Number<uint32_t>("a tensor type");
  t.offset = r->Number<uint64_t>("a tensor offset");
  if (!r->ok()) return t;
  t.entry.type = FindGgufType(type);
  if (t.entry.type == nullptr) {
    r->Fail("tensor \"{}\" has type {}, which the format does not define", name, type);
    return t;
  }
  if (!t.entry.type->readable) {
    r->Refuse(Unsupported("tensor \"{}\" is {}; read are {}", name, t.entry.type->name,
                          ReadableGgufTypes()));
    return t;
  }
  const auto elements = ElementCount(t.entry.shape);
  const int64_t block = t.entry.type->block_elements;
  const int64_t row = t.entry.shape.empty() ? 1 : t.entry.shape.back();
  int64_t size = 0;
  if (!elements.ok() ||
      __builtin_mul_overflow(*elements / block, t.entry.type->block_bytes, &size)) {
    r->Fail("tensor \"{}\" of shape {} is larger than 2^63 bytes", name,
            ShapeToString(t.entry.shape));
  } else if (row % block != 0) {
    r->Fail("tensor \"{}\": rows of {} are no multiple of the {} elements of a {} block", name, row,
            block, t.entry.type->name);
  }
  t.entry.size_bytes = static_cast<uint64_t>(size);
  return t;
}

// Tensors lie one after the other, each at the next multiple of the alignment.
Status CheckLayout(std::vector<RawTensor>* tensors, uint64_t alignment, uint64_t data_begin,
                   uint64_t file_bytes) {
  std::stable_sort(tensors->begin(), tensors->end(), [](const RawTensor& a, const RawTensor& b) {
    return std::tie(a.offset, a.entry.size_bytes) < std::tie(b.offset, b.entry.size_bytes);
  });
  if (data_begin > file_bytes && !tensors->empty()) {
    return DataLoss("data begins at byte {}, the file ends at {}", data_begin, file_bytes);
  }
  const uint64_t data_bytes = data_begin > file_bytes ? 0 : file_bytes - data_begin;
  uint64_t end = 0;
  for (RawTensor& t : *tensors) {
    const std::string name = Printable(t.entry.name);
    const uint64_t expected = (end + alignment - 1) / alignment * alignment;
    if (t.offset % alignment != 0) {
      return DataLoss("tensor \"{}\": offset {} is no multiple of the alignment {}", name, t.offset,
                      alignment);
    }
    if (t.offset > data_bytes || t.entry.size_bytes > data_bytes - t.offset) {
      return DataLoss("tensor \"{}\" of {} bytes at offset {} ends past the {} bytes of data", name,
                      t.entry.size_bytes, t.offset, data_bytes);
    }
    if (t.offset < expected) {
      return DataLoss("tensor \"{}\" at offset {} overlaps the one before, which ends at {}", name,
                      t.offset, end);
    }
    if (t.offset > expected) {
      return DataLoss("gap: tensor \"{}\" is at offset {}, the next free one is {}", name, t.offset,
                      expected);
    }
    end = t.offset + t.entry.size_bytes;
    t.entry.begin = data_begin + t.offset;
  }
  const uint64_t padded = (end + alignment - 1) / alignment * alignment;
  if (data_bytes > padded) {
    return DataLoss("the file has {} bytes of data, its tensors end at {}", data_bytes, end);
  }
  return Ok();
}

template <typename T, typename NameOf>
Status CheckUnique(const std::vector<T>& items, const char* what, NameOf name_of) {
  std::vector<std::string_view> names;
  names.reserve(items.size());
  for (const T& item : items) names.push_back(name_of(item));
  std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  if (twice == names.end()) return Ok();
  return DataLoss("{} \"{}\" twice", what, Printable(*twice));
}

}  // namespace

std::string_view GgufTypeName(GgufValue::Type type) {
  static constexpr std::string_view kNames[] = {"u8",  "i8",  "u16",  "i16",    "u32",
                                                "i32", "f32", "bool", "string", "array",
                                                "u64", "i64", "f64"};
  const auto i = static_cast<size_t>(type);
  return i < std::size(kNames) ? kNames[i] : "unknown";
}

Result<GgufFile> GgufFile::Open(Env* env, const std::string& path) {
  TARE_ASSIGN_OR_RETURN(auto file, env->OpenReadable(path));
  std::shared_ptr<ReadableFile> owner(std::move(file));
  const std::string_view bytes = owner->bytes();
  return Parse(bytes, std::move(owner), path);
}

Result<GgufFile> GgufFile::Parse(std::string_view bytes, std::shared_ptr<const void> owner,
                                 const std::string& where) {
  static_assert(std::endian::native == std::endian::little);
  GgufFile f;
  f.where_ = where;
  f.bytes_ = bytes;
  f.owner_ = std::move(owner);
  Reader r(bytes);
  std::vector<RawTensor> tensors;
  const auto parse = [&]() -> Status {
    if (bytes.substr(0, 4) != "GGUF") {
      return DataLoss("starts with \"{}\"; a GGUF file starts with \"GGUF\"",
                      Printable(bytes.substr(0, 4)));
    }
    (void)r.Number<uint32_t>("the magic");
    f.version_ = r.Number<uint32_t>("the version");
    TARE_RETURN_IF_ERROR(r.status());
    if (f.version_ == 0x02000000 || f.version_ == 0x03000000) {
      return Unsupported("a big-endian GGUF file; convert it to little-endian");
    }
    if (f.version_ != 2 && f.version_ != 3) {
      return Unsupported("GGUF version {}; read are 2 and 3", f.version_);
    }
    const auto tensor_count = r.Number<uint64_t>("the number of tensors");
    const auto value_count = r.Number<uint64_t>("the number of metadata values");
    TARE_RETURN_IF_ERROR(r.status());
    // The least that a value (key length, type, one byte) and a tensor take.
    if (value_count > r.left() / 13 || tensor_count > r.left() / 24) {
      return DataLoss("claims {} metadata values and {} tensors in {} bytes", value_count,
                      tensor_count, bytes.size());
    }
    for (uint64_t i = 0; i < value_count && r.ok(); ++i) {
      std::string key = r.String("a metadata key", kMaxNameBytes);
      if (r.ok() && (key.empty() || !IsUtf8(key))) {
        r.Fail("metadata key \"{}\" is {}", Printable(key), key.empty() ? "empty" : "not UTF-8");
      }
      GgufValue value = ReadValue(&r);
      if (!r.ok()) return r.status().Annotate(fmt::format("metadata \"{}\"", Printable(key)));
      f.metadata_.emplace_back(std::move(key), std::move(value));
    }
    for (uint64_t i = 0; i < tensor_count && r.ok(); ++i) tensors.push_back(ReadTensorInfo(&r));
    TARE_RETURN_IF_ERROR(r.status());
    TARE_RETURN_IF_ERROR(CheckUnique(f.metadata_, "metadata key",
                                     [](const auto& kv) { return std::string_view(kv.first); }));
    TARE_RETURN_IF_ERROR(CheckUnique(
        tensors, "tensor", [](const RawTensor& t) { return std::string_view(t.entry.name); }));
    uint64_t alignment = 32;
    if (f.Find("general.alignment") != nullptr) {
      TARE_ASSIGN_OR_RETURN(const int64_t a, f.Integer("general.alignment"));
      if (a < 8 || a > (1 << 20) || !std::has_single_bit(static_cast<uint64_t>(a))) {
        return DataLoss("general.alignment is {}; a power of two from 8 to 2^20 expected", a);
      }
      alignment = static_cast<uint64_t>(a);
    }
    const uint64_t data_begin = (r.at() + alignment - 1) / alignment * alignment;
    return CheckLayout(&tensors, alignment, data_begin, bytes.size());
  };
  if (Status s = parse(); !s.ok()) return s.Annotate(Printable(where));
  for (RawTensor& t : tensors) f.entries_.push_back(std::move(t.entry));
  return f;
}

const GgufEntry* GgufFile::FindTensor(std::string_view name) const {
  const auto it = std::find_if(entries_.begin(), entries_.end(),
                               [&](const GgufEntry& e) { return e.name == name; });
  return it == entries_.end() ? nullptr : &*it;
}

const GgufValue* GgufFile::Find(std::string_view key) const {
  const auto it = std::find_if(metadata_.begin(), metadata_.end(),
                               [&](const auto& kv) { return kv.first == key; });
  return it == metadata_.end() ? nullptr : &it->second;
}

namespace {

Result<const GgufValue*> Scalar(const GgufFile& file, std::string_view key, std::string_view wanted,
                                bool (*fits)(Type)) {
  const GgufValue* value = file.Find(key);
  if (value == nullptr) {
    return Error(Code::kNotFound, "{}: no metadata \"{}\"", Printable(file.where()), key);
  }
  if (value->is_array || !fits(value->type)) {
    return DataLoss("{}: metadata \"{}\" is {}{}; {} expected", Printable(file.where()), key,
                    value->is_array ? "an array of " : "", GgufTypeName(value->type), wanted);
  }
  return value;
}

}  // namespace

Result<int64_t> GgufFile::Integer(std::string_view key) const {
  TARE_ASSIGN_OR_RETURN(const GgufValue* v, Scalar(*this, key, "an integer", [](Type t) {
                          return t <= Type::kI32 || t == Type::kU64 || t == Type::kI64;
                        }));
  if (v->type == Type::kU64 && v->integers[0] < 0) {
    return DataLoss("{}: metadata \"{}\" is {}, above 2^63 - 1", Printable(where_), key,
                    static_cast<uint64_t>(v->integers[0]));
  }
  return v->integers[0];
}

Result<double> GgufFile::Float(std::string_view key) const {
  TARE_ASSIGN_OR_RETURN(const GgufValue* v, Scalar(*this, key, "a float", [](Type t) {
                          return t == Type::kF32 || t == Type::kF64;
                        }));
  return v->floats[0];
}

Result<bool> GgufFile::Bool(std::string_view key) const {
  TARE_ASSIGN_OR_RETURN(const GgufValue* v,
                        Scalar(*this, key, "a bool", [](Type t) { return t == Type::kBool; }));
  return v->integers[0] != 0;
}

Result<std::string> GgufFile::String(std::string_view key) const {
  TARE_ASSIGN_OR_RETURN(const GgufValue* v,
                        Scalar(*this, key, "a string", [](Type t) { return t == Type::kString; }));
  if (!IsUtf8(v->strings[0])) {
    return DataLoss("{}: metadata \"{}\" is not UTF-8", Printable(where_), key);
  }
  return v->strings[0];
}

Result<Tensor> GgufFile::DequantizeF32(const GgufEntry& entry) const {
  TARE_ASSIGN_OR_RETURN(Tensor out, Tensor::Allocate(DType::kF32, entry.shape));
  if (out.elements() > 0) {
    DequantizeGguf(*entry.type, bytes_.data() + entry.begin, out.mutable_as<float>(),
                   out.elements());
  }
  return out;
}

}  // namespace tare
