#include "nccl/shared.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

namespace softnccl {

Shared::Shared(const std::string& name, std::uint32_t ranks) : ranks_(ranks) {
  const std::size_t head = (sizeof(Header) + 4095) / 4096 * 4096;
  bytes_ = head + ranks * kChunk + ranks * ranks * sizeof(Mail);
  const int file = shm_open(name.c_str(), O_RDWR | O_CREAT, 0600);
  if (file < 0) return;
  // Zeros are the initial state; setting the same length again changes nothing.
  if (ftruncate(file, static_cast<off_t>(bytes_)) == 0)
    map_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (map_ == nullptr || map_ == MAP_FAILED) return;
  header_ = static_cast<Header*>(map_);
  chunks_ = static_cast<unsigned char*>(map_) + head;
  mails_ = reinterpret_cast<Mail*>(chunks_ + ranks * kChunk);
  if (++header_->mapped == ranks) shm_unlink(name.c_str());
}

Shared::~Shared() {
  if (header_) munmap(map_, bytes_);
}

bool Shared::meet(Barrier& barrier) {
  const std::uint32_t round = barrier.round.load();
  if (++barrier.here == ranks_) {
    barrier.here.store(0);
    ++barrier.round;
    return !aborted();
  }
  Pause pause;
  while (barrier.round.load() == round) {
    if (aborted()) return false;
    pause();
  }
  return true;
}

void Pause::operator()() {
  if (++count_ < 200)
    sched_yield();
  else
    usleep(count_ < 2000 ? 50 : 1000);
}

}  // namespace softnccl
