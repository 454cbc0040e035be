// Threads that allocate, use, hint at and free blocks against one runtime, while one changes the
// budget, the policy, the layout of large blocks and their pieces, and one puts all to sleep and
// wakes it. Ops use some blocks in part, and all threads parts of one block. Built with each
// sanitizer by tests/native/test_sanitizers.py. Every block carries a pattern that is checked
// before each use and before its release.
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <thread>
#include <vector>

#include "base/units.h"
#include "policy/plan.h"
#include "runtime/alloc.h"
#include "runtime/hints.h"
#include "runtime/layouts.h"
#include "runtime/ops.h"
#include "runtime/pins.h"
#include "runtime/plans.h"
#include "runtime/reports.h"
#include "runtime/runtime.h"
#include "runtime/sleep.h"
#include "runtime/steps.h"

namespace {

using namespace umem;  // NOLINT: a test program

std::atomic<int> g_wrong{0};

struct Block {
  unsigned char* ptr;
  std::size_t bytes;
  unsigned char value;
};

// The bytes that carry the pattern: both ends, and one in each page between.
template <class Visit>
void each_probe(const Block& block, Visit visit) {
  for (std::size_t at = 0; at < block.bytes; at += kPageBytes) visit(block.ptr[at]);
  visit(block.ptr[block.bytes - 1]);
}

void check(const Block& block) {
  each_probe(block, [&](unsigned char& byte) {
    if (byte != block.value) ++g_wrong;
  });
}

void write(const Block& block) {
  each_probe(block, [&](unsigned char& byte) { byte = block.value; });
}

// A thread's part of the block that all threads share.
unsigned char* g_flat = nullptr;
constexpr std::size_t kFlatBytes = 8 * MiB;

std::array<unsigned char, 4> g_values{1, 2, 3, 4};  // each is its thread's, which changes it

Block part_of(unsigned thread) {
  return {g_flat + thread * kPageBytes, kPageBytes, g_values[thread]};
}

// One hint on the thread's own block, between ops. A refusal is fine: it is pinned, memory is full,
// or another thread's op uses a page that the block shares.
void hint(std::mt19937& random, const Block& block, std::vector<std::uint64_t>& holds) {
  const managed::MemSpan span{reinterpret_cast<std::uintptr_t>(block.ptr), block.bytes};
  Status status;
  switch (random() % 6) {
    case 0:
      status = runtime::prefetch({span});
      break;
    case 1:
      status = runtime::evict({span});
      break;
    case 2:
      status = runtime::read_mostly({span}, random() % 2 == 0);
      break;
    case 3: {
      Result<std::size_t> gone = runtime::discard(span, 0);
      if (gone.ok()) write(block);  // its whole pages are undefined now
      break;
    }
    case 4: {
      const auto kind = random() % 2 ? runtime::PinKind::kPin : runtime::PinKind::kExempt;
      Result<std::uint64_t> held = runtime::add_pins({span}, kind, {"a block"});
      if (held.ok()) holds.push_back(held.value());
      break;
    }
    default: {
      Result<runtime::Placement> at = runtime::placement_of(span);
      if (!at.ok() || at.value().bytes != block.bytes) ++g_wrong;
    }
  }
  while (holds.size() > 2) {  // some end with their block, before
    runtime::remove_pins(holds.front());
    holds.erase(holds.begin());
  }
}

std::atomic<std::uint64_t> g_slept{0};

// All of it, or some tags; a refusal is fine: an op is running.
void sleep_and_wake(const std::atomic<bool>& done) {
  std::mt19937 random(11);
  while (!done) {
    const std::uint32_t tags = random() % 2 ? ~0U : 1U << static_cast<int>(random() % 9);
    runtime::Slept slept;
    if (runtime::sleep(tags, false, &slept).ok()) g_slept += slept.bytes;
    std::this_thread::sleep_for(std::chrono::milliseconds(random() % 3));
    std::size_t back = 0;
    const Status woken = runtime::wake(~0U, random() % 2 ? slept.number : 0, &back);
    // Pins may find no memory while ops run; the ops fetch the blocks.
    if (!woken.ok() && woken.code() != Code::kOutOfDeviceMemory) ++g_wrong;
    std::this_thread::sleep_for(std::chrono::milliseconds(random() % 5));
  }
}

void work(unsigned seed, int rounds) {
  std::mt19937 random(seed);
  std::vector<Block> live;
  std::vector<std::uint64_t> holds;
  for (int round = 0; round < rounds; ++round) {
    const std::size_t bytes = random() % 2 ? 1 + random() % 5000 : 1 + random() % (8 * MiB);
    runtime::Op op;
    std::vector<runtime::Input> inputs;
    for (const Block& block : live)
      if (random() % 5 == 0) {
        const std::size_t offset = random() % block.bytes;
        inputs.push_back({block.ptr, offset, random() % 2 ? (block.bytes - offset + 1) / 2 : 0});
      }
    Block part = part_of(seed % 4);
    inputs.push_back({g_flat, seed % 4 * kPageBytes, kPageBytes});
    runtime::op_begin(&op, inputs.data(), inputs.size());
    runtime::Failure failure;
    void* ptr = runtime::allocate(bytes, 0, 0, &failure);
    if (!ptr) {
      std::fprintf(stderr, "allocation failed: %s\n", failure.message);
      ++g_wrong;
    } else {
      live.push_back(
          {static_cast<unsigned char*>(ptr), bytes, static_cast<unsigned char>(random())});
      write(live.back());
    }
    for (const Block& block : live) check(block);
    check(part);
    if (random() % 4 == 0) {
      part.value = g_values[seed % 4] = static_cast<unsigned char>(random());
      write(part);
    }
    runtime::op_end(&op, residency::Tag::kActivation);
    if (random() % 4 == 0) runtime::step();  // a layout serves again
    if (!live.empty() && random() % 3 == 0) hint(random, live[random() % live.size()], holds);
    if (live.size() > 10) {
      std::swap(live[random() % live.size()], live.back());
      check(live.back());
      if (!runtime::release(live.back().ptr)) ++g_wrong;
      live.pop_back();
    }
  }
  for (const Block& block : live) {
    check(block);
    if (!runtime::release(block.ptr)) ++g_wrong;
  }
}

// Any layout will do: a block whose place is taken is put elsewhere.
std::uint64_t change_layout(std::mt19937& random) {
  const std::uint64_t hits = runtime::layout_status().hits;
  if (random() % 8 == 0) runtime::clear_layout();
  std::vector<arena::LayoutEntry> entries;
  for (unsigned i = 0; i < 16; ++i) {
    const std::size_t pages = 2 + random() % 3;  // as most blocks have
    const std::size_t offset = random() % 8 ? random() % 9 * kPageBytes : arena::kNoPlace;
    entries.push_back({pages * kPageBytes, offset});
  }
  const Status installed = runtime::install_layout(entries, 12 * kPageBytes);
  return installed.ok() ? hits : 0;  // a refusal is fine: blocks of the last one are alive
}

// A plan of a step that uses the block of all threads, which cuts it.
void cut_by_plan() {
  policy::Plan plan;
  plan.n_ops = 1;
  plan.bytes = {static_cast<std::int64_t>(kFlatBytes)};
  plan.kind = {0};
  plan.next_alias = {-1};
  plan.address = {reinterpret_cast<std::int64_t>(g_flat)};
  plan.segment = {0};
  plan.access_start = {0, 1};
  plan.access_tensor = {0};
  plan.op = {policy::number_of("")};
  plan.cut = plan.bytes;
  const Result<std::uint64_t> installed = runtime::install_plan(std::move(plan));
  if (!installed.ok() && installed.code() != Code::kBadState) ++g_wrong;
}

// While threads have blocks a layout may be refused, or fit nothing: this one cannot.
bool layout_serves() {
  const std::size_t bytes = 2 * kPageBytes;
  if (!runtime::install_layout({{bytes, 0}, {bytes, bytes}}, 2 * bytes).ok()) return false;
  runtime::step();
  const std::uint64_t before = runtime::layout_status().hits;
  for (unsigned char value = 1; value <= 2; ++value) {
    runtime::Failure failure;
    void* ptr = runtime::allocate(bytes, 0, 0, &failure);
    if (!ptr) return false;
    const Block block{static_cast<unsigned char*>(ptr), bytes, value};
    write(block);
    check(block);
    if (!runtime::release(ptr)) return false;
  }
  return runtime::layout_status().hits > before;
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 300;
  Options options;
  options.budget_bytes = 40 * MiB;
  options.floor_bytes = 32 * MiB;
  options.min_swap_bytes = kPageBytes;
  if (Status status = runtime::start(options); !status.ok()) {
    std::fprintf(stderr, "%s\n", status.message().c_str());
    return 2;
  }
  runtime::Failure no_block;
  g_flat = static_cast<unsigned char*>(runtime::allocate(kFlatBytes, 0, 0, &no_block));
  if (!g_flat) return 2;
  for (unsigned thread = 0; thread < 4; ++thread) write(part_of(thread));
  std::atomic<bool> done{false};
  std::uint64_t layout_hits = 0;
  std::thread changer([&] {
    const char* policies[] = {"planned", "conv_lru", "lru", "none"};
    std::mt19937 random(7);
    for (unsigned i = 0; !done; ++i) {
      // A refusal is fine here: running ops may use more than the new budget.
      Status changed = runtime::set_budget((32 + i % 5 * 8) * MiB, 0);
      changed = runtime::set_policy(policies[i / 4 % 4]);
      if (i % 4 == 0) layout_hits += change_layout(random);
      if (i % 8 == 2) cut_by_plan();
      if (runtime::stats().resident_bytes > 64 * MiB) ++g_wrong;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  });
  std::vector<std::thread> workers;
  std::thread sleeper(sleep_and_wake, std::cref(done));
  for (unsigned i = 0; i < 3; ++i) workers.emplace_back(work, 100 + i, rounds);
  for (std::thread& worker : workers) worker.join();
  done = true;
  changer.join();
  sleeper.join();
  if (g_slept == 0) ++g_wrong;
  layout_hits += runtime::layout_status().hits;
  if (!layout_serves()) ++g_wrong;
  for (unsigned thread = 0; thread < 4; ++thread) check(part_of(thread));
  if (runtime::cut_sizes().empty()) ++g_wrong;
  if (!runtime::release(g_flat)) ++g_wrong;
  const runtime::Stats stats = runtime::stats();
  if (stats.live_bytes != 0 || stats.allocs != stats.frees) ++g_wrong;
  if (Status status = runtime::stop(); !status.ok()) ++g_wrong;
  std::printf(
      "%s: %d wrong, %llu evictions, %llu faults, %llu blocks placed, %llu MiB slept\n",
      g_wrong ? "FAILED" : "ok", g_wrong.load(), static_cast<unsigned long long>(stats.evictions),
      static_cast<unsigned long long>(stats.faults), static_cast<unsigned long long>(layout_hits),
      static_cast<unsigned long long>(g_slept / MiB));
  return g_wrong ? 1 : 0;
}
