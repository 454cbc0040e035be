// The driver table itself, entry by entry, for the contract suite, for fault injection and for
// measurements. Calls return (CUresult, values...) and raise nothing.
#include <pybind11/stl.h>

#include <chrono>
#include <cstring>
#include <tuple>

#include "base/units.h"
#include "bindings/bind.h"
#include "core_testing/testing.h"
#include "driver/loader.h"
#include "driver/table.h"
#include "runtime/runtime.h"
#include "soft/device.h"

namespace py = pybind11;

namespace umem::bindings {
namespace {

using namespace umem::cu;  // NOLINT: the driver's own vocabulary
using driver::Entry;

using Handle = std::uintptr_t;
using Location = std::pair<int, int>;  // type, id

// A driver opened separately, or else the runtime's.
driver::Driver g_opened;
bool g_is_open = false;

driver::Driver& current() {
  if (g_is_open) return g_opened;
  driver::Driver* running = runtime::current_driver();
  if (!running)
    raise_if_error(Status(Code::kBadState, "no driver is open: call open_soft or open_cuda first"));
  return *running;
}
driver::Table& table() {
  return current().table;
}

// A real driver may block in a call (a prefetch to the host waits for its copy): other Python
// threads run meanwhile.
template <class Call>
int call_entries(const Call& call) {
  driver::Table& entries = table();  // with the lock still held: it may raise
  const Unlocked release;
  return static_cast<int>(call(entries));
}

CUstream stream_of(Handle handle) {
  return reinterpret_cast<CUstream>(handle);
}
CUevent event_of(Handle handle) {
  return reinterpret_cast<CUevent>(handle);
}
CUmemLocation location_of(const Location& location) {
  return {static_cast<CUmemLocationType>(location.first), location.second};
}

void check_none_is_open() {
  if (g_is_open)
    raise_if_error(Status(Code::kBadState, "a driver is open already: close it first"));
}

void open_soft(std::size_t device_bytes, const std::string& profile, bool backed,
               const std::string& disk, std::size_t staging_bytes) {
  check_none_is_open();
  soft::Options options{device_bytes, soft::find_profile(profile), backed};
  options.disk = disk;
  options.staging_bytes = staging_bytes;
  raise_if_error(soft::open(options, g_opened));
  g_is_open = true;
}

// libcuda.so.1. The caller makes a context current, which torch does at its first CUDA call.
void open_cuda() {
  check_none_is_open();
  raise_if_error(driver::open_cuda(g_opened));
  g_is_open = true;
}

void close() {
  if (!g_is_open)
    raise_if_error(Status(Code::kBadState, "no driver was opened by open_soft or open_cuda"));
  if (g_opened.kind == driver::Kind::kSoft) raise_if_error(soft::close());
  g_is_open = false;
}

py::dict telemetry() {
  const driver::Telemetry t = current().telemetry ? current().telemetry() : driver::Telemetry{};
  py::dict result;
  result["faults"] = t.faults;
  result["bytes_in"] = t.bytes_in;
  result["bytes_out"] = t.bytes_out;
  result["fault_bytes_in"] = t.fault_bytes_in;
  result["pressure_bytes_out"] = t.pressure_bytes_out;
  result["resident_bytes"] = t.resident_bytes;
  result["peak_resident_bytes"] = t.peak_resident_bytes;
  result["host_bytes"] = t.host_bytes;
  result["stall_us"] = t.stall_us;
  result["disk_bytes_in"] = t.disk.bytes_in;
  result["disk_bytes_out"] = t.disk.bytes_out;
  result["disk_file_bytes"] = t.disk.file_bytes;
  return result;
}

Entry entry_of(const std::string& name) {
  const Entry entry = driver::find_entry(name);
  if (entry == Entry::kCount)
    raise_if_error(Status(Code::kInvalidArgument, "umem calls no entry point named " + name));
  return entry;
}

void bind_control(py::module_& m) {
  m.def("open_soft", &open_soft, py::arg("device_bytes"), py::arg("profile"),
        py::arg("backed") = true, py::arg("disk") = "", py::arg("staging_bytes") = 0);
  m.def("open_cuda", &open_cuda);
  m.def("close", &close);
  m.def("resize", [](std::size_t bytes) {
    if (!current().resize)
      raise_if_error(Status(Code::kNotSupported, "the size of a real device is fixed"));
    raise_if_error(current().resize(bytes));
  });
  m.def("telemetry", &telemetry);
  m.def("place_in_file",
        [](std::uintptr_t ptr, std::size_t bytes, const std::string& path, std::uint64_t offset) {
          raise_if_error(current().place_in_file(ptr, bytes, path, offset));
        });
  m.def("entries", [] {
    std::vector<std::pair<std::string, int>> result;
    for (int i = 0; i < static_cast<int>(Entry::kCount); ++i) {
      const driver::Symbol& symbol = driver::symbol(static_cast<Entry>(i));
      result.emplace_back(symbol.name, symbol.version);
    }
    return result;
  });
  m.def("instrument", [] { driver::instrument(table()); });
  m.def(
      "inject",
      [](const std::string& name, std::uint64_t nth, int error, bool torn) {
        driver::inject(entry_of(name), nth, static_cast<CUresult>(error), torn);
      },
      py::arg("name"), py::arg("nth"), py::arg("error"), py::arg("torn") = false);
  m.def("clear_injections", &driver::clear_injections);
  m.def("calls", [](const std::string& name) { return driver::calls(entry_of(name)); });
  m.def("set_poison", &soft::set_poison);
  m.def("launch", [](Handle stream, double us) { soft::launch(stream_of(stream), us); });
  m.def("now_us", &soft::now_us);
  m.def("access", [](std::uintptr_t ptr, std::size_t bytes, bool write) {
    const soft::Access one{ptr, bytes, write};
    raise_if_error(soft::access(&one, 1));
  });
  m.def("page_states", [](std::uintptr_t ptr, std::size_t bytes) {
    Result<std::vector<soft::PageState>> states = soft::page_states(ptr, bytes);
    raise_if_error(states.take_status());
    static constexpr const char* kNames[] = {"void", "device", "host", "duplicate", "discarded"};
    std::vector<std::string> result;
    for (soft::PageState state : states.value())
      result.emplace_back(kNames[static_cast<std::size_t>(state)]);
    return result;
  });
}

// A kernel's view of memory: plain loads and stores, which fault like one.
void bind_access(py::module_& m) {
  m.def("load", [](std::uintptr_t ptr, std::size_t bytes) {
    std::string copy(bytes, '\0');
    std::memcpy(copy.data(), reinterpret_cast<const void*>(ptr), bytes);
    return py::bytes(copy);
  });
  m.def("store", [](std::uintptr_t ptr, const py::bytes& data) {
    const auto text = static_cast<std::string_view>(data);
    std::memcpy(reinterpret_cast<void*>(ptr), text.data(), text.size());
  });
  // Writes one byte a page; microseconds of real time in all.
  m.def("touch", [](std::uintptr_t ptr, std::size_t bytes) {
    const auto start = std::chrono::steady_clock::now();
    for (std::size_t at = 0; at < bytes; at += kPageBytes)
      *reinterpret_cast<volatile char*>(ptr + at) = 1;
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
    return took.count();
  });
}

void bind_memory_calls(py::module_& m) {
  m.def("cuMemAllocManaged", [](std::size_t bytes, unsigned flags) {
    CUdeviceptr ptr = 0;
    const int result = call_entries(
        [&](driver::Table& entries) { return entries.cuMemAllocManaged(&ptr, bytes, flags); });
    return std::make_tuple(result, ptr);
  });
  m.def("cuMemAlloc", [](std::size_t bytes) {
    CUdeviceptr ptr = 0;
    const CUresult result = table().cuMemAlloc(&ptr, bytes);
    return std::make_tuple(static_cast<int>(result), ptr);
  });
  m.def("cuMemFree", [](CUdeviceptr ptr) {
    return call_entries([&](driver::Table& entries) { return entries.cuMemFree(ptr); });
  });
  m.def("cuMemGetInfo", [] {
    std::size_t free_bytes = 0, total_bytes = 0;
    const CUresult result = table().cuMemGetInfo(&free_bytes, &total_bytes);
    return std::make_tuple(static_cast<int>(result), free_bytes, total_bytes);
  });
  m.def("cuMemPrefetchAsync", [](CUdeviceptr ptr, std::size_t bytes, const Location& location,
                                 unsigned flags, Handle stream) {
    return call_entries([&](driver::Table& entries) {
      return entries.cuMemPrefetchAsync(ptr, bytes, location_of(location), flags,
                                        stream_of(stream));
    });
  });
  m.def("cuMemAdvise",
        [](CUdeviceptr ptr, std::size_t bytes, int advice, const Location& location) {
          return call_entries([&](driver::Table& entries) {
            return entries.cuMemAdvise(ptr, bytes, static_cast<CUmem_advise>(advice),
                                       location_of(location));
          });
        });
  m.def("cuMemcpyAsync", [](CUdeviceptr to, CUdeviceptr from, std::size_t bytes, Handle stream) {
    return static_cast<int>(table().cuMemcpyAsync(to, from, bytes, stream_of(stream)));
  });
  m.def("cuMemsetD8Async",
        [](CUdeviceptr to, unsigned char value, std::size_t bytes, Handle stream) {
          return static_cast<int>(table().cuMemsetD8Async(to, value, bytes, stream_of(stream)));
        });
  m.def("cuMemRangeGetAttribute", [](int attribute, CUdeviceptr ptr, std::size_t bytes, int count) {
    std::vector<int> values(static_cast<std::size_t>(count), -99);
    const CUresult result =
        table().cuMemRangeGetAttribute(values.data(), values.size() * sizeof(int),
                                       static_cast<CUmem_range_attribute>(attribute), ptr, bytes);
    return std::make_tuple(static_cast<int>(result), values);
  });
  m.def("cuMemRangeGetAttributes",
        [](std::vector<int> attributes, CUdeviceptr ptr, std::size_t bytes) {
          std::vector<int> values(attributes.size(), -99);
          std::vector<void*> data;
          std::vector<std::size_t> sizes(attributes.size(), sizeof(int));
          std::vector<CUmem_range_attribute> kinds;
          for (std::size_t i = 0; i < attributes.size(); ++i) {
            data.push_back(&values[i]);
            kinds.push_back(static_cast<CUmem_range_attribute>(attributes[i]));
          }
          const CUresult result = table().cuMemRangeGetAttributes(
              data.data(), sizes.data(), kinds.data(), kinds.size(), ptr, bytes);
          return std::make_tuple(static_cast<int>(result), values);
        });
  m.def("cuPointerGetAttribute", [](int attribute, CUdeviceptr ptr) {
    std::uint64_t value = 0;
    const CUresult result =
        table().cuPointerGetAttribute(&value, static_cast<CUpointer_attribute>(attribute), ptr);
    return std::make_tuple(static_cast<int>(result), value);
  });
}

// The batch calls that move: one signature, one binding.
using MoveBatch = decltype(driver::Table::cuMemPrefetchBatchAsync);

void bind_move_batch(py::module_& m, const char* name, MoveBatch driver::Table::* entry) {
  m.def(name, [entry](std::vector<CUdeviceptr> ptrs, std::vector<std::size_t> sizes,
                      const std::vector<Location>& locations, std::vector<std::size_t> first_of,
                      unsigned long long flags, Handle stream) {
    std::vector<CUmemLocation> places;
    for (const Location& location : locations) places.push_back(location_of(location));
    return call_entries([&](driver::Table& entries) {
      return (entries.*entry)(ptrs.data(), sizes.data(), ptrs.size(), places.data(),
                              first_of.data(), places.size(), flags, stream_of(stream));
    });
  });
}

void bind_batch_calls(py::module_& m) {
  using driver::Table;
  bind_move_batch(m, "cuMemPrefetchBatchAsync", &Table::cuMemPrefetchBatchAsync);
  bind_move_batch(m, "cuMemDiscardAndPrefetchBatchAsync",
                  &Table::cuMemDiscardAndPrefetchBatchAsync);
  m.def("cuMemDiscardBatchAsync", [](std::vector<CUdeviceptr> ptrs, std::vector<std::size_t> sizes,
                                     unsigned long long flags, Handle stream) {
    return call_entries([&](driver::Table& entries) {
      return entries.cuMemDiscardBatchAsync(ptrs.data(), sizes.data(), ptrs.size(), flags,
                                            stream_of(stream));
    });
  });
}

void bind_stream_calls(py::module_& m) {
  m.def("cuStreamCreate", [](unsigned flags) {
    CUstream stream = nullptr;
    const CUresult result = table().cuStreamCreate(&stream, flags);
    return std::make_tuple(static_cast<int>(result), reinterpret_cast<Handle>(stream));
  });
  m.def("cuStreamDestroy",
        [](Handle s) { return static_cast<int>(table().cuStreamDestroy(stream_of(s))); });
  m.def("cuStreamSynchronize", [](Handle s) {
    return call_entries(
        [&](driver::Table& entries) { return entries.cuStreamSynchronize(stream_of(s)); });
  });
  m.def("cuStreamQuery",
        [](Handle s) { return static_cast<int>(table().cuStreamQuery(stream_of(s))); });
  m.def("cuStreamWaitEvent", [](Handle s, Handle e, unsigned flags) {
    return static_cast<int>(table().cuStreamWaitEvent(stream_of(s), event_of(e), flags));
  });
  m.def("cuStreamIsCapturing", [](Handle s) {
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_INVALIDATED;
    const CUresult result = table().cuStreamIsCapturing(stream_of(s), &status);
    return std::make_tuple(static_cast<int>(result), static_cast<int>(status));
  });
  m.def("cuCtxSynchronize", [] {
    return call_entries([](driver::Table& entries) { return entries.cuCtxSynchronize(); });
  });
  m.def("cuEventCreate", [](unsigned flags) {
    CUevent event = nullptr;
    const CUresult result = table().cuEventCreate(&event, flags);
    return std::make_tuple(static_cast<int>(result), reinterpret_cast<Handle>(event));
  });
  m.def("cuEventDestroy",
        [](Handle e) { return static_cast<int>(table().cuEventDestroy(event_of(e))); });
  m.def("cuEventRecord", [](Handle e, Handle s) {
    return static_cast<int>(table().cuEventRecord(event_of(e), stream_of(s)));
  });
  m.def("cuEventQuery",
        [](Handle e) { return static_cast<int>(table().cuEventQuery(event_of(e))); });
  m.def("cuEventSynchronize",
        [](Handle e) { return static_cast<int>(table().cuEventSynchronize(event_of(e))); });
  m.def("cuEventElapsedTime", [](Handle start, Handle end) {
    float ms = -1;
    const CUresult result = table().cuEventElapsedTime(&ms, event_of(start), event_of(end));
    return std::make_tuple(static_cast<int>(result), ms);
  });
}

void bind_device_calls(py::module_& m) {
  m.def("cuInit", [](unsigned flags) { return static_cast<int>(table().cuInit(flags)); });
  m.def("cuDriverGetVersion", [] {
    int version = 0;
    const CUresult result = table().cuDriverGetVersion(&version);
    return std::make_tuple(static_cast<int>(result), version);
  });
  m.def("cuDeviceGetCount", [] {
    int count = -1;
    const CUresult result = table().cuDeviceGetCount(&count);
    return std::make_tuple(static_cast<int>(result), count);
  });
  m.def("cuDeviceGet", [](int ordinal) {
    CUdevice device = -1;
    const CUresult result = table().cuDeviceGet(&device, ordinal);
    return std::make_tuple(static_cast<int>(result), device);
  });
  m.def("cuDeviceGetName", [](CUdevice device) {
    char name[128] = "";
    const CUresult result = table().cuDeviceGetName(name, sizeof name, device);
    return std::make_tuple(static_cast<int>(result), std::string(name));
  });
  m.def("cuDeviceTotalMem", [](CUdevice device) {
    std::size_t bytes = 0;
    const CUresult result = table().cuDeviceTotalMem(&bytes, device);
    return std::make_tuple(static_cast<int>(result), bytes);
  });
  m.def("cuDeviceGetAttribute", [](int attribute, CUdevice device) {
    int value = -1;
    const CUresult result =
        table().cuDeviceGetAttribute(&value, static_cast<CUdevice_attribute>(attribute), device);
    return std::make_tuple(static_cast<int>(result), value);
  });
}

}  // namespace

void bind_driver(py::module_& m) {
  bind_control(m);
  bind_access(m);
  bind_memory_calls(m);
  bind_batch_calls(m);
  bind_stream_calls(m);
  bind_device_calls(m);
}

}  // namespace umem::bindings
