#include "base/json.h"

#include <algorithm>
#include <exception>
#include <set>
#include <vector>

namespace tare {
namespace {

// Length of the UTF-8 character at the front of `s` and its code point, 0 when it is not one
// (overlong, surrogate, above U+10FFFF, cut short).
struct Utf8Char {
  size_t length = 0;
  uint32_t code = 0;
};

Utf8Char DecodeUtf8(std::string_view s) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(s[i]); };
  const uint8_t b0 = byte(0);
  if (b0 < 0x80) return {1, b0};
  const size_t length = b0 >= 0xf0 ? 4 : b0 >= 0xe0 ? 3 : 2;
  if (b0 < 0xc2 || b0 > 0xf4 || s.size() < length) return {};
  uint32_t code = b0 & (0x7fu >> length);
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return {};
    code = code << 6 | (byte(i) & 0x3f);
  }
  const uint32_t smallest = length == 4 ? 0x10000 : length == 3 ? 0x800 : 0x80;
  if (code < smallest || code > 0x10ffff || (code >= 0xd800 && code <= 0xdfff)) return {};
  return {length, code};
}

// Characters that a terminal acts on, or that make text look like other text.
bool IsUnsafe(uint32_t c) {
  return c < 0x20 || (c >= 0x7f && c < 0xa0) ||  // C0, DEL, C1
         c == 0x061c || c == 0x200e || c == 0x200f || (c >= 0x202a && c <= 0x202e) ||
         (c >= 0x2066 && c <= 0x2069) ||                            // bidi
         c == 0x200b || c == 0x2028 || c == 0x2029 || c == 0xfeff;  // invisible, line ends
}

std::string LineColumn(std::string_view text, size_t at) {
  at = std::min(at, text.size());
  const std::string_view before = text.substr(0, at);
  const auto line = 1 + std::count(before.begin(), before.end(), '\n');
  const size_t start = before.rfind('\n');
  return fmt::format("line {} column {}", line,
                     start == std::string_view::npos ? at + 1 : at - start);
}

// Where the library's lexer stands: an iterator that reports its progress.
struct Cursor {
  using difference_type = std::ptrdiff_t;
  using value_type = char;
  using pointer = const char*;
  using reference = const char&;
  using iterator_category = std::input_iterator_tag;

  const char* at;
  const char** progress;

  reference operator*() const { return *at; }
  Cursor& operator++() {
    *progress = ++at;
    return *this;
  }
  Cursor operator++(int) {
    Cursor before = *this;
    ++*this;
    return before;
  }
  bool operator==(const Cursor& other) const { return at == other.at; }
  bool operator!=(const Cursor& other) const { return at != other.at; }
};

// The keys of one object. Small objects are scanned; a set bounds the cost of hostile large ones.
class KeySet {
 public:
  bool Insert(const std::string& key) {
    if (large_.empty()) {
      if (std::find(small_.begin(), small_.end(), key) != small_.end()) return false;
      small_.push_back(key);
      if (small_.size() == 16) large_.insert(small_.begin(), small_.end());
      return true;
    }
    return large_.insert(key).second;
  }

 private:
  std::vector<std::string> small_;
  std::set<std::string> large_;
};

class SaxAdapter {
 public:
  SaxAdapter(JsonEvents* events, int max_depth) : events_(events), max_depth_(max_depth) {}

  bool null() { return Take(events_->Null()); }
  bool boolean(bool v) { return Take(events_->Bool(v)); }
  bool number_integer(int64_t v) { return Take(events_->Signed(v)); }
  bool number_unsigned(uint64_t v) { return Take(events_->Unsigned(v)); }
  bool number_float(double v, const std::string& token) {
    if (token.find_first_of(".eE") == std::string::npos) {
      return Take(
          InvalidArgument("integer {} does not fit 64 bits", Printable(token.substr(0, 40))));
    }
    return Take(events_->Float(v));
  }
  bool string(std::string& v) { return Take(events_->String(v)); }
  bool binary(Json::binary_t&) { return Take(InvalidArgument("binary value")); }
  bool start_object(size_t) {
    keys_.emplace_back();
    return Enter() && Take(events_->StartObject());
  }
  bool key(std::string& v) {
    if (!keys_.back().Insert(v)) {
      return Take(InvalidArgument("duplicate key \"{}\"", Printable(v.substr(0, 200))));
    }
    return Take(events_->Key(v));
  }
  bool end_object() {
    keys_.pop_back();
    --depth_;
    return Take(events_->EndObject());
  }
  bool start_array(size_t) { return Enter() && Take(events_->StartArray()); }
  bool end_array() {
    --depth_;
    return Take(events_->EndArray());
  }
  bool parse_error(size_t position, const std::string&, const nlohmann::detail::exception& e) {
    // "[json.exception.parse_error.101] parse error at line 1, column 2: syntax error while ..."
    std::string_view what = e.what();
    for (const std::string_view mark : {"] ", "parse error", ": "}) {
      const size_t at = what.find(mark);
      if (at != std::string_view::npos && (mark != ": " || position_ == 0)) {
        what.remove_prefix(at + mark.size());
      }
    }
    position_ = position;
    return Take(InvalidArgument("{}", Printable(what.substr(0, 300))));
  }

