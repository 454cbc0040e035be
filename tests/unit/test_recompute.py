"""Recompute plans in replay: graphs, rewritten steps, candidates, the search and its modes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.benches import module
from support.steptraces import LINK, PAGE, Op, Tensor, step

from umem.analysis.linear_program import LinearProgram
from umem.errors import ConfigError, PlanError
from umem.recompute.planner import search
from umem.recompute.planner.bound import lower_bound_us
from umem.recompute.planner.candidates import Checkpoints, Selection, per_block
from umem.recompute.planner.graph import RecomputeGraph
from umem.recompute.planner.modes import RecomputePlanner
from umem.recompute.planner.plan import MODES, RecomputePlan, check
from umem.recompute.planner.reduced import reduced
from umem.recompute.planner.rewrite import Rewritten, rewrite
from umem.recompute.planner.search import Search
from umem.simulation.replay import simulate_updates
from umem.trace.step_trace import Bools, StepTrace

WEIGHT = 0


def training(
    layers: int, *, pages: int = 8, us: float = 100.0, in_place: Sequence[int] = ()
) -> StepTrace:
    """Layer i makes activation i from i - 1, backward reads both; `in_place` ones change theirs.

    Tensors in the order weights, input, activations, gradients of activations.
    """
    n = layers
    tensors = [Tensor(1, tag="param") for _ in range(n)]
    tensors.append(Tensor(pages, None, "input"))
    forward: list[Op] = []
    for i in range(n):
        forward.append(Op("linear", [i, n + i], [n + 1 + i], us))
        if i in in_place:
            forward.append(Op("relu_", [], [n + 1 + i], us / 10))
    backward = [
        Op("linear_backward", [n + i, n + 1 + i, i, *([2 * n + 2 + i] if i < n - 1 else [])],
           [2 * n + 1 + i], 2 * us)
        for i in reversed(range(n))
    ]  # fmt: skip
    ops = [*forward, *backward]
    lives = [_life(ops, n + 1 + i) for i in range(2 * n)]
    tensors += [Tensor(pages, life, "activation") for life in lives[:n]]
    tensors += [Tensor(pages, life, "temp") for life in lives[n:]]
    return step(tensors, ops)


def _life(ops: Sequence[Op], tensor: int) -> tuple[int, int]:
    uses = [i for i, op in enumerate(ops) if tensor in op.touched]
    return uses[0], uses[-1]


def drop_of(graph: RecomputeGraph, tensors: Sequence[int]) -> Selection:
    drop = np.zeros(graph.step.n_tensors, bool)
    drop[list(tensors)] = True
    return Selection(drop, np.zeros_like(drop), np.zeros_like(drop))


def check_step(new: Rewritten) -> None:
    """Lives hold all accesses, what is read was written before, and only forward ops run again."""
    trace, graph = new.step, new.graph
    again = new.again
    assert graph.forward[new.origin[again]].all()
    assert new.origin[~again].tolist() == list(range(graph.step.n_ops))
    assert (trace.first <= trace.last).all()
    written: set[int] = set()
    for op in range(trace.n_ops):
        for at in range(int(trace.access_start[op]), int(trace.access_start[op + 1])):
            tensor, write = int(trace.access_tensor[at]), bool(trace.access_write[at])
            assert trace.first[tensor] <= op <= trace.last[tensor]
            if tensor >= graph.step.n_tensors and not write:
                assert tensor in written
            if write:
                written.add(tensor)
    for op in np.flatnonzero(again).tolist():  # a second run reads and writes what the first did
        mine = trace.access_tensor[trace.access_start[op] : trace.access_start[op + 1]]
        first = graph.step
        origin = int(new.origin[op])
        theirs = first.access_tensor[first.access_start[origin] : first.access_start[origin + 1]]
        assert new.copy_of[mine].tolist() == theirs.tolist()


def check_values(new: Rewritten) -> None:
    """Run both steps on symbols: every op after forward reads the same values."""
    whole, graph = new.graph.step, new.graph
    expected = _symbols(whole, np.arange(whole.n_ops))
    found = _symbols(new.step, new.origin)
    again = np.flatnonzero(~new.again)
    for op, at in enumerate(again.tolist()):
        if not graph.forward[op]:
            assert found[at] == expected[op]


def _symbols(trace: StepTrace, origin: np.ndarray) -> list[list[object]]:
    """Each op's inputs, as terms of the ops that made them."""
    held: dict[int, object] = {}
    read: list[list[object]] = []
    for op in range(trace.n_ops):
        span = slice(int(trace.access_start[op]), int(trace.access_start[op + 1]))
        tensors, writes = trace.access_tensor[span].tolist(), trace.access_write[span].tolist()
        values: list[object] = []
        for tensor, write in zip(tensors, writes, strict=True):
            fresh = write and trace.first[tensor] == op
            given = ("given", tensor)
            values.append(None if fresh else held.get(tensor, given))
        read.append(values)
        term = hash((int(origin[op]), tuple(map(repr, values))))
        for place, (tensor, write) in enumerate(zip(tensors, writes, strict=True)):
            if write:
                held[tensor] = (term, place)
    return read


