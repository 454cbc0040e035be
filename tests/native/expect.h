// The checks of the stress programs: they continue after a failure, and count.
#pragma once
#include <atomic>
#include <cstdio>

inline std::atomic<int> g_wrong{0};
#define EXPECT(condition)                                                   \
  do {                                                                      \
    if (!(condition)) {                                                     \
      std::fprintf(stderr, "line %d: %s is false\n", __LINE__, #condition); \
      ++g_wrong;                                                            \
    }                                                                       \
  } while (false)
