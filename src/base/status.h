#pragma once

// Status and Result<T>: how every fallible function of Tare answers. Nothing of ours throws across
// a room; a library's exception is caught at the call and becomes a Status.
//
// Status says whether something *could run*. What it *showed* is a Verdict (base/verdict.h).

#include <fmt/format.h>

#include <cassert>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "base/check.h"

namespace tare {

enum class Code {
  kOk = 0,
  kInvalidArgument,  // the caller's value is malformed; the message says what would be right
  kNotFound,
  kAlreadyExists,
  kDataLoss,      // bytes are missing, torn, or do not match their digest
  kUnsupported,   // an honest answer: this build, device or format does not do it
  kExhausted,     // memory, disk, blocks, limits
  kPrecondition,  // the state does not allow it now
  kIo,            // the operating system refused
  kAborted,       // cut short by a signal, a shutdown or a peer
  kInternal,      // a bug of ours, caught
};

// "invalid-argument", "data-loss", ...: stable, used in JSON.
std::string_view CodeName(Code code);

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  const std::string& message() const { return message_; }
  // "data-loss: model.safetensors: header ends at 812 but ...", or "ok".
  std::string ToString() const;
  // The same code with `where: ` put before the message; ok stays ok.
  Status Annotate(std::string_view where) const;

 private:
  Code code_ = Code::kOk;
  std::string message_;
};

inline Status Ok() { return Status(); }

template <typename... Args>
Status Error(Code code, fmt::format_string<Args...> format, Args&&... args) {
  return Status(code, fmt::format(format, std::forward<Args>(args)...));
}
template <typename... Args>
Status InvalidArgument(fmt::format_string<Args...> format, Args&&... args) {
  return Status(Code::kInvalidArgument, fmt::format(format, std::forward<Args>(args)...));
}
template <typename... Args>
Status DataLoss(fmt::format_string<Args...> format, Args&&... args) {
  return Status(Code::kDataLoss, fmt::format(format, std::forward<Args>(args)...));
}
template <typename... Args>
Status Unsupported(fmt::format_string<Args...> format, Args&&... args) {
  return Status(Code::kUnsupported, fmt::format(format, std::forward<Args>(args)...));
}
// errno as a Status: `Errno("open", path)` gives "open model.json: No such file or directory".
Status Errno(std::string_view call, std::string_view path, int errno_value);

template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}         // NOLINT(google-explicit-constructor)
  Result(Status status) : status_(std::move(status)) {  // NOLINT(google-explicit-constructor)
    TARE_CHECK(!status_.ok()) << "a Result without a value needs an error";
  }

  bool ok() const { return value_.has_value(); }
  const Status& status() const { return status_; }

  // REQUIRES: ok()
  T& value() & {
    TARE_CHECK(ok()) << status_.ToString();
    return *value_;
  }
  const T& value() const& {
    TARE_CHECK(ok()) << status_.ToString();
    return *value_;
  }
  // By value, so that `for (auto& x : List(dir).value())` does not dangle.
  T value() && {
    TARE_CHECK(ok()) << status_.ToString();
    return *std::move(value_);
  }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T operator*() && { return std::move(*this).value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }

 private:
  Status status_;
  std::optional<T> value_;
};

}  // namespace tare

#define TARE_CONCAT_INNER(a, b) a##b
#define TARE_CONCAT(a, b) TARE_CONCAT_INNER(a, b)

// Returns the error of a Status expression from the enclosing function.
#define TARE_RETURN_IF_ERROR(expr)                                                     \
  do {                                                                                 \
    if (::tare::Status tare_status_ = (expr); !tare_status_.ok()) return tare_status_; \
  } while (false)

// TARE_ASSIGN_OR_RETURN(auto file, Open(path));
#define TARE_ASSIGN_OR_RETURN(lhs, expr) \
  TARE_ASSIGN_OR_RETURN_INNER(TARE_CONCAT(tare_result_, __LINE__), lhs, expr)
#define TARE_ASSIGN_OR_RETURN_INNER(result, lhs, expr) \
  auto result = (expr);                                \
  if (!result.ok()) return result.status();            \
  lhs = std::move(result).value()
