// Two devices, each with its own lock. A release while another thread has the device's lock returns
// immediately, and the block is free as soon as that lock is released; another device is not
// affected. And threads that use the blocks of both and free each other's. Built with each
// sanitizer by tests/native/test_sanitizers.py. Under the policy `none`, since the software device
// moves bytes for its first ordinal only.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "base/units.h"
#include "expect.h"
#include "runtime/accounts.h"
#include "runtime/alloc.h"
#include "runtime/ops.h"
#include "runtime/reports.h"
#include "runtime/runtime.h"
#include "runtime/steps.h"

namespace {

using namespace umem;  // NOLINT: a test program

constexpr int kNoSuchDevice = 1000;

std::atomic<int> g_stage{0};
std::atomic<bool> g_hold{false};

bool reached(int stage) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (g_stage < stage && std::chrono::steady_clock::now() < end) std::this_thread::yield();
  return g_stage >= stage;
}

// Called with the lock of device 0: keeps it until the other thread has released.
void on_event(const arena::Event& event) {
  if (event.kind != arena::EventKind::kAlloc || event.device != 0 || !g_hold.exchange(false))
    return;
  g_stage = 1;
  if (!reached(2)) g_stage = -1;
}

void* allocate(std::size_t bytes, int device) {
  runtime::Failure failure;
  void* ptr = runtime::allocate(bytes, device, 0, &failure);
  EXPECT(ptr != nullptr);
  return ptr;
}

void release_beside_the_lock() {
  void* const large = allocate(4 * MiB, 0);
  void* const small = allocate(1000, 0);
  void* const elsewhere = allocate(4 * MiB, 1);
  runtime::set_listener(&on_event);
  g_hold = true;
  void* held = nullptr;
  std::thread holder([&] { held = allocate(4 * MiB, 0); });
  EXPECT(reached(1));
  // Device 0 is locked from here on.
  EXPECT(runtime::release(large));
  EXPECT(runtime::release(small));
  EXPECT(runtime::arena_stats(1).allocated_bytes[arena::kAll].current == 4 * MiB);
  arena::ArenaStats stats;
  EXPECT(!runtime::try_arena_stats(0, &stats));
  runtime::step();
  EXPECT(runtime::release(allocate(4 * MiB, 1)));
  EXPECT(g_stage == 1);  // all of it without the lock
  g_stage = 2;
  holder.join();
  runtime::set_listener(nullptr);
  EXPECT(runtime::try_arena_stats(0, &stats));
  EXPECT(stats.allocated_bytes[arena::kAll].current == 4 * MiB);
  EXPECT(runtime::stats().frees == 3);
  EXPECT(!runtime::release(small));
  EXPECT(runtime::release(held));
  EXPECT(runtime::release(elsewhere));
  EXPECT(runtime::stats().live_bytes == 0);
}

// Blocks that any thread may take, use and free.
std::mutex g_mutex;
std::vector<void*> g_blocks;

std::vector<void*> take_some() {
  const std::lock_guard guard(g_mutex);
  const std::size_t count = std::min<std::size_t>(4, g_blocks.size());
  std::vector<void*> taken(g_blocks.end() - static_cast<std::ptrdiff_t>(count), g_blocks.end());
  g_blocks.resize(g_blocks.size() - count);
  return taken;
}

void work(unsigned seed, int rounds) {
  std::mt19937 random(seed);
  for (int round = 0; round < rounds; ++round) {
    std::vector<void*> mine = take_some();
    runtime::Op op;
    op.device = static_cast<int>(seed % 2);
    std::vector<runtime::Input> inputs;
    for (void* block : mine) inputs.push_back({block, 0, random() % 2});
    runtime::op_begin(&op, inputs.data(), inputs.size());
    for (int device = 0; device < 2; ++device)
      mine.push_back(
          allocate(random() % 2 ? 1 + random() % 5000 : 1 + random() % (3 * MiB), device));
    runtime::op_end(&op, residency::Tag::kActivation);
    if (round % 8 == 0) runtime::step();
    while (mine.size() > 1) {
      if (random() % 2) runtime::record_stream(mine.back(), 8);
      EXPECT(runtime::release(mine.back()));
      mine.pop_back();
    }
    const std::lock_guard guard(g_mutex);
    g_blocks.insert(g_blocks.end(), mine.begin(), mine.end());
  }
}

void use_both(int rounds) {
  std::vector<std::thread> workers;
  for (unsigned i = 0; i < 4; ++i) workers.emplace_back(work, 200 + i, rounds);
  for (int round = 0; round < rounds / 8; ++round) {
    EXPECT(runtime::trim().ok());
    EXPECT(runtime::stats().ooms == 0);
  }
  for (std::thread& worker : workers) worker.join();
  for (void* block : g_blocks) EXPECT(runtime::release(block));
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  options.budget_bytes = 128 * MiB;
  options.floor_bytes = 32 * MiB;
  options.policy = "none";
  EXPECT(runtime::start(options).ok());
  release_beside_the_lock();
  use_both(argc > 1 ? std::atoi(argv[1]) : 2000);
  const runtime::Stats stats = runtime::stats();
  EXPECT(stats.live_bytes == 0 && stats.allocs == stats.frees);
  runtime::Failure failure;
  EXPECT(runtime::allocate(1, kNoSuchDevice, 0, &failure) == nullptr && failure.code != 0);
  EXPECT(runtime::stop().ok());
  std::printf("%s\n", g_wrong ? "FAILED" : "ok");
  return g_wrong ? 1 : 0;
}
