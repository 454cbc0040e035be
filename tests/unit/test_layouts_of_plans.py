"""Which of the layouts of a device's plans is installed, with native code that only records."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from support.steptraces import PAGE, Op, Tensor, step

from umem.base.device_profiles import DeviceProfile
from umem.errors import NotSupportedError
from umem.session import layouts
from umem.session.layouts import Layouts
from umem.trace.step_trace import StepTrace

LINK = DeviceProfile("link", 1e6, 1e6, 1.0, 1 << 40, "made up")


class Native(SimpleNamespace):
    """The functions that `Layouts` calls."""

    room = PAGE
    plans = (1, 2)
    refuses = False
    stays: bool | None = None  # of the installed layout; None: there is none
    followed = True  # by the last step

    def room_ahead(self, _device: int) -> int:
        return self.room

    def plan_status(self, _device: int) -> dict[str, tuple[int, ...]]:
        return {"plans": self.plans}

    def install_layout(self, *given: Any) -> None:
        if self.refuses:
            raise NotSupportedError("there is no room")
        self.stays = given[-1]

    def clear_layout(self, _device: int) -> None:
        self.stays = None

    def layout_status(self, _device: int) -> dict[str, int]:
        there = self.stays is not None
        return {"entries": int(there), "followed": there and self.followed}


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> Native:
    found = Native()
    monkeypatch.setattr(layouts, "core", found)
    return found


def training() -> StepTrace:
    """64 ops of 1 ms, each with a brief tensor of two pages and a weight of one."""
    tensors = [*(Tensor(2, (i, i)) for i in range(64)), *(Tensor(1) for _ in range(64))]
    return step(tensors, [Op(writes=[i], reads=[64 + i], us=1000.0) for i in range(64)])


def planned(made: Layouts, number: int, trace: StepTrace, budget: int) -> None:
    made.planned(number, trace, budget, made.resident(trace, budget, LINK))


def test_a_step_that_does_not_fit_has_a_resident_layout(native: Native) -> None:
    trace, made = training(), Layouts("on")
    found = made.resident(trace, 32 * PAGE, LINK)
    assert found is not None
    assert found.bytes == 2 * PAGE  # more would be idle
    assert (found.offsets == 0).all()
    assert made.resident(trace, 66 * PAGE, LINK) is None  # it fits
    # An op needs three pages, and one stays free.
    assert made.resident(trace, 5 * PAGE, LINK) is None
    slow = replace(LINK, bytes_per_us_out=PAGE / 2 / layouts._SAVED_US / 64)
    assert made.resident(trace, 32 * PAGE, slow) is not None  # it is never idle
    assert made.resident(replace(trace, op_us=trace.op_us * 0), 32 * PAGE, slow) is None


@pytest.mark.parametrize(("mode", "room"), [("off", PAGE), ("auto", PAGE), ("on", 0)])
def test_without_layouts_or_mapped_memory_there_is_none(
    mode: str, room: int, native: Native
) -> None:
    native.room = room
    assert Layouts(mode).resident(training(), 40 * PAGE, LINK) is None


def installed(number: int = 1) -> Layouts:
    made = Layouts("on")
    planned(made, number, training(), 32 * PAGE)
    for _ in range(2):
        assert not made.step_ended(number)
    return made


def test_a_resident_layout_is_dropped_if_steps_leave_it(native: Native) -> None:
    made = installed()
    assert native.stays is True
    assert made.resident_of(1) is not None
    for followed in (True, False, True, False):
        native.followed = followed
        assert not made.step_ended(1)
        assert native.stays is True
    assert made.step_ended(1)  # its plan is made again
    assert native.stays is None
    assert made.resident_of(1) is None
    for _ in range(4):
        assert not made.step_ended(1)
        assert native.stays is None


def test_it_is_not_installed_before_steps_follow_its_plan(native: Native) -> None:
    made = Layouts("on")
    planned(made, 1, training(), 32 * PAGE)
    for number in (0, 1, 0, 1, 2):
        made.step_ended(number)
        assert native.stays is None


@pytest.mark.parametrize("other", [0, 2])
def test_it_leaves_when_steps_follow_another_plan_or_none_and_returns(
    other: int, native: Native
) -> None:
    made = installed()
    for number, stays in [(other, True), (1, True), (other, True), (other, None), (1, None)]:
        assert not made.step_ended(number)
        assert native.stays is stays
    made.step_ended(1)
    assert native.stays is True
    made.stop()
    assert native.stays is None


def test_one_makes_room_for_that_of_another_plan(native: Native) -> None:
    made = installed()
    planned(made, 2, training(), 32 * PAGE)
    for _ in range(2):
        assert not made.step_ended(2)
    assert native.stays is True
    assert made.settled(2)
    assert made.resident_of(1) is not None


def test_one_that_others_need_the_memory_of_each_step_is_given_up(native: Native) -> None:
    made = installed()
    native.stays = None
    assert not made.step_ended(1)
    assert native.stays is True  # it returns once
    native.stays = None
    assert made.step_ended(1)
    assert made.resident_of(1) is None


def test_one_that_cannot_be_installed_is_given_up(native: Native) -> None:
    native.refuses = True
    made = Layouts("on")
    planned(made, 1, training(), 32 * PAGE)
    assert [made.step_ended(1) for _ in range(3)] == [False, True, False]
    assert made.settled(1)


@pytest.mark.parametrize("number", [1, None])
def test_a_plan_that_is_dropped_gives_its_layout_up(number: int | None, native: Native) -> None:
    made = installed()
    planned(made, 2, training(), 32 * PAGE)
    assert made.give_up(number) == ([1] if number else [1, 2])
    assert native.stays is None
    assert made.settled(1)
    assert made.settled(2) is (number is None)  # it has none, or it is not installed yet


def test_layouts_of_plans_that_native_code_dropped_are_forgotten(native: Native) -> None:
    made = installed()
    native.plans = (2, 3)
    planned(made, 3, training(), 32 * PAGE)
    assert made.resident_of(1) is None
    assert made.resident_of(3) is not None


def test_a_step_that_does_not_fit_has_no_other_layout_under_mapped_memory(native: Native) -> None:
    made = Layouts("on")
    made.planned(1, training(), 32 * PAGE)
    for _ in range(3):
        made.step_ended(1)
    assert native.stays is None
    native.room = 0
    made.planned(2, training(), 32 * PAGE)
    assert native.stays is False  # managed memory


def test_another_budget_removes_it(native: Native) -> None:
    made = installed()
    made.forget()
    assert native.stays is None
    assert made.resident_of(1) is None
    planned(made, 2, training(), 48 * PAGE)
    for _ in range(2):
        made.step_ended(2)
    assert native.stays is True
