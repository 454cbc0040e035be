"""The ways to pass a policy: an object, a function, a place; and messages about its plans."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from support import page_blocks
from support.steptraces import LINK, PAGE, Op, Tensor, step, training

import umem
from umem import policies
from umem.base.native import core
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


class Short:
    name = "short"

    def plan(self, trace: StepTrace, budget: int) -> Plan:
        return Plan(trace)


class Numbered(Object):
    name: Any = 3


class Nameless:
    rollback = True

    def plan(self, trace: StepTrace, device: object, budget: int) -> Plan:
        return Plan(trace)


class Called:
    name = "by_its_name"
    rollback = True

    def __call__(self, trace: StepTrace, device: object, budget: int) -> Plan:
        return Plan(trace)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "of_a_test.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_folder_that_is_searched_already_keeps_its_place(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched = [str(place), *sys.path]
    monkeypatch.setattr(sys, "path", [*searched])
    registry.make("of_a_test:Class")
    assert sys.path == searched


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


def test_a_function_of_three_arguments_plans_also_if_all_have_defaults() -> None:
    def defaults(step: Any = None, device: object = None, budget: int = 0) -> Plan:
        return Plan(step)

    for given in (defaults, lambda *a: Plan(a[0])):
        assert registry.make(given).plan(TRACE, LINK, PAGE) is not None


def test_what_has_no_name_is_named_after_its_class_and_keeps_its_attributes() -> None:
    nameless: Any = registry.make(Nameless())
    assert (nameless.name, nameless.rollback) == ("Nameless", True)
    called: Any = registry.make(Called())
    assert (called.name, called.rollback) == ("by_its_name", True)
    assert not hasattr(called, "victims")


def test_attributes_of_a_function_are_those_of_the_policy() -> None:
    def given(trace: StepTrace, device: object, budget: int) -> Plan:
        return Plan(trace)

    def other(*_: object) -> None:
        return None

    extras = {"rollback": True, "second": other, "victims": other}
    vars(given).update(extras)
    policy = registry.make(given)
    assert {name: getattr(policy, name) for name in extras} == extras


def test_the_example_of_the_page_loads_without_its_simulations(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (example, *_) = page_blocks.blocks("docs/policies.md")
    (place / "my_policies.py").write_text(example.text)
    assert registry.make("my_policies.py:idle_first").name == "idle_first"
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("of_a_test.py:absent", "of_a_test.py has no 'absent'"),
        ("of_a_test.py:instanse", r"did you mean instance\?"),
        ("of_a_test:number", "is an int, not a policy"),
        ("of_a_test:failing", r"cannot be made: RuntimeError\('boom'\)"),
        ("absent.py:plan", "does not load: FileNotFoundError"),
        ("absent:plan", "does not load: ModuleNotFoundError"),
        (":plan", "allowed: module:attribute or file.py:attribute"),
        ("of_a_test:", "allowed: module:attribute or file.py:attribute"),
        (7, "7 is an int, not a policy"),
        (lambda trace: None, "is a function, not a policy"),
        (Short(), r"is a Short, not a policy: it has no method `plan\(trace, device, budget\)`"),
        (Numbered(), "is a Numbered, not a policy: it has no `name` of text"),
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
    with pytest.raises(ConfigError, match=r"budget=: .* is an Object"):
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
        ({"capacity": -1}, "capacity: -1; allowed: 0 to "),
        ({"headroom": -5}, "headroom: -5; allowed: 0 to "),
        ({"window": -3}, "window: -3; allowed: 0 to 1073741824"),
        ({"occupancy": [0] * 3}, r"occupancy: shape \(3,\); allowed: one value per op, \(4,\)"),
    ],
)
def test_every_problem_is_named(fields: dict[str, Any], words: str) -> None:
    import re

    (problem,) = check(Plan(TRACE, **fields))
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
    ("fields", "words"),
    [
        ({"order": "LRU"}, "order='LRU': there is no .*allowed: 'lru' or 'fifo' or 'furthest'"),
        ({"headroom": "8MiB"}, "headroom='8MiB': .*; allowed: a whole number"),
        ({"headroom": float("nan")}, "headroom=nan"),
        ({"window": 2.5}, r"window=2\.5"),
        ({"evict": None}, r"evict=None: .*allowed: Move\(after, tensor\) with whole numbers"),
        ({"evict": (Move(1.7, 0),)}, "evict=.*of type float64; allowed: Move"),  # type: ignore[arg-type]
        ({"evict": [Move(0, 0), (0, 1, 2)]}, "evict="),
        ({"evict": 7}, "evict=7"),
        ({"fetch": [Move(0, 0)]}, r"fetch=.* its shape is \(1, 2\); allowed: Fetch\(after, by"),
        ({"write_back": "auto"}, "write_back='auto'"),
        ({"retain": (1.5,)}, r"retain=\(1\.5,\): .*; allowed: whole numbers"),
        ({"barriers": None}, "barriers=None"),
        ({"occupancy": np.full(4, np.nan)}, "occupancy=.*of type float64"),
    ],
)
def test_a_field_of_another_kind_is_refused_by_name(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=f"the plan's {words}"):
        Plan(TRACE, **fields)


@pytest.mark.parametrize(
    "given",
    [
        lambda *rows: [Move(*row) for row in rows],
        lambda *rows: set(rows),
        lambda *rows: (list(row) for row in rows),
        lambda *rows: np.array(rows),
        lambda *rows: np.array(rows, np.uint8),
    ],
)
def test_entries_come_in_any_form(given: Any) -> None:
    fields: dict[str, Any] = {
        "evict": given((0, 0), (2, 1)),
        "fetch": np.array([[1, 3, 0]]),
        "retain": {3},
        "barriers": (op for op in (-1, 2)),
        "occupancy": [0] * 4,
        "gated": True,
    }
    plan = Plan(TRACE, **fields)
    assert set(plan.evict) == {Move(0, 0), Move(2, 1)}
    assert (plan.fetch, plan.retain, plan.barriers) == ((Fetch(1, 3, 0),), (3,), (-1, 2))
    assert check(plan) == []
    columns: Any = lower(plan, lambda _: 0)
    assert sorted(columns["evict_tensor"]) == [0, 1]


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
        {"fetch": (Fetch(0, 8, 0),)},
        {"write_back": (WriteBack(0, 9, 0),)},
        {"occupancy": np.zeros(3, np.int64)},
        {"occupancy": None, "gated": True},
        {"headroom": -1},
        {"window": (1 << 30) + 1},
    ],
)
def test_an_index_out_of_range_is_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=f"the plan is refused: {next(iter(fields))}: "):
        lower(Plan(TRACE, **fields), lambda _: 0)


class Named:
    """Its name is a property, which a class does not have."""

    @property
    def name(self) -> str:
        return "named"

    def plan(self, trace: StepTrace, device: object, budget: int) -> Plan:
        return Plan(trace)


def test_a_class_whose_name_is_a_property_has_its_own() -> None:
    for policy, name in ((Named, "Named"), (Named(), "named")):
        assert umem.simulate(training(4), cast("Any", policy), budget="100%").policy == name


def test_a_step_in_pieces_or_of_another_programs_addresses_is_that_step() -> None:
    trace = training(6)
    whole = umem.simulate(trace, "belady", budget="50%")
    elsewhere = replace(trace, place=np.full(trace.n_tensors, 1 << 40))
    for each in (trace.pieces, elsewhere):
        found = umem.simulate(each, "belady", budget="50%")
        assert found.plan_misses == 0
        assert found.step_us == whole.step_us


def test_a_simulation_leaves_the_sessions_figures() -> None:
    torch = pytest.importorskip("torch")
    foreign = torch.ones(1 << 21)  # 8 MiB
    with umem.enable(budget="64MiB", device="soft:h200-pcie5", policy="lru"):
        for _ in range(3):
            used = foreign + 1
            umem.step()
        del used
    before = umem.stats(), core.current_options().profile, umem.stats(0)
    assert before[0].peak_unmanaged_bytes >= 8 << 20
    umem.simulate(training(6), "lru", budget="50%")
    assert (umem.stats(), core.current_options().profile, umem.stats(0)) == before


def test_a_session_that_begins_during_a_replay_keeps_its_options() -> None:
    options = core.Options()
    options.budget_bytes, options.policy, options.profile = 64 << 20, "lru", "a100-pcie4"
    replay = core.Replay(options)
    block = core.allocate(4 << 20)
    replay.close()
    assert core.current_options().profile == "a100-pcie4"
    core.release(block)
    core.stop()


def test_a_plain_step_is_passed_to_a_policy_as_it_is() -> None:
    trace, seen = training(4), []

    def same(given: StepTrace, device: object, budget: int) -> Plan:
        seen.append(given is trace)
        return Plan(given)

    umem.simulate(trace, same, budget="100%")
    assert seen == [True]


def test_a_budget_without_end_and_what_comes_after_it() -> None:
    trace = training(6)
    endless = umem.simulate(trace, "lru", budget=1 << 60)
    assert endless.stall_us == 0
    assert umem.simulate(trace, "lru", budget="100%").step_us == endless.step_us


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
    assert "the plan of policy useless has 1 problem(s)" in caplog.text
    assert "\n  evict: Move(after=0, tensor=1): " in caplog.text


def test_a_function_with_a_native_name_plans() -> None:
    trace = training(6)

    def lru(trace: StepTrace, device: object, budget: int) -> Plan:
        return Plan(trace)

    assert umem.simulate(trace, lru, budget="50%").plan_hits > 0


class Victims:
    name = "lru"

    def __init__(self, *, plans: bool) -> None:
        self.plans = plans

    def plan(self, trace: StepTrace, device: object, budget: int) -> Plan | None:
        return Plan(trace) if self.plans else None

    def victims(self, view: object, need: int) -> list[int]:
        raise AssertionError("asked in a simulation")


def test_a_simulation_does_not_ask_for_victims_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(ConfigError, match="`victims` is asked in programs only, so its plan"):
        umem.simulate(training(6), Victims(plans=False), budget="50%")
    with caplog.at_level(logging.WARNING, "umem"):
        umem.simulate(training(6), Victims(plans=True), budget="50%")
    (record,) = caplog.records
    assert record.getMessage() == "policy lru: `victims` is asked in programs only"


def test_a_simulation_refuses_what_is_no_plan() -> None:
    words = "policy <lambda> returned a list; allowed: a umem.policies.Plan, or None"
    with pytest.raises(PlanError, match=words):
        umem.simulate(training(6), lambda *_: [1], budget="50%")  # type: ignore[arg-type]


def test_the_types_of_a_policys_arguments_are_in_the_package() -> None:
    assert isinstance(TRACE, policies.StepTrace)
    assert isinstance(LINK, policies.DeviceProfile)
    assert TRACE.kind[0] == policies.Kind.PERSISTENT


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"budget": "auto"}, "no free memory to follow"),
        ({"budget": "half"}, "budget='half'.*allowed"),
        ({"device": "abacus"}, "no device profile"),
        ({"policy": "lur"}, "did you mean lru"),
    ],
)
def test_simulate_says_what_is_allowed(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        umem.simulate(training(2), **arguments)


def test_what_a_step_can_come_from(tmp_path: Path) -> None:
    trace = training(2)
    assert recorded_step(trace, LINK) is trace
    with pytest.raises(ConfigError, match="step=7 is an int; allowed: a StepTrace"):
        recorded_step(7, LINK)  # type: ignore[arg-type]


def test_what_the_program_pinned_stays_out_of_plans() -> None:
    pinned = replace(TRACE, exempt=np.ones(TRACE.n_tensors, np.bool_))
    (problem,) = check(Plan(pinned, evict=(Move(0, 0),)))
    assert problem.endswith("tensor=0): the program pinned or excluded the tensor")
