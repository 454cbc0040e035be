"""A training loop gets a static layout from its recorded step, and computes the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from support.layers import Scale  # noqa: E402

import umem  # noqa: E402
from umem.base.native import core  # noqa: E402
from umem.errors import ConfigError  # noqa: E402
from umem.policies.default.planner import Auto  # noqa: E402
from umem.session import layouts  # noqa: E402
from umem.session.device_planner import DevicePlanner  # noqa: E402

LAYERS, WIDTH = 3, 1024  # 4 MiB a weight; outputs of 512 rows have 2 MiB
PLENTY, TIGHT = "96MiB", "36MiB"


def losses(layout: str, budget: str, rows: list[int], clear: str = "first") -> list[float]:
    """The steps of a training loop that clears gradients first, after forward, or last."""
    with umem.enable(budget=budget, device="soft", layout=layout):
        torch.manual_seed(0)
        net = torch.nn.Sequential(*(Scale(WIDTH) for _ in range(LAYERS)))
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
        result = []
        for count in rows:
            if clear == "first":
                optimizer.zero_grad()
            loss = net(torch.randn(count, WIDTH)).relu().square().mean()
            if clear == "between":
                optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if clear == "last":
                optimizer.zero_grad()
            result.append(float(loss.item()))
            del loss
        result.append(float(core.layout_status()["followed"]))
        result.append(float(core.layout_status()["hits"]))
        return result


@pytest.mark.parametrize("clear", ["first", "between", "last"])
def test_a_step_that_fits_goes_by_its_layout(clear: str) -> None:
    rows = [512] * 8
    *planned, followed, hits = losses("auto", PLENTY, rows, clear)
    *plain, never, none = losses("off", PLENTY, rows, clear)
    assert planned == plain  # to the last bit
    assert (never, none) == (0, 0)
    assert followed == 1
    assert hits >= 3 * LAYERS


def test_auto_leaves_a_step_alone_that_does_not_fit() -> None:
    assert losses("auto", TIGHT, [512] * 5)[-1] == 0


@pytest.mark.parametrize("budget", [TIGHT, PLENTY])
def test_a_smaller_last_batch_keeps_the_layout_of_the_others(budget: str) -> None:
    rows = [512, 512, 512, 512, 256, 512, 512, 256, 512]
    *planned, followed, hits = losses("on", budget, rows)
    *plain, _, _ = losses("off", budget, rows)
    assert planned == plain
    assert followed == 1
    assert hits >= 5 * 3 * LAYERS  # the third, fourth, sixth, seventh and last step


@pytest.mark.parametrize("budget", [TIGHT, PLENTY])
def test_another_shape_for_good_has_its_own_layout(budget: str) -> None:
    rows = [512, 512, 512, 512, 768, 768, 768, 768, 768]
    *planned, followed, _ = losses("on", budget, rows)
    *plain, _, _ = losses("off", budget, rows)
    assert planned == plain
    assert followed == 1


def test_a_word_that_is_no_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'maybe'.*allowed: auto, on, off"):
        umem.enable(layout="maybe", device="soft", budget="64MiB")


def training() -> Callable[[int], None]:
    """Trains for so many steps."""
    net = torch.nn.Sequential(*(Scale(WIDTH) for _ in range(LAYERS)))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)

    def run(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            net(torch.randn(512, WIDTH)).relu().square().mean().backward()
            optimizer.step()

    return run


def test_a_layout_goes_with_the_budget_that_the_step_fitted() -> None:
    with umem.enable(budget=PLENTY, device="soft"):
        run = training()
        run(5)
        assert core.layout_status()["entries"] > 0
        umem.set_budget(TIGHT)
        run(5)
        assert core.layout_status()["entries"] == 0
        del run


def test_a_plan_that_loses_its_resident_layout_is_made_for_the_whole_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As under mapped memory, of which the software device has none: there it is a layout too."""
    monkeypatch.setattr(core, "room_ahead", lambda _device: 2 << 20)
    monkeypatch.setattr(layouts, "_SAVED_US", 1e6)
    monkeypatch.setattr(Auto, "rollback", False)  # the first plan is followed
    made: list[bool] = []
    plan = DevicePlanner._made

    def recorded(self: DevicePlanner, trace: Any, step: Any, resident: Any) -> object:
        made.append(resident is not None)
        return plan(self, trace, step, resident)

    monkeypatch.setattr(DevicePlanner, "_made", recorded)

    def entries() -> int:
        return core.layout_status()["entries"]

    with umem.enable(budget=TIGHT, device="soft", layout="on"):
        run = training()
        run(8)
        assert made[0]
        assert entries() > 0
        umem.set_budget("40MiB")
        assert entries() == 0
        run(8)
        assert made[-1]
        assert entries() > 0
        count = len(made)
        status = core.layout_status
        monkeypatch.setattr(core, "layout_status", lambda d=0: {**status(d), "followed": False})
        run(3)
        assert made[count:] == [False]
        assert entries() == 0
        del run