@pytest.mark.parametrize(
    ("freed", "runs"), [((), 3), ((0, 1, 2), 3 + 3 + 2 + 1), ((0,), 3 + 1 + 1), ((2,), 3 + 1)]
)
def test_a_dropped_chain_is_made_again_in_order(freed: tuple[int, ...], runs: int) -> None:
    graph = RecomputeGraph(training(6))
    acts = list(range(7, 13))
    chain = acts[1:4]
    free = drop_of(graph, [chain[i] for i in freed]).drop
    new = rewrite(graph, *drop_of(graph, chain)._replace(free=free))
    check_step(new)
    check_values(new)
    assert new.drop_ops == (1, 2, 3)
    assert new.free_ops == tuple(1 + i for i in freed)
    # Backward of layer 4 needs activation 3, and all three are made then.
    assert new.again.sum() == runs


def test_dropping_nothing_changes_nothing() -> None:
    whole = training(4, in_place=(1,))
    whole = replace(whole, access_read=np.arange(len(whole.access_tensor)) % 3 > 0)
    new = rewrite(RecomputeGraph(whole), *drop_of(RecomputeGraph(whole), []))
    for column in (
        "op_us",
        "first",
        "last",
        "access_tensor",
        "access_write",
        "access_start",
        "access_read",
    ):
        assert (getattr(new.step, column) == getattr(whole, column)).all()
    assert new.step.op_names == whole.op_names
    assert new.recompute_us == 0


def test_all_dropped_turns_over_and_checkpoints_do_not() -> None:
    graph = RecomputeGraph(training(32))
    nothing = np.zeros(graph.step.n_tensors, bool)
    everything = rewrite(graph, graph.droppable, nothing, nothing)
    assert everything.step.peak_bytes >= 0.9 * graph.step.peak_bytes
    cut = rewrite(graph, *Checkpoints(graph, 6).cheapest(1.0))
    assert cut.step.peak_bytes < 0.5 * graph.step.peak_bytes


def test_in_place_ops_run_again_on_the_copy() -> None:
    graph = RecomputeGraph(training(4, in_place=(1, 2)))
    tensor = 4 + 1 + 1
    new = rewrite(graph, *drop_of(graph, [tensor]))
    check_values(new)
    assert [graph.step.op_names[op] for op in new.origin[new.again]] == ["linear", "relu_"]


def overwritten(by_forward: bool) -> StepTrace:
    """Op 0 makes 1 from the input 0, which is then changed in place; op 2 is backward."""
    tensors = [Tensor(4, None, "input"), Tensor(4, (0, 3)), Tensor(4, (2, 3), "temp")]
    change = Op("add_", [], [0])
    wanted = Op("mul_backward", [1], [2])
    ops = [Op("mul", [0], [1]), *([change, wanted] if by_forward else [wanted, change])]
    return step(tensors, [*ops, Op("mul_backward", [1], [2])])


