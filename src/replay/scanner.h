// JSON, one line at a time, without a tree: the caller asks for the values that it knows and skips
// the others. A line ends with '\n', which no JSON value contains raw, so that nothing runs past
// it.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

namespace umem::replay {

class Scanner {
 public:
  // `line` ends with '\n'.
  void start(std::string_view line);

  // Each is false when the line is not what was asked for; then `error` says why.
  // Of an object, after its '{': the next key, or `more` is false at its '}'.
  bool enter_object();
  bool next_key(std::string_view& key, bool& more);
  bool text(std::string_view what, std::string_view& value);  // valid until the next call
  bool integer(std::string_view what, std::uint64_t max, std::uint64_t& value);
  // A number from 0 to `max`.
  bool number(std::string_view what, double max, double& value);
  // Calls `take` with every integer of a list.
  template <class Take>
  bool integers(std::string_view what, std::uint64_t max, Take take) {
    if (!enter(what, '[', "a list")) return false;
    if (peek() == ']') return ++at_, true;
    while (true) {
      std::uint64_t value = 0;
      if (!integer(what, max, value)) return false;
      take(value);
      const char c = peek();
      ++at_;
      if (c == ']') return true;
      if (c != ',') return --at_, fail_here("expected ',' or ']'");
    }
  }
  bool null();  // takes a null if there is one; never an error
  bool skip(int depth = 16);
  // Nothing but white space is left.
  bool finish();

  bool fail(std::string reason) {
    error_ = std::move(reason);
    return false;
  }
  std::string& error() { return error_; }

 private:
  char peek() {
    while (*at_ == ' ' || *at_ == '\t' || *at_ == '\r') ++at_;
    return *at_;
  }
  bool fail_here(const char* reason);
  bool enter(std::string_view what, char open, const char* wanted);
  bool string(std::string_view& value);
  bool escape();
  bool hex4(unsigned& code);
  bool number_token(std::string_view what, std::string_view& token, bool& integral);
  bool word(std::string_view word);
  bool skip_list(int depth);
  bool skip_object(int depth);
  std::string shown() const;  // the value here, cut short

  const char* begin_ = nullptr;
  const char* at_ = nullptr;
  const char* end_ = nullptr;  // the '\n'
  bool first_key_ = true;
  std::string scratch_, error_;
};

}  // namespace umem::replay
