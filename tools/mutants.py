"""Defects that tests must find, each a change of a few words in one native source.

`mutate.py` makes them one by one. Each is of a kind that occurred here or that a change could
introduce: a missing wait, pin or check, a page too few, a stale handle, a wrong stream.
"""

from __future__ import annotations

from typing import NamedTuple

_NATIVE = "tests/native"
# Seconds each, in descending order of the defects they find.
CORE = tuple(
    f"{_NATIVE}/test_{name}.py"
    for name in (
        "runtime", "hints", "planned", "layout", "clean_copies", "pieces", "swap_out", "buffers",
        "sleep", "replay", "planned_replay", "fragmentation", "found_again",
    )
)  # fmt: skip
DEVICE = tuple(f"{_NATIVE}/test_{name}.py" for name in ("driver_contract", "soft_device", "replay"))
# On the software driver, where work is late: stream order.
STREAMS = (
    "tests/gpu/test_streams.py", "tests/gpu/test_hints.py", "tests/gpu/test_races.py",
    "tests/gpu/test_frames.py",
)  # fmt: skip
MAPPED = ("tests/gpu/test_mapped.py", "tests/gpu/test_numbers.py")
LAYOUTS = ("tests/gpu/test_layout.py",)
LINK_RATES = ("tests/gpu/test_link_rates.py",)
PLANS = ("tests/gpu/test_planning.py",)
FOLLOWED = ("tests/integration/test_autoplan.py",)
COLLECTIVES = ("tests/integration/test_collectives.py",)


class Mutant(NamedTuple):
    """One defect: in `source`, below src/, `old` becomes `new`; one of `tests` must fail."""

    name: str
    source: str
    old: str
    new: str
    tests: tuple[str, ...] = CORE

    @property
    def needs_cuda(self) -> bool:
        """True if its tests need the software driver and the CUDA build of torch."""
        return self.tests[0].startswith("tests/gpu/")


_TRANSFERS, _MOVES, _ENGINE = (f"engine/{name}.cpp" for name in ("transfers", "moves", "engine"))
_ARENA, _POOL, _LAYOUT = "arena/arena.cpp", "arena/segment_pool.cpp", "arena/layout.cpp"
_PAGER, _CURSOR, _OPS = "soft/pager.cpp", "policy/plan_cursor.cpp", "runtime/ops.cpp"

