// The few cuDNN calls whose results torch depends on: one engine is found for everything, needs a
// workspace, and computes nothing. Appended to the generated libcudnn.so.9.
#include <stddef.h>
#include <stdint.h>

enum { kTypeInt64 = 3, kTypeDescriptor = 15 };

long cudnnGetVersion(void) {
  return 91900;
}
long cudnnGetCudartVersion(void) {
  return 13000;
}

static int g_descriptor;

int cudnnBackendCreateDescriptor(int kind, void** descriptor) {
  (void)kind;
  *descriptor = &g_descriptor;
  return 0;
}

// Lists have one member (created by the caller), numbers are 0, all else is absent.
int cudnnBackendGetAttribute(void* descriptor, int name, int type, int64_t requested,
                             int64_t* count, void* values) {
  (void)descriptor;
  (void)name;
  const int64_t found = type == kTypeDescriptor ? 1 : type == kTypeInt64 ? requested : 0;
  if (count) *count = found;
  if (type == kTypeInt64 && values)
    for (int64_t i = 0; i < requested; ++i) ((int64_t*)values)[i] = 0;
  return 0;
}

static int zero_size(size_t* bytes) {
  *bytes = 0;
  return 0;
}
int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void* handle, int mode, int ops,
                                                             void* x, void* z, void* y,
                                                             void* parameters, void* activation,
                                                             size_t* bytes) {
  (void)handle, (void)mode, (void)ops, (void)x, (void)z, (void)y, (void)parameters;
  (void)activation;
  return zero_size(bytes);
}
int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void* handle, int mode, int ops, void* x,
                                                      void* y, void* dy, void* dz, void* dx,
                                                      void* parameters, void* activation,
                                                      size_t* bytes) {
  (void)handle, (void)mode, (void)ops, (void)x, (void)y, (void)dy, (void)dz, (void)dx;
  (void)parameters, (void)activation;
  return zero_size(bytes);
}
int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void* handle, int mode, int ops,
                                                         void* activation, void* x, size_t* bytes) {
  (void)handle, (void)mode, (void)ops, (void)activation, (void)x;
  return zero_size(bytes);
}
