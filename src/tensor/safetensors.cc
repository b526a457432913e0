#include "tensor/safetensors.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "base/json.h"
#include "base/overwrite.h"

namespace tare {
namespace {

// dtypes of the format without a Tare dtype: refused by name, not called malformed.
constexpr std::string_view kForeignDTypes[] = {"U16",         "U32",         "U64", "F8_E8M0",
                                               "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4",  "F6_E2M3",
                                               "F6_E3M2",     "C64"};

// The header as a stream of JSON events: it may hold a hundred thousand tensors, so no tree is
// built.
class HeaderReader : public JsonEvents {
 public:
  HeaderReader(std::vector<SafetensorsEntry>* entries,
               std::vector<std::pair<std::string, std::string>>* metadata)
      : entries_(entries), metadata_(metadata) {}

  Status Null() override { return Wrong("null"); }
  Status Bool(bool) override { return Wrong("true or false"); }
  Status Signed(int64_t v) override {
    return Bad("{} is {}; a dimension or offset is not negative", Place(), v);
  }
  Status Float(double) override { return Wrong("a number with a fraction or exponent"); }

  Status Unsigned(uint64_t v) override {
    if (state_ == State::kShape) {
      if (v > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
        return Bad("{} holds {}, more than 2^63 - 1", Place(), v);
      }
      if (entry_.shape.size() == kMaxRank)
        return Bad("{} has more than {} dimensions", Place(), kMaxRank);
      entry_.shape.push_back(static_cast<int64_t>(v));
      return Ok();
    }
    if (state_ == State::kOffsets) {
      if (offsets_seen_ == 2) return Bad("{} has more than two numbers", Place());
      (offsets_seen_++ == 0 ? entry_.begin : entry_.end) = v;
      return Ok();
    }
    return Wrong("a number");
  }

  Status String(std::string& v) override {
    if (state_ == State::kMetadata) {
      metadata_->back().second = std::move(v);
      return Ok();
    }
    if (state_ != State::kField || field_ != "dtype") return Wrong("a string");
    const auto dtype = ParseSafetensorsName(v);
    if (!dtype) {
      const bool foreign = std::find(std::begin(kForeignDTypes), std::end(kForeignDTypes), v) !=
                           std::end(kForeignDTypes);
      std::string known;
      for (int i = 0; i < kDTypeCount; ++i) {
        known += fmt::format("{}{}", i ? " " : "", SafetensorsName(static_cast<DType>(i)));
      }
      return Error(foreign ? Code::kUnsupported : Code::kDataLoss,
                   "tensor \"{}\" has {} dtype \"{}\"; known: {}", Printable(entry_.name),
                   foreign ? "the unsupported" : "the unknown", Printable(v), known);
    }
    entry_.dtype = *dtype;
    has_dtype_ = true;
    return Ok();
  }

  Status StartObject() override {
    switch (state_) {
      case State::kStart:
        state_ = State::kRoot;
        return Ok();
      case State::kRoot:
        state_ = in_metadata_ ? State::kMetadata : State::kEntry;
        return Ok();
      default:
        return Wrong("an object");
    }
  }

  Status Key(std::string& key) override {
    if (state_ == State::kRoot) {
      in_metadata_ = key == "__metadata__";
      entry_ = SafetensorsEntry();
      entry_.name = std::move(key);
      has_dtype_ = has_shape_ = false;
      offsets_seen_ = -1;
      return Ok();
    }
    if (state_ == State::kMetadata) {
      metadata_->emplace_back(std::move(key), "");
      return Ok();
    }
    field_ = std::move(key);
    if (field_ != "dtype" && field_ != "shape" && field_ != "data_offsets") {
      return Bad("tensor \"{}\" has the unknown key \"{}\"; known: dtype shape data_offsets",
                 Printable(entry_.name), Printable(field_));
    }
    state_ = State::kField;
    return Ok();
  }

  Status StartArray() override {
    if (state_ != State::kField || field_ == "dtype") return Wrong("an array");
    state_ = field_ == "shape" ? State::kShape : State::kOffsets;
    if (state_ == State::kOffsets) offsets_seen_ = 0;
    return Ok();
  }