@pytest.mark.parametrize("by_forward", [True, False])
def test_what_was_made_from_an_overwritten_input_is_not_dropped(by_forward: bool) -> None:
    assert not RecomputeGraph(overwritten(by_forward)).droppable.any()


def test_an_earlier_version_is_made_again_from_the_start() -> None:
    """Op 1 reads tensor 1 before op 2 changes it in place: making 2 again needs it as it was."""
    tensors = [Tensor(4, None, "input"), *(Tensor(4, life) for life in ((0, 5), (1, 4)))]
    tensors.append(Tensor(4, (3, 5), "temp"))
    ops = [
        Op("mul", [0], [1]),
        Op("exp", [1], [2]),
        Op("relu_", [], [1]),
        Op("mul_backward", [], [3]),
        Op("exp_backward", [2], [3]),
        Op("relu_backward", [1], [3]),
    ]
    graph = RecomputeGraph(step(tensors, ops))
    new = rewrite(graph, *drop_of(graph, [2]))
    check_values(new)
    assert new.origin[new.again].tolist() == [0, 1]
    both = rewrite(graph, *drop_of(graph, [1, 2]))
    check_values(both)
    assert sorted(both.origin[both.again].tolist()) == [0, 1, 2]


def test_what_the_program_holds_is_not_dropped() -> None:
    long = step(
        [Tensor(4, None, "input"), Tensor(4, (0, 39)), Tensor(4, (1, 39), "temp")],
        [Op("mul", [0], [1]), Op("mul_backward", [1], [2])] + [Op("add", [2], [2])] * 38,
    )
    assert not RecomputeGraph(long).droppable.any()
    assert RecomputeGraph(training(4)).droppable.any()


def test_outputs_of_one_op_are_dropped_together() -> None:
    tensors = [Tensor(4, None, "input"), Tensor(4, (0, 2)), Tensor(2, (0, 2)), Tensor(4, (1, 2))]
    ops = [Op("max_pool", [0], [1, 2]), Op("pool_backward", [2], [3]), Op("mul", [1, 3], [])]
    graph = RecomputeGraph(step(tensors, ops))
    new = rewrite(graph, *drop_of(graph, [1]))
    assert new.dropped.tolist() == [False, True, True, False]
    check_values(new)


@st.composite
def graphs(draw: st.DrawFn) -> StepTrace:
    """A forward pass of any shape, in-place ops and temporaries too, and a backward that wants."""
    tensors = [Tensor(draw(st.integers(1, 4)), None, "input"), Tensor(1, None, "param")]
    ops: list[Op] = []
    made: list[int] = []
    for _ in range(draw(st.integers(1, 10))):
        sources = draw(
            st.lists(st.sampled_from([0, 1, *made]), min_size=1, max_size=3, unique=True)
        )
        if made and draw(st.integers(0, 4)) == 0:
            ops.append(Op("relu_", [], [draw(st.sampled_from(made))]))
            continue
        outputs = list(range(len(tensors), len(tensors) + draw(st.sampled_from([1, 1, 1, 2]))))
        tensors += [Tensor(draw(st.integers(0, 4)), (0, 0)) for _ in outputs]
        ops.append(Op("linear", sources, outputs, float(draw(st.integers(1, 200)))))
        made += outputs
    for wanted in draw(st.lists(st.lists(st.sampled_from(made), max_size=3, unique=True),
                                min_size=1, max_size=8)):  # fmt: skip
        tensors.append(Tensor(1, (0, 0), "grad"))
        ops.append(Op("linear_backward", wanted, [len(tensors) - 1], 100.0))
    for tensor in range(2, len(tensors)):
        tensors[tensor].life = _life(ops, tensor)
    return step(tensors, ops)


@given(graphs(), st.data())
@settings(max_examples=100)
def test_any_selection_gives_a_valid_step_with_the_same_values(
    trace: StepTrace, data: st.DataObject
) -> None:
    graph = RecomputeGraph(trace)
    drop, keep, free = (np.array(data.draw(_bools(trace.n_tensors)), bool) for _ in range(3))
    for freed in (~drop, free, drop | ~drop):
        new = rewrite(graph, drop, keep, freed)
        check_step(new)
        check_values(new)
        assert not (new.freed & ~new.dropped).any()
        assert set(new.free_ops) <= set(new.drop_ops)
        if not new.dropped.any():
            assert not new.again.any()


