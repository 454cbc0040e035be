"""Plans of policies, lowered and followed by the native engine in a replay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.planned import MIB, PAGE, options

from umem import _core
from umem.base.device_profiles import DeviceProfile
from umem.policies import registry
from umem.policies.base import Plan
from umem.policies.lowering import lower
from umem.simulation.replay import columns_of
from umem.trace.step_trace import Kind, StepTrace

PROFILE = DeviceProfile("a100-pcie4", 25e3, 25e3, 20.0, 40 << 30, "the same as the native one")
PLANNED = [name for name in registry.names() if name not in _core.policies()]


def training(layers: int = 6, us: float = 200.0) -> StepTrace:
    """A stack: weights, activations, gradients that live into the next step, small tensors too."""
    rows: list[
        tuple[int, int, str, int, int, int]
    ] = []  # bytes, kind, tag, first, last, next_alias
    ops: list[list[int]] = []
    last = 2 * layers - 1

    def tensor(*row: Any) -> int:
        rows.append(row)
        return len(rows) - 1

    weights = [tensor(4 * MIB, Kind.PERSISTENT, "param", 0, last, -1) for _ in range(layers)]
    biases = [tensor(4096, Kind.PERSISTENT, "param", 0, last, -1) for _ in range(layers)]
    made = [tensor(4 * MIB, Kind.MADE, "grad", 2 * layers - 1 - i, last, -1) for i in range(layers)]
    old = [tensor(4 * MIB, Kind.CARRIED, "grad", 0, i, made[i]) for i in range(layers)]
    acts = [
        tensor(6 * MIB, Kind.TRANSIENT, "activation", i, 2 * layers - 1 - i, -1)
        for i in range(layers)
    ]
    for i in range(layers):
        ops.append([*acts[max(i - 1, 0) : i + 1], weights[i], biases[i], old[i]])
    for i in reversed(range(layers)):
        ops.append([*acts[max(i - 1, 0) : i + 1], weights[i], made[i]])
    asked = np.array([row[0] for row in rows], np.int64)
    large = asked >= PAGE
    access = np.array([t for op in ops for t in op], np.int64)
    write = np.array([rows[t][1] in (Kind.MADE, Kind.TRANSIENT) for t in access])
    return StepTrace(
        op_us=np.full(len(ops), us),
        op_names=("op",) * len(ops),
        bytes=np.where(large, -(-asked // PAGE) * PAGE, asked),
        large=large,
        tags=tuple(row[2] for row in rows),
        families=("linear",) * len(rows),
        kind=np.array([row[1] for row in rows], np.int64),
        first=np.array([row[3] for row in rows], np.int64),
        last=np.array([row[4] for row in rows], np.int64),
        next_alias=np.array([row[5] for row in rows], np.int64),
        source=np.arange(len(rows)),
        access_start=np.cumsum([0, *map(len, ops)]),
        access_tensor=access,
        access_write=write,
    )


def replayed(plan: Plan | None, trace: StepTrace, budget: int, backed: bool) -> dict[str, float]:
    replay = _core.Replay(options(budget, floor_bytes=8 * MIB), backed)
    try:
        replay.set_step(columns_of(trace))
        if plan is not None:
            _core.install_plan(lower(plan, replay.address, alone=True))
        replay.run_step(4)
        figures = replay.figures()
        del figures["seconds"]
        if plan is not None:
            assert _core.plan_status()["complete"] == 1
        return figures
    finally:
        replay.close()


@pytest.fixture(scope="module")
def trace() -> StepTrace:
    return training()


@pytest.mark.parametrize("share", [0.4, 0.7])
@pytest.mark.parametrize("name", PLANNED)
def test_a_replay_follows_the_plan_with_memory_behind_it_and_without(
    name: str, share: float, trace: StepTrace
) -> None:
    budget = int(trace.peak_bytes * share) // PAGE * PAGE
    plan = registry.make(name).plan(trace, PROFILE, budget)
    assert plan is not None
    with_memory = replayed(plan, trace, budget, True)
    assert with_memory == replayed(plan, trace, budget, False)
    assert (with_memory["plan_hits"], with_memory["plan_misses"]) == (trace.n_ops, 0)
    assert with_memory["peak_resident_bytes"] <= budget
    assert with_memory["faults"] == 0


def test_a_plan_hides_the_transfers_that_lru_waits_for() -> None:
    trace = training(16, us=1500.0)
    budget = int(trace.peak_bytes * 0.85) // PAGE * PAGE
    plan = registry.make("auto").plan(trace, PROFILE, budget)
    planned = replayed(plan, trace, budget, False)
    lru = replayed(None, trace, budget, False)
    assert lru["plan_hits"] == lru["plan_misses"] == 0
    assert planned["bytes_in"] <= lru["bytes_in"]
    assert planned["stall_us"] < 0.5 * lru["stall_us"]