  const Status& status() const { return status_; }
  size_t position() const {
    return position_;
  }  // 1-based byte where the library stopped; 0: unknown

 private:
  bool Enter() {
    if (++depth_ <= max_depth_) return true;
    return Take(Error(Code::kExhausted, "nested deeper than {} levels", max_depth_));
  }
  bool Take(Status status) {
    if (status.ok()) return true;
    status_ = std::move(status);
    return false;
  }

  JsonEvents* events_;
  int max_depth_;
  int depth_ = 0;
  std::vector<KeySet> keys_;
  Status status_;
  size_t position_ = 0;
};

class TreeBuilder : public JsonEvents {
 public:
  Status Null() override { return Add(nullptr); }
  Status Bool(bool v) override { return Add(v); }
  Status Signed(int64_t v) override { return Add(v); }
  Status Unsigned(uint64_t v) override { return Add(v); }
  Status Float(double v) override { return Add(v); }
  Status String(std::string& v) override { return Add(std::move(v)); }
  Status StartObject() override { return Open(Json::object()); }
  Status Key(std::string& key) override {
    key_ = std::move(key);
    return Ok();
  }
  Status EndObject() override { return Close(); }
  Status StartArray() override { return Open(Json::array()); }
  Status EndArray() override { return Close(); }

  Json Take() { return std::move(root_); }

 private:
  Status Add(Json value) {
    (void)Place(std::move(value));
    return Ok();
  }
  Status Open(Json value) {
    open_.push_back(Place(std::move(value)));
    return Ok();
  }
  Status Close() {
    open_.pop_back();
    return Ok();
  }
  // Only the last child of an open container grows, so the pointers on the stack stay valid.
  Json* Place(Json value) {
    if (open_.empty()) {
      root_ = std::move(value);
      return &root_;
    }
    if (open_.back()->is_array()) {
      open_.back()->push_back(std::move(value));
      return &open_.back()->back();
    }
    // Keys are known to be unique; the map's own insertion would search all of them each time.
    auto& object = open_.back()->get_ref<Json::object_t&>();
    object.Json::object_t::Container::emplace_back(std::move(key_), std::move(value));
    return &object.back().second;
  }

  Json root_;
  std::vector<Json*> open_;
  std::string key_;
};

void AppendQuoted(std::string_view text, std::string* out) {
  out->push_back('"');
  for (const char c : text) {
    switch (c) {
      case '"':
        *out += "\\\"";
        break;
      case '\\':
        *out += "\\\\";
        break;
      case '\b':
        *out += "\\b";
        break;
      case '\f':
        *out += "\\f";
        break;
      case '\n':
        *out += "\\n";
        break;
      case '\r':
        *out += "\\r";
        break;
      case '\t':
        *out += "\\t";
        break;
      default:
        if (static_cast<uint8_t>(c) < 0x20) {
          *out += fmt::format("\\u{:04x}", static_cast<uint8_t>(c));
        } else {
          out->push_back(c);
        }
    }
  }
  out->push_back('"');
}

