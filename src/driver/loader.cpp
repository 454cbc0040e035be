#include "driver/loader.h"

#include <dlfcn.h>

namespace umem::driver {
namespace {

// cuGetProcAddress_v2(name, &function, CUDA version, flags, &status)
using GetProcAddress = CUresult (*)(const char*, void**, int, std::uint64_t, int*);

class Library {
 public:
  Status open() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (!library) return {Code::kNotSupported, "there is no NVIDIA driver (libcuda.so.1)"};
    get_ = reinterpret_cast<GetProcAddress>(dlsym(library, "cuGetProcAddress_v2"));
    if (!get_) return {Code::kNotSupported, "the NVIDIA driver is older than CUDA 12.0; update it"};
    using GetVersion = CUresult (*)(int*);
    if (const auto version = reinterpret_cast<GetVersion>(address("cuDriverGetVersion", 2020)))
      UMEM_RETURN_IF_ERROR(check(version(&version_), Entry::cuDriverGetVersion));
    return {};
  }

  // Null also for a form that is newer than the driver: an older one of that name may take other
  // parameters.
  void* find(const char* name, int version) const {
    return version > version_ ? nullptr : address(name, version);
  }

 private:
  void* address(const char* name, int version) const {
    void* function = nullptr;
    int status = 0;
    return get_(name, &function, version, 0, &status) == CUDA_SUCCESS ? function : nullptr;
  }

  GetProcAddress get_ = nullptr;
  int version_ = 0;  // CUDA version of the driver
};

}  // namespace

Status open_cuda(Driver& driver) {
  Library library;
  UMEM_RETURN_IF_ERROR(library.open());
  driver = {Kind::kCuda, {}, nullptr, nullptr, nullptr};
#define UMEM_SYMBOL(name, version, params) \
  driver.table.name = reinterpret_cast<CUresult(*) params>(library.find(#name, version));
#include "driver/symbols.def"
#undef UMEM_SYMBOL
  fill_missing(driver.table);
  return {};
}

bool libcuda_exports(const char* name, int version) {
  Library library;
  return library.open().ok() && library.find(name, version) != nullptr;
}

}  // namespace umem::driver
