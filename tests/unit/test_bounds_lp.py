"""Bounds by linear programs: above the closed ones, below what paging does."""

from __future__ import annotations

import sys
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import bounds_lp
from support.cuts import disjoint_cuts, largest_cut, pfoo_l
from support.paging import steady
from support.steps import Tensor, make_step, steps

from umem.analysis import bounds
from umem.analysis.idle_intervals import IdleIntervals
from umem.analysis.turning_points import turns
from umem.base.device_profiles import DeviceProfile
from umem.base.units import MIB
from umem.errors import NotSupportedError, PlanError
from umem.trace.step_trace import Kind, StepTrace

pytest.importorskip("highspy", reason="bounds by linear programs need highspy")
pytest.importorskip("scipy", reason="it states the same programs a second way")
LINK = DeviceProfile("test", 2.0 * MIB, 1.0 * MIB, 0.0, 1 << 40, "made up")
few = settings(max_examples=60)


def _capacity(trace: StepTrace, share: float) -> int:
    """Between the largest op and the peak."""
    least = int(trace.working_set.max())
    return least + int(max(trace.peak_bytes - least, 0) * share)


def _direct(trace: StepTrace, capacity: int) -> float:
    """The LP of offline paging with one row an op, as it is written down."""
    from scipy.optimize import linprog

    n, spans = trace.n_ops, IdleIntervals(trace)
    gaps = spans.gaps
    rows = np.zeros((n, len(gaps.start)))
    for g, (start, end) in enumerate(zip(gaps.start, gaps.end, strict=True)):
        rows[np.arange(start + 1, end) % n, g] = 1
    size = trace.bytes[gaps.tensor] / MIB
    if not len(size):
        return 0.0
    excess = (rows @ size) + (trace.working_set - capacity) / MIB
    bounds_of = np.stack((np.zeros(len(size)), size), axis=1)
    cost = spans.returns.astype(float)
    result = linprog(cost, A_ub=-rows, b_ub=-np.maximum(excess, 0), bounds=bounds_of)
    assert result.status == 0
    return float(result.fun) * MIB


@few
@given(steps(), st.floats(0, 1))
def test_closed_bounds_are_below_the_program(trace: StepTrace, share: float) -> None:
    capacity = _capacity(trace, share)
    least = _direct(trace, capacity)
    cuts = disjoint_cuts(trace, capacity).bytes
    assert largest_cut(trace, capacity) <= cuts <= least + 1
    assert pfoo_l(trace, capacity) <= least + 1


@few
@given(steps(), st.floats(0, 1))
def test_bytes_in_are_those_of_the_program_with_one_row_an_op(
    trace: StepTrace, share: float
) -> None:
    capacity = _capacity(trace, share)
    direct = _direct(trace, capacity)
    assert bounds_lp.lp_bytes_in(trace, capacity) == pytest.approx(direct, rel=1e-4, abs=2)


def test_peaks_add_up_that_one_gap_spans() -> None:
    part, peak = 30 * MIB, 110 * MIB
    long, early, late = {0: True, 4: False}, {0: True, 2: False}, {2: True, 4: False}
    kept = [Tensor(part, long), Tensor(part, early), Tensor(part, late)]
    trace = make_step([1.0] * 5, [*kept, Tensor(peak, {1: True}), Tensor(peak, {3: True})])
    assert bounds.lower_bound_bytes_in(trace, peak) == 2 * part
    assert bounds_lp.lp_bytes_in(trace, peak) == pytest.approx(3 * part, rel=1e-5)
    assert bounds_lp.lp_bytes_moved(trace, peak) == pytest.approx(6 * part, rel=1e-5)


def test_a_gap_that_ends_before_the_first_peak_frees_nothing_at_later_ones() -> None:
    before = Tensor(256, {0: True, 2: False})
    uses = ({3: True, 7: False}, {3: True, 5: False}, {5: True, 7: False})
    kept = [Tensor(256, use) for use in uses]
    peaks = [Tensor(1024, {op: True}) for op in (4, 6)]
    trace = make_step([1.0] * 8, [before, *kept, *peaks])
    assert 767 <= bounds_lp.lp_bytes_in(trace, 1024) <= 768


