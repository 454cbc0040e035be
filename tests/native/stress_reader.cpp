// The reader of traces and the replay of what it accepts, on files of a corpus and on damaged ones:
// the same result however a text is cut into pieces. Built with each sanitizer by
// tests/native/test_sanitizers.py.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "base/units.h"
#include "expect.h"
#include "replay/replay.h"

namespace {

using namespace umem;  // NOLINT: a test program

struct Outcome {
  std::string error;
  std::uint64_t events = 0;
  bool operator==(const Outcome&) const = default;
};

// Each piece in memory of exactly its size, so that a sanitizer sees a read past its end.
template <class Target, class Finish>
Outcome feed(const std::string& text, std::size_t piece, Target take, Finish finish) {
  Status status;
  for (std::size_t at = 0; status.ok() && at < text.size(); at += piece) {
    const std::size_t size = std::min(piece, text.size() - at);
    const std::vector<char> copy(text.data() + at, text.data() + at + size);
    status = take(std::string_view(copy.data(), size));
  }
  if (status.ok()) status = finish();
  return {status.message()};
}

Outcome read(const std::string& text, std::size_t piece) {
  replay::Reader reader;
  std::uint64_t events = 0;
  const auto count = [&](const replay::Event& event) {
    for (replay::BlockId id : event.reads) events += id % 7;
    ++events;
    return Status();
  };
  Outcome outcome = feed(
      text, piece, [&](std::string_view part) { return reader.feed(part, count); },
      [&] { return reader.finish(count); });
  outcome.events = events;
  return outcome;
}

void play(const std::string& text, bool readable) {
  Options options;
  options.budget_bytes = 64 * MiB;
  options.floor_bytes = 8 * MiB;
  options.min_swap_bytes = kPageBytes;
  options.profile = "a100-pcie4";
  options.backed = false;
  Result<std::unique_ptr<replay::Replay>> opened = replay::Replay::open(options);
  EXPECT(opened.ok());
  if (!opened.ok()) return;
  replay::Replay& replay = *opened.value();
  const Outcome played = feed(
      text, text.size() + 1, [&](std::string_view part) { return replay.feed(part); },
      [&] { return text.empty() ? Status() : replay.finish(); });
  EXPECT(readable || text.empty() || !played.error.empty());
  EXPECT(replay.close().ok());
}

void check(const std::string& text, std::mt19937& random) {
  const Outcome whole = read(text, text.size() + 1);
  EXPECT(read(text, 1 + random() % 40) == whole);
  EXPECT(read(text, 1) == whole);
  play(text, whole.error.empty());
}

std::string damaged(std::string text, const std::string& other, std::mt19937& random) {
  static constexpr std::string_view kWords[] = {"\"", "\\", "\\u",   "\\ud800", "{", "[", "\n",
                                                "-",  "1e", "1e999", "null",    ",", ":", "\x80"};
  for (unsigned edits = 1 + random() % 4; edits > 0 && !text.empty(); --edits) {
    const std::size_t at = random() % text.size(), count = random() % 16;
    switch (random() % 4) {
      case 0:
        text[at] = static_cast<char>(random());
        break;
      case 1:
        text.erase(at, count);
        break;
      case 2:
        text.insert(at, kWords[random() % std::size(kWords)]);
        break;
      default:
        text.replace(at, count, other, random() % (other.size() + 1), 4 * count);
    }
  }
  return text;
}

std::vector<std::string> files(const char* folder) {
  std::vector<std::string> found;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    std::ifstream file(entry.path(), std::ios::binary);
    found.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  std::sort(found.begin(), found.end());
  return found;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return std::fprintf(stderr, "%s FOLDER ROUNDS\n", argv[0]), 2;
  const std::vector<std::string> corpus = files(argv[1]);
  EXPECT(!corpus.empty());
  std::mt19937 random(1);
  for (const std::string& text : corpus) {
    check(text, random);
    for (int round = std::atoi(argv[2]); round > 0; --round)
      check(damaged(text, corpus[random() % corpus.size()], random), random);
  }
  return g_wrong == 0 ? 0 : 1;
}
