// UMEM_ASSERT(expression, message) states an invariant. Debug and sanitizer builds abort if it is
// violated. All other builds compile it, and evaluate nothing.
#pragma once

#include "base/export.h"

namespace umem {

#ifdef UMEM_ASSERTS
inline constexpr bool kAsserts = true;
#else
inline constexpr bool kAsserts = false;
#endif

// Safe in signal handlers: the software device asserts in its fault handler.
[[noreturn]] UMEM_API void assert_failed(const char* file, unsigned line, const char* expression,
                                         const char* message) noexcept;

}  // namespace umem

#ifdef UMEM_ASSERTS
#define UMEM_ASSERT(expression, message) \
  ((expression) ? static_cast<void>(0)   \
                : ::umem::assert_failed(__FILE__, __LINE__, #expression, message))
#else
#define UMEM_ASSERT(expression, message) static_cast<void>(sizeof((expression) ? 1 : 0))
#endif