Status AppendCanonical(const Json& value, int depth, std::string* out) {
  constexpr int kMaxDepth = 256;
  if (depth > kMaxDepth) return InvalidArgument("canonical JSON deeper than {} levels", kMaxDepth);
  const auto string = [&](const std::string& s) -> Status {
    if (!IsUtf8(s))
      return InvalidArgument("canonical JSON: string \"{}\" is not UTF-8", Printable(s));
    AppendQuoted(s, out);
    return Ok();
  };
  switch (value.type()) {
    case Json::value_t::null:
      *out += "null";
      return Ok();
    case Json::value_t::boolean:
      *out += value.get<bool>() ? "true" : "false";
      return Ok();
    case Json::value_t::number_integer:
      *out += fmt::format("{}", value.get<int64_t>());
      return Ok();
    case Json::value_t::number_unsigned:
      *out += fmt::format("{}", value.get<uint64_t>());
      return Ok();
    case Json::value_t::string:
      return string(value.get_ref<const std::string&>());
    case Json::value_t::array: {
      out->push_back('[');
      bool first = true;
      for (const Json& item : value) {
        if (!first) out->push_back(',');
        first = false;
        TARE_RETURN_IF_ERROR(AppendCanonical(item, depth + 1, out));
      }
      out->push_back(']');
      return Ok();
    }
    case Json::value_t::object: {
      const auto& object = value.get_ref<const Json::object_t&>();
      std::vector<const Json::object_t::value_type*> items;
      for (const auto& item : object) items.push_back(&item);
      std::sort(items.begin(), items.end(), [](auto* a, auto* b) { return a->first < b->first; });
      out->push_back('{');
      for (size_t i = 0; i < items.size(); ++i) {
        if (i > 0) {
          if (items[i]->first == items[i - 1]->first) {
            return InvalidArgument("canonical JSON: duplicate key \"{}\"",
                                   Printable(items[i]->first));
          }
          out->push_back(',');
        }
        TARE_RETURN_IF_ERROR(string(items[i]->first));
        out->push_back(':');
        if (Status s = AppendCanonical(items[i]->second, depth + 1, out); !s.ok()) {
          return s.Annotate(Printable(items[i]->first));
        }
      }
      out->push_back('}');
      return Ok();
    }
    case Json::value_t::number_float:
      return InvalidArgument("canonical JSON holds no floating-point value; write its bits as hex");
    case Json::value_t::binary:
    case Json::value_t::discarded:
      break;
  }
  return InvalidArgument("canonical JSON: a value of type {}", value.type_name());
}

}  // namespace

bool IsUtf8(std::string_view text) {
  while (!text.empty()) {
    const size_t n = DecodeUtf8(text).length;
    if (n == 0) return false;
    text.remove_prefix(n);
  }
  return true;
}

Status ParseJsonEvents(std::string_view text, JsonEvents* events, const JsonLimits& limits) {
  if (text.size() > limits.max_bytes) {
    return Error(Code::kExhausted, "JSON of {} bytes, at most {} are read", text.size(),
                 limits.max_bytes);
  }
  if (text.substr(0, 3) == "\xef\xbb\xbf") {
    return InvalidArgument("line 1 column 1: JSON starts with a byte order mark; remove it");
  }
  // The library takes a NUL byte for the end of the text.
  if (const size_t nul = text.find('\0'); nul != std::string_view::npos) {
    return InvalidArgument("{}: a NUL byte", LineColumn(text, nul));
  }
  SaxAdapter sax(events, limits.max_depth);
  const char* progress = text.data();
  try {
    const bool done = Json::sax_parse(Cursor{text.data(), &progress},
                                      Cursor{text.data() + text.size(), &progress}, &sax);
    if (done && sax.status().ok()) return Ok();
  } catch (const std::bad_alloc&) {
    return Error(Code::kExhausted, "no memory for JSON of {} bytes", text.size());
  } catch (const std::exception& e) {
    return Error(Code::kInternal, "JSON parser: {}", Printable(e.what()));
  }
  const size_t at =
      sax.position() > 0 ? sax.position() - 1 : static_cast<size_t>(progress - text.data());
  return sax.status().Annotate(LineColumn(text, at));
}

Result<Json> ParseJson(std::string_view text, const JsonLimits& limits) {
  TreeBuilder builder;
  TARE_RETURN_IF_ERROR(ParseJsonEvents(text, &builder, limits));
  return builder.Take();
}

Result<std::string> CanonicalJson(const Json& value) {
  std::string out;
  TARE_RETURN_IF_ERROR(AppendCanonical(value, 0, &out));
  return out;
}

std::string Printable(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const Utf8Char c = DecodeUtf8(text);
    const size_t n = c.length == 0 ? 1 : c.length;
    if (c.length == 0 || IsUnsafe(c.code)) {
      for (size_t i = 0; i < n; ++i) out += fmt::format("\\x{:02x}", static_cast<uint8_t>(text[i]));
    } else {
      out.append(text.substr(0, n));
    }
    text.remove_prefix(n);
  }
  return out;
}

}  // namespace tare
