// The memory shared by the ranks of a fake NCCL communicator: a file in memory that each maps, also
// if several are in one process.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

namespace softnccl {

inline constexpr std::size_t kMaxRanks = 16;
inline constexpr std::size_t kChunk = std::size_t{1} << 20;  // a collective's, per rank
inline constexpr std::size_t kMail = std::size_t{1} << 18;   // a send's, per pair of ranks

// All ranks meet, any number of times.
struct Barrier {
  std::atomic<std::uint32_t> here, round;
};

// From one rank to another; empty or full.
struct Mail {
  std::atomic<std::uint32_t> full;
  unsigned char bytes[kMail];
};

struct Member {
  std::int32_t color, key;  // a split's
};

struct Header {
  std::atomic<std::uint32_t> mapped;   // ranks that have the file
  std::atomic<std::uint32_t> aborted;  // by a rank: all waits end
  Barrier device, host;                // kernels, and calls
  Member members[kMaxRanks];
};

class Shared {
 public:
  // Does not wait. The last rank to arrive removes the file's name.
  Shared(const std::string& name, std::uint32_t ranks);
  ~Shared();
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;

  bool ok() const { return header_ != nullptr; }
  Header& header() { return *header_; }
  unsigned char* chunk(std::uint32_t rank) { return chunks_ + rank * kChunk; }
  Mail& mail(std::uint32_t from, std::uint32_t to) { return mails_[from * ranks_ + to]; }
  // False: a rank has aborted.
  bool meet(Barrier& barrier);
  bool aborted() const { return header_->aborted.load() != 0; }

 private:
  const std::uint32_t ranks_;
  std::size_t bytes_ = 0;
  void* map_ = nullptr;
  Header* header_ = nullptr;
  unsigned char* chunks_ = nullptr;
  Mail* mails_ = nullptr;
};

// Gives the processor away; longer the longer it has been waited already.
class Pause {
 public:
  void operator()();

 private:
  unsigned count_ = 0;
};

}  // namespace softnccl