@given(graphs(), st.data())
@settings(max_examples=25)
def test_no_step_that_fits_is_below_the_bound(trace: StepTrace, data: st.DataObject) -> None:
    pytest.importorskip("highspy")
    graph = RecomputeGraph(trace)
    drop, keep, free = (np.array(data.draw(_bools(trace.n_tensors)), bool) for _ in range(3))
    new = rewrite(graph, drop, keep, free)
    assert lower_bound_us(graph, LINK, new.step.peak_bytes) <= new.step.compute_us + 1e-3


@pytest.mark.parametrize("held", [0, 1])
def test_a_temporary_that_is_kept_while_the_program_holds_it_counts_once(held: int) -> None:
    """Tensor 2 is rebuilt from tensor 1, which is kept for that; tensor 3 needs the memory."""
    pytest.importorskip("highspy")
    tensors = [
        Tensor(1, tag="param"),
        Tensor(10, (0, 1 + held)),
        Tensor(50, (1, 3)),
        Tensor(55, (2, 2)),
        Tensor(1, (3, 4), "grad"),
    ]
    ops = [
        Op("make", [0], [1], 10_000.0),
        Op("use", [1], [2], 10.0),
        Op("large", [], [3], 10.0),
        Op("backward", [2], [4], 10.0),
        Op("update", [4], [0], 10.0),
    ]
    graph = RecomputeGraph(step(tensors, ops))
    drop, keep = np.zeros((2, 5), bool)
    drop[2] = keep[1] = True
    new = rewrite(graph, drop, keep, np.zeros_like(drop))
    slow = replace(LINK, bytes_per_us_in=PAGE / 2000, bytes_per_us_out=PAGE / 2000)
    assert new.recompute_us == 10.0
    assert lower_bound_us(graph, slow, new.step.peak_bytes) <= new.step.compute_us + 1e-3


def test_the_bound_knows_copies_that_are_freed_between_two_uses() -> None:
    """Tensor 1 is cheap to rebuild, and tensor 2 needs the memory between its uses."""
    pytest.importorskip("highspy")
    tensors = [
        Tensor(1, tag="param"),
        Tensor(50, (0, 4)),
        Tensor(55, (1, 1)),
        Tensor(55, (3, 3), "temp"),
        Tensor(1, (2, 5), "grad"),
    ]
    ops = [
        Op("make", [0], [1], 10.0),
        Op("large", [], [2], 10_000.0),
        Op("backward", [1], [4], 10.0),
        Op("large_backward", [], [3], 10_000.0),
        Op("backward", [1], [4], 10.0),
        Op("update", [4], [0], 10.0),
    ]
    graph = RecomputeGraph(step(tensors, ops), np.arange(6) < 2)
    drop = drop_of(graph, [1])
    kept, freed = rewrite(graph, *drop), rewrite(graph, *drop._replace(free=drop.drop))
    assert (kept.recompute_us, freed.recompute_us) == (10.0, 20.0)
    assert freed.step.peak_bytes + 40 * PAGE < kept.step.peak_bytes
    slow = replace(LINK, bytes_per_us_in=PAGE / 2000, bytes_per_us_out=PAGE / 2000)
    bound = lower_bound_us(graph, slow, freed.step.peak_bytes)
    assert graph.step.compute_us + 19.9 <= bound <= freed.step.compute_us + 1e-3


def _bools(count: int) -> st.SearchStrategy[list[bool]]:
    return st.lists(st.booleans(), min_size=count, max_size=count)