MUTANTS = (
    # --- waits between streams
    Mutant(
        "an op does not wait for what comes in", _TRANSFERS,
        "if (arrival > streams_.awaited(stream)) {", "if (false) {", STREAMS,
    ),
    Mutant(
        "an op does not wait for what is populated", _TRANSFERS,
        "if (populated > streams_.awaited_local(stream)) {", "if (false) {", STREAMS,
    ),
    Mutant(
        "what comes in does not wait for its way out", _TRANSFERS,
        "for (RangeId id : ids) UMEM_RETURN_IF_ERROR(out_.make_wait(in_, "
        "state_.ledger.at(id).departure));",
        "", STREAMS,
    ),
    Mutant(
        "what goes out does not wait for its last use", _TRANSFERS,
        "unit.used_on | streams_.bit(unit.stream), unit.last_use,",
        "unit.used_on | streams_.bit(unit.stream), 0,", STREAMS,
    ),
    Mutant(
        "what goes out forgets the streams that used it", _TRANSFERS,
        "unit.used_on | streams_.bit(unit.stream)", "streams_.bit(unit.stream)", STREAMS,
    ),
    Mutant(
        "a populate does not wait for the last block's work", _TRANSFERS,
        "if (unit.death > 0) UMEM_RETURN_IF_ERROR(after_death(id));", "", STREAMS,
    ),
    Mutant(
        "a discard does not wait for the work before it", _TRANSFERS,
        "UMEM_RETURN_IF_ERROR(state_.mapped() ? after_deaths(ids) : after_homes(ids));", "",
        STREAMS,
    ),
    Mutant(
        "mapped memory moves before what uses it has ended", "engine/lane.cpp",
        "UMEM_RETURN_IF_ERROR(wait_for(verb, spans, after, before));", "", MAPPED,
    ),
    Mutant(
        "dead memory leaves once room is short", _MOVES,
        "if (room > 0 && !state_.fits(room)) discard_dead(room);", "", PLANS,
    ),
    Mutant(
        "mapped memory comes in while it is used on the host", _TRANSFERS,
        "if (unit.used_away) UMEM_RETURN_IF_ERROR(after_uses(id));", "", MAPPED,
    ),
    Mutant(
        "the contents of mapped memory are forgotten as it leaves", "managed/mapped_memory.cpp",
        "return unmap(base, chunk, At::kAway);", "return unmap(base, chunk, At::kNowhere);", MAPPED,
    ),
    Mutant(
        "the contents of a layout's blocks are forgotten as it is parted",
        "managed/mapped_memory.cpp", "made.at = At::kAway;", "made.at = At::kNowhere;", LAYOUTS,
    ),
    Mutant(
        "a block of a parted layout is not usable on the host", "engine/engine.cpp",
        "!state_.mapped() && sharing_.contains(", "sharing_.contains(", LAYOUTS,
    ),
    Mutant(
        "a resident layout leaves before units beside it", "engine/moves.cpp",
        "if (!stays) part();", "part();", LAYOUTS,
    ),
    Mutant(
        "a free workspace is not cut where plans cut it", "engine/engine.cpp",
        "(unit.tag != Tag::kWorkspace || !state_.ledger.live(piece))",
        "unit.tag != Tag::kWorkspace", ("tests/unit/test_replay.py",),
    ),
    Mutant(
        "what the program keeps stays away when a layout is parted", "engine/moves.cpp",
        "return !state_.ledger.kept_in_place(id);", "return true;",
        LAYOUTS,
    ),
    Mutant(
        "what an inner op left stays for good", "runtime/ops.cpp",
        "if (!t_left.empty() && !within_an_op())", "if (false)", MAPPED,
    ),
    Mutant(
        "plans keep the nominal rates of the link", "engine/lane_meter.cpp",
        "if (!under_way_) return;", "return;", LINK_RATES,
    ),
    Mutant(
        "an event from before the last use will do", "engine/streams.cpp",
        "return mark.time < t;", "return mark.time + 16 < t;", STREAMS,
    ),
    Mutant(
        "what is issued is taken for complete", "engine/lane.cpp",
        "if (ticket <= complete_) return {};", "if (ticket <= issued_) return {};", STREAMS,
    ),
    Mutant(
        "a lane issues the newest first", "engine/lane.cpp",
        "const Job job = std::move(waiting_.front());\n    waiting_.pop_front();",
        "const Job job = std::move(waiting_.back());\n    waiting_.pop_back();", STREAMS,
    ),
    Mutant(
        "a block is reused while another stream works on it", _ARENA,
        "if (result == cu::CUDA_ERROR_NOT_READY) return {};",
        "if (result == cu::CUDA_ERROR_NOT_READY) break;", STREAMS,
    ),
    Mutant(
        "a recorded stream is forgotten at the free", _ARENA,
        "if (!recorded_.empty()) {", "if (false) {",
    ),
    Mutant(
        "a cached range serves any stream", _ARENA,
        "const RangeId id = pools_[pool]->large[bytes];",
        "const RangeId id = pools_[0]->large[bytes];", STREAMS,
    ),
    # --- residency
    Mutant(
        "what an op uses is evicted by hand", "engine/hints.cpp",
        "  if (state_.ledger.at(id).op_pins > 0)\n    return {Code::kBadState, \"the block",
        "  if (false)\n    return {Code::kBadState, \"the block",
    ),
    Mutant(
        "more comes in than the budget holds", _MOVES,
        "++state_.counters.left_out;\n      continue;", "++state_.counters.left_out;",
    ),
    Mutant(
        "the host budget is not looked at", _MOVES,
        "return state_.ledger.host_bytes() + more <= state_.limits.host_budget_bytes;",
        "return true;",
    ),
    Mutant(
        "a discard that failed is not taken back", _MOVES,
        "ledger.set_state(id, State::kDead);  // still where it was", ";",
    ),
    Mutant(
        "what could not leave counts as gone", _MOVES,
        "state_.ledger.set_state(id, before);", ";",
    ),
    Mutant(
        "preferred victims leave although they are pinned", _MOVES,
        "state_.ledger.has(id) && now.evictable(id) &&", "state_.ledger.has(id) &&",
        (f"{_NATIVE}/test_victim_callback.py",),
    ),
    Mutant("an op keeps its pins", _ENGINE, "state_.ledger.unpin(ids[i]);\n    state_", "state_"),
    Mutant("a use does not count", _ENGINE, "state_.ledger.touch(ids[i], inner);", ""),
    Mutant(
        "a block of another size takes over dead bytes", _ENGINE,
        "(state_.ledger.at(id).bytes == bytes ||", "(true ||",
    ),
    Mutant(
        "pieces of a new block evict each other", _ENGINE,
        "state_.ledger.pin(piece);  // the next piece must not evict it", "",
    ),
    Mutant(
        "a new owner inherits read-mostly", _ENGINE,
        "state_.count_error(write_back_.advise(id, false));  // the next owner may write", ";",
    ),
    Mutant(
        "bytes that the driver moved meanwhile are where they were", _ENGINE,
        "state_.ledger.set_state(id, stays ? State::kDevice : State::kHost);\n"
        "    (stays ? stay : moved_).push_back(id);",
        "state_.ledger.set_state(id, State::kDevice);",
    ),
    Mutant(
        "a pinned block is evicted by hand", "engine/hints.cpp",
        "if (state_.ledger.at(id).user_pins > 0)", "if (false)",
    ),
    Mutant(
        "pins may take all of the budget", "engine/hints.cpp",
        "pinned + more + reserve <= budget", "pinned + more <= budget",
    ),
    Mutant(
        "shared pages that do not touch are one run", "engine/shared_pages.cpp",
        "joins = wanted;", "joins = joins || wanted;",
    ),
    Mutant(
        "a page that is taken over keeps its old life", "engine/shared_pages.cpp",
        "page = {false, false, false, false};", "page.idle = false;",
    ),
    Mutant(
        "an early copy is not valid on the host", "engine/write_back.cpp",
        "  ledger.hold_host(id);\n", "",
    ),
    # --- the arena
    Mutant(
        "a large block is a page short", _ARENA,
        "slots_[id].bytes = align_up(bytes, kPageBytes);",
        "slots_[id].bytes = align_down(bytes, kPageBytes);",
    ),
    Mutant(
        "a range that an op uses is freed", _ARENA, "if (leaving && !leaving(id)) continue;",
        "if (leaving) leaving(id);",
    ),
    Mutant(
        "a run below the size is taken", _POOL,
        "if (end - begin < units) continue;", "",
    ),
    Mutant(
        "what is given back is not remembered as free", _POOL,
        "seat.longest = std::max(seat.longest, end - begin);", "",
    ),
    Mutant(
        "a settled segment takes blocks", _POOL,
        "if (seat.settled || seat.longest < units) continue;",
        "if (seat.longest < units) continue;",
    ),
    Mutant(
        "a layout takes any size", _LAYOUT,
        "entries_[next_].bytes == bytes && stream == stream_", "stream == stream_",
    ),
    Mutant(
        "a place is given while a block is in it", _LAYOUT,
        "(subrange != kNoRange && !ranges_.unseen(subrange, range_))", "false",
    ),
    # --- the pager
    Mutant(
        "an evicted page is not copied out", _PAGER,
        "hold_host(page);\n    space_.copy_out(page.frame, index);\n  }", "hold_host(page);\n  }",
        DEVICE,
    ),
    Mutant(
        "a page comes in without its contents", _PAGER,
        "if (copy) space_.copy_in(frame, index);", "", DEVICE,
    ),
    Mutant(
        "a frame more than there are", _PAGER, "while (used_ > frames)\n",
        "while (used_ > frames + 1)\n", DEVICE,
    ),
    Mutant(
        "live pages leave before discarded ones", _PAGER,
        "if (discarded_.head) return evict(discarded_.head",
        "if (discarded_.head && !used_list_.head) return evict(discarded_.head", DEVICE,
    ),
    Mutant(
        "a page leaves while a system call accesses it", _PAGER,
        "if (held(page)) {\n      page.leaves = true;\n      continue;\n    }\n", "", DEVICE,
    ),
    Mutant(
        "system calls hold all frames", _PAGER,
        "return 2 * fixed_ > frames_ || fixed_ + kMinFrames > frames_;", "return false;", DEVICE,
    ),
    Mutant(
        "a write to a duplicate leaves two versions", _PAGER,
        "page.state = PageState::kDevice;\n  page.read_only = false;", "page.read_only = false;",
        DEVICE,
    ),
    # --- the plan's follower
    Mutant(
        "an allocation of another size is the plan's", _CURSOR,
        "if (static_cast<std::size_t>(plan_.bytes[index(tensor)]) != bytes) ++resized_;", "",
    ),
    Mutant(
        "an op of other tensors is the plan's", _CURSOR,
        "if (op == n_ops() || signature_[op] != signature) {", "if (op == n_ops()) {",
    ),
    Mutant(
        "small blocks at other places are the plan's", _CURSOR,
        "misplaced_bytes_ > max_misplaced_bytes_ &&", "false &&", FOLLOWED,
    ),
    Mutant(
        "a step that ends early is complete", _CURSOR,
        "resized_ == 0 && at_end() &&", "resized_ == 0 &&",
    ),
    Mutant(
        "a step with a detour is complete", _CURSOR, "!lost_ && detours_ == 0 && resized_",
        "!lost_ && resized_",
    ),
    Mutant(
        "one op that looks alike is a place", _CURSOR,
        "op = shapes_.first(last_shape_, shape.value(), next_op_);",
        "op = shapes_.first(shape.value(), next_op_);",
    ),
    Mutant(
        "what was allocated before an op is not the op's", _CURSOR,
        "for (const Block& block : allocated_) shape.add_allocated(block.bytes);", "",
    ),
    Mutant(
        "what nothing uses any more leaves late", "policy/planned.cpp",
        "unit.last_use < last_begin_ &&", "false &&",
    ),
    Mutant(
        "the oldest of two plans acts", "policy/planned.cpp",
        "~one.used);", "one.used);",
    ),
    Mutant(
        "units that the plan keeps leave like the rest", "policy/planned.cpp",
        "if (active_->keep[static_cast<std::size_t>(tensor)]) return Class::kKept;", "",
    ),
    Mutant(
        "what the plan has away stays under pressure", "policy/planned.cpp",
        "if (schedule.returns_later(tensor) && !cursor.used_lately(tensor))", "if (false)",
    ),
    Mutant(
        "what pressure drives out returns before the plan's fetch", "policy/plan_schedule.cpp",
        "marked(fetch_mark_, tensor) || returns_later(tensor))", "marked(fetch_mark_, tensor))",
    ),
    Mutant(
        "room made ahead is filled by the plan's fetches", _MOVES,
        "if (state_.follows_plans() && state_.planned->gated()) return;", "", PLANS,
    ),
    Mutant(
        "a copy does not wait for a collective", "policy/plan_schedule.cpp",
        "if (unit.in_collective || unit.op_pins > 0)", "if (unit.op_pins > 0)", COLLECTIVES,
    ),
    Mutant(
        "a copy that waited is given up at the next use", "policy/plan_schedule.cpp",
        "if (unit.in_collective || unit.op_pins > 0)", "if (unit.in_collective)", COLLECTIVES,
    ),
    Mutant(
        "what an inner op left is copied while the outer one goes on", "policy/plan_schedule.cpp",
        "if (inner && left_by_inner(view, copy.tensor, id)) return false;", "",
    ),
    Mutant(
        "what an inner op left leaves while the outer one goes on", "policy/plan_schedule.cpp",
        "if (here && inner && left_by_inner(view, tensor, id)) return false;", "",
    ),
    # --- ops
    Mutant(
        "only the first input is brought", _OPS,
        "for (std::size_t i = inputs.first; i < inputs.count; ++i) {",
        "for (std::size_t i = inputs.first; i < inputs.first + 1; ++i) {",
    ),
    Mutant(
        "the end of an op ends those around it", _OPS, "*link = op->parent;", "*link = nullptr;",
    ),
    Mutant(
        "pins outlive their block", "runtime/deferred.cpp",
        "if (!device.pins.empty()) end_pins", "if (false) end_pins",
    ),
)  # fmt: skip
