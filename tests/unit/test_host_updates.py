"""Updates on the host in a step's trace: which there are, the step without them, and its time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.steptraces import LINK, PAGE, Op, Tensor, step, training

from umem.base.device_profiles import DeviceProfile
from umem.base.native import core
from umem.base.units import PIECE_BYTES
from umem.errors import StateError
from umem.policies.default.planner import Auto
from umem.recompute.planner.bound import lower_bound_us
from umem.recompute.planner.graph import RecomputeGraph
from umem.recompute.planner.host_updates import SHARES, Candidates, candidates, on_host
from umem.simulation import replay
from umem.simulation.replay import replay_step, simulate_updates
from umem.trace.step_trace import HostUpdates, Kind, StepTrace

HOST = replace(LINK, host_bytes_per_us=50_000.0)  # 50 GB/s
PAGE_US = PAGE / 20_000.0  # of the link, each way


def adam(
    weights: Sequence[int] = (4, 4, 4), *, foreach: bool = False, made: bool = False
) -> StepTrace:
    """Layers of this many pages, forward, backward and Adam; activations take 2 pages."""
    n = len(weights)
    ops: list[Op] = []
    first, grad, mean, square = n, 2 * n, 3 * n, 4 * n  # activations, gradients and states
    temp = 5 * n
    for i in range(n):
        ops.append(Op("linear", [i, *([first + i - 1] if i else [])], [first + i], 400.0))
    back = {}
    for i in reversed(range(n)):
        back[i] = len(ops)
        reads = [i, first + i, *([first + i - 1] if i else [])]
        ops.append(Op("linear_backward", reads, [grad + i], 800.0))
    begin, rows = len(ops), [range(n)] if foreach else [[i] for i in range(n)]
    prefix = "aten::_foreach_" if foreach else "aten::"
    for row in rows:
        p, g, m, v, t = ([base + i for i in row] for base in (0, grad, mean, square, temp))
        ops += [
            Op(prefix + "lerp_", [*m, *g], m, 50.0),
            Op(prefix + "addcmul_", [*v, *g], v, 50.0),
            Op(prefix + "sqrt", v, t, 50.0),
            Op(prefix + "addcdiv_", [*p, *m, *t], p, 50.0),
        ]
    end = len(ops) - 1
    span = {i: (begin, end) if foreach else (begin + 4 * i, begin + 4 * i + 3) for i in range(n)}
    kind = Kind.MADE if made else None
    tensors = [Tensor(w, tag="param") for w in weights]
    tensors += [Tensor(2, (i, back[max(i - 1, 0)] if i < n - 1 else back[i])) for i in range(n)]
    tensors += [Tensor(w, (back[i], end), "grad", kind=kind) for i, w in enumerate(weights)]
    tensors += [Tensor(w, tag="optimizer") for w in (*weights, *weights)]
    tensors += [Tensor(w, (span[i][0] + 2, span[i][1]), "temp") for i, w in enumerate(weights)]
    for i in range(n - 1):  # an activation is read by its own backward and the next layer's
        tensors[first + i].life = (i, back[i])
    return step(tensors, ops)


@pytest.mark.parametrize("foreach", [False, True])
def test_each_parameter_is_an_update_with_its_states(foreach: bool) -> None:
    trace = adam((4, 6, 8), foreach=foreach)
    found = candidates(trace)
    # The last layer is used last in forward, and its gradient is the first of backward.
    assert [update.pairs for update in found.updates] == [((2, 8),), ((1, 7),), ((0, 6),)]
    for update, i in zip(found.updates, (2, 1, 0), strict=True):
        assert set(update.inside) == {9 + i, 12 + i, 15 + i}
        size = int(trace.bytes[i])
        assert update.bytes == 7 * size  # parameter and two states both ways, and the gradient
        share = size / int(trace.bytes[:3].sum()) if foreach else 1.0
        assert update.parts == pytest.approx((share,) * 4)
    assert found.bytes == 18 * PAGE


def test_a_share_takes_those_with_the_most_time_first() -> None:
    found = candidates(adam((4, 6, 8)))
    assert found.first(0.0) == ()
    assert found.first(0.25) == found.updates[:1]  # half of it is within the share
    assert found.first(0.65) == found.updates[:2]
    assert found.first(1.0) == found.updates
    assert found.share_of(found.first(0.25)) == pytest.approx(8 / 18)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("made", [False, True])
def test_the_step_without_the_updates_of_the_host(foreach: bool, made: bool) -> None:
    trace = adam((4, 6, 8), foreach=foreach, made=made)
    chosen = candidates(trace).updates[:1]
    new = on_host(trace, chosen, HOST)
    update = chosen[0]
    assert new.n_ops == trace.n_ops
    kept = ~np.isin(np.arange(trace.n_tensors), update.inside)
    assert (new.bytes[kept] == trace.bytes[kept]).all()
    assert not new.bytes[~kept].any()
    assert not new.large[~kept].any()
    assert new.compute_us == pytest.approx(trace.compute_us - 200.0 * update.parts[0])
    assert not set(np.flatnonzero(~kept)) & set(new.access_tensor.tolist())
    assert new.clean[2]  # no op writes the parameter
    assert new.kind[8] == Kind.TRANSIENT
    assert new.last[8] == 3  # freed once it is complete
    assert new.updates is not None
    assert new.updates.us.tolist() == [7 * 8 * PAGE / 50_000.0]
    # The other updates are those of before.
    left = [found.pairs for found in candidates(trace).updates][1:]
    assert [found.pairs for found in candidates(new).updates] == left
    assert on_host(trace, (), HOST) is trace


def test_what_the_rest_of_the_step_reads_keeps_the_update_on_the_device() -> None:
    trace = adam()
    changed = trace.access_tensor.copy()
    changed[0] = 9  # the first op reads the first layer's mean
    left = candidates(replace(trace, access_tensor=changed)).updates
    assert [update.pairs for update in left] == [((2, 8),), ((1, 7),)]


def test_small_parameters_and_steps_without_an_optimizer_have_no_update() -> None:
    assert candidates(adam((4, 0, 4))).bytes == 8 * PAGE
    forward = step([Tensor(4, tag="param")], [Op("linear", [0])])
    assert candidates(forward) == Candidates(forward, ())


def test_a_parameter_that_another_network_reads_after_its_update_stays() -> None:
    tensors = [
        Tensor(4, tag="param"), Tensor(4, tag="optimizer"), Tensor(4, (1, 2), "grad"),
        Tensor(4, (3, 4)), Tensor(4, tag="param"), Tensor(4, (4, 5), "grad"),
    ]  # fmt: skip
    ops = [
        Op("linear", [0]), Op("linear_backward", [0], [2]), Op("update", [2], [0, 1]),
        Op("linear", [0, 4], [3]), Op("linear_backward", [3, 4], [5]), Op("update", [5], [4]),
    ]  # fmt: skip
    assert [update.pairs for update in candidates(step(tensors, ops)).updates] == [((4, 5),)]


def test_an_update_in_the_backward_pass_is_one() -> None:
    tensors = [
        Tensor(4, tag="param"), Tensor(4, tag="param"), Tensor(4, tag="optimizer"),
        Tensor(4, tag="optimizer"), Tensor(4, (2, 3), "grad"), Tensor(4, (4, 5), "grad"),
        Tensor(2, (0, 4)), Tensor(2, (1, 2)),
    ]  # fmt: skip
    ops = [
        Op("linear", [0], [6]), Op("linear", [1, 6], [7]),
        Op("linear_backward", [1, 7], [4]), Op("update", [4], [1, 3]),
        Op("linear_backward", [0, 6], [5]), Op("update", [5], [0, 2]),
    ]  # fmt: skip
    assert [update.pairs for update in candidates(step(tensors, ops)).updates] == [
        ((1, 4),), ((0, 5),)
    ]  # fmt: skip


def test_pieces_of_a_parameter_are_updated_one_by_one() -> None:
    pages = 3 * PIECE_BYTES // PAGE // 2  # a piece and a half
    trace = adam((4, pages))
    cut = on_host(trace, candidates(trace).updates, HOST).pieces
    assert cut.updates is not None
    assert cut.whole is not None
    rows = {
        (int(cut.whole[p]), int(cut.whole[g])): 0.0
        for p, g in zip(cut.updates.parameter, cut.updates.gradient, strict=True)
    }
    assert rows.keys() == {(0, 4), (1, 5)}
    large = cut.whole[cut.updates.parameter] == 1
    total = 7 * pages * PAGE / 50_000.0
    assert cut.updates.us[large].tolist() == pytest.approx([total * 2 / 3, total / 3])
    assert (np.diff(cut.updates.gradient[large]) == 1).all()


def timed(trace: StepTrace, budget: int, device: DeviceProfile = HOST) -> replay.Result:
    result = replay_step(trace, "auto", device, budget)
    assert result.plan_misses == 0
    return result


def test_the_replay_takes_gradients_out_and_parameters_back() -> None:
    trace = adam((4, 6, 8))
    new = on_host(trace, candidates(trace).updates, HOST)
    result = timed(new, trace.peak_bytes * 2)
    assert result.bytes_out == 18 * PAGE
    assert result.bytes_in == 18 * PAGE
    assert result.host_us == pytest.approx(7 * 18 * PAGE / 50_000.0)
    assert result.step_us >= result.host_us


def test_a_forward_pass_waits_for_the_host_and_no_longer() -> None:
    trace = adam((4,))
    new = on_host(trace, candidates(trace).updates, HOST)
    work = 7 * 4 * PAGE / 50_000.0
    # One layer: forward, backward, gradient out, update, parameter in, one after another.
    result = timed(new, trace.peak_bytes * 2)
    assert result.step_us == pytest.approx(1200.0 + 4 * PAGE_US + work + 4 * PAGE_US)
    assert Auto().estimate_us(new, HOST, trace.peak_bytes * 2) == pytest.approx(result.step_us)


def test_the_host_waits_for_a_parameter_that_is_copied_out() -> None:
    trace = adam((4,))
    new = on_host(trace, candidates(trace).updates, HOST)
    result = replay_step(new, "lru", HOST, trace.peak_bytes * 2)
    assert result.bytes_out == 2 * 4 * PAGE  # lru copies it although nothing has written it
    work = 7 * 4 * PAGE / 50_000.0
    assert result.step_us == pytest.approx(1200.0 + 3 * 4 * PAGE_US + work)


def test_what_is_used_first_is_updated_first() -> None:
    slow = replace(LINK, host_bytes_per_us=20_000.0)
    trace = adam((4,) * 8)
    new = on_host(trace, candidates(trace).updates, slow)
    result = timed(new, trace.peak_bytes * 2, slow)
    work = 7 * 4 * PAGE / 20_000.0
    assert result.host_us == pytest.approx(8 * work)
    # Before the next update, the last one returns, and its layer runs both ways.
    one = 2 * 4 * PAGE_US + 400.0 + 800.0
    assert result.step_us < 8 * work + one + 2 * 400.0  # else the forward pass would wait for all
    assert Auto().estimate_us(new, slow, trace.peak_bytes * 2) == pytest.approx(
        result.step_us, rel=0.05
    )


def with_norm(trace: StepTrace, gradient: int, at: int) -> StepTrace:
    """The step with an op before op `at` that reads a gradient, such as for its norm."""

    def moved(column: np.ndarray) -> np.ndarray:
        return np.where(column >= at, column + 1, column)

    place = int(trace.access_start[at])
    return replace(
        trace,
        op_us=np.insert(trace.op_us, at, 100.0),
        op_names=(*trace.op_names[:at], "aten::norm", *trace.op_names[at:]),
        first=moved(trace.first),
        last=moved(trace.last),
        access_start=np.insert(trace.access_start[at:] + 1, 0, trace.access_start[: at + 1]),
        access_tensor=np.insert(trace.access_tensor, place, gradient),
        access_write=np.insert(trace.access_write, place, False),
    )


def test_a_gradient_that_is_read_again_leaves_once() -> None:
    """The bound counted it twice where it was swapped out between completion and that read."""
    pytest.importorskip("highspy")
    tensors = [
        Tensor(20, tag="param"), Tensor(20, (1, 4), "grad"), Tensor(62, (2, 2), "temp"),
        Tensor(2, (0, 1)),
    ]  # fmt: skip
    ops = [
        Op("linear", [0], [3], 100.0), Op("linear_backward", [0, 3], [1], 100.0),
        Op("big", [], [2], 100.0), Op("norm", [1], [], 100.0), Op("update", [1], [0], 100.0),
    ]  # fmt: skip
    trace = step(tensors, ops)
    slow = replace(HOST, bytes_per_us_out=20_000.0)
    found = candidates(trace)
    assert [update.pairs for update in found.updates] == [((0, 1),)]
    new = on_host(trace, found.updates, slow)
    result = replay_step(new, "auto", slow, 66 * PAGE)
    bound = lower_bound_us(RecomputeGraph(trace), slow, result.budget, found.updates)
    assert result.step_us >= bound * (1 - 1e-6)


def test_a_parameter_that_the_last_op_and_the_first_one_use_is_updated_between_them() -> None:
    """As in a step whose ops are merged for the search; nothing is left to overlap the update."""
    tensors = [Tensor(20, tag="param"), Tensor(20, (1, 1), "grad"), Tensor(30, (0, 1))]
    ops = [Op("linear", [0], [2], 100.0), Op("linear_backward", [0, 2], [1], 100.0)]
    plain = step(tensors, ops)
    rows = HostUpdates(np.array([0]), np.array([1]), np.array([300.0]))
    trace = replace(plain, updates=rows)
    alone = 200.0 + 20 * PAGE_US + 300.0 + 20 * PAGE_US  # compute, out, update, back
    found = Auto().estimate_us(trace, HOST, 60 * PAGE)
    assert found == pytest.approx(alone, rel=0.05)
    assert replay_step(trace, "auto", HOST, 70 * PAGE).step_us == pytest.approx(alone, rel=0.05)


def test_a_share_that_fits_is_better_than_one_that_does_not() -> None:
    trace = adam((8,) * 4, foreach=True)
    budget = trace.peak_bytes // 3
    assert budget < replay.min_budget(trace)
    best = simulate_updates(RecomputeGraph(trace), HOST, budget)
    assert best.recomputed.result.raised_from is None
    _, one = replay.replay_shares(trace, SHARES, "auto", HOST, budget)
    assert one.raised_from is None


@pytest.mark.parametrize("share", [None, 0.5])
def test_a_search_tells_of_each_share_that_is_done(share: float | None) -> None:
    trace = adam((8,) * 4, foreach=True)
    done: list[float] = []
    simulate_updates(RecomputeGraph(trace), HOST, trace.peak_bytes // 2, share, advance=done.append)
    assert done == [1] * replay.shares_tried(share)
    assert len(done) > 1 or share is not None


def test_lists_of_two_tensors_are_told_by_what_is_written() -> None:
    """An average of weights by `_foreach_lerp_` reads the new values: it moves along."""
    trace = adam((4, 4), foreach=True)
    n = trace.n_tensors
    tensors = [Tensor(4, tag="param"), Tensor(4, tag="param")]
    both = step(tensors, [Op("x", [], [], 0.0)] * trace.n_ops)
    joined = replace(
        trace,
        op_us=np.append(trace.op_us, 50.0),
        op_names=(*trace.op_names, "aten::_foreach_lerp_"),
        bytes=np.append(trace.bytes, both.bytes),
        large=np.append(trace.large, both.large),
        tags=(*trace.tags, "param", "param"),
        families=(*trace.families, "", ""),
        kind=np.append(trace.kind, both.kind),
        first=np.append(trace.first, [0, 0]),
        last=np.append(trace.last, [trace.n_ops] * 2),
        next_alias=np.append(trace.next_alias, [-1, -1]),
        source=np.arange(n + 2),
        access_start=np.append(trace.access_start, len(trace.access_tensor) + 4),
        access_tensor=np.append(trace.access_tensor, [n, n + 1, 0, 1]),
        access_write=np.append(trace.access_write, [True, True, False, False]),
    )
    found = candidates(joined).updates
    assert [update.pairs for update in found] == [((1, 5),), ((0, 4),)]
    assert {n, n + 1} == {t for update in found for t in update.inside if t >= n}


def test_an_op_on_several_parameters_that_is_no_list_stays() -> None:
    tensors = [
        Tensor(4, tag="param"), Tensor(4, tag="param"), Tensor(4, (1, 2), "grad"),
        Tensor(4, (1, 2), "grad"),
    ]  # fmt: skip
    ops = [
        Op("linear", [0, 1]), Op("linear_backward", [0, 1], [2, 3]), Op("lamb", [2, 3], [0, 1]),
    ]  # fmt: skip
    assert candidates(step(tensors, ops)).updates == ()


def test_single_tensors_behind_lists_change_nothing() -> None:
    """Like `found_inf` and a learning rate, which a fused op takes after its lists."""
    trace = adam((4, 4), foreach=True)
    at = trace.op_names.index("aten::_foreach_lerp_")
    names = [*trace.op_names]
    names[at] = "aten::_fused_adamw_"
    more = with_norm(replace(trace, op_names=tuple(names)), 4, at)
    assert len(candidates(more).updates) == 2


def test_what_is_excluded_stays() -> None:
    trace = adam()
    exempt = np.zeros(trace.n_tensors, bool)
    exempt[1] = True
    pairs = [update.pairs for update in candidates(replace(trace, exempt=exempt)).updates]
    assert pairs == [((2, 8),), ((0, 6),)]


def test_updates_can_be_added_to_others() -> None:
    trace = adam((4, 6, 8))
    first, *others = candidates(trace).updates
    both = on_host(on_host(trace, [first], HOST), others, HOST)
    once = on_host(trace, [first, *others], HOST)
    assert both.updates is not None
    assert once.updates is not None
    assert [c.tolist() for c in both.updates] == [c.tolist() for c in once.updates]


@settings(max_examples=40)
@given(
    weights=st.lists(st.sampled_from([0, 1, 4, 9]), min_size=1, max_size=5),
    foreach=st.booleans(),
    made=st.booleans(),
    share=st.sampled_from([0.3, 0.6, 1.0]),
    room=st.floats(0.3, 1.2),
    rate=st.sampled_from([5_000.0, 50_000.0, 500_000.0]),
    norm=st.booleans(),
)
def test_no_replay_is_below_the_bounds(
    weights: list[int],
    foreach: bool,
    made: bool,
    share: float,
    room: float,
    rate: float,
    norm: bool,
) -> None:
    pytest.importorskip("highspy")
    device = replace(LINK, host_bytes_per_us=rate)
    trace = adam(weights, foreach=foreach, made=made)
    if norm:
        trace = with_norm(trace, 2 * len(weights), 2 * len(weights))
    found = candidates(trace)
    new = on_host(trace, found.first(share), device)
    budget = max(int(trace.peak_bytes * room), replay.min_budget(trace))
    result = replay_step(new, "auto", device, budget)
    assert result.step_us >= result.floor_us * (1 - 1e-6)
    assert result.step_us >= result.host_us * (1 - 1e-6)
    graph = RecomputeGraph(trace)
    bound = lower_bound_us(graph, device, result.budget, found.updates)
    assert result.step_us >= bound * (1 - 1e-6)


def test_the_planner_is_as_fast_as_any_share() -> None:
    pytest.importorskip("highspy")
    trace = adam((4, 6, 8, 8, 6, 4))
    graph = RecomputeGraph(trace)
    budget = trace.peak_bytes // 2
    best = simulate_updates(graph, HOST, budget)
    fixed = [simulate_updates(graph, HOST, budget, share) for share in SHARES]
    assert best.step_us <= 1.01 * min(one.step_us for one in fixed)
    assert fixed[0].updates == ()
    assert fixed[-1].share == 1.0
    bound = lower_bound_us(graph, HOST, budget, candidates(trace).updates)
    assert best.step_us >= bound * (1 - 1e-6)


def test_a_step_without_updates_is_planned_as_ever() -> None:
    trace = training(4, states=False)
    changed = replace(trace, tags=("activation",) * trace.n_tensors)
    graph = RecomputeGraph(changed, np.arange(changed.n_ops) < 4)
    best = simulate_updates(graph, HOST, changed.peak_bytes)
    assert best.share == 0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"update_parameter": [99]}, "names a tensor that the step has not"),
        ({"update_gradient": [-1]}, "names a tensor that the step has not"),
        ({"update_parameter": [3]}, "does not persist"),
        ({"update_gradient": [1]}, "not made and freed in the step"),
        ({"update_us": [-1.0]}, "negative or not finite"),
        ({"update_us": [1.0, 2.0]}, "differ in length"),
    ],
)
def test_bad_columns_of_updates_are_refused(changed: dict[str, list[float]], message: str) -> None:
    trace = adam()
    new = on_host(trace, candidates(trace).updates[:1], HOST)
    columns = replay.columns_of(new)
    for name, values in changed.items():
        columns[name] = np.array(values, columns[name].dtype)
    run = core.Replay(replay._options("lru", HOST, trace.peak_bytes, 0))
    try:
        with pytest.raises(ValueError, match=message):
            run.set_step(columns)
    finally:
        run.close()


@pytest.mark.parametrize("policy", ["lru", "none", "belady"])
def test_any_policy_runs_a_step_with_updates(policy: str) -> None:
    trace = adam((4, 6, 8))
    new = on_host(trace, candidates(trace).updates, HOST)
    try:
        result = replay_step(new, policy, HOST, trace.peak_bytes * 2)
    except StateError as error:  # pragma: no cover - names the open question
        pytest.fail(str(error))
    assert result.bytes_in >= 18 * PAGE
    assert result.host_us == pytest.approx(7 * 18 * PAGE / 50_000.0)
