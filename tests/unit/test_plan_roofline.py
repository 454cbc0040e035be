"""Durations by the roofline, and their correction by a recorded run."""

from __future__ import annotations

import dataclasses

import pytest

from umem.base import device_profiles
from umem.capture import roofline
from umem.capture.recording import OpCost
from umem.errors import ConfigError
from umem.trace.schema import Alloc, Event, Op

DEVICE = device_profiles.find("a100-pcie4")


def _timed(
    name: str = "aten::mm", flops: float = 0, moved: int = 0, precision: str = "half"
) -> tuple[Op, OpCost]:
    return Op(name, (), ()), OpCost("", "forward", flops, moved, precision)


def test_the_longer_of_compute_and_memory_and_a_launch() -> None:
    clock = roofline.clock(DEVICE)
    assert clock(*_timed()) == 3.0
    assert clock(*_timed(flops=312e6 * 50)) == pytest.approx(50 + 3)
    assert clock(*_timed(flops=312e6 * 50, moved=1555_000 * 80)) == pytest.approx(80 + 3)
    for precision, flops in (("tf32", 156e6), ("fp32", 19.5e6), ("fp64", 9.7e6)):
        assert clock(*_timed(flops=flops * 7, precision=precision)) == pytest.approx(10)


def test_a_profile_without_compute_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no table `compute`.*add the table"):
        roofline.clock(dataclasses.replace(DEVICE, compute=None))


def test_a_recorded_run_scales_each_name_by_its_median() -> None:
    base = roofline.clock(DEVICE)
    small, large = _timed(moved=1555_000 * 7), _timed(moved=1555_000 * 17)  # 10 and 20 µs
    other, unseen = _timed("aten::add", moved=1555_000 * 7), _timed("aten::exp", moved=1555_000 * 7)
    run: list[Event] = [
        Alloc(1, 8), Op("aten::mm", (), (), us=30.0), Op("aten::mm", (), (), us=1e9),
        Op("aten::mm", (), (), us=30.0), Op("aten::add", (), (), us=5.0),
        Op("aten::cos", (), (), us=7.0), Op("aten::add", (), ()),
    ]  # fmt: skip
    clock = roofline.scaled(base, [small, small, large, other, unseen], run)
    assert clock(*small) == pytest.approx(30)
    assert clock(*large) == pytest.approx(60)
    assert clock(*other) == pytest.approx(5)
    assert clock(*unseen) == pytest.approx(10 * 35 / 20)  # as the two known names together


@pytest.mark.parametrize("run", [[], [Op("aten::mm", (), ())], [Op("aten::cos", (), (), us=1.0)]])
def test_a_run_that_says_nothing_is_refused(run: list[Op]) -> None:
    with pytest.raises(ConfigError, match="times none of the planned ops"):
        roofline.scaled(roofline.clock(DEVICE), [_timed()], run)
