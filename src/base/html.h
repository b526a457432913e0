#pragma once

#include <string>
#include <string_view>

namespace tare {

// `text` for the content or a double-quoted attribute of an HTML page: & < > " escaped, every other
// byte as it is. Text from outside goes through Printable (base/json.h) first.
std::string HtmlEscape(std::string_view text);

}  // namespace tare
