#include "base/status.h"

#include <cerrno>
#include <cstring>

namespace tare {

std::string_view CodeName(Code code) {
  switch (code) {
    case Code::kOk:
      return "ok";
    case Code::kInvalidArgument:
      return "invalid-argument";
    case Code::kNotFound:
      return "not-found";
    case Code::kAlreadyExists:
      return "already-exists";
    case Code::kDataLoss:
      return "data-loss";
    case Code::kUnsupported:
      return "unsupported";
    case Code::kExhausted:
      return "exhausted";
    case Code::kPrecondition:
      return "precondition";
    case Code::kIo:
      return "io";
    case Code::kAborted:
      return "aborted";
    case Code::kInternal:
      return "internal";
  }
  return "unknown";
}

std::string Status::ToString() const {
  if (ok()) return "ok";
  return fmt::format("{}: {}", CodeName(code_), message_);
}

Status Status::Annotate(std::string_view where) const {
  if (ok()) return *this;
  return Status(code_, fmt::format("{}: {}", where, message_));
}

Status Errno(std::string_view call, std::string_view path, int errno_value) {
  const Code code = errno_value == ENOENT                            ? Code::kNotFound
                    : errno_value == EEXIST                          ? Code::kAlreadyExists
                    : errno_value == ENOSPC || errno_value == EDQUOT ? Code::kExhausted
                                                                     : Code::kIo;
  char buffer[128] = "";
  const char* text = strerror_r(errno_value, buffer, sizeof(buffer));
  return Error(code, "{} {}: {}", call, path, text);
}

}  // namespace tare
