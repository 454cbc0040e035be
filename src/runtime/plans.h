// Plans of each device, for the policy `planned`.
#pragma once
#include "base/export.h"
#include "base/status.h"
#include "policy/plan.h"
#include "policy/planned.h"

namespace umem::runtime {

// A step begins here. The number of the plan, from 1. kBadState when the device is not open
// or its policy is another; kInvalidArgument for columns that do not fit together, and here as
// below for a device that umem does not serve.
UMEM_API Result<std::uint64_t> install_plan(policy::Plan plan, int device = 0);
// Before the device is open, as a GPU is not until its first allocation, there are no plans.
UMEM_API Status clear_plans(int device = 0);
// A step begins here. The plan moves nothing from now on. kInvalidArgument: there is none of this
// number.
UMEM_API Status roll_back_plan(std::uint64_t number, int device = 0);
// A step begins here. From now on the plan does what this one says, which is for the same steps.
// kInvalidArgument: there is none of this number, or it is for other steps.
UMEM_API Status replace_plan(std::uint64_t number, policy::Plan plan, int device = 0);
UMEM_API Result<policy::PlanStatus> plan_status(int device = 0);

// Sizes of the ranges that are cut finer, as plans asked; the bytes of a piece of such a range, for
// blocks of `block` bytes.
UMEM_API std::vector<std::size_t> cut_sizes();
UMEM_API std::size_t range_bytes(std::size_t block);  // of the range for such a block
UMEM_API std::size_t finer_piece(std::size_t block);

}  // namespace umem::runtime
