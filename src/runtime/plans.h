// Plans of each device, for the policy `planned`.
#pragma once
#include "base/export.h"
#include "base/status.h"
#include "policy/plan.h"
#include "policy/planned.h"

namespace umem::runtime {

// Call these where a step begins. Returns the plan's number, from 1. kBadState if the device is not
// open or has another policy; kInvalidArgument for inconsistent columns, and here as below for a
// device that umem does not serve.
UMEM_API Result<std::uint64_t> install_plan(policy::Plan plan, int device = 0);
// Does nothing before the device is open: a GPU is opened by its first allocation.
UMEM_API Status clear_plans(int device = 0);
// The plan moves nothing from now on. kInvalidArgument: there is no plan of this number.
UMEM_API Status roll_back_plan(std::uint64_t number, int device = 0);
// Replaces the plan's moves by those of a plan for the same steps. kInvalidArgument: there is no
// plan of this number, or it is for other steps.
UMEM_API Status replace_plan(std::uint64_t number, policy::Plan plan, int device = 0);
UMEM_API Result<policy::PlanStatus> plan_status(int device = 0);
// Bytes of the budget that plans leave free (Engine::room_ahead); 0 before the device is open.
UMEM_API Result<std::size_t> room_ahead(int device = 0);

// `cut_sizes`: sizes of the ranges that are cut finer for plans. `finer_piece`: bytes of a piece of
// such a range, for blocks of `block` bytes.
UMEM_API std::vector<std::size_t> cut_sizes();
UMEM_API std::size_t range_bytes(std::size_t block);  // of the range of such a block
UMEM_API std::size_t finer_piece(std::size_t block);

}  // namespace umem::runtime
