"""A log of several devices, split into one for each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from support import recorded
from support.synthetic import training

from umem.trace.device_split import DeviceSplit
from umem.trace.event_columns import EventColumns, by_step
from umem.trace.ids import BlockId
from umem.trace.schema import Alloc, Event, Free, Op, Step, Validator
from umem.trace.step_builder import StepBuilder

MIB = 1 << 20
A, B, C, D = map(BlockId, range(4))


def split(log: Iterable[Event], devices: Iterable[int] = (0, 1)) -> dict[int, list[Event]]:
    result: dict[int, list[Event]] = {device: [] for device in devices}
    one = DeviceSplit()
    for step in by_step(log):
        for device, own in one.take(step).items():
            result[device] += recorded.events(own)
    return result


def times(events: Iterable[Event]) -> list[tuple[str, float]]:
    return [(event.name, event.us or 0.0) for event in events if isinstance(event, Op)]


def on(device: int, *blocks: BlockId) -> list[Event]:
    return [Alloc(block, 4 * MIB, device=device) for block in blocks]


def test_a_log_of_one_device_is_left_as_it_is() -> None:
    events = list(training(3, 4 * MIB, 8 * MIB))
    assert split(events) == {0: events, 1: []}
    moved: list[Event] = [Alloc(A, MIB, device=1), Op("f", (A,), (), 2.0), Free(A), Step()]
    assert split(moved) == {0: [Step()], 1: moved}


def test_each_device_gets_its_blocks_and_the_ops_that_use_them() -> None:
    first: list[Event] = [*on(0, A), Op("f", (), (A,), 1.0), Free(A)]
    second: list[Event] = [*on(1, B), Op("g", (), (B,), 1.0), Free(B)]
    found = split([*first, *second, Step()])
    assert found == {0: [*first, Step()], 1: [*second, Step()]}


def test_an_op_between_devices_is_one_of_both() -> None:
    copy = Op("copy", (A, C), (B, D), 3.0, parts=(0, 0, 8, 1, 8, 16, 3, 4, 12))
    found = split([*on(0, A, D), *on(1, B, C), copy, Step()])
    assert found[0][2] == Op("copy", (A,), (D,), 3.0, parts=(0, 0, 8, 1, 4, 12))
    assert found[1][2] == Op("copy", (C,), (B,), 3.0, parts=(0, 8, 16))


def test_a_device_waits_for_what_another_hands_over() -> None:
    """A pipeline of two: the second one is idle first, and the first one in the middle."""
    found = split(
        [
            *on(0, A), *on(1, B),
            Op("forward0", (A,), (), 10.0),
            Op("hand over", (A,), (B,), 1.0),
            Op("forward1", (B,), (), 20.0),
            Op("backward1", (B,), (), 40.0),
            Op("hand back", (B,), (A,), 1.0),
            Op("backward0", (A,), (), 20.0),
            Step(),
        ]
    )  # fmt: skip
    assert times(found[0]) == [
        ("forward0", 10), ("hand over", 1), ("", 60), ("hand back", 1), ("backward0", 20)
    ]  # fmt: skip
    assert times(found[1]) == [
        ("", 10), ("hand over", 1), ("forward1", 20), ("backward1", 40), ("hand back", 1), ("", 20)
    ]  # fmt: skip


def test_devices_side_by_side_wait_only_at_the_end_of_the_step() -> None:
    """As with replicas: the work of one is not idle time of the other."""
    ops = [Op(name, (block,), (), 5.0) for name in "fgh" for block in (A, B)]
    found = split([*on(0, A), *on(1, B), *ops, Op("more", (B,), (), 7.0), Step()])
    assert times(found[0]) == [("f", 5), ("g", 5), ("h", 5), ("", 7)]
    assert times(found[1]) == [("f", 5), ("g", 5), ("h", 5), ("more", 7)]


def test_times_that_are_not_known_are_no_waits() -> None:
    """They are medians, also for the other device."""
    ops = [Op("f", (block,), (), 5.0 if block == A or known else None)
           for known in (True, False, False) for block in (A, B)]  # fmt: skip
    found = split([*on(0, A), *on(1, B), *ops, Step()])
    assert times(found[0]) == times(found[1]) == [("f", 5.0)] * 3


def test_the_devices_of_a_step_are_those_with_ops_in_it() -> None:
    one = DeviceSplit()
    steps: list[list[Event]] = [
        [*on(0, A), Op("f", (A,), (), 1.0)],
        [*on(1, B), Op("g", (B,), (), 1.0)],
        [Free(A)],
    ]
    used = []
    for events in steps:
        for step in by_step([*events, Step()]):
            one.take(step)
        used.append(set(one.used))
    assert used == [{0}, {1}, set()]


def test_a_device_that_a_step_does_not_use_has_no_step() -> None:
    one, two = StepBuilder(), StepBuilder()
    log: list[Event] = [*on(0, A), *on(1, B)]
    for step in range(4):
        log.append(Op("f", (A,), (), 1.0))
        if step == 1:
            log.append(Op("g", (B,), (), 1.0))
        log.append(Step())
    found = split(log)
    for builder, events in ((one, found[0]), (two, found[1])):
        for event in events:
            builder.add(event)
    assert (one.steps, two.steps) == (4, 1)


def test_both_halves_are_valid_traces_whose_times_are_those_of_the_step() -> None:
    """Layers of a synthetic training alternate between two devices."""
    events = [
        Alloc(e.id, e.bytes, e.tag, e.family, e.id % 2) if isinstance(e, Alloc) else e
        for e in training(4, 4 * MIB, 8 * MIB)
    ]
    found = split(events)
    totals = []
    for own in found.values():
        check, builder = Validator(), StepBuilder()
        for event in own:
            check.check(event)
            builder.add(event)
        totals.append(builder.step().op_us.sum())
        assert builder.step().n_tensors > 0
    assert totals[0] == pytest.approx(totals[1])


def test_what_was_there_before_another_device_joins_is_the_first_ones() -> None:
    found = split(
        [
            *on(0, A), Op("f", (A,), (), 5.0), *on(1, B),
            Op("copy", (A,), (B,), 1.0), Free(A), Op("g", (B,), (), 2.0), Step(),
        ]
    )  # fmt: skip
    assert times(found[0]) == [("f", 5), ("copy", 1), ("", 2)]
    assert times(found[1]) == [("", 5), ("copy", 1), ("g", 2)]
    assert Free(A) in found[0]
    assert Free(A) not in found[1]


def test_rows_of_the_recorder_may_precede_rows_of_a_split() -> None:
    """The recorder's have no events that they came from, and those of a split may have some."""

    def native(*events: Event) -> EventColumns:
        (columns,) = by_step(events)
        return replace(columns, source=())

    one, builder = DeviceSplit(), StepBuilder()
    builder.take(one.take(native(*on(0, A)))[0])
    builder.begin()
    second: list[Event] = [*on(1, B), Op("g", (), (B,), 1.0)]
    later = native(*second, *on(0, C), Op("f", (A,), (C,), 1.0), *on(0, D), Step())
    builder.take(one.take(later)[0])
    assert builder.steps == 1
    assert builder.step().n_ops == 1
    assert builder.peak_bytes == 12 * MIB
