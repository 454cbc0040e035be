// The engine as it runs on a GPU, with its lane out on a thread, over the software device: random
// ops, releases, hints and changes of the budget, under lru and under plans that the program leaves
// and that name anything, while another thread logs its transfers. Built with each sanitizer by
// tests/native/test_sanitizers.py. Every range carries a pattern that is checked before each use.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "base/units.h"
#include "engine/engine.h"
#include "expect.h"
#include "policy/planned.h"
#include "policy/registry.h"
#include "soft/device.h"

namespace {

using namespace umem;  // NOLINT: a test program
using managed::RangeId;

constexpr std::size_t kBudget = 64 * MiB;
constexpr std::size_t kMaxBytes = 8 * MiB;

class Program {
 public:
  Program(driver::Driver& driver, driver::Place place, const char* policy)
      : place_(place),
        ranges_(driver.table),
        engine_(driver.table, ranges_, place, true, *policy::find(policy), [] {}) {
    EXPECT(engine_.open({kBudget, 0, kPageBytes, 0}).ok());
  }

  void run(unsigned seed, int rounds) {
    std::mt19937 random(seed);
    std::atomic<bool> running{true};
    std::atomic<std::size_t> logged{0};
    std::thread profiler([&] {
      while (running) logged += profile();
    });
    // On, where the profiler's thread had no core so far.
    for (int round = 0; round < rounds || (logged == 0 && round < 100 * rounds); ++round) {
      const unsigned action = random() % 16;
      if (action < 4 || live_.size() < 4) {
        allocate(random);
      } else if (action < 12) {
        use(random);
      } else if (action < 14) {
        release(pick(random));
      } else if (action == 14) {
        hint(random);
      } else {
        EXPECT(engine_.set_limits({(3 + random() % 2) * kBudget / 4, 0, kPageBytes, 0}).ok());
      }
      if (round % 16 == 15) end_step(random);
      EXPECT(engine_.ledger().resident_bytes() <= engine_.limits().budget_bytes);
      engine_.check_invariants();
    }
    running = false;
    profiler.join();
    EXPECT(logged > 0);
    while (!live_.empty()) release(live_.begin()->first);
    for (RangeId id : cached_) {
      engine_.forget(id);
      EXPECT(ranges_.destroy(id, place_).ok());
    }
    EXPECT(engine_.hook_errors() == 0);
    EXPECT(engine_.counters().evictions > 0);
    EXPECT(!engine_.follows_plans() || engine_.counters().plan_hits > 0);
    EXPECT(engine_.close().ok());
  }

 private:
  RangeId pick(std::mt19937& random) {
    auto found = live_.begin();
    std::advance(found, random() % live_.size());
    return found->first;
  }
  unsigned char* bytes_of(RangeId id) { return reinterpret_cast<unsigned char*>(ranges_[id].base); }
  cu::CUstream stream(std::mt19937& random) {
    return random() % 3 ? nullptr : cu::per_thread_stream();
  }
  void write(RangeId id, unsigned char value) {
    live_[id] = value;
    for (std::size_t at = 0; at < ranges_[id].bytes; at += kPageBytes) bytes_of(id)[at] = value;
  }
  void check(RangeId id) {
    for (std::size_t at = 0; at < ranges_[id].bytes; at += kPageBytes)
      EXPECT(bytes_of(id)[at] == live_[id]);
  }

  // How many transfers a moment of the program has.
  std::size_t profile() {
    EXPECT(engine_.start_log().ok());
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    std::size_t left_out = 0;
    const std::vector<engine::Transfer> taken = engine_.take_log(left_out);
    EXPECT(left_out == 0);
    for (const engine::Transfer& each : taken)
      EXPECT(each.bytes > 0 && each.begin_ns <= each.end_ns);
    return taken.size();
  }

