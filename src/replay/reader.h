// Traces of format v1 from text that comes in pieces, cut anywhere: one event at a time.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/status.h"
#include "base/units.h"
#include "replay/event.h"
#include "replay/scanner.h"

namespace umem::replay {

inline constexpr std::size_t kMaxLine = MiB;

class Reader {
 public:
  // Calls `sink` with every event that the text completes. kInvalidArgument, "LINE: reason", for
  // the first line that is wrong; reading cannot go on then.
  template <class Sink>
  Status feed(std::string_view text, Sink sink) {
    while (!text.empty()) {
      const std::size_t end = text.find('\n');
      if (end == std::string_view::npos) return keep(text);
      std::string_view line = text.substr(0, end + 1);
      text.remove_prefix(end + 1);
      if (!carry_.empty()) {
        UMEM_RETURN_IF_ERROR(keep(line));
        line = carry_;
      }
      UMEM_RETURN_IF_ERROR(take(line, sink));
      carry_.clear();
    }
    return {};
  }
  // The end of the text: its last line may lack the line break.
  template <class Sink>
  Status finish(Sink sink) {
    if (carry_.empty())
      return line_ > 0 ? Status() : at(1, "the trace is empty; it starts with a header line");
    carry_ += '\n';
    return take(carry_, sink);
  }

  std::uint64_t line() const { return line_; }  // the last one read

 private:
  template <class Sink>
  Status take(std::string_view line, Sink& sink) {
    bool is_event = false;
    UMEM_RETURN_IF_ERROR(parse(line, is_event));
    return is_event ? sink(event_) : Status();
  }
  Status keep(std::string_view piece);
  Status at(std::uint64_t line, const std::string& reason) const {
    return {Code::kInvalidArgument, std::to_string(line) + ": " + reason};
  }
  Status parse(std::string_view line, bool& is_event);
  bool parse_header();
  bool parse_event(std::string_view line);
  bool find_kind();
  bool parse_value(std::string_view key);
  bool check(std::string_view kind);

  std::uint64_t line_ = 0;
  std::string carry_;  // the start of a line
  Scanner scanner_;
  Event event_;
  unsigned seen_ = 0;  // keys of the line
  std::string kind_;   // its "e"; empty before that is read
};

}  // namespace umem::replay
