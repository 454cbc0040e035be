// Threads that allocate, use and free blocks, while others record them, choose evictions, change
// the policy and end steps. Built with each sanitizer by tests/native/test_sanitizers.py. Each
// recording must be consistent.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>
#include <unordered_set>
#include <vector>

#include "base/units.h"
#include "expect.h"
#include "runtime/alloc.h"
#include "runtime/ops.h"
#include "runtime/plans.h"
#include "runtime/record.h"
#include "runtime/reports.h"
#include "runtime/runtime.h"
#include "runtime/steps.h"
#include "runtime/victim_callback.h"
#include "trace/json_lines.h"

namespace {

using namespace umem;  // NOLINT: a test program
using trace::EventKind;

std::atomic<bool> g_done{false};
std::atomic<int> g_asked{0}, g_steps{0};

void work(unsigned seed, int rounds) {
  std::mt19937 random(seed);
  std::vector<void*> live;
  for (int round = 0; round < rounds; ++round) {
    runtime::Op outer, inner;
    outer.name = "outer";
    inner.name = "inner";
    std::vector<runtime::Input> inputs;
    for (void* block : live) inputs.push_back({block});
    runtime::op_begin(&outer, inputs.data(), inputs.size() / 2);
    runtime::op_begin(&inner, inputs.data(), inputs.size());
    const std::size_t bytes = random() % 2 ? 1 + random() % 5000 : 1 + random() % (8 * MiB);
    void* const made = runtime::allocate(bytes, 0, 0, nullptr);
    EXPECT(made != nullptr);
    live.push_back(made);
    runtime::op_end(&inner, residency::Tag::kActivation);
    if (live.size() > 6) {
      std::swap(live[random() % live.size()], live.back());
      EXPECT(runtime::release(live.back()));
      live.pop_back();
    }
    runtime::op_end(&outer, residency::Tag::kTemp);
    if (round % 8 == 0) runtime::step();
  }
  for (void* block : live) EXPECT(runtime::release(block));
}

// Ids are new when they are allocated, and alive when they are used and freed.
void check(const trace::Batch& batch, std::unordered_set<std::uint32_t>& live) {
  for (const trace::Event& event : batch.events) {
    if (event.kind == EventKind::kAlloc) EXPECT(live.insert(event.id).second);
    if (event.kind == EventKind::kFree) EXPECT(live.erase(event.id) == 1);
    if (event.kind != EventKind::kOp) continue;
    EXPECT(event.us >= 0 && event.reads + event.writes > 0);
    for (std::uint64_t at = event.first; at < event.first + event.reads + event.writes; ++at)
      EXPECT(at < batch.accesses.size() && live.count(batch.accesses[at]) == 1);
  }
  EXPECT(batch.dropped == 0);
  std::uint64_t next_op = 0;
  EXPECT(trace::to_json_lines(batch, next_op).empty() == batch.events.empty());
}

std::size_t record(trace::Sink sink, unsigned seed) {
  std::mt19937 random(seed);
  std::size_t events = 0;
  while (!g_done) {
    EXPECT(runtime::record_start(sink).ok());
    std::unordered_set<std::uint32_t> live;
    for (unsigned takes = random() % 5; takes > 0; --takes) {
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));
      const trace::Batch batch = runtime::record_take(sink, random() % 2 == 0);
      check(batch, live);
      events += batch.events.size();
    }
    runtime::record_stop(sink);
  }
  return events;
}

void advise(const runtime::Shortage& shortage, std::vector<std::uint32_t>& ids) {
  ++g_asked;
  void* const block = runtime::allocate(3 * MiB, 0, 0, nullptr);  // no advisor is called here
  runtime::release(block);
  for (const runtime::Candidate& unit : shortage.candidates) ids.push_back(unit.id);
  ids.push_back(1u << 30);
}

void change() {
  const char* const policies[] = {"planned", "lru", "planned", "none"};
  for (unsigned round = 0; !g_done; ++round) {
    EXPECT(runtime::set_policy(policies[round % 4]).ok());
    runtime::set_victim_callback(round % 3 ? &advise : nullptr);
    if (round % 2 == 0) {
      policy::Plan plan;
      plan.n_ops = 1;
      plan.bytes = {static_cast<std::int64_t>(2 * MiB)};
      plan.kind = {0};
      plan.next_alias = {-1};
      plan.address = plan.segment = plan.op = {0};
      plan.access_start = {0, 1};
      plan.access_tensor = {0};
      EXPECT(runtime::install_plan(std::move(plan)).ok());
      EXPECT(runtime::plan_status().value().plans.size() == 1);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 1000;
  Options options;
  options.device = "soft";
  options.budget_bytes = options.floor_bytes = 16 * MiB;
  EXPECT(runtime::start(options).ok());
  runtime::set_step_listener([] { ++g_steps; });
  std::size_t recorded[2] = {};
  std::thread recorders[] = {std::thread([&] { recorded[0] = record(trace::kPlan, 1); }),
                             std::thread([&] { recorded[1] = record(trace::kFile, 2); }),
                             std::thread(change)};
  std::vector<std::thread> workers;
  for (unsigned seed = 0; seed < 3; ++seed) workers.emplace_back(work, seed, rounds);
  for (std::thread& worker : workers) worker.join();
  g_done = true;
  for (std::thread& thread : recorders) thread.join();
  runtime::set_victim_callback(nullptr);
  EXPECT(recorded[0] > 0 && recorded[1] > 0 && g_asked > 0 && g_steps > 0);
  EXPECT(runtime::stats().live_bytes == 0);
  EXPECT(runtime::stop().ok());
  std::printf("%zu and %zu events, asked %d times\n", recorded[0], recorded[1], g_asked.load());
  return g_wrong == 0 ? 0 : 1;
}
