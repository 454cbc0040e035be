"""The planners' loops in native code, against equivalent plain loops, and on bad columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import plain_estimate
from support.steptraces import steps

from umem.base.device_profiles import DeviceProfile
from umem.base.native import core
from umem.base.units import PAGE_BYTES
from umem.policies.default.estimate import estimate
from umem.policies.default.occupancy import all_gaps, large_live_bytes
from umem.policies.default.planner import _choice
from umem.policies.default.writeback import NEVER
from umem.trace.step_trace import Floats, HostUpdates, Ints, StepTrace


def ints(*values: int) -> Ints:
    return np.array(values, np.int64)


times = st.sampled_from([0.0, 1.0, 70.0, 4000.0])


def floats(*values: float) -> Floats:
    return np.array(values, float)


@settings(max_examples=300)
@given(st.data())
def test_the_choice_is_that_of_plain_loops(data: st.DataObject) -> None:
    places = data.draw(st.integers(1, 12))
    over = data.draw(st.lists(st.integers(1, 9), min_size=places, max_size=places))
    sizes, idles = st.integers(1, 5), st.sampled_from([1.0, 2.0, 3.0])
    ranges = st.lists(st.integers(0, places), min_size=3, max_size=3).map(sorted)
    rows = data.draw(st.lists(st.tuples(ranges, sizes, idles), max_size=12))
    gaps: list[Any] = [(*row, size, idle_us) for row, size, idle_us in rows]
    order = data.draw(st.permutations(range(len(gaps))))

    left = {op: float(amount) for op, amount in enumerate(over)}
    inside = [[*range(wrap), *range(begin, end)] for wrap, begin, end, _, _ in gaps]

    def most(i: int) -> float:
        return max((left[op] for op in inside[i]), default=-np.inf)

    def add(i: int, amount: float) -> None:
        for op in inside[i]:
            left[op] += amount

    away = []
    for whole in (True, False):
        for i in order:
            if i not in away and most(i) >= (gaps[i][3] if whole else 1):
                add(i, -gaps[i][3])
                away.append(i)
    kept = []
    for i in sorted(away, key=lambda i: (gaps[i][4], -i)):
        if most(i) <= -gaps[i][3]:
            add(i, gaps[i][3])
            kept.append(i)

    columns: Any = [ints(*(gap[k] for gap in gaps)) for k in (1, 2, 0, 3)]
    idle_us = floats(*(gap[4] for gap in gaps))
    found = core.choose_gaps(*columns, idle_us, ints(*over), ints(*order))
    assert sorted(found.tolist()) == sorted(set(away) - set(kept))


@settings(max_examples=300)
@given(st.data())
def test_returns_start_where_a_plain_search_finds_room(data: st.DataObject) -> None:
    n = data.draw(st.integers(2, 10))
    row = st.tuples(st.integers(-1, n - 2), st.integers(2, n), st.integers(1, 4))
    rows = data.draw(st.lists(row, max_size=8))
    rows = sorted(((a, a + b, size) for a, b, size in rows), key=lambda row: row[1])
    occupancy = data.draw(st.lists(st.integers(0, 6), min_size=n, max_size=n))
    room = max(occupancy) + data.draw(st.integers(0, 6))

    taken = occupancy * 3
    starts = [0] * len(rows)
    waiting: list[tuple[int, int, int]] = []
    for point in range(3 * n):
        for i, (start, end, _) in enumerate(rows):
            waiting += [(end + lap * n, i, lap) for lap in (0, 1) if start + 1 + lap * n == point]
        for due, i, lap in sorted(waiting):
            if any(taken[op] > room - rows[i][2] for op in range(point, due)):
                break  # no other before it
            begin = min(point, due)
            for op in range(begin, due):
                taken[op] += rows[i][2]
            waiting.remove((due, i, lap))
            if lap == (rows[i][1] < n):  # requests due in a third step would have no competitors
                starts[i] = begin - lap * n

    columns: Any = [ints(*(row[k] for row in rows)) for k in range(3)]
    op, bytes_taken = core.return_starts(*columns, ints(*occupancy), room)
    assert op.tolist() == starts
    assert bytes_taken.tolist() == taken[n : 2 * n]


@settings(max_examples=300)
@given(trace=steps(), data=st.data())
def test_the_estimate_is_that_of_plain_loops(trace: StepTrace, data: st.DataObject) -> None:
    gaps = all_gaps(trace)
    count = len(gaps.tensor)
    index = np.flatnonzero(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)))
    index = index[np.lexsort((gaps.tensor[index], gaps.start[index]))]
    choice = _choice(trace, gaps, index, large_live_bytes(trace))
    if len(choice.away.tensor) > 1:
        choice = choice._replace(updates=data.draw(updates(choice.returns, len(index))))
    room = int(choice.occupancy.max()) + data.draw(st.integers(0, 20)) * PAGE_BYTES
    speed = st.sampled_from([PAGE_BYTES / 2, PAGE_BYTES / 20, PAGE_BYTES / 200])
    device = DeviceProfile("test", data.draw(speed), data.draw(speed), 45.0, 1 << 40, "made up")
    found = estimate(trace, device, choice, room)
    us, copied = plain_estimate.estimate(trace, device, choice, room)
    assert found.us == pytest.approx(us, rel=1e-12)
    assert found.copied.tolist() == copied


@st.composite
def updates(draw: st.DrawFn, returns: Ints, count: int) -> HostUpdates:
    """Updates of what returns, each with the gradient in another gap."""
    rows = [
        (gap, draw(st.sampled_from([g for g in range(count) if g != gap])), draw(times))
        for gap in returns.tolist()
        if draw(st.booleans())
    ]
    parameter, gradient, us = zip(*rows, strict=True) if rows else ((), (), ())
    return HostUpdates(ints(*parameter), ints(*gradient), floats(*us))


def estimated(**changed: Ints | Floats) -> float:
    """A step of two ops: a tensor leaves after op 0, and returns for op 0 of the next step."""
    columns: Any = {
        "start": ints(0), "out_us": floats(10.0), "in_us": floats(10.0), "quiet": ints(-1),
        "returns": ints(0), "return_start": ints(1), "return_end": ints(2),
        "room_us": floats(10.0), "written": ints(), "due": ints(), "copy_us": floats(),
        "parameter": ints(), "gradient": ints(), "work_us": floats(),
        "op_us": floats(5.0, 5.0), "slack_us": floats(0.0, 0.0),
    }  # fmt: skip
    columns.update(changed)
    ops = columns.pop("op_us"), columns.pop("slack_us")
    return core.step_estimate(*ops, **columns, never=NEVER)[0]


def test_a_step_waits_for_what_comes_back() -> None:
    assert estimated() == 10 + 10 + 5  # op 1 waits for the memory, and op 0 for the return
    assert estimated(slack_us=floats(10.0, 10.0)) == 5 + 10 + 10
    assert estimated(in_us=floats(0.0), slack_us=floats(10.0, 10.0)) == 15
    assert estimated(out_us=floats(0.0), in_us=floats(0.0)) == 10


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: core.choose_gaps(ints(0), ints(9), ints(0), ints(1), floats(1), ints(1), ints(0)),
         "end is not from 0 to 1"),
        (lambda: core.choose_gaps(ints(0), ints(1), ints(0), ints(1), floats(1), ints(1), ints(1)),
         "order is not from 0 to 0"),
        (lambda: core.choose_gaps(ints(0), ints(), ints(0), ints(1), floats(1), ints(1), ints(0)),
         "end has 0 rows, and not 1"),
        (lambda: core.return_starts(ints(-2), ints(1), ints(1), ints(0, 0), 1),
         "start is not from -1 to 4"),
        (lambda: core.return_starts(ints(0), ints(5), ints(1), ints(0, 0), 1),
         "end is not from 0 to 4"),
        (lambda: core.choose_gaps(
            ints(0), ints(1), ints(0), ints(1), floats(np.nan), ints(1), ints(0)),
         "idle_us has what is no number"),
        (lambda: estimated(due=ints(1 << 40), written=ints(0), copy_us=floats(1.0)), "due is not"),
        (lambda: estimated(quiet=ints(0)), "quiet is not from -1 to -1"),
        (lambda: estimated(returns=ints(1)), "returns is not from 0 to 0"),
        (lambda: estimated(slack_us=floats(1.0)), "slack_us has 1 rows, and not 2"),
        (lambda: estimated(parameter=ints(1), gradient=ints(0), work_us=floats(1.0)),
         "parameter is not from 0 to 0"),
        (lambda: estimated(parameter=ints(0), gradient=ints(0), work_us=floats(np.nan)),
         "work_us has what is no number"),
        (lambda: estimated(parameter=ints(0), gradient=ints(0)), "parameter has 1 rows, and not 0"),
        (lambda: estimated(op_us=floats(), slack_us=floats()), "a step without ops"),
        (lambda: estimated(start=np.zeros((1, 1), np.int64)), "start is no column"),
    ],
)  # fmt: skip
def test_a_place_that_is_in_no_column_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