  Status EndArray() override {
    if (state_ == State::kShape) {
      has_shape_ = true;
    } else if (offsets_seen_ != 2) {
      return Bad("{} has {} numbers; [begin, end] expected", Place(), offsets_seen_);
    }
    state_ = State::kField;
    return Ok();
  }

  Status EndObject() override {
    if (state_ == State::kMetadata) {
      state_ = State::kRoot;
    } else if (state_ == State::kEntry || state_ == State::kField) {
      if (!has_dtype_) return Bad("tensor \"{}\" has no dtype", Printable(entry_.name));
      if (!has_shape_) return Bad("tensor \"{}\" has no shape", Printable(entry_.name));
      if (offsets_seen_ != 2)
        return Bad("tensor \"{}\" has no data_offsets", Printable(entry_.name));
      entries_->push_back(std::move(entry_));
      state_ = State::kRoot;
    }
    return Ok();
  }

 private:
  static constexpr size_t kMaxRank = 16;
  enum class State { kStart, kRoot, kMetadata, kEntry, kField, kShape, kOffsets };

  std::string Place() const {
    if (state_ == State::kStart) return "the header";
    if (state_ == State::kRoot) return fmt::format("the value of \"{}\"", Printable(entry_.name));
    if (state_ == State::kMetadata) return "a value of __metadata__";
    return fmt::format("{} of tensor \"{}\"", state_ == State::kEntry ? "a key" : field_,
                       Printable(entry_.name));
  }
  template <typename... Args>
  Status Bad(fmt::format_string<Args...> format, Args&&... args) const {
    return DataLoss(format, std::forward<Args>(args)...);
  }
  Status Wrong(std::string_view got) const {
    const std::string_view expected = state_ == State::kStart                        ? "an object"
                                      : state_ == State::kRoot                       ? "an object"
                                      : state_ == State::kMetadata                   ? "a string"
                                      : state_ == State::kField && field_ == "dtype" ? "a string"
                                      : state_ == State::kField ? "an array of integers"
                                                                : "an integer";
    return Bad("{} is {}; {} expected", Place(), got, expected);
  }

