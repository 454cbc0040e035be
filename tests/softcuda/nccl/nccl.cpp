// A libnccl.so.2 for the software device: collectives and sends between processes of one machine.
//
// Like NCCL's kernels, a call's work waits on the device until all ranks have enqueued theirs, and
// later work of the streams waits as long: a program whose ranks call in different orders hangs,
// and so does one that waits for its device before a required rank has arrived. The calls of a
// communicator run in order. Not supported: windows, the program's own reductions, capture in
// graphs; registration of buffers is only checked.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "nccl/reduce.h"
#include "nccl/shared.h"
#include "softcuda.h"

extern "C" int cuCtxGetDevice(int* device);

namespace softnccl {
namespace {

enum Code {  // ncclResult_t
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
};

constexpr int kVersion = 22900;
constexpr const char* kPrefix = "/softcuda-nccl-";
struct Id {
  char text[128];
};

thread_local std::string t_error;

int failed(Code code, std::string why) {
  t_error = std::move(why);
  return code;
}

}  // namespace

struct Communicator {
  std::string name;
  std::uint32_t ranks, rank;
  int device = 0;
  std::shared_ptr<Shared> shared;
  std::uint64_t splits = 0;
  std::atomic<std::uint64_t> called{0}, ended{0};  // works, in the order of their calls
};

namespace {

using Comm = std::shared_ptr<Communicator>;

// One call. `count` is of elements of `type` that each rank gives, or of a send.
struct Call {
  enum Kind {
    kAllReduce,
    kReduce,
    kBroadcast,
    kAllGather,
    kReduceScatter,
    kAllToAll,
    kSend,
    kRecv
  };
  Kind kind;
  const void* from;
  void* to;
  std::size_t count;
  int type, op = kSum;
  std::uint32_t peer = 0;  // the root, or the other rank
};

// The bytes that a rank gives to all.
std::size_t given(const Call& call, const Communicator& comm) {
  const bool to_each = call.kind == Call::kReduceScatter || call.kind == Call::kAllToAll;
  return call.count * size_of(call.type) * (to_each ? comm.ranks : 1);
}

std::size_t received(const Call& call, const Communicator& comm) {
  const bool of_each = call.kind == Call::kAllGather || call.kind == Call::kAllToAll;
  return call.count * size_of(call.type) * (of_each ? comm.ranks : 1);
}

bool gives(const Call& call, const Communicator& comm) {
  if (call.kind == Call::kBroadcast) return comm.rank == call.peer;
  return call.kind != Call::kRecv;
}

bool receives(const Call& call, const Communicator& comm) {
  if (call.kind == Call::kReduce) return comm.rank == call.peer;
  return call.kind != Call::kSend;
}

// The kernel of a group's calls on one communicator and stream.
class Kernel {
 public:
  Kernel(Comm comm, std::vector<Call> calls)
      : comm_(std::move(comm)), calls_(std::move(calls)), turn_(comm_->called++) {}

  static void run(void* data) { static_cast<Kernel*>(data)->run_all(); }
  static void drop(void* data) { delete static_cast<Kernel*>(data); }

  std::vector<SoftcudaRange> ranges() const {
    std::vector<SoftcudaRange> found;
    for (const Call& call : calls_) {
      if (gives(call, *comm_)) found.push_back({call.from, given(call, *comm_), 0});
      if (receives(call, *comm_)) found.push_back({call.to, received(call, *comm_), 1});
    }
    return found;
  }

 private:
  void run_all() {
    Pause pause;
    while (comm_->ended.load() != turn_ && !comm_->shared->aborted()) pause();
    std::vector<Call> mail;
    for (const Call& call : calls_) {
      if (call.kind == Call::kSend || call.kind == Call::kRecv)
        mail.push_back(call);
      else if (!collect(call))
        break;
    }
    exchange(mail);
    ++comm_->ended;
  }

