// The information from an operator's name, looked up once per name.
#pragma once
#include <ATen/record_function.h>

#include <string>
#include <vector>

#include "residency/tags.h"

namespace umem::torch_ext {

enum class OpKind : unsigned char {
  kCompute,         // reads or writes data
  kIgnored,         // a view, or a range that some other library marks: no data is touched
  kFactory,         // makes uninitialised memory and reads nothing
  kBackward,        // the autograd engine's scope around one node, and the node itself
  kAccumulateGrad,  // the node that hands a leaf its gradient
  kOptimizer,       // an optimizer's step
  kCompiled,        // the forward pass of torch.compile's code, around its kernels
};

// An op's use of an argument. It does not read an overwritten tensor that is its whole storage.
enum class Use : unsigned char { kReads, kChanges, kOverwrites };

struct OpInfo {
  std::string name;
  std::string key;              // with the overload
  const char* label = "other";  // the name, if it remains valid forever
  residency::Family family = residency::Family::kNone;
  OpKind kind = OpKind::kCompute;
  bool collective = false;  // torch.distributed's
  bool exchanges = false;   // a collective without a single source rank
  bool shape_only = false;  // reads the shapes of its inputs and not their contents
  // One per argument, empty if the op writes none.
  std::vector<Use> uses;
};

// Direct-mapped, one per thread: operator names have fixed addresses, so most look-ups are one
// compare. Names of autograd nodes move; they use the table shared by all threads.
class OpInfoCache {
 public:
  const OpInfo& find(const at::RecordFunction& fn);

 private:
  struct Entry {
    const char* key = nullptr;
    const OpInfo* info = nullptr;
  };
  static constexpr std::size_t kEntries = 512;
  Entry entries_[kEntries];
  OpInfo overflow_;  // for names beyond the shared table's bound
};
// Around fork(): as a child that finds the shared table locked could run no op.
void lock_names_for_fork();
void unlock_names_in_parent();
void unlock_names_in_child();

}  // namespace umem::torch_ext