def test_fewer_bytes_in_may_be_more_bytes_in_all() -> None:
    # Over the peak either the weight leaves, which no op writes, or what is never read again.
    weight = Tensor(40 * MIB, {0: False, 2: False}, Kind.PERSISTENT)
    dead = Tensor(40 * MIB, {0: True}, held=3)
    trace = make_step([1.0] * 4, [weight, dead, Tensor(70 * MIB, {1: True})])
    assert bounds_lp.lp_bytes_in(trace, 110 * MIB) == 0
    assert bounds.lower_bound_bytes_out(trace, 110 * MIB) == 0
    assert bounds_lp.lp_bytes_moved(trace, 110 * MIB) == pytest.approx(40 * MIB, rel=1e-5)


@few
@given(steps(), st.floats(0, 1))
def test_paging_on_demand_is_above_the_programs(trace: StepTrace, share: float) -> None:
    capacity = _capacity(trace, share)
    floor = bounds_lp.lp_time_floor(trace, LINK, capacity)
    assert bounds.closed_form_floor(trace, LINK, capacity).us <= floor
    least = bounds_lp.lp_bytes_in(trace, capacity)
    assert bounds.lower_bound_bytes_in(trace, capacity) <= least
    both = bounds_lp.lp_bytes_moved(trace, capacity)
    assert least + bounds.lower_bound_bytes_out(trace, capacity) <= both * (1 + 1e-6) + 2
    for policy in ("lru", "belady", *range(8)):
        moved = steady(trace, capacity, policy)
        assert moved.bytes_in >= least
        assert moved.bytes_in + moved.bytes_out >= both
        link_us = moved.bytes_in / LINK.bytes_per_us_in + moved.bytes_out / LINK.bytes_per_us_out
        assert trace.compute_us + link_us >= floor * (1 - 1e-6)