  // Chunk by chunk: all give theirs, and take what they need of it.
  bool collect(const Call& call) {
    Shared& shared = *comm_->shared;
    const std::size_t all = given(call, *comm_);
    if (call.kind == Call::kReduce || call.kind == Call::kAllReduce ||
        call.kind == Call::kReduceScatter)
      sum_.resize(std::min(all, kChunk));
    for (std::size_t at = 0; at < all; at += kChunk) {
      const std::size_t bytes = std::min(kChunk, all - at);
      if (gives(call, *comm_))
        std::memcpy(shared.chunk(comm_->rank), static_cast<const char*>(call.from) + at, bytes);
      if (!shared.meet(shared.header().device)) return false;
      if (receives(call, *comm_)) take(call, at, bytes);
      if (!shared.meet(shared.header().device)) return false;
    }
    return true;
  }

  void take(const Call& call, std::size_t at, std::size_t bytes) {
    Shared& shared = *comm_->shared;
    auto* to = static_cast<unsigned char*>(call.to);
    const std::size_t block = call.count * size_of(call.type);
    switch (call.kind) {
      case Call::kAllReduce:
      case Call::kReduce:
        sum(call, 0, bytes);
        std::memcpy(to + at, sum_.data(), bytes);
        return;
      case Call::kBroadcast:
        std::memcpy(to + at, shared.chunk(call.peer), bytes);
        return;
      case Call::kAllGather:
        for (std::uint32_t r = 0; r < comm_->ranks; ++r)
          std::memcpy(to + r * block + at, shared.chunk(r), bytes);
        return;
      default: {  // each rank's part for this one
        const std::size_t begin = std::max(at, comm_->rank * block);
        const std::size_t end = std::min(at + bytes, (comm_->rank + 1) * block);
        if (begin >= end) return;
        const std::size_t place = begin - comm_->rank * block;
        if (call.kind == Call::kAllToAll) {
          for (std::uint32_t r = 0; r < comm_->ranks; ++r)
            std::memcpy(to + r * block + place, shared.chunk(r) + (begin - at), end - begin);
          return;
        }
        sum(call, begin - at, end - begin);
        std::memcpy(to + place, sum_.data(), end - begin);
      }
    }
  }

  // In the order of the ranks, so that each gets the same bits.
  void sum(const Call& call, std::size_t at, std::size_t bytes) {
    Shared& shared = *comm_->shared;
    const std::size_t count = bytes / size_of(call.type);
    std::memcpy(sum_.data(), shared.chunk(0) + at, bytes);
    for (std::uint32_t r = 1; r < comm_->ranks; ++r)
      reduce(sum_.data(), shared.chunk(r) + at, count, call.type, call.op);
    if (call.op == kAverage) divide(sum_.data(), count, call.type, comm_->ranks);
  }

  // All sends and receives of a group run concurrently; those of one pair in order.
  void exchange(const std::vector<Call>& calls) {
    std::vector<std::size_t> done(calls.size());
    Pause pause;
    for (bool left = !calls.empty(); left && !comm_->shared->aborted(); pause()) {
      left = false;
      std::vector<std::pair<int, std::uint32_t>> waiting;
      for (std::size_t i = 0; i < calls.size(); ++i) {
        const std::size_t all = calls[i].count * size_of(calls[i].type);
        const std::pair<int, std::uint32_t> way{calls[i].kind, calls[i].peer};
        const bool first = std::find(waiting.begin(), waiting.end(), way) == waiting.end();
        while (first && done[i] < all && move(calls[i], done[i], all)) {
        }
        if (done[i] == all) continue;
        waiting.push_back(way);
        left = true;
      }
    }
  }

  bool move(const Call& call, std::size_t& done, std::size_t all) {
    const bool sends = call.kind == Call::kSend;
    Shared& shared = *comm_->shared;
    Mail& mail = sends ? shared.mail(comm_->rank, call.peer) : shared.mail(call.peer, comm_->rank);
    if ((mail.full.load() != 0) == sends) return false;
    const std::size_t bytes = std::min(kMail, all - done);
    if (sends)
      std::memcpy(mail.bytes, static_cast<const char*>(call.from) + done, bytes);
    else
      std::memcpy(static_cast<char*>(call.to) + done, mail.bytes, bytes);
    mail.full.store(sends ? 1 : 0);
    done += bytes;
    return true;
  }

