"""Steps that are not all alike: plans are followed, and move no more bytes than lru."""

from __future__ import annotations

from typing import NamedTuple

import pytest

torch = pytest.importorskip("torch")

from support.varying import PROGRAMS  # noqa: E402

import umem  # noqa: E402

STEPS, COUNTED = 64, 16  # counted after all choices were tried
LEAST_HITS = {"branches": 0.8}  # 95 % of the others
MORE = 1.02


class Run(NamedTuple):
    losses: list[float]
    bytes: int
    hits: float


def run(name: str, budget: int, policy: str) -> Run:
    torch.manual_seed(0)
    with umem.enable(budget=budget, device="soft", policy=policy):
        step = PROGRAMS[name]()
        losses = []
        for i in range(STEPS):
            if i == STEPS - COUNTED:
                before = umem.stats()
            losses.append(float(step(i).detach()))
        now = umem.stats()
        del step
    moved = now.bytes_in + now.bytes_out - before.bytes_in - before.bytes_out
    hits, misses = now.plan_hits - before.plan_hits, now.plan_misses - before.plan_misses
    return Run(losses, moved, hits / max(hits + misses, 1))


# Those that take most of the time; the others have what is special about them too.
SLOW = ("lengths", "gan", "buckets", "evaluation", "early_exit", "two_tasks", "by_hand")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.nightly) if name in SLOW else name for name in PROGRAMS],
)
def test_plans_are_followed_and_move_no_more_than_lru(name: str) -> None:
    torch.manual_seed(0)
    with umem.enable(budget="4GiB", device="soft", policy="lru"):
        step = PROGRAMS[name]()
        for i in range(4):
            step(i)
        budget = umem.stats().peak_live_bytes // 2
        del step
    lru, auto = run(name, budget, "lru"), run(name, budget, "auto")
    assert auto.losses == lru.losses  # to the last bit
    assert auto.hits >= LEAST_HITS.get(name, 0.95)
    assert auto.bytes <= MORE * lru.bytes
