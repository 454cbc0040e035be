"""The ways to pass a policy: an object, a function, a place; and messages about its plans."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from support.steptraces import LINK, PAGE, Op, Tensor, step, training

import umem
from umem.config.settings import load
from umem.errors import ConfigError, PlanError
from umem.policies import Fetch, Move, Plan, Policy, WriteBack, check, registry
from umem.policies.lowering import lower
from umem.simulation.simulate import recorded_step
from umem.trace.step_trace import StepTrace

SOURCE = """
from umem.policies import Plan

def plan_function(trace, device, budget):
    return Plan(trace)

class Class:
    name = "of_a_class"
    def plan(self, trace, device, budget):
        return Plan(trace)

def factory():
    return Class()

instance = Class()
number = 7

def failing():
    raise RuntimeError("boom")
"""


def plan_function(trace: StepTrace, device: object, budget: int) -> Plan:
    return Plan(trace)


class Object:
    name = "object"

    def plan(self, trace: StepTrace, device: object, budget: int) -> Plan:
        return Plan(trace)


class Callable(Object):
    """One that could be taken for a factory."""

    def __call__(self) -> int:
        return 7


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "of_a_test.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("attribute", "name"),
    [
        ("plan_function", "plan_function"),
        ("Class", "of_a_class"),
        ("factory", "of_a_class"),
        ("instance", "of_a_class"),
    ],
)
@pytest.mark.parametrize("where", ["of_a_test", "of_a_test.py", "./of_a_test.py"])
def test_a_place_names_a_policy(place: Path, where: str, attribute: str, name: str) -> None:
    policy = registry.make(f"{where}:{attribute}")
    assert isinstance(policy, Policy)
    assert policy.name == name
    assert not registry.is_built_in(policy)
    plan = policy.plan(training(2), LINK, PAGE)
    assert isinstance(plan, Plan)


def test_objects_and_functions_are_policies() -> None:
    given = Object()
    assert registry.make(given) is given
    assert registry.make(Object).name == "object"
    assert registry.make(plan_function).name == "plan_function"
    called = Callable()
    assert registry.make(called) is called


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("of_a_test.py:absent", "of_a_test.py has no 'absent'"),
        ("of_a_test.py:instanse", r"did you mean instance\?"),
        ("of_a_test:number", "is a int, not a policy"),
        ("of_a_test:failing", r"cannot be made: RuntimeError\('boom'\)"),
        ("absent.py:plan", "does not load: FileNotFoundError"),
        ("absent:plan", "does not load: ModuleNotFoundError"),
        (":plan", "allowed: module:attribute or file.py:attribute"),
        ("of_a_test:", "allowed: module:attribute or file.py:attribute"),
        (7, "7 is a int, not a policy"),
        (lambda trace: None, "is a function, not a policy"),
    ],
)
def test_what_is_no_policy_is_refused(place: Path, spec: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        registry.make(spec)


def test_baselines_stand_after_the_others() -> None:
    with pytest.raises(ConfigError) as error:
        registry.make("no such")
    first, _, rest = str(error.value).partition("; baselines: ")
    assert first.endswith(
        "allowed: auto, lru, conv_lru, none; module:attribute or file.py:attribute"
    )
    assert rest.split(", ") == list(registry.BASELINES)


def test_options_take_a_place_but_not_from_a_directorys_file(tmp_path: Path) -> None:
    assert load({"policy": "a.py:plan"}, directory=tmp_path).policy == "a.py:plan"
    assert load(environ={"UMEM_POLICY": "a:plan"}, directory=tmp_path).policy == "a:plan"
    given = Object()
    assert load({"policy": given}, directory=tmp_path).policy is given
    path = tmp_path / "pyproject.toml"
    path.write_text('[tool.umem]\npolicy = "a.py:plan"\n')
    path.chmod(0o644)  # under any umask: one that others can write is ignored
    with pytest.raises(ConfigError, match="names code to load; allowed: a policy's name here"):
        load(directory=tmp_path)
    with pytest.raises(ConfigError, match=r"budget=: .* is a Object"):
        load({"budget": given})


# Tensors: 0 and 1 persistent, 2 small, 3 alive in ops 1 and 2. Op 2 writes tensor 1.
TRACE = step(
    [Tensor(2), Tensor(1), Tensor(0), Tensor(1, life=(1, 2))],
    [Op(reads=[0, 2]), Op(reads=[1], writes=[3]), Op(reads=[3], writes=[1]), Op(reads=[0])],
)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"evict": (Move(4, 0),)}, r"evict: Move\(after=4, tensor=0\): there is no op 4"),
        ({"evict": (Move(0, 9),)}, "there is no tensor 9; tensors are 0 to 3"),
        ({"evict": (Move(0, 2),)}, "the tensor has 4 KiB; only tensors of 2 MiB or more"),
        ({"evict": (Move(3, 3),)}, "alive in ops 1 to 2, not after op 3"),
        ({"evict_first": (Move(0, 2),)}, "evict_first: .*the tensor has 4 KiB"),
        ({"fetch": (Fetch(2, 1, 0),)}, r"`by` must be above `after` and below 8"),
        ({"fetch": (Fetch(0, 9, 0),)}, "`by` must be above"),
        ({"fetch": (Fetch(1, 3, 3),)}, "not alive in op 3"),
        ({"write_back": (WriteBack(0, 4, 1),)}, "op 2 writes the tensor before `until`"),
        ({"write_back": (WriteBack(0, 9, 0),)}, "`until` must be above `after` and at most 8"),
        ({"retain": (2,)}, "retain: 2: the tensor has 4 KiB"),
        ({"read_mostly": (1,)}, "read_mostly: 1: the step writes the tensor"),
        ({"barriers": (7,)}, "barriers: 7: there is no op 7"),
        ({"barriers": (1, 1)}, "barriers: an op is listed more than once"),
        ({"gated": True, "capacity": PAGE}, "occupancy: shape None"),
        ({"gated": True, "occupancy": np.zeros(4, np.int64), "capacity": -1}, "capacity: -1"),
    ],
)
def test_every_problem_is_named(fields: dict[str, object], words: str) -> None:
    import re

    (problem,) = check(Plan(TRACE, **fields))  # type: ignore[arg-type]
    assert re.search(words, problem), problem


def test_a_sound_plan_has_no_problem() -> None:
    plan = Plan(
        TRACE,
        evict=(Move(0, 0), Move(2, 1)),
        fetch=(Fetch(1, 3, 0), Fetch(3, 5, 1)),
        write_back=(WriteBack(2, 6, 1),),
        retain=(3,),
        read_mostly=(0,),
        barriers=(-1, 2),
    )
    assert check(plan) == []


@pytest.mark.parametrize(
    "fields",
    [
        {"evict": (Move(4, 0),)},
        {"evict_first": (Move(-2, 0),)},
        {"fetch": (Fetch(0, 3, -1),)},
        {"write_back": (WriteBack(0, 3, 4),)},
        {"retain": (4,)},
        {"read_mostly": (-1,)},
        {"barriers": (4,)},
    ],
)
def test_an_index_out_of_range_is_refused_by_name(fields: dict[str, object]) -> None:
    with pytest.raises(PlanError, match=f"the plan is refused: {next(iter(fields))}: "):
        lower(Plan(TRACE, **fields), lambda _: 0)  # type: ignore[arg-type]


def test_simulate_takes_words_for_everything(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trace = training(6)
    by_words = umem.simulate(trace, "lru", device="a100-pcie4", budget="50%")
    by_bytes = umem.simulate(trace, registry.make("lru"), budget=trace.peak_bytes // 2)
    assert by_words.step_us == by_bytes.step_us > 0
    assert "lru on a100-pcie4 with" in str(by_words)

    small = step([Tensor(4), Tensor(0)], [Op(reads=[0, 1]), Op(reads=[0])])

    def useless(trace: StepTrace, device: object, budget: int) -> Plan:
        assert trace.large.all(), "the small tensor is in a segment"
        return Plan(small, evict=(Move(0, 1),))  # of the step as it was before

    with caplog.at_level(logging.WARNING, "umem"):
        assert umem.simulate(small, useless, budget="100%").policy == "useless"
    assert "the plan of policy useless: evict: Move(after=0, tensor=1): " in caplog.text


def test_a_function_with_a_native_name_plans() -> None:
    trace = training(6)

    def lru(trace: StepTrace, device: object, budget: int) -> Plan:
        return Plan(trace)

    assert umem.simulate(trace, lru, budget="50%").plan_hits > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"budget": "auto"}, "no free memory to follow"),
        ({"budget": "half"}, "budget='half'.*allowed"),
        ({"device": "abacus"}, "no device profile"),
        ({"policy": "lur"}, "did you mean lru"),
    ],
)
def test_simulate_says_what_is_allowed(arguments: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        umem.simulate(training(2), **arguments)  # type: ignore[arg-type]


def test_what_a_step_can_come_from(tmp_path: Path) -> None:
    trace = training(2)
    assert recorded_step(trace, LINK) is trace
    with pytest.raises(ConfigError, match="step=7 is a int; allowed: a StepTrace"):
        recorded_step(7, LINK)  # type: ignore[arg-type]
