"""Lower bounds of bytes and time: known values, properties, and paging above them."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cuts import disjoint_cuts, largest_cut, pfoo_l
from support.paging import reloads, steady
from support.steps import OVER, Tensor, make_step, sequence, steps

from umem.analysis import bounds
from umem.analysis.idle_intervals import IdleIntervals
from umem.base.device_profiles import DeviceProfile
from umem.base.units import MIB, PAGE_BYTES
from umem.errors import PlanError
from umem.trace.step_trace import Kind, StepTrace

LINK = DeviceProfile("test", 2.0 * MIB, 1.0 * MIB, 0.0, 1 << 40, "made up")
few = settings(max_examples=80)


def _chain(n: int) -> list[list[int]]:
    forward = [[0]] + [[i - 1, i] for i in range(1, n)]
    return forward + forward[::-1]


@pytest.mark.parametrize(
    ("n", "size", "capacity", "moved", "area"),
    [
        (10, 16, 48, 112, 60.8),
        (10, 16, 64, 96, 32.0),
        (10, 16, 96, 64, 0.0),
        (20, 8, 64, 96, 23.5),
        (30, 4, 40, 80, 26.2),
    ],
)
def test_a_chain_forward_and_backward(
    n: int, size: int, capacity: int, moved: int, area: float
) -> None:
    trace = sequence(_chain(n), [size] * n)
    assert moved == n * size - capacity
    assert largest_cut(trace, capacity) == moved
    assert disjoint_cuts(trace, capacity) == bounds.Cut(moved, (n - 1,))
    assert pfoo_l(trace, capacity) == pytest.approx(area, abs=0.05)
    for policy in ("lru", "belady"):
        assert reloads(_chain(n), [size] * n, capacity, policy) == moved


@pytest.mark.parametrize(
    ("capacity", "lru", "oracle", "area"),
    [
        (4, 11.84, 8.68, 8.56),
        (6, 11.74, 6.47, 6.26),
        (8, 11.63, 4.26, 3.96),
        (10, 11.53, 2.11, 1.67),
    ],
)
def test_a_cyclic_sweep(capacity: int, lru: float, oracle: float, area: float) -> None:
    n, passes = 12, 20
    ops = [[i % n] for i in range(n * passes)]
    trace = sequence(ops, [1] * n)
    again = passes - 1
    assert reloads(ops, [1] * n, capacity, "lru") / again == pytest.approx(lru, abs=0.005)
    best = reloads(ops, [1] * n, capacity, "belady")
    assert best / again == pytest.approx(oracle, abs=0.005)
    assert pfoo_l(trace, capacity) / again == pytest.approx(area, abs=0.005)
    assert disjoint_cuts(trace, capacity).bytes <= best


def _training(layers: int = 16, steps: int = 4) -> tuple[list[list[int]], list[int]]:
    """Forward op i touches act(i-1), act(i), w(i); backward mirrors it; new acts each step."""
    ops: list[list[int]] = []
    for step in range(steps):
        base = layers * (step + 1)
        forward = [[base + i, i] + ([base + i - 1] if i else []) for i in range(layers)]
        ops += forward + forward[::-1]
    return ops, [4] * layers + [16] * layers * steps


@pytest.mark.parametrize(
    ("capacity", "lru", "oracle", "single", "cuts"),
    [
        (80, 1104, 1008, 634.0, 960),
        (120, 920, 812, 361.5, 800),
        (160, 736, 652, 160, 640),
        (200, 564, 492, 120, 480),
        (260, 288, 252, 60, 240),
    ],
)
def test_training_with_weights(
    capacity: int, lru: int, oracle: int, single: float, cuts: int
) -> None:
    ops, sizes = _training()
    trace = sequence(ops, sizes)
    assert reloads(ops, sizes, capacity, "lru") == lru
    assert reloads(ops, sizes, capacity, "belady") == oracle
    cut = largest_cut(trace, capacity)
    assert 4 * cut == cuts
    assert max(cut, pfoo_l(trace, capacity)) == pytest.approx(single, abs=0.05)
    # One cut at the turn of each step; no interval spans two of them.
    assert disjoint_cuts(trace, capacity) == bounds.Cut(cuts, (15, 47, 79, 111))


def _turn() -> StepTrace:
    """Op 0 makes A of 60 MiB, op 3 reads it; ops 1 and 2 take all of 80 MiB."""
    a = Tensor(60 * MIB, {0: True, 3: False})
    b = Tensor(80 * MIB, {1: True, 2: False})
    return make_step([10.0] * 4, [a, b])


def test_what_is_away_at_an_op_leaves_before_it_and_comes_back_after() -> None:
    trace = _turn()
    assert disjoint_cuts(trace, 80 * MIB) == bounds.Cut(60 * MIB, (1,))
    # Out: 60 us before op 1, which is more than 10 us of compute; in: 30 us, more than op 2 and 3.
    assert bounds.closed_form_floor(trace, LINK, 80 * MIB) == (90.0, "turning point", 1)
    # With 20 MiB left: 40 us out, 20 us in, overlapping as much compute.
    assert bounds.closed_form_floor(trace, LINK, 100 * MIB) == (60.0, "turning point", 1)
    assert bounds.closed_form_floor(trace, LINK, 140 * MIB) == (40.0, "compute", -1)


def test_clean_weights_need_no_write_back_and_may_come_for_the_next_step() -> None:
    weights = [Tensor(40 * MIB, {i: False}, Kind.PERSISTENT, "param") for i in range(4)]
    trace = make_step([10.0] * 4, weights)
    assert trace.gaps.end.tolist() == [4, 5, 6, 7]
    # At each op 3 of 4 weights are in gaps and one of them has room: 80 MiB are away.
    assert largest_cut(trace, 80 * MIB) == 80 * MIB
    # Room for the gaps is 4 x 40 MiB; one whole gap of 3 ops takes 120 of it, another a third.
    assert pfoo_l(trace, 80 * MIB) == pytest.approx((160 - 40 - 40 / 3) * MIB)
    assert bounds.lower_bound_bytes_out(trace, 80 * MIB) == 0
    floor = bounds.closed_form_floor(trace, LINK, 80 * MIB)
    assert floor.bound == "bytes in"
    assert floor.us == pytest.approx((160 - 40 - 40 / 3) / 2)


def test_a_write_back_serves_all_gaps_until_the_next_write() -> None:
    # p is written at op 4 only; its three gaps span ops 1, 3 and 5 (which the others fill).
    p = Tensor(20 * MIB, {0: False, 2: False, 4: True}, Kind.PERSISTENT, "param")
    full = [Tensor(30 * MIB, {op: True}) for op in (1, 3, 5)]
    trace = make_step([1.0] * 6, [p, *full])
    assert disjoint_cuts(trace, 30 * MIB) == bounds.Cut(60 * MIB, (1, 3, 5))
    assert bounds.lower_bound_bytes_out(trace, 30 * MIB) == 20 * MIB


def test_a_carried_tensor_may_have_left_in_the_step_before() -> None:
    made = Tensor(20 * MIB, {2: True}, Kind.MADE, "grad")
    carried = Tensor(20 * MIB, {0: False, 2: False}, Kind.CARRIED, "grad", next_alias=0)
    full = Tensor(30 * MIB, {1: True})
    trace = make_step([1.0] * 3, [made, carried, full])
    assert bounds.lower_bound_bytes_in(trace, 40 * MIB) == 10 * MIB
    assert bounds.lower_bound_bytes_out(trace, 40 * MIB) == 0


def test_contents_that_are_overwritten_whole_need_no_way_back() -> None:
    # Three ops: `cleared` is read by op 0, idle during the 80 MiB of op 1, overwritten by op 2.
    full = Tensor(80 * MIB, {1: True})
    dead, held = (
        make_step([10.0] * 3, [Tensor(40 * MIB, {0: True, 2: use}), full]) for use in (OVER, True)
    )
    for trace in (dead, held):  # unknown before op 2 that it is overwritten
        assert bounds.lower_bound_bytes_out(trace, 90 * MIB) == 30 * MIB
    assert bounds.lower_bound_bytes_in(held, 90 * MIB) == 30 * MIB
    assert bounds.lower_bound_bytes_in(dead, 90 * MIB) == 0
    assert pfoo_l(dead, 90 * MIB) == 0
    # 30 us out before op 1, which is more than 10 us of compute; then op 2.
    assert bounds.closed_form_floor(dead, LINK, 90 * MIB).us == 40.0
    assert steady(dead, 90 * MIB, "belady") == (0, 40 * MIB)
    # Around the end of the step: the tensor that op 0 overwrites is not needed in op 1 and 2.
    around = make_step(
        [10.0] * 3, [Tensor(40 * MIB, {0: OVER, 1: False}, Kind.PERSISTENT, "param"), full]
    )
    assert bounds.lower_bound_bytes_in(around, 120 * MIB) == 0


def test_what_an_optimizer_writes_leaves_from_there_on() -> None:
    """A state is written by the last op; ops 1 and 2 take all of 80 MiB."""
    state = Tensor(60 * MIB, {3: True}, Kind.PERSISTENT, "optimizer")
    full = Tensor(80 * MIB, {1: True, 2: False})
    trace = make_step([10.0] * 4, [state, full])
    # 60 us out from op 3 to op 1, overlapping 10 us of compute; 30 us in from op 2 to op 3.
    assert bounds.closed_form_floor(trace, LINK, 80 * MIB) == (
        90.0,
        "2 turning points, the highest",
        1,
    )


def test_what_a_program_holds_has_to_leave_and_does_not_come_back() -> None:
    """Op 2 takes 80 of 120 MiB in addition to 60 MiB that no op uses again before their free."""
    held = Tensor(60 * MIB, {0: True, 1: False}, held=2)
    trace = make_step([10.0] * 5, [held, Tensor(80 * MIB, {2: True})])
    assert IdleIntervals(trace).unread.tolist() == [0, 0, 60 * MIB, 60 * MIB, 0]
    assert not IdleIntervals(trace, kept=np.zeros(2, bool)).unread.any()
    assert bounds.lower_bound_bytes_in(trace, 120 * MIB) == 0
    assert bounds.lower_bound_bytes_out(trace, 120 * MIB) == 20 * MIB
    assert steady(trace, 120 * MIB, "belady") == (0, 60 * MIB)
    # 40 us out before op 2, overlapping 20 us of compute; nothing in during 20 us after it.
    slow = replace(LINK, bytes_per_us_out=0.5 * MIB)
    assert bounds.closed_form_floor(trace, slow, 120 * MIB).us == 60.0


@few
@given(steps(), st.integers(0, 99))
def test_sums_of_spans_are_those_of_the_gaps(trace: StepTrace, begin: int) -> None:
    n, spans = trace.n_ops, IdleIntervals(trace)
    gaps = spans.gaps
    begin %= n
    held, later, before, clean = (np.zeros(n, np.int64) for _ in range(4))
    for t, start, end, back in zip(gaps.tensor, gaps.start, gaps.end, spans.returns, strict=True):
        writes = [u for u in trace.uses(t) if _writes(trace, int(t), int(u))]
        ago = [w for w in writes if w <= start]
        never = not writes or (not ago and trace.kind[t] != Kind.PERSISTENT)
        for op in range(start + 1, end):
            size = trace.bytes[t]
            held[op % n] += size
            clean[op % n] += size if never else 0
            since = (op - begin) // n * n + begin  # the latest `begin` at or before the op
            written = ago[-1] if ago else writes[-1] - n if writes else 0
            later[op % n] += size if end >= since + n or not back else 0
            before[op % n] += size if never or written < since else 0
    assert spans.held.tolist() == held.tolist()
    assert spans.in_until(begin).tolist() == later.tolist()
    assert spans.out_since(begin).tolist() == before.tolist()
    assert spans.clean.tolist() == clean.tolist()


def _writes(trace: StepTrace, tensor: int, op: int) -> bool:
    span = slice(trace.access_start[op], trace.access_start[op + 1])
    return bool(trace.access_write[span][trace.access_tensor[span] == tensor][0])


def _capacity(trace: StepTrace, share: float) -> int:
    """Between the largest op and the peak."""
    least = int(trace.working_set.max())
    return least + int(max(trace.peak_bytes - least, 0) * share)


@few
@given(steps(), st.floats(0, 1))
def test_paging_on_demand_is_above_the_bounds(trace: StepTrace, share: float) -> None:
    capacity = _capacity(trace, share)
    most_in = bounds.lower_bound_bytes_in(trace, capacity)
    most_out = bounds.lower_bound_bytes_out(trace, capacity)
    floor = bounds.closed_form_floor(trace, LINK, capacity).us
    for policy in ("lru", "belady", *range(8)):
        moved = steady(trace, capacity, policy)
        assert moved.bytes_in >= most_in
        assert moved.bytes_out >= most_out
        link_us = moved.bytes_in / LINK.bytes_per_us_in + moved.bytes_out / LINK.bytes_per_us_out
        assert trace.compute_us + link_us >= floor * (1 - 1e-9)


@settings(max_examples=150)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.integers(1, 6))
def test_bound_oracle_and_lru_are_in_order_for_equal_sizes(uses: list[int], capacity: int) -> None:
    ops, sizes = [[t] for t in uses], [1] * 6
    trace = sequence(ops, sizes)
    oracle = reloads(ops, sizes, capacity, "belady")
    assert bounds.lower_bound_bytes_in(trace, capacity) <= oracle
    assert oracle <= reloads(ops, sizes, capacity, "lru")


@settings(max_examples=150)
@given(
    st.lists(st.sets(st.integers(0, 5), min_size=1, max_size=3), min_size=1, max_size=20),
    st.lists(st.integers(1, 9), min_size=6, max_size=6),
    st.integers(0, 20),
)
def test_any_sizes_stay_above_the_bound(
    objects: list[set[int]], sizes: list[int], more: int
) -> None:
    ops = [sorted(those) for those in objects]
    trace = sequence(ops, sizes)
    capacity = int(trace.working_set.max()) + more
    for policy in ("lru", "belady"):
        assert bounds.lower_bound_bytes_in(trace, capacity) <= reloads(ops, sizes, capacity, policy)


@few
@given(steps(), st.floats(0, 1), st.integers(2, 7))
def test_bounds_scale_with_sizes(trace: StepTrace, share: float, factor: int) -> None:
    capacity = _capacity(trace, share)
    scaled = replace(trace, bytes=trace.bytes * factor)
    link = replace(LINK, bytes_per_us_in=2.0 * MIB * factor, bytes_per_us_out=1.0 * MIB * factor)
    floor = bounds.closed_form_floor(trace, LINK, capacity)
    again = bounds.closed_form_floor(scaled, link, capacity * factor)
    # The bound of bytes in is rounded up to whole bytes.
    assert again.us == pytest.approx(floor.us, abs=1e-5)
    cut = disjoint_cuts(trace, capacity)
    assert disjoint_cuts(scaled, capacity * factor) == (cut.bytes * factor, cut.ops)
    area = pfoo_l(trace, capacity)
    assert pfoo_l(scaled, capacity * factor) == pytest.approx(area * factor, abs=1e-3)


@few
@given(steps(), st.floats(0, 1), st.floats(0, 1))
def test_more_capacity_never_raises_a_bound(trace: StepTrace, one: float, two: float) -> None:
    less, more = (_capacity(trace, share) for share in sorted((one, two)))
    for bound in (bounds.lower_bound_bytes_in, bounds.lower_bound_bytes_out):
        assert bound(trace, more) <= bound(trace, less)
    small = bounds.closed_form_floor(trace, LINK, less).us
    assert trace.compute_us <= bounds.closed_form_floor(trace, LINK, more).us <= small


@few
@given(steps())
def test_nothing_moves_where_all_fits(trace: StepTrace) -> None:
    for bound in (bounds.lower_bound_bytes_in, bounds.lower_bound_bytes_out):
        assert bound(trace, trace.peak_bytes) == 0
    floor = bounds.closed_form_floor(trace, LINK, trace.peak_bytes)
    assert floor == (trace.compute_us, "compute", -1)


@few
@given(steps(), st.floats(0, 1))
def test_chosen_cuts_share_no_gap(trace: StepTrace, share: float) -> None:
    capacity = _capacity(trace, share)
    cuts = disjoint_cuts(trace, capacity)
    spans = IdleIntervals(trace)
    excess = spans.need - spans.unread - capacity
    assert cuts.bytes == sum(int(excess[op]) for op in cuts.ops)
    for start, end in zip(
        spans.gaps.start[spans.returns], spans.gaps.end[spans.returns], strict=True
    ):
        spanned = {op % trace.n_ops for op in range(start + 1, end)}
        assert len(spanned.intersection(cuts.ops)) <= 1


def test_below_the_largest_op_there_is_no_bound() -> None:
    trace = _turn()
    with pytest.raises(PlanError, match=r"op 1 \(op1\) accesses 80.* give at least 84"):
        bounds.closed_form_floor(trace, LINK, 79 * MIB)
    for bound in (largest_cut, disjoint_cuts, pfoo_l):
        with pytest.raises(PlanError, match="accesses"):
            bound(trace, 79 * MIB)


def test_the_min_budget_has_space_for_the_largest_op() -> None:
    assert bounds.largest_op(_turn()) == (1, 80 * MIB)
    assert bounds.min_budget(_turn()) == 84 * MIB
    # Three small tensors take up to three pages, but no more than all small ones.
    small = [Tensor(MIB, {0: True}) for _ in range(3)]
    trace = make_step([1.0], [Tensor(100 * MIB, {0: True}), *small])
    assert bounds.largest_op(trace).bytes == 100 * MIB + 2 * PAGE_BYTES
    assert bounds.min_budget(trace) == 110 * MIB  # 109.2, in whole pages
    assert bounds.min_budget(make_step([1.0], [])) == 4 * PAGE_BYTES


@few
@given(steps(), st.integers(0, 64))
def test_every_bound_holds_from_the_min_budget_on(trace: StepTrace, pages: int) -> None:
    budget = bounds.min_budget(trace) + pages * PAGE_BYTES
    assert bounds.closed_form_floor(trace, LINK, budget).us >= trace.compute_us
    moved = steady(trace, budget, "belady")
    assert 0 <= bounds.lower_bound_bytes_in(trace, budget) <= moved.bytes_in
    assert 0 <= bounds.lower_bound_bytes_out(trace, budget) <= moved.bytes_out


def test_a_step_without_ops_has_bounds_of_nothing() -> None:
    trace = make_step([], [])
    assert bounds.closed_form_floor(trace, LINK, 8 * MIB).us == 0
    assert pfoo_l(trace, 0) == 0


def _stack(layers: int) -> StepTrace:
    """Forward, backward and optimizer of `layers` equal layers."""
    rows = []
    for i in range(layers):
        back, update = 2 * layers - 1 - i, 2 * layers + i
        rows += [
            Tensor(16 * MIB, {i: True, i + 1: False, back: False}),
            Tensor(4 * MIB, {i: False, back: False, update: True}, Kind.PERSISTENT, "param"),
            Tensor(4 * MIB, {update: True}, Kind.PERSISTENT, "optimizer"),
            Tensor(4 * MIB, {back: True, update: False}, tag="grad"),
        ]
    return make_step([1.0] * (3 * layers), rows)


def test_the_floor_of_20000_tensors_is_quick() -> None:
    trace = _stack(5000)
    assert trace.gaps.tensor.size > 20_000
    budget = trace.peak_bytes // 2
    taken = []
    for _ in range(5):
        begin = time.thread_time()
        floor = bounds.closed_form_floor(trace, LINK, budget)
        taken.append(time.thread_time() - begin)
    assert floor.us > trace.compute_us
    assert min(taken) < 0.1  # about 5 ms on an idle core
