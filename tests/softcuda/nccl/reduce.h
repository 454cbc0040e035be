// Reductions as ncclRedOp_t names them, over ncclDataType_t.
#pragma once
#include <cstddef>

namespace softnccl {

enum Type { kInt8, kUint8, kInt32, kUint32, kInt64, kUint64, kHalf, kFloat, kDouble, kBfloat16 };
enum Reduction { kSum, kProduct, kMax, kMin, kAverage };

// Bytes of an element; 0: not supported.
std::size_t size_of(int type);
// into[i] = into[i] op from[i], for this many elements. False: not supported.
bool reduce(void* into, const void* from, std::size_t count, int type, int op);
// into[i] /= ranks.
bool divide(void* into, std::size_t count, int type, unsigned ranks);

}  // namespace softnccl
