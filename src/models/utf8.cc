#include "models/utf8.h"

namespace tare::models {

Utf8Piece NextUtf8(std::string_view text) {
  TARE_CHECK(!text.empty());
  const auto at = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t lead = at(0);
  if (lead < 0x80) return {Utf8Kind::kWhole, 1, lead};
  size_t length = 0;
  // The range of the second byte excludes overlong forms, surrogates and what is above U+10FFFF.
  uint8_t low = 0x80, high = 0xBF;
  uint32_t value = 0;
  if (lead >= 0xC2 && lead <= 0xDF) {
    length = 2;
    value = lead & 0x1Fu;
  } else if (lead >= 0xE0 && lead <= 0xEF) {
    length = 3;
    value = lead & 0x0Fu;
    if (lead == 0xE0) low = 0xA0;
    if (lead == 0xED) high = 0x9F;
  } else if (lead >= 0xF0 && lead <= 0xF4) {
    length = 4;
    value = lead & 0x07u;
    if (lead == 0xF0) low = 0x90;
    if (lead == 0xF4) high = 0x8F;
  } else {
    return {Utf8Kind::kInvalid, 1, 0};
  }
  for (size_t i = 1; i < length; ++i) {
    if (i >= text.size()) return {Utf8Kind::kIncomplete, i, 0};
    if (at(i) < low || at(i) > high) return {Utf8Kind::kInvalid, i, 0};
    value = value << 6 | (at(i) & 0x3Fu);
    low = 0x80;
    high = 0xBF;
  }
  return {Utf8Kind::kWhole, length, value};
}

Status CheckUtf8(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const Utf8Piece piece = NextUtf8(text.substr(i));
    if (piece.kind != Utf8Kind::kWhole) {
      return InvalidArgument("text is not UTF-8 at byte {} (0x{:02x}{})", i,
                             static_cast<uint8_t>(text[i]),
                             piece.kind == Utf8Kind::kIncomplete ? ", cut short at the end" : "");
    }
    i += piece.size_bytes;
  }
  return Ok();
}

size_t AppendLossyUtf8(std::string_view bytes, bool at_end, std::string* out) {
  size_t i = 0;
  while (i < bytes.size()) {
    const Utf8Piece piece = NextUtf8(bytes.substr(i));
    if (piece.kind == Utf8Kind::kIncomplete && !at_end) break;
    if (piece.kind == Utf8Kind::kWhole) {
      out->append(bytes.substr(i, piece.size_bytes));
    } else {
      out->append("\xEF\xBF\xBD");
    }
    i += piece.size_bytes;
  }
  return i;
}

}  // namespace tare::models
