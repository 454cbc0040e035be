// Compares umem's own declarations of the driver API (driver/types.h, driver/symbols.def) with the
// real cuda.h and cudaTypedefs.h. The compiler compares: differences do not build. If the headers
// are not on the include path the program reports that nothing was compared.
#include <cstddef>
#include <cstdio>

#include "driver/table.h"

namespace {

// Taken before cuda.h is included, which has macros of the same names.
constexpr int kCpu = umem::cu::CU_DEVICE_CPU;
constexpr int kInvalid = umem::cu::CU_DEVICE_INVALID;

}  // namespace

#if __has_include(<cuda.h>) && __has_include(<cudaTypedefs.h>)
// clang-format off: cudaTypedefs.h needs cuda.h before it
#include <cuda.h>
#include <cudaTypedefs.h>
// clang-format on

#include <type_traits>

namespace {

static_assert(CUDA_VERSION >= 13000, "symbols.def has entry points of CUDA 13.0");
static_assert(kCpu == CU_DEVICE_CPU && kInvalid == CU_DEVICE_INVALID);

#define SAME(name) static_assert(static_cast<long>(umem::cu::name) == static_cast<long>(::name))

SAME(CUDA_SUCCESS);
SAME(CUDA_ERROR_INVALID_VALUE);
SAME(CUDA_ERROR_OUT_OF_MEMORY);
SAME(CUDA_ERROR_OPERATING_SYSTEM);
SAME(CUDA_ERROR_NOT_INITIALIZED);
SAME(CUDA_ERROR_DEINITIALIZED);
SAME(CUDA_ERROR_NO_DEVICE);
SAME(CUDA_ERROR_INVALID_DEVICE);
SAME(CUDA_ERROR_INVALID_CONTEXT);
SAME(CUDA_ERROR_INVALID_HANDLE);
SAME(CUDA_ERROR_NOT_FOUND);
SAME(CUDA_ERROR_NOT_READY);
SAME(CUDA_ERROR_ILLEGAL_ADDRESS);
SAME(CUDA_ERROR_LAUNCH_FAILED);
SAME(CUDA_ERROR_NOT_PERMITTED);
SAME(CUDA_ERROR_NOT_SUPPORTED);
SAME(CUDA_ERROR_UNKNOWN);
SAME(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
SAME(CU_DEVICE_ATTRIBUTE_INTEGRATED);
SAME(CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY);
SAME(CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING);
SAME(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
SAME(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
SAME(CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY);
SAME(CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS);
SAME(CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS);
SAME(CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES);
SAME(CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID);
SAME(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
SAME(CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
SAME(CU_MEM_ALLOCATION_TYPE_PINNED);
SAME(CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
SAME(CU_MEM_ATTACH_GLOBAL);
SAME(CU_MEM_ATTACH_HOST);
SAME(CU_MEM_ADVISE_SET_READ_MOSTLY);
SAME(CU_MEM_ADVISE_UNSET_READ_MOSTLY);
SAME(CU_MEM_ADVISE_SET_PREFERRED_LOCATION);
SAME(CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION);
SAME(CU_MEM_ADVISE_SET_ACCESSED_BY);
SAME(CU_MEM_ADVISE_UNSET_ACCESSED_BY);
SAME(CU_MEM_LOCATION_TYPE_INVALID);
SAME(CU_MEM_LOCATION_TYPE_DEVICE);
SAME(CU_MEM_LOCATION_TYPE_HOST);
SAME(CU_MEM_LOCATION_TYPE_HOST_NUMA);
SAME(CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT);
SAME(CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY);
SAME(CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION);
SAME(CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY);
SAME(CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION);
SAME(CU_POINTER_ATTRIBUTE_MEMORY_TYPE);
SAME(CU_POINTER_ATTRIBUTE_IS_MANAGED);
SAME(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
SAME(CU_POINTER_ATTRIBUTE_RANGE_START_ADDR);
SAME(CU_POINTER_ATTRIBUTE_RANGE_SIZE);
SAME(CU_MEMORYTYPE_HOST);
SAME(CU_MEMORYTYPE_DEVICE);
SAME(CU_STREAM_DEFAULT);
SAME(CU_STREAM_NON_BLOCKING);
SAME(CU_EVENT_DEFAULT);
SAME(CU_EVENT_DISABLE_TIMING);
SAME(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
SAME(CU_STREAM_CAPTURE_MODE_GLOBAL);
SAME(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
SAME(CU_STREAM_CAPTURE_MODE_RELAXED);
SAME(CU_STREAM_CAPTURE_STATUS_NONE);
SAME(CU_STREAM_CAPTURE_STATUS_ACTIVE);
SAME(CU_STREAM_CAPTURE_STATUS_INVALIDATED);
#undef SAME

// One type as umem and as cuda.h declare it. Pointees count: a size_t written through an unsigned*
// is the mistake to find. Handles point to structs that neither side defines.
template <class Ours, class Theirs>
constexpr bool same_shape() {
  if constexpr (std::is_pointer_v<Ours> && std::is_pointer_v<Theirs>) {
    using A = std::remove_pointer_t<Ours>;
    using B = std::remove_pointer_t<Theirs>;
    return std::is_const_v<A> == std::is_const_v<B> &&
           same_shape<std::remove_const_t<A>, std::remove_const_t<B>>();
  } else if constexpr (requires { sizeof(Ours) == sizeof(Theirs); }) {
    constexpr bool ours = std::is_integral_v<Ours> || std::is_enum_v<Ours>;
    constexpr bool theirs = std::is_integral_v<Theirs> || std::is_enum_v<Theirs>;
    return sizeof(Ours) == sizeof(Theirs) && ours == theirs &&
           std::is_class_v<Ours> == std::is_class_v<Theirs> &&
           std::is_pointer_v<Ours> == std::is_pointer_v<Theirs>;
  } else {
    return std::is_void_v<Ours> == std::is_void_v<Theirs> &&
           std::is_class_v<Ours> == std::is_class_v<Theirs>;
  }
}

template <class Ours, class Theirs>
struct SameCall : std::false_type {};
template <class R, class... Ours, class S, class... Theirs>
  requires(sizeof...(Ours) == sizeof...(Theirs))
struct SameCall<R (*)(Ours...), S (*)(Theirs...)>
    : std::bool_constant<same_shape<R, S>() && (same_shape<Ours, Theirs>() && ...)> {};

static_assert(same_shape<umem::cu::CUstream*, ::CUstream*>());
static_assert(same_shape<umem::cu::CUmemLocation*, ::CUmemLocation*>());
static_assert(same_shape<umem::cu::CUmemAllocationProp, ::CUmemAllocationProp>());
static_assert(same_shape<umem::cu::CUmemAccessDesc, ::CUmemAccessDesc>());
static_assert(offsetof(umem::cu::CUmemAllocationProp, allocFlags) ==
              offsetof(::CUmemAllocationProp, allocFlags));
static_assert(!same_shape<unsigned*, std::size_t*>());
static_assert(!same_shape<const char**, char**>());
static_assert(!same_shape<umem::cu::CUmemLocation, ::CUdeviceptr>());

}  // namespace

// cudaTypedefs.h has a type for each form of an entry point, named by the version that brought it:
// a wrong version in symbols.def names a type that does not exist, or one of another form.
namespace umem::cu {
#define UMEM_SYMBOL(name, version, params) \
  static_assert(SameCall<CUresult(*) params, ::PFN_##name##_v##version>::value, #name);
#include "driver/symbols.def"
#undef UMEM_SYMBOL
}  // namespace umem::cu

int main() {
  std::puts("ok: driver/types.h and driver/symbols.def agree with cuda.h");
  return 0;
}
#else
int main() {
  std::puts("skipped: cuda.h and cudaTypedefs.h are not on the include path");
  return kCpu < 0 && kInvalid < 0 ? 0 : 1;
}
#endif
