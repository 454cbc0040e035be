"""The schedule of recording: which steps are recorded if kinds of steps come now and then."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from umem.session.recording_schedule import RecordingSchedule


class Program:
    """A program whose steps are of some kinds; each kind follows its plan once it has one."""

    def __init__(self) -> None:
        self.schedule = RecordingSchedule()
        self.planned: dict[object, int] = {}  # the plan of each kind
        self.recorded = 0  # steps

    def run(self, kinds: Iterable[object]) -> None:
        for kind in kinds:
            recorded = self.schedule.wants_step
            self.recorded += recorded
            self.schedule.step_used()
            if kind in self.planned:
                self.schedule.followed(self.planned[kind], testing=False)
            elif self.schedule.left(recorded=recorded):
                self.planned[kind] = len(self.planned) + 1


def with_rare(every: int, kind: object = "rare") -> list[object]:
    return ["usual"] * (every - 1) + [kind]


@pytest.mark.parametrize("every", [2, 10, 64, 65, 70, 99, 150, 1000])
def test_a_kind_that_comes_once_in_some_steps_is_planned_by_its_fourth_time(every: int) -> None:
    program = Program()
    program.run(with_rare(every) * 3)
    assert set(program.planned) == {"usual", "rare"}
    program.recorded = 0
    program.run(with_rare(every) * 10)
    assert program.recorded <= every  # the wait that the last one began
    program.recorded = 0
    program.run(with_rare(every) * 10)
    assert program.recorded == 0


@pytest.mark.parametrize("every", [2, 8, 9, 20, 100])
def test_a_device_that_is_used_at_intervals_is_planned_by_its_fourth_use(every: int) -> None:
    program = Program()
    for _ in range(4):
        program.run(["used"])
        for _ in range(every - 1):
            program.schedule.step_passed()
    assert program.planned
    program.recorded = 0
    for _ in range(100):
        program.run(["used"])
        for _ in range(every - 1):
            program.schedule.step_passed()
    assert 2 <= program.recorded <= 8  # the plan's trial, and no more


@pytest.mark.parametrize("steps", [(70, 71), (300, 700), (100, 150), (1000, 90)])
def test_two_rare_kinds_are_planned(steps: tuple[int, int]) -> None:
    program = Program()
    program.run((with_rare(steps[0]) + with_rare(steps[1], "other")) * 6)
    assert set(program.planned) == {"usual", "rare", "other"}
    program.recorded = 0
    program.run((with_rare(steps[0]) + with_rare(steps[1], "other")) * 10)
    assert program.recorded <= 8


def test_a_kind_is_planned_that_comes_after_many_others_were_new() -> None:
    program = Program()
    for number in range(40):
        program.run(with_rare(70, number))
    program.run(with_rare(70) * 6)
    assert "rare" in program.planned


@pytest.mark.parametrize("every", [2, 5, 6, 10, 64, 70, 99, 150, 1000])
def test_steps_that_are_new_each_time_record_few(every: int) -> None:
    program = Program()
    for number in range(40):
        program.run(with_rare(every, number))
    program.recorded = 0
    for number in range(100, 140):
        program.run(with_rare(every, number))
    assert program.recorded <= 0.06 * 40 * every
