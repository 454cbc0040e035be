#include <pybind11/numpy.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "bindings/bind.h"
#include "runtime/record.h"
#include "runtime/steps.h"
#include "trace/json_lines.h"

namespace py = pybind11;

namespace umem::bindings {
namespace {

trace::Sink sink_of(const std::string& name) {
  if (name == "plan") return trace::kPlan;
  if (name == "file") return trace::kFile;
  raise_if_error(Status(Code::kInvalidArgument, "no sink '" + name + "'; allowed: plan, file"));
  return trace::kSinks;
}

template <class Value, class Get>
py::array_t<Value> column(const std::vector<trace::Event>& events, Get get) {
  py::array_t<Value> result(static_cast<py::ssize_t>(events.size()));
  Value* to = result.mutable_data();
  for (const trace::Event& event : events) *to++ = static_cast<Value>(get(event));
  return result;
}

// Few strings for many events: each is created once.
template <class Get>
py::list strings(const std::vector<trace::Event>& events, Get get) {
  std::unordered_map<const char*, py::str> made;
  py::list result(events.size());
  for (std::size_t i = 0; i < events.size(); ++i) {
    const char* text = get(events[i]);
    result[i] = made.try_emplace(text, text).first->second;
  }
  return result;
}

py::dict take(const std::string& sink) {
  const trace::Sink from = sink_of(sink);
  const trace::Batch batch = unlocked([&] { return runtime::record_take(from, true); });
  using trace::Event;
  const std::vector<Event>& events = batch.events;
  py::dict result;
  result["kind"] =
      column<std::int64_t>(events, [](const Event& e) { return static_cast<int>(e.kind); });
  result["id"] = column<std::int64_t>(events, [](const Event& e) { return e.id; });
  result["bytes"] = column<std::int64_t>(events, [](const Event& e) { return e.bytes; });
  result["address"] = column<std::int64_t>(events, [](const Event& e) { return e.address; });
  result["device"] = column<std::int64_t>(events, [](const Event& e) { return e.device; });
  result["us"] = column<double>(events, [](const Event& e) { return e.us; });
  result["reads"] = column<std::int64_t>(events, [](const Event& e) { return e.reads; });
  result["writes"] = column<std::int64_t>(events, [](const Event& e) { return e.writes; });
  result["name"] = strings(events, [](const Event& e) { return e.name; });
  result["family"] = strings(events, [](const Event& e) { return e.family; });
  py::array_t<std::int64_t> accesses(static_cast<py::ssize_t>(batch.accesses.size()));
  std::copy(batch.accesses.begin(), batch.accesses.end(), accesses.mutable_data());
  result["accesses"] = accesses;
  const auto of_parts = [&](auto get) {
    py::array_t<std::int64_t> rows(static_cast<py::ssize_t>(batch.parts.size()));
    std::transform(batch.parts.begin(), batch.parts.end(), rows.mutable_data(), get);
    return rows;
  };
  using trace::Part;
  result["part_access"] = of_parts([](const Part& part) { return part.access; });
  result["begin"] = of_parts([](const Part& part) { return part.begin; });
  result["end"] = of_parts([](const Part& part) { return part.end; });
  result["before"] = batch.before;
  result["dropped"] = batch.dropped;
  return result;
}

// Touched with the GIL held only.
std::uint64_t g_next_op = 0;

py::tuple lines(const std::string& sink, bool all) {
  const trace::Sink from = sink_of(sink);
  std::uint64_t next_op = g_next_op, dropped = 0;
  std::string text;
  {
    const Unlocked unlocked;
    const trace::Batch batch = runtime::record_take(from, all);
    text = trace::to_json_lines(batch, next_op);
    dropped = batch.dropped;
  }
  g_next_op = next_op;
  return py::make_tuple(py::bytes(text), dropped);
}

void start(const std::string& sink) {
  const trace::Sink to = sink_of(sink);
  if (to == trace::kFile) g_next_op = 0;
  run([to] { return runtime::record_start(to); });
}

// Never destroyed: steps may end while the interpreter shuts down.
py::object* g_listener = nullptr;
pid_t g_listener_process = 0;

// Called on the thread that ends a step, with or without the GIL. A forked child has its own steps.
void on_step() {
  if (interpreter_ended() || getpid() != g_listener_process) return;
  const Locked locked;
  if (!g_listener || !*g_listener) return;
  const py::object listener = *g_listener;  // it may replace itself
  py::error_scope outside;                  // an exception may be on its way through the step
  try {
    listener();
  } catch (py::error_already_set& error) {
    if (!raise_later(error)) error.discard_as_unraisable("umem's end of a step");
  }
}

void set_step_listener(const py::object& listener) {
  runtime::set_step_listener(nullptr);
  if (!g_listener) g_listener = new py::object;
  *g_listener = listener.is_none() ? py::object() : listener;
  g_listener_process = getpid();
  if (!listener.is_none()) runtime::set_step_listener(&on_step);
}

}  // namespace

void bind_trace(py::module_& module) {
  module.def("record_start", &start, py::arg("sink"));
  module.def("record_stop", [](const std::string& sink) {
    const trace::Sink of = sink_of(sink);
    const Unlocked unlocked;
    runtime::record_stop(of);
  });
  module.def("record_take", &take, py::arg("sink"));
  module.def("record_lines", &lines, py::arg("sink"), py::arg("final"));
  module.def("record_waiting", [](const std::string& sink) {
    const trace::Sink of = sink_of(sink);
    const Unlocked unlocked;
    return runtime::record_waiting(of);
  });
  module.def("set_step_listener", &set_step_listener, py::arg("listener"));
}

}  // namespace umem::bindings