  void allocate(std::mt19937& random) {
    RangeId id = managed::kNoRange;
    if (!cached_.empty() && random() % 4) {
      id = cached_.back();
      cached_.pop_back();
    } else {
      Result<RangeId> made = ranges_.create(kPageBytes + random() % kMaxBytes, place_);
      EXPECT(made.ok());
      id = made.value();
    }
    EXPECT(engine_
               .admit(id, ranges_[id].bytes, false, residency::Tag::kActivation,
                      residency::Family::kConv, stream(random))
               .ok());
    write(id, static_cast<unsigned char>(random()));
  }
  void use(std::mt19937& random) {
    std::vector<RangeId> ids{pick(random)};
    if (const RangeId second = pick(random); second != ids[0]) ids.push_back(second);
    const cu::CUstream on = stream(random);
    engine_.begin_use(ids.data(), ids.size(), on);
    for (RangeId id : ids) check(id);
    if (random() % 2) write(ids[0], static_cast<unsigned char>(random()));
    engine_.end_use(ids.data(), ids.size(), on);
    engine_.op_ended({ids.data(), ids.size(), ids.size()}, on);
  }
  // Occasionally a plan for the live blocks: its ops use random units, except the first few, which
  // are followed for as long as `use` happens to do so.
  void end_step(std::mt19937& random) {
    engine_.step_ended();
    policy::Planned* planned = engine_.planned();
    if (!planned || live_.size() < 2) return;
    policy::Plan plan;
    std::vector<RangeId> units;
    for (const auto& [id, value] : live_) {
      units.push_back(id);
      plan.bytes.push_back(static_cast<std::int64_t>(ranges_[id].bytes));
      plan.segment.push_back(engine_.ledger().at(id).segment ? 1 : 0);
    }
    const auto m = static_cast<unsigned>(units.size());
    plan.kind.assign(m, 0);
    plan.next_alias.assign(m, -1);
    plan.address.assign(m, 0);
    plan.n_ops = 4;
    plan.access_start = {0, 1, 2, 3, 4};
    for (unsigned op = 0; op < 4; ++op) {
      plan.access_tensor.push_back(random() % m);
      plan.op.push_back(random() % 2);
    }
    for (unsigned i = 0; i < m; ++i) {
      plan.evict_after.push_back(static_cast<int>(random() % 5) - 1);
      plan.evict_tensor.push_back(random() % m);
      plan.fetch_after.push_back(static_cast<int>(random() % 5) - 1);
      plan.fetch_by.push_back(4 + random() % 4);
      plan.fetch_tensor.push_back(random() % m);
      plan.copy_after.push_back(static_cast<int>(random() % 5) - 1);
      plan.copy_until.push_back(4 + random() % 5);
      plan.copy_tensor.push_back(random() % m);
    }
    for (unsigned i = 0; i < m; ++i)  // written all the same, now and then
      if (random() % 2) plan.read_mostly.push_back(i);
    plan.waits = {static_cast<int>(random() % 4)};
    plan.gated = random() % 2;
    plan.capacity = kBudget;
    plan.occupancy.assign(4, kBudget / 2);
    plan.order = random() % 3;
    plan.headroom = random() % 2 ? kBudget / 8 : 0;
    EXPECT(policy::check(plan).ok());
    const std::vector<std::int64_t> ops = plan.access_tensor;
    const policy::Plan idle = policy::without_moves(plan);
    const std::uint64_t number = planned->install(std::move(plan), units);
    if (random() % 4 == 0) EXPECT(planned->replace(number, idle));
    engine_.apply_pending(stream(random));
    for (std::int64_t tensor : ops) {  // as planned, now and then to the end
      if (random() % 8 == 0) break;
      use_one(units[static_cast<std::size_t>(tensor)], stream(random));
    }
  }
  void use_one(RangeId id, cu::CUstream on) {
    engine_.begin_use(&id, 1, on);
    check(id);
    engine_.end_use(&id, 1, on);
    engine_.op_ended({&id, 1, 1}, on);
  }
  void release(RangeId id) {
    check(id);
    engine_.retire(id);
    live_.erase(id);
    cached_.push_back(id);
  }
  void hint(std::mt19937& random) {
    const RangeId id = pick(random);
    if (random() % 4 == 0)
      EXPECT(engine_.hints().read_mostly(id, random() % 2 == 0).ok());
    else
      EXPECT((random() % 2 ? engine_.hints().evict(id) : engine_.hints().prefetch(id)).ok());
  }

  driver::Place place_;
  managed::RangeTable ranges_;
  engine::Engine engine_;
  std::map<RangeId, unsigned char> live_;
  std::vector<RangeId> cached_;
};

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 2000;
  driver::Driver driver;
  EXPECT(soft::open({kBudget * 2, soft::find_profile("a100-pcie4")}, driver).ok());
  driver::Place place;
  EXPECT(driver.table.cuDevicePrimaryCtxRetain(&place.context, 0) == cu::CUDA_SUCCESS);
  EXPECT(place.context != nullptr);
  for (const char* policy : {"lru", "planned"}) {
    Program program(driver, place, policy);
    program.run(7, rounds);
  }
  EXPECT(soft::close().ok());
  std::printf("%s: %d wrong\n", g_wrong ? "FAILED" : "ok", g_wrong.load());
  return g_wrong ? 1 : 0;
}
