#include "trace/json_lines.h"

#include <algorithm>
#include <charconv>
#include <cstring>

namespace umem::trace {
namespace {

class Line {
 public:
  explicit Line(std::string& out) : out_(out) {}

  Line& raw(const char* text) {
    out_ += text;
    return *this;
  }
  template <class Number>
  Line& number(Number value) {
    char digits[32];
    const auto end = std::to_chars(digits, digits + sizeof digits, value);
    out_.append(digits, end.ptr);
    return *this;
  }
  Line& text(const char* value) {
    out_ += '"';
    for (const char* c = value; *c; ++c) {
      if (*c == '"' || *c == '\\') out_ += '\\';
      out_ += static_cast<unsigned char>(*c) < 0x20 ? ' ' : *c;  // no name of an op has those
    }
    out_ += '"';
    return *this;
  }
  Line& ids(const std::uint32_t* first, std::size_t count) {
    out_ += '[';
    for (std::size_t i = 0; i < count; ++i) {
      if (i > 0) out_ += ',';
      number(first[i]);
    }
    out_ += ']';
    return *this;
  }

 private:
  std::string& out_;
};

// Three decimals: a nanosecond is finer than any clock here.
void append_us(Line& line, float us) {
  const auto ns = static_cast<std::uint64_t>(static_cast<double>(us) * 1e3 + 0.5);
  line.number(ns / 1000);
  const unsigned rest = static_cast<unsigned>(ns % 1000);
  const char fraction[] = {'.', static_cast<char>('0' + rest / 100),
                           static_cast<char>('0' + rest / 10 % 10),
                           static_cast<char>('0' + rest % 10), 0};
  line.raw(fraction);
}

// Flat: which of the accesses, and from where to where in its block.
void append_parts(Line& line, const Batch& batch, const Event& event) {
  auto part = std::partition_point(batch.parts.begin(), batch.parts.end(),
                                   [&](const Part& row) { return row.access < event.first; });
  const std::uint64_t end = event.first + event.reads + event.writes;
  const char* before = ",\"parts\":[";
  for (; part != batch.parts.end() && part->access < end; ++part) {
    line.raw(before).number(part->access - event.first);
    line.raw(",").number(part->begin).raw(",").number(part->end);
    before = ",";
  }
  if (*before == ',' && !before[1]) line.raw("]");
}

void append(Line line, const Batch& batch, const Event& event, std::uint64_t& next_op) {
  const std::uint32_t* accesses = batch.accesses.data() + event.first;
  switch (event.kind) {
    case EventKind::kAlloc:
      line.raw("{\"e\":\"alloc\",\"id\":").number(event.id);
      line.raw(",\"bytes\":").number(event.bytes);
      if (*event.name) line.raw(",\"tag\":").text(event.name);
      if (event.device > 0) line.raw(",\"device\":").number(event.device);
      break;
    case EventKind::kFree:
      line.raw("{\"e\":\"free\",\"id\":").number(event.id);
      break;
    case EventKind::kOp:
      line.raw("{\"e\":\"op\",\"i\":").number(next_op++).raw(",\"name\":").text(event.name);
      line.raw(",\"r\":").ids(accesses, event.reads);
      line.raw(",\"w\":").ids(accesses + event.reads, event.writes);
      append_parts(line, batch, event);
      if (event.us >= 0) append_us(line.raw(",\"us\":"), event.us);
      break;
    case EventKind::kStep:
      line.raw("{\"e\":\"step\"");
      break;
  }
  if (*event.family) line.raw(",\"family\":").text(event.family);
  line.raw("}\n");
}

}  // namespace

std::string to_json_lines(const Batch& batch, std::uint64_t& next_op) {
  std::string out;
  out.reserve(batch.events.size() * 96);
  for (const Event& event : batch.events) append(Line(out), batch, event, next_op);
  return out;
}

}  // namespace umem::trace