  std::vector<SafetensorsEntry>* entries_;
  std::vector<std::pair<std::string, std::string>>* metadata_;
  State state_ = State::kStart;
  SafetensorsEntry entry_;
  std::string field_;
  bool in_metadata_ = false;
  bool has_dtype_ = false;
  bool has_shape_ = false;
  int offsets_seen_ = -1;
};

// The order of the reference library, which makes equal input give equal files: larger elements
// first, so every tensor is aligned.
int LayoutRank(DType dtype) {
  switch (dtype) {
    case DType::kBool:
      return 0;
    case DType::kU8:
      return 1;
    case DType::kI8:
      return 2;
    case DType::kE5M2:
      return 3;
    case DType::kE4M3:
      return 4;
    case DType::kI16:
      return 5;
    case DType::kF16:
      return 6;
    case DType::kBF16:
      return 7;
    case DType::kI32:
      return 8;
    case DType::kF32:
      return 9;
    case DType::kF64:
      return 10;
    case DType::kI64:
      return 11;
  }
  return 0;
}

Status CheckLayout(std::vector<SafetensorsEntry>* entries, uint64_t data_offset,
                   uint64_t data_bytes) {
  std::sort(entries->begin(), entries->end(), [](const auto& a, const auto& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  });
  uint64_t at = 0;
  const std::string* before = nullptr;
  for (const SafetensorsEntry& e : *entries) {
    if (e.begin > e.end) {
      return DataLoss("tensor \"{}\" begins at {} and ends before it, at {}", Printable(e.name),
                      e.begin, e.end);
    }
    if (e.end > data_bytes) {
      return DataLoss("tensor \"{}\" ends at {}, past the {} bytes of data in the file",
                      Printable(e.name), e.end, data_bytes);
    }
    const auto elements = ElementCount(e.shape);
    int64_t size = 0;
    if (!elements.ok() || __builtin_mul_overflow(*elements, SizeOf(e.dtype), &size)) {
      return DataLoss("tensor \"{}\": shape {} of {} is larger than 2^63 bytes", Printable(e.name),
                      ShapeToString(e.shape), DTypeName(e.dtype));
    }
    if (static_cast<uint64_t>(size) != e.end - e.begin) {
      return DataLoss("tensor \"{}\": {} {} takes {} bytes, data_offsets [{}, {}] hold {}",
                      Printable(e.name), DTypeName(e.dtype), ShapeToString(e.shape), size, e.begin,
                      e.end, e.end - e.begin);
    }
    if (e.begin < at) {
      return DataLoss("tensor \"{}\" begins at {} and overlaps \"{}\", which ends at {}",
                      Printable(e.name), e.begin, Printable(*before), at);
    }
    if (e.begin > at) {
      return DataLoss("gap: no tensor holds the bytes [{}, {}) before tensor \"{}\"", at, e.begin,
                      Printable(e.name));
    }
    if ((data_offset + e.begin) % static_cast<uint64_t>(SizeOf(e.dtype)) != 0) {
      return DataLoss(
          "tensor \"{}\" lies at byte {} of the file, not aligned to the {} bytes of {}; a writer "
          "pads "
          "the header with spaces to a multiple of 8 and lays large elements first",
          Printable(e.name), data_offset + e.begin, SizeOf(e.dtype), DTypeName(e.dtype));
    }
    at = e.end;
    before = &e.name;
  }
  if (at != data_bytes) {
    return DataLoss("tensors end at byte {} of the data, the file has {}", at, data_bytes);
  }
  return Ok();
}

Status ParseInto(std::string_view bytes, std::vector<SafetensorsEntry>* entries,
                 std::vector<std::pair<std::string, std::string>>* metadata,
                 uint64_t* data_offset) {
  if (bytes.size() < 8) {
    return DataLoss("{} bytes are too short for a header length (8 bytes)", bytes.size());
  }
  uint64_t header_bytes = 0;
  for (int i = 7; i >= 0; --i) {
    header_bytes = header_bytes << 8 | static_cast<uint8_t>(bytes[static_cast<size_t>(i)]);
  }
  if (header_bytes > kSafetensorsMaxHeaderBytes) {
    return DataLoss("header length {} exceeds the limit of {}; is this a safetensors file?",
                    header_bytes, kSafetensorsMaxHeaderBytes);
  }
  if (header_bytes > bytes.size() - 8) {
    return DataLoss("header ends at byte {}, the file at {}", header_bytes + 8, bytes.size());
  }
  const std::string_view header = bytes.substr(8, header_bytes);
  if (header.empty() || header[0] != '{') return DataLoss("the header does not start with '{{'");
  HeaderReader reader(entries, metadata);
  JsonLimits limits;
  limits.max_depth = 4;
  if (Status s = ParseJsonEvents(header, &reader, limits); !s.ok()) {
    const Code code = s.code() == Code::kInvalidArgument ? Code::kDataLoss : s.code();
    return Status(code, "header: " + s.message());
  }
  *data_offset = 8 + header_bytes;
  return CheckLayout(entries, *data_offset, bytes.size() - *data_offset);
}

}  // namespace

Result<SafetensorsFile> SafetensorsFile::Open(Env* env, const std::string& path) {
  TARE_ASSIGN_OR_RETURN(auto file, env->OpenReadable(path));
  std::shared_ptr<ReadableFile> owner(std::move(file));
  const std::string_view bytes = owner->bytes();
  return Parse(bytes, std::move(owner), path);
}

Result<SafetensorsFile> SafetensorsFile::Parse(std::string_view bytes,
                                               std::shared_ptr<const void> owner,
                                               const std::string& where) {
  TARE_CHECK(reinterpret_cast<uintptr_t>(bytes.data()) % 8 == 0) << "safetensors bytes not aligned";
  SafetensorsFile f;
  uint64_t data_offset = 0;
  if (Status s = ParseInto(bytes, &f.entries_, &f.metadata_, &data_offset); !s.ok()) {
    return s.Annotate(Printable(where));
  }
  f.where_ = where;
  f.data_ = bytes.data() + data_offset;
  f.owner_ = std::move(owner);
  f.by_name_.resize(f.entries_.size());
  for (size_t i = 0; i < f.by_name_.size(); ++i) f.by_name_[i] = static_cast<uint32_t>(i);
  std::sort(f.by_name_.begin(), f.by_name_.end(),
            [&](uint32_t a, uint32_t b) { return f.entries_[a].name < f.entries_[b].name; });
  return f;
}

const SafetensorsEntry* SafetensorsFile::Find(std::string_view name) const {
  const auto it =
      std::lower_bound(by_name_.begin(), by_name_.end(), name,
                       [&](uint32_t i, std::string_view n) { return entries_[i].name < n; });
  if (it == by_name_.end() || entries_[*it].name != name) return nullptr;
  return &entries_[*it];
}

Tensor SafetensorsFile::View(const SafetensorsEntry& entry) const {
  // An empty tensor may lie at the very end of the mapping; it needs no address.
  const void* at = entry.begin == entry.end ? nullptr : data_ + entry.begin;
  return Tensor::Wrap(at, entry.dtype, entry.shape, owner_).value();
}

Result<Tensor> SafetensorsFile::Get(std::string_view name) const {
  const SafetensorsEntry* entry = Find(name);
  if (entry == nullptr) {
    return Error(Code::kNotFound, "{} has no tensor \"{}\"", Printable(where_), Printable(name));
  }
  return View(*entry);
}

namespace {

using Produce = std::function<Result<Tensor>(const SafetensorsSpec&)>;

// The header with its padding; `specs` in the order of the file.
Result<std::string> HeaderOf(const std::string& path, std::vector<SafetensorsSpec>* specs,
                             std::vector<std::pair<std::string, std::string>> metadata) {
  std::sort(specs->begin(), specs->end(), [](const auto& a, const auto& b) {
    const int ra = LayoutRank(a.dtype);
    const int rb = LayoutRank(b.dtype);
    return ra != rb ? ra > rb : a.name < b.name;
  });
  std::string header = "{";
  const auto quote = [](const std::string& s) { return Json(s).dump(); };
  if (!metadata.empty()) {
    std::sort(metadata.begin(), metadata.end());
    header += "\"__metadata__\":{";
    for (size_t i = 0; i < metadata.size(); ++i) {
      const auto& [key, value] = metadata[i];
      if (!IsUtf8(key) || !IsUtf8(value)) {
        return InvalidArgument("{}: metadata \"{}\" is not UTF-8", path, Printable(key));
      }
      if (i > 0 && metadata[i - 1].first == key) {
        return InvalidArgument("{}: metadata key \"{}\" twice", path, Printable(key));
      }
      header += fmt::format("{}{}:{}", i > 0 ? "," : "", quote(key), quote(value));
    }
    header += "}";
  }
  std::vector<std::string> names;
  uint64_t at = 0;
  for (const SafetensorsSpec& spec : *specs) {
    if (spec.name == "__metadata__" || !IsUtf8(spec.name)) {
      return InvalidArgument("{}: \"{}\" cannot be the name of a tensor", path,
                             Printable(spec.name));
    }
    names.push_back(spec.name);
    TARE_ASSIGN_OR_RETURN(const int64_t elements, ElementCount(spec.shape));
    int64_t size = 0;
    if (__builtin_mul_overflow(elements, SizeOf(spec.dtype), &size) ||
        __builtin_add_overflow(at, static_cast<uint64_t>(size), &size)) {
      return InvalidArgument("{}: more than 2^63 bytes", path);
    }
    const uint64_t end = static_cast<uint64_t>(size);
    header += fmt::format("{}{}:{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{},{}]}}",
                          header.size() > 1 ? "," : "", quote(spec.name),
                          SafetensorsName(spec.dtype), fmt::join(spec.shape, ","), at, end);
    at = end;
  }
  std::sort(names.begin(), names.end());
  if (const auto twice = std::adjacent_find(names.begin(), names.end()); twice != names.end()) {
    return InvalidArgument("{}: tensor \"{}\" twice", path, Printable(*twice));
  }
  header += "}";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  if (header.size() > kSafetensorsMaxHeaderBytes) {
    return Error(Code::kExhausted, "{}: header of {} bytes exceeds the limit of {}", path,
                 header.size(), kSafetensorsMaxHeaderBytes);
  }
  return header;
}

Status WriteBody(WritableFile* file, const std::string& path, const std::string& header,
                 const std::vector<SafetensorsSpec>& specs, const Produce& produce) {
  char length[8];
  for (int i = 0; i < 8; ++i) length[i] = static_cast<char>(header.size() >> (8 * i) & 0xff);
  TARE_RETURN_IF_ERROR(file->Append({length, 8}));
  TARE_RETURN_IF_ERROR(file->Append(header));
  for (const SafetensorsSpec& spec : specs) {
    TARE_ASSIGN_OR_RETURN(const Tensor t, produce(spec));
    if (t.dtype() != spec.dtype || t.shape() != spec.shape || t.device() != Device::kCpu) {
      return InvalidArgument("{}: tensor \"{}\" is {} {} on {}, announced as {} {} on cpu", path,
                             Printable(spec.name), DTypeName(t.dtype()), ShapeToString(t.shape()),
                             DeviceName(t.device()), DTypeName(spec.dtype),
                             ShapeToString(spec.shape));
    }
    if (t.size_bytes() > 0) {
      TARE_RETURN_IF_ERROR(
          file->Append({static_cast<const char*>(t.data()), static_cast<size_t>(t.size_bytes())}));
    }
  }
  return Ok();
}

// Specs of tensors in memory, and how each is found by name.
class InMemory {
 public:
  explicit InMemory(const std::vector<std::pair<std::string, Tensor>>& tensors) {
    for (const auto& item : tensors) sorted_.push_back(&item);
    std::sort(sorted_.begin(), sorted_.end(), [](auto* a, auto* b) { return a->first < b->first; });
  }
  std::vector<SafetensorsSpec> Specs() const {
    std::vector<SafetensorsSpec> specs;
    specs.reserve(sorted_.size());
    for (const auto* item : sorted_)
      specs.push_back({item->first, item->second.dtype(), item->second.shape()});
    return specs;
  }
  Produce Get() const {
    return [this](const SafetensorsSpec& spec) -> Result<Tensor> {
      return (*std::lower_bound(sorted_.begin(), sorted_.end(), spec.name,
                                [](auto* a, const std::string& n) { return a->first < n; }))
          ->second;
    };
  }

