// cuGetProcAddress, and the names that this driver has but does not support.
#include <cstring>
#include <map>
#include <vector>

#include "config.h"
#include "entry.h"

namespace softcuda {
namespace {

struct Form {
  int since;
  void* function;
};
// Plain name -> forms, oldest first.
std::map<std::string, std::vector<Form>>& forms() {
  static auto* instance = new std::map<std::string, std::vector<Form>>;
  return *instance;
}

}  // namespace

Entry::Entry(const char* exported, int since, void* function) {
  forms()[probe_of(exported).name()].push_back({since, function});
}

}  // namespace softcuda

using namespace softcuda;  // NOLINT

namespace {

enum QueryResult { kFound = 0, kNotFound = 1, kTooOld = 2 };

CUresult find(const char* name, void** function, int version, int* result) {
  *function = nullptr;
  const auto found = forms().find(name);
  if (found == forms().end() || config().missing.count(name)) {
    log_once(std::string("cuGetProcAddress: no ") + name);
    *result = kNotFound;
    return CUDA_ERROR_NOT_FOUND;
  }
  int best = 0;
  for (const Form& form : found->second) {
    const bool offered = form.since <= version && form.since <= config().version;
    if (offered && form.since >= best) {
      best = form.since;
      *function = form.function;
    }
  }
  *result = *function ? kFound : kTooOld;
  return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

CUresult unsupported(const char* name) {
  log_once(std::string(name) + " is not supported");
  return CUDA_ERROR_NOT_SUPPORTED;
}

}  // namespace

ENTRY(cuGetProcAddress_v2, 12000,
      (const char* name, void** function, int version, std::uint64_t, int* result)) {
  SOFTCUDA_ENTER();
  if (!name || !function) return CUDA_ERROR_INVALID_VALUE;
  int ignored = 0;
  return find(name, function, version, result ? result : &ignored);
}
ENTRY(cuGetProcAddress, 11030,
      (const char* name, void** function, int version, std::uint64_t flags)) {
  return cuGetProcAddress_v2(name, function, version, flags, nullptr);
}
ENTRY(cuGetExportTable, 3000, (const void** table, const void*)) {
  SOFTCUDA_ENTER();
  if (table) *table = nullptr;
  return CUDA_ERROR_NOT_FOUND;
}

// Names that torch resolves, here without a meaning. Their parameters do not matter: none is read.
#define UNSUPPORTED(name, since) \
  ENTRY(name, since, ()) {       \
    SOFTCUDA_ENTER();            \
    return unsupported(#name);   \
  }
#include "unsupported.def"
#undef UNSUPPORTED