  const Comm comm_;
  const std::vector<Call> calls_;
  const std::uint64_t turn_;
  std::vector<unsigned char> sum_;
};

struct Launch {
  Comm comm;
  void* stream;
  std::vector<Call> calls;
};
thread_local int t_depth = 0;
thread_local std::vector<Launch> t_group;

int launch(Launch& launch) {
  auto kernel = std::make_unique<Kernel>(launch.comm, std::move(launch.calls));
  const std::vector<SoftcudaRange> ranges = kernel->ranges();
  const SoftcudaKernel described{"nccl", ranges.data(), ranges.size()};
  const int error = softcuda_enqueue(launch.stream, &described, Kernel::run, Kernel::drop,
                                     kernel.release(), /*waits=*/1);
  return error == 0 ? kSuccess : failed(kUnhandledCudaError, "the driver refused a kernel");
}

int call(void* handle, void* stream, const Call& made) {
  if (handle == nullptr) return failed(kInvalidArgument, "no communicator");
  const Comm& comm = *static_cast<Comm*>(handle);
  if (size_of(made.type) == 0) return failed(kInvalidArgument, "this type is not supported");
  if (made.op > kAverage) return failed(kInvalidArgument, "this reduction is not supported");
  if (made.peer >= comm->ranks) return failed(kInvalidArgument, "there is no such rank");
  const auto same = std::find_if(t_group.begin(), t_group.end(), [&](const Launch& l) {
    return l.comm == comm && l.stream == stream;
  });
  if (same == t_group.end())
    t_group.push_back({comm, stream, {made}});
  else
    same->calls.push_back(made);
  if (t_depth > 0) return kSuccess;
  std::vector<Launch> launches = std::exchange(t_group, {});
  return launch(launches.front());
}

int make(void** handle, std::string name, int ranks, int rank) {
  if (ranks < 1 || ranks > static_cast<int>(kMaxRanks) || rank < 0 || rank >= ranks)
    return failed(kInvalidArgument, "1 to 16 ranks are supported");
  auto comm = std::make_shared<Communicator>();
  comm->name = std::move(name);
  comm->ranks = static_cast<std::uint32_t>(ranks);
  comm->rank = static_cast<std::uint32_t>(rank);
  cuCtxGetDevice(&comm->device);
  comm->shared = std::make_shared<Shared>(comm->name, comm->ranks);
  if (!comm->shared->ok()) return failed(kSystemError, "no shared memory for a communicator");
  *handle = new Comm(std::move(comm));
  return kSuccess;
}

std::string fresh_name() {
  std::random_device random;
  char text[64];
  std::snprintf(text, sizeof text, "%s%08x%08x", kPrefix, random(), random());
  return text;
}

Communicator& of(void* handle) {
  return **static_cast<Comm*>(handle);
}

}  // namespace
}  // namespace softnccl

using namespace softnccl;  // NOLINT: of this file

