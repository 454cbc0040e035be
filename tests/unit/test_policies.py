"""The contract of every registered policy."""

from __future__ import annotations

import importlib
import subprocess
import sys
from importlib import metadata
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.plans import occupancy, problems
from support.steptraces import LINK, PAGE, inference, steps, training

from umem.errors import ConfigError
from umem.policies import registry
from umem.policies.base import Plan, Policy
from umem.policies.default.occupancy import (
    bytes_over,
    large_live_bytes,
    min_occupancy,
    movable_gaps,
    select,
)
from umem.trace.step_trace import StepTrace

NATIVE = {"none", "lru", "conv_lru"}
PLANNED = [name for name in registry.names() if name not in NATIVE]
PREDICTED = {"deepum"}  # its tables may predict wrongly


@pytest.mark.parametrize("name", registry.names())
def test_every_policy_is_one_and_cites_its_source(name: str) -> None:
    policy = registry.make(name)
    assert isinstance(policy, Policy)
    assert policy.name == name
    doc = importlib.import_module(type(policy).__module__).__doc__ or ""
    assert f"`{name}`" in doc
    bases = [cls.__doc__ or "" for cls in type(policy).__mro__]
    assert any("Source:" in text for text in bases)


@pytest.mark.parametrize("name", sorted(NATIVE))
def test_native_policies_give_no_plan(name: str) -> None:
    assert registry.make(name).plan(training(3), LINK, 64 * PAGE) is None


@pytest.mark.parametrize("name", PLANNED)
@settings(max_examples=60)
@given(trace=steps(), share=st.sampled_from([0.02, 0.3, 0.5, 0.75, 1.0]))
def test_plans_are_valid(name: str, trace: StepTrace, share: float) -> None:
    check(name, trace, int(trace.peak_bytes * share))


@pytest.mark.parametrize("name", PLANNED)
@pytest.mark.parametrize("share", [0.01, 0.25, 0.5, 0.75, 1.0])
def test_plans_of_training_and_inference_are_valid(name: str, share: float) -> None:
    for trace in (training(6, convolutions=(0, 3)), inference(7)):
        check(name, trace, int(trace.peak_bytes * share))


def check(name: str, trace: StepTrace, budget: int) -> None:
    policy = registry.make(name)
    before = columns(trace)
    plan = policy.plan(trace, LINK, budget)
    assert isinstance(plan, Plan)
    assert plan.trace in (trace, trace.pieces)
    assert problems(plan, deadlines=name not in PREDICTED) == []
    assert columns(trace) == before
    for again in (policy.plan(trace, LINK, budget), registry.make(name).plan(trace, LINK, budget)):
        assert again is not None
        assert moves(again) == moves(plan)
    assert 0 <= plan.headroom <= budget
    if plan.gated:
        assert plan.occupancy is not None
        assert plan.occupancy.shape == (trace.n_ops,)
        assert plan.occupancy.max() <= plan.capacity <= budget


def columns(trace: StepTrace) -> list[bytes]:
    return [value.tobytes() for value in vars(trace).values() if isinstance(value, np.ndarray)][:10]


def moves(plan: Plan) -> list[object]:
    return [
        value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in vars(plan).items()
        if name != "trace"
    ]


@pytest.mark.parametrize("name", ["auto", "capuchin"])
@settings(max_examples=100)
@given(trace=steps(), share=st.sampled_from([0.3, 0.5, 0.75, 1.0]))
def test_planned_occupancy_stays_in_the_capacity(name: str, trace: StepTrace, share: float) -> None:
    budget = int(trace.peak_bytes * share)
    plan = registry.make(name).plan(trace, LINK, budget)
    assert plan is not None
    least = min_occupancy(trace)
    if name == "capuchin":  # it knows what is used before and after only
        gaps = movable_gaps(trace)
        between = select(gaps, np.flatnonzero(gaps.start >= 0))
        away = bytes_over(between, trace.bytes[between.tensor], trace.n_ops)
        least = large_live_bytes(trace) - away
    room = max(budget // PAGE * PAGE - trace.small_bytes, int(least.max()))
    there = occupancy(plan)
    assert (there <= room).all()
    assert (there <= large_live_bytes(trace)).all()


@pytest.mark.parametrize("name", ["auto", "autoswap", "capuchin", "distance", "vdnn", "lms"])
def test_nothing_moves_where_the_step_fits(name: str) -> None:
    trace = training(6)
    budget = int((trace.peak_bytes + PAGE) * (1.12 if name == "distance" else 1.0))
    plan = registry.make(name).plan(trace, LINK, budget)
    assert plan is not None
    assert (plan.evict, plan.fetch, plan.barriers) == ((), (), ())


def test_names_are_cheap() -> None:
    code = "import sys, umem.policies.registry as r; r.names(); print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]


def test_an_unknown_name_gets_a_hint() -> None:
    with pytest.raises(ConfigError, match=r"'autoswop' \(did you mean autoswap\?\); allowed: auto"):
        registry.make("autoswop")


class Third:
    name = "third"

    def plan(self, trace: StepTrace, device: object, budget: int) -> None:
        return None


class NoPolicy:
    name = "third"


class Renamed(Third):
    name = "other"


def broken() -> Policy:
    raise RuntimeError("boom")


@pytest.fixture
def bring(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Register callables of this module as entry points."""

    def register(*pairs: tuple[str, str]) -> None:
        entries = [
            metadata.EntryPoint(name, f"{__name__}:{what}", registry.ENTRY_POINTS)
            for name, what in pairs
        ]
        monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or _this())
        monkeypatch.setattr(metadata, "entry_points", lambda group: entries)

    return register


def _this() -> Any:
    import types

    module = types.ModuleType(__name__)
    module.__dict__.update(globals())
    return module


def test_third_parties_bring_policies(bring: Any) -> None:
    bring(("third", "Third"), ("auto", "Third"))
    assert registry.names()[-1] == "third"
    assert registry.names().count("auto") == 1
    assert isinstance(registry.make("third"), Policy)
    assert registry.make("auto").plan(training(2), LINK, PAGE) is not None  # the built-in one


@pytest.mark.parametrize(
    ("brought", "words"),
    [
        (
            (("third", "NoPolicy"),),
            r"is a NoPolicy, not a policy: it has no method `plan\(",
        ),
        ((("third", "broken"),), r"cannot be made: RuntimeError\('boom'\)"),
        ((("third", "absent"),), r"does not load: AttributeError"),
        ((("third", "Renamed"),), r"calls itself 'other'"),
        ((("third", "Third"), ("third", "Renamed")), r"registered more than once: by .* and "),
    ],
)
def test_what_is_no_policy_is_refused(bring: Any, brought: Any, words: str) -> None:
    bring(*brought)
    with pytest.raises(ConfigError, match=words):
        registry.make("third")
