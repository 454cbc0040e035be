#include "replay/scanner.h"

#include <algorithm>
#include <charconv>
#include <cstdio>

namespace umem::replay {
namespace {

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

void append_utf8(unsigned code, std::string& out) {
  const auto put = [&](unsigned byte) { out += static_cast<char>(byte); };
  if (code < 0x80) {
    put(code);
  } else if (code < 0x800) {
    put(0xC0 | code >> 6);
    put(0x80 | (code & 0x3F));
  } else if (code < 0x10000) {
    put(0xE0 | code >> 12);
    put(0x80 | (code >> 6 & 0x3F));
    put(0x80 | (code & 0x3F));
  } else {
    put(0xF0 | code >> 18);
    put(0x80 | (code >> 12 & 0x3F));
    put(0x80 | (code >> 6 & 0x3F));
    put(0x80 | (code & 0x3F));
  }
}

// Digits of few enough that the quotient of two exact doubles is the nearest double.
bool simple_decimal(std::string_view token, double& value) {
  static constexpr double kPowers[] = {1,   1e1, 1e2,  1e3,  1e4,  1e5,  1e6,  1e7,
                                       1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14, 1e15};
  if (token.size() > 15) return false;
  std::uint64_t digits = 0;
  std::size_t decimals = 0;
  bool after_point = false;
  for (char c : token) {
    if (c == '.') {
      after_point = true;
      continue;
    }
    if (!is_digit(c)) return false;
    digits = digits * 10 + static_cast<std::uint64_t>(c - '0');
    decimals += after_point;
  }
  value = static_cast<double>(digits) / kPowers[decimals];
  return true;
}

}  // namespace

void Scanner::start(std::string_view line) {
  begin_ = at_ = line.data();
  end_ = line.data() + line.size() - 1;
  first_key_ = true;
}

bool Scanner::fail_here(const char* reason) {
  return fail("not JSON: " + std::string(reason) + " at column " +
              std::to_string(at_ - begin_ + 1));
}

std::string Scanner::shown() const {
  constexpr std::ptrdiff_t kMax = 40;
  const char* stop = at_;
  const bool quoted = stop < end_ && *stop == '"';
  for (stop += quoted; stop < end_; ++stop)
    if (quoted ? *stop == '"' : *stop == ',' || *stop == '}' || *stop == ']') break;
  stop = std::min(stop + (quoted && stop < end_), end_);
  if (stop - at_ > kMax) return std::string(at_, kMax - 3) + "...";
  return {at_, stop};
}

bool Scanner::enter(std::string_view what, char open, const char* wanted) {
  if (peek() != open) return fail(std::string(what) + " is " + shown() + ", not " + wanted);
  ++at_;
  return true;
}

bool Scanner::enter_object() {
  if (peek() != '{') return fail("the line is not a JSON object");
  ++at_;
  first_key_ = true;
  return true;
}

bool Scanner::next_key(std::string_view& key, bool& more) {
  char c = peek();
  more = c != '}';
  if (!more) return ++at_, true;
  if (!first_key_) {
    if (c != ',') return fail_here("expected ',' or '}'");
    ++at_;
    c = peek();
  }
  first_key_ = false;
  if (c != '"') return fail_here("expected a key in quotes");
  if (!string(key)) return false;
  if (peek() != ':') return fail_here("expected ':'");
  ++at_;
  return true;
}

// At the opening quote.
bool Scanner::string(std::string_view& value) {
  const char* start = ++at_;
  while (*at_ != '"' && *at_ != '\\' && static_cast<unsigned char>(*at_) >= 0x20) ++at_;
  if (*at_ == '"') {
    value = {start, static_cast<std::size_t>(at_ - start)};
    ++at_;
    return true;
  }
  scratch_.assign(start, at_);
  while (*at_ != '"') {
    if (static_cast<unsigned char>(*at_) < 0x20) return fail_here("a string without an end");
    if (*at_ == '\\') {
      if (!escape()) return false;
    } else {
      scratch_ += *at_++;
    }
  }
  ++at_;
  value = scratch_;
  return true;
}

// At the backslash: appends what it stands for.
bool Scanner::escape() {
  static constexpr std::string_view kEscapes = "\"\\/bfnrt", kMeanings = "\"\\/\b\f\n\r\t";
  const char kind = at_[1];  // the '\n' at the worst
  if (const std::size_t known = kEscapes.find(kind); known != std::string_view::npos) {
    scratch_ += kMeanings[known];
    at_ += 2;
    return true;
  }
  unsigned code = 0, low = 0;
  if (kind != 'u') return fail_here("an unknown escape");
  at_ += 2;
  if (!hex4(code)) return false;
  if (code >= 0xD800 && code < 0xE000) {
    if (code >= 0xDC00 || at_[0] != '\\' || at_[1] != 'u')
      return fail_here("half of a surrogate pair");
    at_ += 2;
    if (!hex4(low)) return false;
    if (low < 0xDC00 || low >= 0xE000) return fail_here("half of a surrogate pair");
    code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
  }
  append_utf8(code, scratch_);
  return true;
}

bool Scanner::hex4(unsigned& code) {
  const char* stop = std::min(at_ + 4, end_);
  const auto [last, error] = std::from_chars(at_, stop, code, 16);
  if (error != std::errc() || last != at_ + 4) return fail_here("\\u without 4 hex digits");
  at_ += 4;
  return true;
}

bool Scanner::text(std::string_view what, std::string_view& value) {
  if (peek() != '"') return fail(std::string(what) + " is " + shown() + ", not a string");
  return string(value);
}

bool Scanner::number_token(std::string_view what, std::string_view& token, bool& integral) {
  const char* start = (peek(), at_);
  const char* c = start;
  const auto digits = [&] {
    const char* from = c;
    while (is_digit(*c)) ++c;
    return c > from;
  };
  c += *c == '-';
  const bool zero = *c == '0';
  bool valid = digits() && !(zero && c > start + 1 + (*start == '-'));
  integral = true;
  if (valid && *c == '.') {
    integral = false;
    valid = (++c, digits());
  }
  if (valid && (*c == 'e' || *c == 'E')) {
    integral = false;
    ++c;
    c += *c == '+' || *c == '-';
    valid = digits();
  }
  if (!valid) return fail(std::string(what) + " is " + shown() + ", not a number");
  token = {start, static_cast<std::size_t>(c - start)};
  at_ = c;
  return true;
}

bool Scanner::integer(std::string_view what, std::uint64_t max, std::uint64_t& value) {
  peek();
  const char* start = at_;
  value = 0;
  while (is_digit(*at_) && at_ - start < 18)
    value = value * 10 + static_cast<std::uint64_t>(*at_++ - '0');
  const bool plain = at_ > start && (*at_ == ',' || *at_ == ']' || *at_ == '}') &&
                     (*start != '0' || at_ == start + 1);
  if (plain && value <= max) return true;
  at_ = start;
  std::string_view token;
  bool integral = false;
  if (!number_token(what, token, integral)) return false;
  at_ = start;
  if (!integral) return fail(std::string(what) + " is " + shown() + ", not an integer");
  const auto [last, error] = std::from_chars(start, start + token.size(), value);
  const bool minus_zero = token == "-0";
  if (minus_zero) value = 0;
  if ((error != std::errc() && !minus_zero) || value > max)
    return fail(std::string(what) + " is " + shown() + "; allowed: 0 to " + std::to_string(max));
  at_ = start + token.size();
  return true;
}

bool Scanner::number(std::string_view what, double max, double& value) {
  std::string_view token;
  bool integral = false;
  if (!number_token(what, token, integral)) return false;
  if (simple_decimal(token, value) && value <= max) return true;
  const auto [last, error] = std::from_chars(token.data(), token.data() + token.size(), value);
  const bool tiny = error == std::errc::result_out_of_range && token.find("e-") != token.npos;
  if (tiny) value = 0;
  if ((error == std::errc() || tiny) && value >= 0 && value <= max) return true;
  at_ = token.data();
  char limit[32];
  std::snprintf(limit, sizeof limit, "%g", max);
  return fail(std::string(what) + " is " + shown() + "; allowed: 0 to " + limit);
}

bool Scanner::word(std::string_view word) {
  if (static_cast<std::size_t>(end_ - at_) < word.size() ||
      std::string_view(at_, word.size()) != word)
    return fail_here("not a value");
  at_ += word.size();
  return true;
}

bool Scanner::null() {
  if (peek() != 'n' ||
      std::string_view(at_, static_cast<std::size_t>(end_ - at_)).substr(0, 4) != "null")
    return false;
  at_ += 4;
  return true;
}

bool Scanner::skip(int depth) {
  std::string_view ignored;
  bool integral = false;
  switch (peek()) {
    case '"':
      return string(ignored);
    case 't':
      return word("true");
    case 'f':
      return word("false");
    case 'n':
      return word("null");
    case '[':
      return skip_list(depth);
    case '{':
      return skip_object(depth);
    default:
      return number_token("a value", ignored, integral);
  }
}

bool Scanner::skip_list(int depth) {
  if (depth == 0) return fail_here("nested too deeply");
  ++at_;
  if (peek() == ']') return ++at_, true;
  while (true) {
    if (!skip(depth - 1)) return false;
    const char c = peek();
    if (c != ',' && c != ']') return fail_here("expected ',' or ']'");
    ++at_;
    if (c == ']') return true;
  }
}

bool Scanner::skip_object(int depth) {
  if (depth == 0) return fail_here("nested too deeply");
  ++at_;
  first_key_ = true;
  std::string_view key;
  bool more = true;
  while (true) {
    if (!next_key(key, more)) return false;
    if (!more) break;
    if (!skip(depth - 1)) return false;
    first_key_ = false;  // an object inside has its own
  }
  first_key_ = false;
  return true;
}

bool Scanner::finish() {
  peek();
  return at_ >= end_ || fail_here("text after the object");
}

}  // namespace umem::replay