#pragma GCC visibility push(default)
extern "C" {

int ncclGetVersion(int* version) {
  *version = kVersion;
  return kSuccess;
}
const char* ncclGetErrorString(int code) {
  return code == kSuccess ? "no error" : "error of softcuda's NCCL";
}
const char* ncclGetLastError(void*) {
  return t_error.c_str();
}
int ncclGetUniqueId(Id* id) {
  *id = {};
  fresh_name().copy(id->text, sizeof id->text - 1);
  return kSuccess;
}

int ncclCommInitRankConfig(void** comm, int ranks, Id id, int rank, void*) {
  return make(comm, id.text, ranks, rank);
}
int ncclCommInitRank(void** comm, int ranks, Id id, int rank) {
  return make(comm, id.text, ranks, rank);
}
int ncclCommInitRankScalable(void** comm, int ranks, int rank, int, Id* ids, void*) {
  return make(comm, ids[0].text, ranks, rank);
}
int ncclCommInitAll(void** comms, int count, const int* devices) {
  const std::string name = fresh_name();
  for (int i = 0; i < count; ++i) {
    if (const int code = make(&comms[i], name, count, i); code != kSuccess) return code;
    of(comms[i]).device = devices ? devices[i] : i;
  }
  return kSuccess;
}
int ncclCommSplit(void* handle, int color, int key, void** made, void*) {
  Communicator& comm = of(handle);
  *made = nullptr;
  Header& header = comm.shared->header();
  header.members[comm.rank] = {color, key};
  if (!comm.shared->meet(header.host)) return failed(kInvalidUsage, "aborted");
  int ranks = 0, rank = 0;
  for (std::uint32_t r = 0; r < comm.ranks; ++r) {
    const Member& other = header.members[r];
    if (other.color != color) continue;
    ++ranks;
    rank += std::make_pair(other.key, r) < std::make_pair(key, comm.rank);
  }
  if (!comm.shared->meet(header.host)) return failed(kInvalidUsage, "aborted");
  const std::uint64_t number = comm.splits++;
  if (color < 0) return kSuccess;
  const std::string suffix = "." + std::to_string(number) + "." + std::to_string(color);
  return make(made, comm.name + suffix, ranks, rank);
}
int ncclCommFinalize(void*) {
  return kSuccess;
}
// Kernels that still run hold the communicator.
int ncclCommDestroy(void* comm) {
  delete static_cast<Comm*>(comm);
  return kSuccess;
}
int ncclCommAbort(void* comm) {
  of(comm).shared->header().aborted.store(1);
  return ncclCommDestroy(comm);
}
int ncclCommGetAsyncError(void*, int* code) {
  *code = kSuccess;
  return kSuccess;
}
int ncclCommCount(void* comm, int* count) {
  *count = static_cast<int>(of(comm).ranks);
  return kSuccess;
}
int ncclCommUserRank(void* comm, int* rank) {
  *rank = static_cast<int>(of(comm).rank);
  return kSuccess;
}
int ncclCommCuDevice(void* comm, int* device) {
  *device = of(comm).device;
  return kSuccess;
}
// Torch registers each segment of its allocator. NCCL guarantees nothing for managed memory.
int ncclCommRegister(void*, void* ptr, std::size_t, void** registered) {
  bool managed = false;
  if (!softcuda_is_device_pointer(ptr, &managed) || managed)
    return failed(kInvalidUsage, "only memory of cudaMalloc can be registered");
  *registered = ptr;
  return kSuccess;
}
int ncclCommDeregister(void*, void*) {
  return kSuccess;
}

int ncclGroupStart() {
  ++t_depth;
  return kSuccess;
}
int ncclGroupEnd() {
  if (t_depth == 0) return failed(kInvalidUsage, "there is no group");
  if (--t_depth > 0) return kSuccess;
  std::vector<Launch> launches = std::exchange(t_group, {});
  int code = kSuccess;
  for (Launch& each : launches)
    if (const int now = launch(each); now != kSuccess) code = now;
  return code;
}

int ncclAllReduce(const void* from, void* to, std::size_t count, int type, int op, void* comm,
                  void* stream) {
  return call(comm, stream, {Call::kAllReduce, from, to, count, type, op});
}
int ncclReduce(const void* from, void* to, std::size_t count, int type, int op, int root,
               void* comm, void* stream) {
  return call(comm, stream,
              {Call::kReduce, from, to, count, type, op, static_cast<std::uint32_t>(root)});
}
int ncclBroadcast(const void* from, void* to, std::size_t count, int type, int root, void* comm,
                  void* stream) {
  return call(comm, stream,
              {Call::kBroadcast, from, to, count, type, kSum, static_cast<std::uint32_t>(root)});
}
int ncclBcast(void* both, std::size_t count, int type, int root, void* comm, void* stream) {
  return ncclBroadcast(both, both, count, type, root, comm, stream);
}
int ncclAllGather(const void* from, void* to, std::size_t count, int type, void* comm,
                  void* stream) {
  return call(comm, stream, {Call::kAllGather, from, to, count, type});
}
int ncclReduceScatter(const void* from, void* to, std::size_t count, int type, int op, void* comm,
                      void* stream) {
  return call(comm, stream, {Call::kReduceScatter, from, to, count, type, op});
}
int ncclAlltoAll(const void* from, void* to, std::size_t count, int type, void* comm,
                 void* stream) {
  return call(comm, stream, {Call::kAllToAll, from, to, count, type});
}
int ncclSend(const void* from, std::size_t count, int type, int peer, void* comm, void* stream) {
  return call(comm, stream,
              {Call::kSend, from, nullptr, count, type, kSum, static_cast<std::uint32_t>(peer)});
}
int ncclRecv(void* to, std::size_t count, int type, int peer, void* comm, void* stream) {
  return call(comm, stream,
              {Call::kRecv, nullptr, to, count, type, kSum, static_cast<std::uint32_t>(peer)});
}
}
#pragma GCC visibility pop
