#include "replay/reader.h"

#include <utility>

namespace umem::replay {
namespace {

constexpr std::string_view kKind = "umem-trace";
constexpr std::uint64_t kVersion = 1;
// As umem/trace/schema.py has them.
constexpr std::uint64_t kMaxId = (std::uint64_t{1} << 63) - 1;
constexpr std::uint64_t kMaxBytes = std::uint64_t{1} << 60;
constexpr double kMaxUs = 1e15, kMaxFlops = 1e30;

enum Key : unsigned { kId = 1, kBytes = 2, kName = 4 };

// Whether an event of this kind has the key; what it has besides is skipped, whatever its value.
bool has_key(std::string_view kind, std::string_view key) {
  if (kind == "op")
    return key == "name" || key == "r" || key == "w" || key == "us" || key == "flops" ||
           key == "i" || key == "family" || key == "parts";
  if (kind == "alloc")
    return key == "id" || key == "bytes" || key == "tag" || key == "family" || key == "device";
  return kind == "free" && key == "id";
}

}  // namespace

Status Reader::keep(std::string_view piece) {
  if (carry_.size() + piece.size() > kMaxLine + 1)
    return at(line_ + 1, "the line is longer than " + std::to_string(kMaxLine) + " bytes");
  carry_ += piece;
  return {};
}

Status Reader::parse(std::string_view line, bool& is_event) {
  ++line_;
  if (line.size() > kMaxLine + 1)
    return at(line_, "the line is longer than " + std::to_string(kMaxLine) + " bytes");
  scanner_.start(line);
  is_event = line_ > 1;
  const bool fine = is_event ? parse_event(line) : parse_header();
  return fine ? Status() : at(line_, scanner_.error());
}

bool Reader::parse_header() {
  bool is_trace = false, has_version = false, more = true;
  std::string_view key, text;
  if (!scanner_.enter_object()) return false;
  while (scanner_.next_key(key, more) && more) {
    if (key == "kind") {
      if (!scanner_.text("kind", text)) return false;
      is_trace = text == kKind;
    } else if (key == "v") {
      std::uint64_t version = 0;
      if (!scanner_.integer("v", kMaxId, version)) return false;
      if (version != kVersion)
        return scanner_.fail("version " + std::to_string(version) +
                             " is unknown; this umem reads version " + std::to_string(kVersion));
      has_version = true;
    } else if (!scanner_.skip()) {
      return false;
    }
  }
  if (more || !scanner_.finish()) return false;
  if (!is_trace)
    return scanner_.fail("not a trace: the first line must have \"kind\": \"umem-trace\"");
  return has_version || scanner_.fail("the key 'v' is missing");
}

bool Reader::parse_event(std::string_view line) {
  event_.tag = residency::Tag::kCount;
  event_.family = residency::Family::kCount;
  event_.us = -1;
  event_.reads.clear();
  event_.writes.clear();
  event_.parts.clear();
  seen_ = 0;
  kind_.clear();
  std::string_view key;
  bool more = true;
  if (!scanner_.enter_object()) return false;
  while (scanner_.next_key(key, more) && more) {
    if (kind_.empty() && key != "e") {  // it says later which of the keys count
      if (!find_kind()) return false;
      scanner_.start(line);
      if (!scanner_.enter_object()) return false;
      continue;
    }
    if (!parse_value(key)) return false;
  }
  return !more && scanner_.finish() && check(kind_);
}

// After a key: skips to the key "e".
bool Reader::find_kind() {
  std::string_view key;
  bool more = true;
  while (scanner_.skip() && scanner_.next_key(key, more) && more)
    if (key == "e") return parse_value(key) && (!kind_.empty() || check(kind_));
  return !more && check(kind_);
}

bool Reader::parse_value(std::string_view key) {
  std::string_view text;
  double ignored = 0;
  std::uint64_t value = 0;
  if (key == "e") {
    if (!scanner_.text("e", text)) return false;
    kind_.assign(text);
    return !text.empty() || check(text);  // without a kind the line would be begun again
  }
  if (!has_key(kind_, key)) return scanner_.skip();
  if (key == "id") {
    seen_ |= kId;
    return scanner_.integer("id", kMaxId, event_.id);
  }
  if (key == "bytes") {
    seen_ |= kBytes;
    if (!scanner_.integer("bytes", kMaxBytes, value)) return false;
    event_.bytes = value;
    return true;
  }
  if (key == "r" || key == "w") {
    std::vector<BlockId>& ids = key == "r" ? event_.reads : event_.writes;
    ids.clear();
    return scanner_.integers(key == "r" ? "r" : "w", kMaxId,
                             [&](std::uint64_t id) { ids.push_back(id); });
  }
  if (key == "parts") {
    event_.parts.clear();
    return scanner_.integers("parts", kMaxBytes,
                             [&](std::uint64_t value) { event_.parts.push_back(value); });
  }
  if (key == "us") {
    event_.us = -1;
    return scanner_.null() || scanner_.number("us", kMaxUs, event_.us);
  }
  if (key == "name") {
    seen_ |= kName;
    return scanner_.text("name", text);
  }
  if (key == "tag") {
    if (!scanner_.text("tag", text)) return false;
    event_.tag = residency::find_tag(text);
    return true;
  }
  if (key == "family") {
    if (!scanner_.text("family", text)) return false;
    event_.family = residency::find_family(text);
    return true;
  }
  if (key == "device") return scanner_.integer("device", kMaxId, value);
  if (key == "i") return scanner_.null() || scanner_.integer("i", kMaxId, value);
  if (key == "flops") return scanner_.null() || scanner_.number("flops", kMaxFlops, ignored);
  return scanner_.skip();
}

bool Reader::check(std::string_view kind) {
  const auto has = [&](unsigned key, const char* name) {
    return (seen_ & key) != 0 || scanner_.fail("the key '" + std::string(name) + "' is missing");
  };
  if (kind == "op") {
    event_.kind = Event::Kind::kOp;
    return has(kName, "name");
  }
  if (kind == "alloc") {
    event_.kind = Event::Kind::kAlloc;
    return has(kId, "id") && has(kBytes, "bytes");
  }
  if (kind == "free") {
    event_.kind = Event::Kind::kFree;
    return has(kId, "id");
  }
  if (kind == "step") {
    event_.kind = Event::Kind::kStep;
    return true;
  }
  constexpr const char* kEvents = "; events are alloc, op, free, step";
  if (kind.empty())
    return scanner_.fail(std::string("no event: the key \"e\" is missing") + kEvents);
  return scanner_.fail("the event '" + std::string(kind.substr(0, 40)) + "' is unknown" + kEvents);
}

}  // namespace umem::replay