@few
@given(steps(), st.floats(0, 1))
def test_a_tensor_in_two_halves_has_the_same_floor(trace: StepTrace, share: float) -> None:
    capacity = _capacity(trace, share)
    halves = _twice(replace(trace, bytes=trace.bytes // 2))
    floor = _time_on(trace, LINK, capacity)
    assert _time_on(halves, LINK, capacity) == pytest.approx(floor, rel=1e-6, abs=1e-3)


def _twice(trace: StepTrace) -> StepTrace:
    """Each tensor as two of its size."""
    both = {name: np.tile(getattr(trace, name), 2) for name in ("bytes", "large", "kind", "first")}
    both |= {name: np.tile(getattr(trace, name), 2) for name in ("last", "next_alias", "source")}
    tensor = trace.access_tensor
    return replace(
        trace,
        tags=trace.tags * 2,
        families=trace.families * 2,
        access_start=trace.access_start * 2,
        access_tensor=np.stack((tensor, tensor + trace.n_tensors), axis=1).reshape(-1),
        access_write=np.repeat(trace.access_write, 2),
        access_read=None if trace.access_read is None else np.repeat(trace.access_read, 2),
        **both,
    )


@few
@given(steps(), st.floats(0, 1), st.floats(0, 1))
def test_more_capacity_or_link_is_never_slower(trace: StepTrace, one: float, two: float) -> None:
    less, more = (_capacity(trace, share) for share in sorted((one, two)))
    # An instant an op, so that both are cut at the same ones.
    slow = bounds_lp.lp_time_floor(trace, LINK, less, windows=2000)
    fast = replace(LINK, bytes_per_us_in=3.0 * MIB, bytes_per_us_out=3.0 * MIB)
    for device, capacity in ((LINK, more), (fast, less)):
        floor = bounds_lp.lp_time_floor(trace, device, capacity, windows=2000)
        assert floor <= slow * (1 + 1e-6)


@few
@given(steps())
def test_nothing_moves_where_all_fits(trace: StepTrace) -> None:
    assert bounds_lp.lp_time_floor(trace, LINK, trace.peak_bytes) == trace.compute_us


def test_a_cyclic_sweep_of_weights() -> None:
    # 12 objects, capacity 4: the closed form of the optimum is n (n - C) / (n - 1).
    weights = [Tensor(MIB, {i: False}, Kind.PERSISTENT, "param") for i in range(12)]
    trace = make_step([1.0] * 12, weights)
    link = replace(LINK, bytes_per_us_in=MIB / 2)
    assert _time_on(trace, link, 4 * MIB) == pytest.approx(2 * 12 * 8 / 11)


def _time_on(trace: StepTrace, device: DeviceProfile, capacity: int) -> float:
    return bounds_lp.lp_time_floor(trace, device, capacity)


def _two_turns() -> StepTrace:
    """Two tensors of 60 MiB that are made, evicted by ops that take all, and read, in turn."""
    first = Tensor(60 * MIB, {0: True, 2: False})
    second = Tensor(60 * MIB, {2: True, 4: False})
    full = [Tensor(80 * MIB, {1: True}), Tensor(80 * MIB, {3: True})]
    return make_step([10.0] * 5, [first, second, *full])


def test_two_turns_of_a_step_add_up() -> None:
    trace, capacity = _two_turns(), 120 * MIB
    # 20 MiB of each are out: 20 us out and 10 us in, overlapping at most 10 us of compute each.
    floor = bounds.closed_form_floor(trace, LINK, capacity)
    assert bounds.lower_bound_bytes_out(trace, capacity) == 40 * MIB
    assert floor == (60.0, "4 turning points, the highest", 1)
    tight = replace(LINK, bytes_per_us_out=0.5 * MIB)
    # Out takes 40 us a tensor now, from op 0 to op 1 and from op 2 to op 3; in takes 10 us, from
    # op 1 to op 2 and from op 3 to op 4.
    assert bounds.closed_form_floor(trace, tight, capacity).us == pytest.approx(100.0)
    assert _time_on(trace, tight, capacity) == pytest.approx(100.0)


@few
@given(steps(), st.floats(0, 1), st.sampled_from([0.3, 1.0, 3.0]))
def test_turning_points_are_no_higher_than_the_program(
    trace: StepTrace, share: float, out: float
) -> None:
    """The program sees the same ops one by one, so it implies the turning points' bound."""
    device = replace(LINK, bytes_per_us_out=out * MIB)
    capacity = _capacity(trace, share)
    spans = IdleIntervals(trace)
    excess = bounds.excess_bytes(spans, capacity)
    if not excess.any():
        return
    with patch.object(bounds_lp, "closed_form_floor", return_value=bounds.Floor(0.0, "", -1)):
        program = bounds_lp.lp_time_floor(trace, device, capacity, windows=2000)
    assert turns(spans, device, excess).us <= program * (1 + 1e-6) + 1e-3


def _stack(layers: int) -> StepTrace:
    rows = []
    for i in range(layers):
        back, update = 2 * layers - 1 - i, 2 * layers + i
        rows += [
            Tensor(16 * MIB, {i: True, i + 1: False, back: False}),
            Tensor(4 * MIB, {i: False, back: False, update: True}, Kind.PERSISTENT, "param"),
            Tensor(4 * MIB, {back: True, update: False}, tag="grad"),
        ]
    return make_step([2.0] * (3 * layers), rows)


def test_fewer_windows_are_looser() -> None:
    trace = _stack(24)
    budget = trace.peak_bytes // 2
    closed = bounds.closed_form_floor(trace, LINK, budget).us
    coarse = bounds_lp.lp_time_floor(trace, LINK, budget, windows=1)
    fine = bounds_lp.lp_time_floor(trace, LINK, budget, windows=48)
    assert closed <= coarse <= fine * (1 + 1e-6)


def test_a_program_that_is_too_large_gets_fewer_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = _stack(16)
    budget = trace.peak_bytes // 2
    full = bounds_lp.lp_time_floor(trace, LINK, budget)
    monkeypatch.setattr(bounds_lp, "_MAX_VARIABLES", 100)
    less = bounds_lp.lp_time_floor(trace, LINK, budget)
    assert bounds.closed_form_floor(trace, LINK, budget).us <= less < full


def test_all_gaps_of_an_instant_are_in_its_groups() -> None:
    trace = _stack(12)
    spans = IdleIntervals(trace)
    instants = np.array([3, 11, 12, 30])
    count, held = len(instants), np.zeros(4)
    for group in bounds_lp._groups(spans, instants):
        for start, end in group.gaps:
            assert group.written is None or group.written <= start
            for at in range(start, end):
                held[at % count] += group.mib * MIB
    assert held.tolist() == spans.held[instants].tolist()


def test_a_time_limit_that_is_over_says_what_to_do() -> None:
    trace = _stack(32)
    with pytest.raises(PlanError, match="time_limit_s is 1e-06"):
        bounds_lp.lp_time_floor(trace, LINK, trace.peak_bytes // 2, time_limit_s=1e-6)


def test_without_highspy_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "highspy", None)
    with pytest.raises(NotSupportedError, match=r"pip install 'umem\[bounds\]'"):
        _time_on(_two_turns(), LINK, 120 * MIB)