 private:
  std::vector<const std::pair<std::string, Tensor>*> sorted_;
};

}  // namespace

Status WriteSafetensors(Env* env, const std::string& path, std::vector<SafetensorsSpec> specs,
                        std::vector<std::pair<std::string, std::string>> metadata,
                        const Produce& produce) {
  TARE_ASSIGN_OR_RETURN(const std::string header, HeaderOf(path, &specs, std::move(metadata)));
  return env->WriteFileAtomic(
      path, [&](WritableFile* file) { return WriteBody(file, path, header, specs, produce); });
}

Status WriteSafetensors(Env* env, const std::string& path,
                        const std::vector<std::pair<std::string, Tensor>>& tensors,
                        std::vector<std::pair<std::string, std::string>> metadata) {
  const InMemory memory(tensors);
  return WriteSafetensors(env, path, memory.Specs(), std::move(metadata), memory.Get());
}

Status OverwriteSafetensors(const std::string& path,
                            const std::vector<std::pair<std::string, Tensor>>& tensors,
                            std::vector<std::pair<std::string, std::string>> metadata) {
  const InMemory memory(tensors);
  std::vector<SafetensorsSpec> specs = memory.Specs();
  TARE_ASSIGN_OR_RETURN(const std::string header, HeaderOf(path, &specs, std::move(metadata)));
  TARE_ASSIGN_OR_RETURN(const auto file, OpenToOverwrite(path));
  TARE_RETURN_IF_ERROR(WriteBody(file.get(), path, header, specs, memory.Get()));
  TARE_RETURN_IF_ERROR(file->Sync());
  return file->Close();
}

}  // namespace tare
