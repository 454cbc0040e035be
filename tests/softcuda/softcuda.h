// Exports of the software libcuda in addition to the driver API: the controls of tests (through
// ctypes), and functions for the software libcudart that the driver API lacks.
#pragma once
#include <cstddef>
#include <cstdint>

#pragma GCC visibility push(default)
extern "C" {
struct SoftcudaRange {
  const void* begin;
  std::size_t bytes;
  int written;  // else it is read
};
struct SoftcudaKernel {
  const char* name;
  const SoftcudaRange* ranges;
  std::size_t count;
};

// The nth call from now (1 = next) of entry point `name` returns `error` and does nothing else. 0,
// or 1 for a null name, nth 0 or error 0. A misspelt name is never called: see softcuda_calls.
int softcuda_inject(const char* name, std::uint64_t nth, int error);
// The same, and afterwards every call that needs the device fails too, until the next reset.
int softcuda_lose(const char* name, std::uint64_t nth, int error);
// The same for a batch (cuMem…BatchAsync) whose first half is executed. 1 for other names too.
int softcuda_tear(const char* name, std::uint64_t nth, int error);
// Until the next reset its calls do nothing and report success: a program that forgot them.
int softcuda_skip(const char* name);
// Calls of an entry point by the program, so not by another entry point, since the start or the
// last reset; 0 for an unknown name.
std::uint64_t softcuda_calls(const char* name);
// Clears counters and planned failures, and brings a lost device back.
void softcuda_reset();
// Changes SOFTCUDA_SEED at run time, after all enqueued work has run; 0: work runs when enqueued.
void softcuda_seed(std::uint64_t seed);
// Enqueued operations that have not run.
std::uint64_t softcuda_pending();
// Page faults that the device took since the start.
std::uint64_t softcuda_faults();
// Deferred operations whose failure could not be returned by the call that enqueued them.
std::uint64_t softcuda_async_errors();
// The races found since the last call, a line each (driver/races.h). Until the thread's next call.
const char* softcuda_races();
// Prefetches that no order relates to an access to the same bytes, since the start.
std::uint64_t softcuda_slow_moves();
// Parts of memory whose accesses the race detector remembers.
std::size_t softcuda_race_segments();

// For libcudart: one counter and list of planned failures. `enter` counts a call and returns its
// plan: an error, -1 (succeed and do nothing), or 0. `leave` ends it in every case.
void* softcuda_probe(const char* name);
int softcuda_enter(void* probe);
void softcuda_leave();
// Work in stream order. `run(data)` runs once or, from a graph, any number of times; `drop(data)`
// once, when it can no longer run. Its reads and writes are for the race detector. Counts as
// cudaLaunchKernel, and may fail like it. With `waits` it runs on its own thread: it waits for
// other streams or processes.
int softcuda_enqueue(void* stream, const SoftcudaKernel* kernel, void (*run)(void*),
                     void (*drop)(void*), void* data, int waits);
int softcuda_device_count();
std::size_t softcuda_device_bytes();
// True for the device's address of device, managed or mapped memory. `managed`, which may be null:
// it is the host's too.
bool softcuda_is_device_pointer(const void* ptr, bool* managed);
// A free in stream order.
int softcuda_free_async(void* ptr, void* stream);
// Copies `height` rows of `width` bytes, in stream order.
int softcuda_copy_2d(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch,
                     std::size_t width, std::size_t height, void* stream);
// Printed once to stderr if SOFTCUDA_LOG is set.
void softcuda_log(const char* text);
// Nodes of a graph.
std::size_t softcuda_graph_nodes(void* graph);
// The effect of cudaGraphSetConditional in a kernel.
void softcuda_set_condition(std::uint64_t handle, unsigned value);
}
#pragma GCC visibility pop