def test_copies_that_go_after_each_use_lower_the_peak() -> None:
    for layers, pages in itertools.product((4, 9, 16), (2, 8)):
        graph = RecomputeGraph(training(layers, pages=pages))
        nothing: Bools = np.zeros(graph.step.n_tensors, bool)
        memory = rewrite(graph, graph.droppable, nothing, ~nothing)
        speed = rewrite(graph, graph.droppable, nothing, nothing)
        assert memory.step.peak_bytes <= min(speed.step.peak_bytes, graph.step.peak_bytes)
        assert memory.recompute_us >= speed.recompute_us


@given(graphs())
@settings(max_examples=60)
def test_the_reduced_step_has_the_same_decisions(trace: StepTrace) -> None:
    graph = RecomputeGraph(trace)
    small = RecomputeGraph(*reduced(trace, graph.forward, graph.last_wanted))
    assert (small.droppable == graph.droppable).all()
    nothing: Bools = np.zeros(trace.n_tensors, bool)
    whole, less = (rewrite(one, one.droppable, nothing, nothing) for one in (graph, small))
    small_bytes = int((trace.bytes * ~trace.large).sum())
    # Results rebuilt from small tensors may need large temporaries, or others.
    small_inputs = any(not trace.large[graph.tensor_of[v]] for op in graph.inputs for v in op)
    if not small_inputs:
        assert 0 <= whole.step.peak_bytes - less.step.peak_bytes <= 2 * small_bytes
    assert less.step.compute_us <= whole.step.compute_us + 1e-6  # small ones are not rebuilt
    if trace.large.all():
        assert less.step.compute_us == pytest.approx(whole.step.compute_us)


def budget_of(graph: RecomputeGraph, share: float) -> int:
    return int(graph.step.peak_bytes * share) // PAGE * PAGE


@pytest.mark.parametrize("share", [0.7, 0.5, 0.4])
def test_the_search_is_never_slower_than_recompute_or_swap_alone(share: float) -> None:
    graph = RecomputeGraph(training(24, us=1500.0))
    search = Search(graph, LINK, budget_of(graph, share))
    best = search.best()
    alone = search.recompute_only()
    assert alone is not None or share < 0.5
    known = [search.swap_only, *([alone] if alone else [])]
    assert all(search.estimate_us(best) <= search.estimate_us(one) for one in known)
    assert alone is None or alone.fits
    again = Search(graph, LINK, budget_of(graph, share)).best()
    assert (again.selection.drop == best.selection.drop).all()


def joined(layers: int, *, pages: int = 8, us: float = 100.0) -> StepTrace:
    """Like `training`, but the second half of the layers reads the first half's results, in
    reverse.

    Backward needs those twice, with much in between.
    """
    whole = training(layers, pages=pages, us=us)
    ops, n = [], layers
    for op in range(whole.n_ops):
        span = slice(int(whole.access_start[op]), int(whole.access_start[op + 1]))
        touched = zip(whole.access_tensor[span].tolist(), whole.access_write[span].tolist(),
                      strict=True)  # fmt: skip
        reads: list[int] = []
        writes: list[int] = []
        for tensor, write in touched:
            (writes if write else reads).append(tensor)
        layer = op if op < n else 2 * n - 1 - op
        if layer > n // 2:
            reads.append(n + 1 + n - 1 - layer)
        ops.append(Op(whole.op_names[op], reads, writes, float(whole.op_us[op])))
    tensors = [Tensor(1, tag="param") for _ in range(n)]
    tensors.append(Tensor(pages, None, "input"))
    tensors += [Tensor(pages, _life(ops, n + 1 + i), "activation") for i in range(2 * n)]
    return step(tensors, ops)


