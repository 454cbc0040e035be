// The one error channel of native code: functions that can fail return Status or Result<T>.
// Exceptions exist only at the two borders (torch's allocator and pybind11).
#pragma once
#include <memory>
#include <string>
#include <utility>
#include <variant>

namespace umem {

enum class Code : int {
  kOk = 0,
  kInvalidArgument,
  kOutOfDeviceMemory,
  kOutOfHostMemory,
  kNotSupported,
  kBadState,
  kOff,  // umem is not running
  kDriver,
};

constexpr bool is_out_of_memory(Code code) {
  return code == Code::kOutOfDeviceMemory || code == Code::kOutOfHostMemory;
}

// Success costs one null pointer, so Status may be returned on hot paths.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message)
      : detail_(std::make_unique<Detail>(Detail{code, std::move(message)})) {}

  bool ok() const { return detail_ == nullptr; }
  Code code() const { return detail_ ? detail_->code : Code::kOk; }
  const std::string& message() const {
    static const std::string empty;
    return detail_ ? detail_->message : empty;
  }

 private:
  struct Detail {
    Code code;
    std::string message;
  };
  std::unique_ptr<Detail> detail_;
};

template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::move(value)) {}         // NOLINT: conversions are the point
  Result(Status status) : state_(std::move(status)) {}  // NOLINT

  bool ok() const { return std::holds_alternative<T>(state_); }
  T& value() { return std::get<T>(state_); }
  const T& value() const { return std::get<T>(state_); }
  Code code() const { return ok() ? Code::kOk : std::get<Status>(state_).code(); }
  Status take_status() { return ok() ? Status() : std::move(std::get<Status>(state_)); }

 private:
  std::variant<T, Status> state_;
};

// Keeps the first error of several steps that are all taken regardless.
class FirstError {
 public:
  void keep(Status status) {
    if (first_.ok()) first_ = std::move(status);
  }
  bool ok() const { return first_.ok(); }
  Status take() { return std::move(first_); }

 private:
  Status first_;
};

}  // namespace umem

// Returns from the enclosing function if `expr` is not ok.
#define UMEM_RETURN_IF_ERROR(expr)                       \
  do {                                                   \
    if (::umem::Status s_ = (expr); !s_.ok()) return s_; \
  } while (0)
