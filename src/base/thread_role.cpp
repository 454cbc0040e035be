#include "base/thread_role.h"

#include <atomic>

namespace umem {
namespace {

std::atomic<bool> g_any{false};
constinit thread_local bool t_runs_steps = false;

}  // namespace

void runs_steps() noexcept {
  if (t_runs_steps) return;
  t_runs_steps = true;
  g_any.store(true, std::memory_order_relaxed);
}

bool helps_only() noexcept {
  return !t_runs_steps && g_any.load(std::memory_order_relaxed);
}

}  // namespace umem