@pytest.mark.parametrize(
    "share",
    [
        pytest.param(0.5, marks=pytest.mark.nightly),
        0.4,
        pytest.param(0.3, marks=pytest.mark.nightly),
    ],
)
def test_freeing_single_copies_is_faster_than_none_or_all(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = RecomputeGraph(joined(24))
    found = Search(graph, LINK, budget_of(graph, share))
    best = found.best()
    us = found.estimate_us(best)
    monkeypatch.setattr(search, "_FREED", 0)
    whole = Search(graph, LINK, budget_of(graph, share))
    assert us < whole.estimate_us(whole.best())
    drop, keep, free = best.selection
    for every in (np.zeros_like(free), np.ones_like(free)):
        assert us < found.estimate_us(found.look(Selection(drop, keep, every)))


def test_a_step_that_fits_is_left_alone() -> None:
    graph = RecomputeGraph(training(8))
    planner = RecomputePlanner(graph, LINK, 2 * graph.step.peak_bytes)
    for mode in ("auto", "recompute", "swap"):
        new = planner.plan(mode)
        assert new is not None
        assert not new.again.any()
    capuchin = module("recompute_capuchin").planned(graph, LINK, planner.budget)
    assert not capuchin.again.any()


def test_the_bound_is_below_what_the_search_finds() -> None:
    pytest.importorskip("highspy")
    graph = RecomputeGraph(training(24, us=300.0))
    budget = budget_of(graph, 0.4)
    search = Search(graph, LINK, budget)
    bound = lower_bound_us(graph, LINK, budget)
    assert graph.step.compute_us < bound <= search.estimate_us(search.best())


def test_planning_solves_no_linear_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """So plans are the same with and without highspy."""

    def refuse(*_: object, **__: object) -> float:
        raise AssertionError("a linear program is solved")

    monkeypatch.setattr(LinearProgram, "minimum", refuse)
    graph = RecomputeGraph(training(24, us=300.0))
    planner = RecomputePlanner(graph, LINK, budget_of(graph, 0.4))
    assert planner.plan("auto") is not None
    simulate_updates(graph, LINK, budget_of(graph, 0.8))


def test_capuchin_swaps_what_hides_and_recomputes_what_is_cheap() -> None:
    capuchin = module("recompute_capuchin")
    slow = RecomputeGraph(training(16, us=20_000.0))  # all transfers hide
    assert not capuchin.planned(slow, LINK, budget_of(slow, 0.6)).dropped.any()
    quick = RecomputeGraph(training(16, us=50.0))  # none does
    assert capuchin.planned(quick, LINK, budget_of(quick, 0.6)).dropped.any()


def test_blocks_keep_their_inputs() -> None:
    """x -> a -> b, y = x + b: x is read twice, and is what carries the pass on."""
    tensors = [Tensor(1, None, "param"), Tensor(4, None, "input")]
    ops: list[Op] = []
    stream, carried = 1, []
    for _ in range(4):
        a, b, out = range(len(tensors), len(tensors) + 3)
        tensors += [Tensor(4, (0, 0)) for _ in range(3)]
        ops += [Op("linear", [0, stream], [a]), Op("linear", [0, a], [b])]
        ops.append(Op("add", [stream, b], [out]))
        stream = out
        carried.append(out)
    made = list(range(2, len(tensors)))
    tensors.append(Tensor(1, (0, 0), "grad"))
    ops += [Op("linear_backward", [t], [len(tensors) - 1]) for t in reversed(made)]
    for tensor in range(2, len(tensors)):
        tensors[tensor].life = _life(ops, tensor)
    graph = RecomputeGraph(step(tensors, ops))
    kept = np.flatnonzero(per_block(graph).keep).tolist()
    assert kept == carried[:-1]  # no op reads the last one in forward


def test_modes_are_checked_by_name() -> None:
    for mode in MODES:
        check(mode)
    with pytest.raises(ConfigError, match="did you mean per_block"):
        check("perblock")


def test_a_plan_goes_through_json() -> None:
    plan = RecomputePlan(("aten.relu.default",) * 3, (0, 2), (2,), 4096)
    assert "relu" not in repr(plan)  # hundreds of names would hide the rest
    assert json.loads(json.dumps(plan.as_dict())) == {
        "names": ["aten.relu.default"] * 3, "drop": [0, 2], "free": [2], "keep_below": 4096
    }  # fmt: skip
    with pytest.raises(PlanError, match="ascending"):
        RecomputePlan(("aten.relu.default",), (1,))
    for free in ((0, 2), (1, 0)):
        with pytest.raises(PlanError, match="out of drop"):
            RecomputePlan(("aten.relu.default",) * 3, (0, 1), free)
