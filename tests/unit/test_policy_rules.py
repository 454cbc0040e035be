"""The rule of each policy, on examples worked by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.plans import next_use
from support.steptraces import LINK, PAGE, Op, Tensor, inference, step, training

from umem.base.device_profiles import DeviceProfile
from umem.base.units import MIB
from umem.errors import ConfigError
from umem.policies.base import Fetch, Move
from umem.policies.default.occupancy import capacity, large_live_bytes
from umem.policies.published.autoswap import AutoSwap, SwapCandidate, candidates, ranked, wdoa
from umem.policies.published.belady import Belady
from umem.policies.published.capuchin import Capuchin, Swap
from umem.policies.published.deepum import DeepUm
from umem.policies.published.distance import Distance, Levels
from umem.policies.published.graph import DataflowGraph
from umem.policies.published.lanes import Link, first_come, latest_starts
from umem.policies.published.lms import Lms
from umem.policies.published.ocdnn import OcDnn
from umem.policies.published.optimizer_state import OptimizerState
from umem.policies.published.phases import Phases, phases
from umem.policies.published.stream_layers import StreamLayers, scheduled
from umem.policies.published.vdnn import Vdnn, VdnnAll, VdnnConv
from umem.trace.step_trace import StepTrace

# A PCIe 3 x16 link with pinned memory as Apache SINGA has it: 13.2 and 12.2 GB/s.
SINGA = Link(47.2, 0.0756e-3, 9.7, 0.0823e-3)
N = 4  # layers of `small`, whose ops are: forward 0-3, backward 4-7, update 8-11
ACT = 2 * N  # the first activation's index; layer i's is made by op i, last used by op 7 - i


def small(**kwargs: Any) -> StepTrace:
    return training(N, **kwargs)


def slow(bytes_per_us: float) -> DeviceProfile:
    return DeviceProfile("slow", bytes_per_us, bytes_per_us, 45.0, 1 << 40, "made up")


def test_phases_by_names_by_tags_and_by_what_is_idle() -> None:
    assert phases(small()) == Phases(backward=4, optimizer=8)
    assert phases(inference(5)) == Phases(5, 5)
    ops = [Op("a", [], [0]), Op("b", [0], [1]), Op("c", [1]), Op("d", [0])]
    untold = [Tensor(3, (0, 3)), Tensor(1, (1, 2)), Tensor(1, tag="grad")]
    assert phases(step(untold, ops)).backward == 3
    ops[2] = Op("c", [1], [2])
    assert phases(step(untold, ops)).backward == 2
    ops[0] = Op("aten::_foreach_zero_", [], [0, 2])  # before forward
    assert phases(step(untold, ops)).backward == 2


def test_small_tensors_stay_while_the_largest_op_has_room() -> None:
    ops = [Op("a", [0]), Op("b", [1]), Op("c", [2])]
    trace = step([Tensor(4), Tensor(4), Tensor(0)], ops)
    assert trace.small_bytes == PAGE
    assert capacity(trace, 8 * PAGE + 5) == 7 * PAGE
    assert capacity(trace, 4 * PAGE) == 4 * PAGE  # the small ones are paged
    assert capacity(trace, 3 * PAGE) == 3 * PAGE  # never beyond the budget


def test_belady_changes_the_order_only() -> None:
    plan = Belady().plan(small(), LINK, 10 * PAGE)
    assert (plan.order, plan.evict, plan.fetch, plan.gated) == ("furthest", (), (), False)
    clean = [t for t in range(plan.trace.n_tensors) if plan.trace.large[t] and plan.trace.clean[t]]
    assert list(plan.read_mostly) == clean


def test_ocdnn_marks_in_forward_and_fetches_one_op_ahead() -> None:
    plan = OcDnn().plan(small(), LINK, 20 * PAGE)
    # Layer i's activation is read by forward i + 1, then by backward of i + 1.
    # That of layer 2 is read by two ops in a row.
    assert set(plan.evict_first) == {Move(1, ACT), Move(2, ACT + 1)}
    assert Fetch(4, 6, ACT) in plan.fetch
    assert Fetch(2, 5, ACT) not in plan.fetch
    assert Fetch(11, 13, 1) in plan.fetch  # weight 1: read by op 1 of the next step
    assert Fetch(3, 6, ACT) in OcDnn(ahead=2).plan(small(), LINK, 20 * PAGE).fetch


def test_vdnn_offloads_in_forward_and_prefetches_layer_by_layer() -> None:
    plan = VdnnAll().plan(small(), LINK, 20 * PAGE)
    assert plan.evict == (Move(1, ACT), Move(2, ACT + 1))
    # Backward of layer 2 (op 5) starts: the input of layer 1, which op 6 needs, is fetched.
    assert Fetch(4, 6, ACT) in plan.fetch
    assert {2, 3, 5} <= set(plan.barriers)


def test_vdnn_conv_offloads_what_convolutions_read() -> None:
    plan = VdnnConv().plan(small(convolutions=(2,)), LINK, 20 * PAGE)
    assert [move.tensor for move in plan.evict] == [ACT + 1]  # the input of layer 2
    assert plan.fetch == ()  # there is no later layer to fetch for


def test_vdnn_does_not_look_beyond_a_convolution_that_was_not_offloaded() -> None:
    a, b = Tensor(4, (0, 9)), Tensor(4, (1, 9))
    names = ["linear", "linear", "linear", "linear", "x_backward", "y", "y", "y", "z_backward"]
    reads = {4: [1], 8: [0]}
    ops = [Op(name, reads.get(i, []), [i] if i < 2 else []) for i, name in enumerate(names)]
    ops += [Op("end", [])]
    assert VdnnAll().plan(step([a, b], ops), LINK, 4 * PAGE).fetch == (Fetch(3, 8, 0),)
    ops[6] = Op("convolution_backward")
    assert VdnnAll().plan(step([a, b], ops), LINK, 4 * PAGE).fetch == ()


def test_vdnn_climbs_its_ladder_no_further_than_it_must() -> None:
    trace = training(6, convolutions=(1, 2, 3, 4, 5), activation=8, weight=1)
    peak = int(large_live_bytes(trace).max())
    full, conv = (policy.plan(trace, LINK, peak) for policy in (VdnnAll(), VdnnConv()))
    assert full.evict == conv.evict  # every saved tensor here feeds a convolution
    assert Vdnn().plan(trace, LINK, peak + trace.small_bytes).evict == ()
    assert Vdnn().plan(trace, LINK, 30 * PAGE).evict == full.evict


def test_distance_triggers_ahead_by_levels() -> None:
    trace = training(6)
    graph = DataflowGraph(trace)
    assert graph.level[:12] == list(range(12))  # one chain through forward and backward
    plan = Distance(Levels(threshold=2, ahead=2)).plan(trace, LINK, 50 * PAGE)
    acts = 12
    # Activation 1 is read by op 2 and by backward of layer 2, op 9: evicted after the near one.
    assert Move(2, acts + 1) in plan.evict
    assert Fetch(7, 9, acts + 1) in plan.fetch
    # Activation 4: op 5, then op 6, which is near; nothing is far.
    assert acts + 4 not in {move.tensor for move in plan.evict}
    assert plan.barriers == ()
    synced = Distance(Levels(threshold=2, ahead=2, sync=3)).plan(trace, LINK, 50 * PAGE)
    assert {2, 8} <= set(synced.barriers)


def test_distance_groups_consumers() -> None:
    spread = [Op("make", [], [0]), *[Op("go", [i], [i + 1]) for i in range(1, 9)]]
    spread[0].touched = [0, 1]
    tensors = [Tensor(4, (0, 8)), *[Tensor(1, (max(0, i - 1), min(i, 8))) for i in range(1, 10)]]
    ops = [Op("make", [], [0, 1])]
    for i in range(1, 9):
        ops.append(Op("go", [i, *([0] if i in (4, 6, 8) else [])], [i + 1]))
    trace = step(tensors, ops)

    def of_first(levels: Levels) -> list[Fetch]:
        plan = Distance(levels).plan(trace, LINK, 5 * PAGE)
        return [one for one in plan.fetch if one.tensor == 0]

    assert of_first(Levels(2, 1, 0)) == [Fetch(3, 4, 0), Fetch(5, 6, 0), Fetch(7, 8, 0)]
    assert of_first(Levels(2, 1, 2)) == [Fetch(3, 4, 0)]


def test_distance_tunes_itself_to_fit() -> None:
    trace = training(10, weight=1, activation=8)
    peak = int(large_live_bytes(trace).max())
    assert Distance().plan(trace, LINK, peak * 2).evict == ()
    some = Distance().plan(trace, LINK, int(peak * 0.9))
    more = Distance().plan(trace, LINK, int(peak * 0.6))
    assert 0 < len(some.evict) < len(more.evict)


def test_autoswap_reckons_with_its_link() -> None:
    assert SINGA.time_out(2 * MIB) == pytest.approx(205.7, abs=0.05)
    assert SINGA.time_in(2 * MIB) == pytest.approx(182.3, abs=0.05)
    assert Link.of(LINK).time_out(20_000) == 1.0


def test_autoswap_takes_intervals_across_the_peak() -> None:
    trace = small()
    load = large_live_bytes(trace)
    peak = int(load.argmax())
    found = candidates(trace, load, SINGA)
    assert found
    for one in found:
        assert one.r < peak < one.d
        first = trace.begin_us[one.r + 1] if one.r >= 0 else trace.begin_us[one.r + 13] - 11_000
        gone = SINGA.time_out(one.bytes) + SINGA.time_in(one.bytes)
        assert trace.compute_us == 13_000
        if one.r >= 0 and one.d < trace.n_ops:
            assert one.doa == pytest.approx(trace.begin_us[one.d] - first - gone)
    assert any(one.r < 0 for one in found)  # a state: from the previous update around to the next


def test_aoa_is_an_area_or_a_shortage_for_each_byte() -> None:
    assert SwapCandidate(0, 1, 4, 100, 7.0).aoa == 700.0
    assert SwapCandidate(0, 1, 4, 100, -7.0).aoa == -0.07


def test_wdoa_is_the_load_above_the_limit() -> None:
    load = np.array([5, 9, 12, 11, 4])
    assert wdoa(SwapCandidate(0, 1, 4, 1, 0.0), load, 10) == (9 - 10) + (12 - 10) + (11 - 10)
    assert wdoa(SwapCandidate(0, -2, 2, 1, 0.0), load, 10) == (11 + 4 + 5 + 9) - 40
    assert wdoa(SwapCandidate(0, 3, 6, 1, 0.0), load, 10) == (11 + 4 + 5) - 30


def test_the_vote_adds_up_ranks() -> None:
    load, limit = np.array([0, 9, 9, 0, 0, 0]), 5
    a = SwapCandidate(0, 1, 3, 1, 3.0)  # wdoa 8, doa 3, aoa 3
    b = SwapCandidate(1, 0, 4, 9, 2.0)  # wdoa -2, doa 2, aoa 18
    c = SwapCandidate(2, 2, 3, 1, -5.0)  # wdoa 4, doa -5, aoa -5
    assert [one.tensor for one in ranked([c, b, a], "doa", load, limit)] == [0, 1, 2]
    assert [one.tensor for one in ranked([c, b, a], "aoa", load, limit)] == [1, 0, 2]
    assert [one.tensor for one in ranked([c, b, a], "wdoa", load, limit)] == [0, 2, 1]
    # Points for those beaten: a 2 + 1 + 2, b 1 + 2 + 0, c 0 + 0 + 1.
    assert [one.tensor for one in ranked([c, b, a], "vote", load, limit)] == [0, 1, 2]


def test_lanes_run_one_transfer_at_a_time() -> None:
    assert first_come([(0.0, 10.0), (5.0, 10.0), (50.0, 1.0)]) == [10.0, 20.0, 51.0]
    assert latest_starts([(100.0, 10.0), (95.0, 10.0), (20.0, 5.0)]) == [90.0, 80.0, 15.0]


def test_autoswap_waits_only_where_the_limit_asks_for_it() -> None:
    tensors = [Tensor(4, (0, 9)), Tensor(4, (3, 3))]
    ops = [Op("op", [0] if i in (0, 9) else [1] if i == 3 else []) for i in range(10)]
    trace, budget = step(tensors, ops), 7 * PAGE
    late, early = slow(4 * PAGE / 450), slow(4 * PAGE / 150)  # absent in op 5, and in op 2
    held = AutoSwap(schedule="stick_to_limit").plan(trace, late, budget)
    assert held.evict == (Move(0, 0),)
    assert held.barriers == (2,)  # before op 3 allocates
    assert held.fetch == (Fetch(3, 9, 0),)  # the latest start, in op 4, is after it as well
    assert AutoSwap(schedule="no_overhead").plan(trace, late, budget).barriers == ()
    assert AutoSwap(schedule="stick_to_limit").plan(trace, early, budget).barriers == ()


@pytest.mark.parametrize("score", ["doa", "aoa", "wdoa", "swdoa", "vote"])
def test_autoswap_takes_until_the_load_is_below_the_limit(score: Any) -> None:
    trace = training(8, weight=1, activation=8)
    load = large_live_bytes(trace)
    budget = int(load.max() * 0.7)
    plan = AutoSwap(score=score, schedule="no_overhead").plan(trace, slow(1e9), budget)
    for move in plan.evict:
        back = next_use(trace, move.tensor, move.after)
        assert back is not None
        load[(np.arange(move.after + 1, back)) % trace.n_ops] -= trace.bytes[move.tensor]
    assert load.max() <= budget


def test_autoswap_refuses_an_unknown_score() -> None:
    with pytest.raises(ConfigError, match=r".best. is not an option; allowed: doa, aoa"):
        AutoSwap(score="best")  # type: ignore[arg-type]


def test_free_time_is_what_both_transfers_leave() -> None:
    swap = Swap(0, 1, 5, 100, evicted_us=20.0, back_us=90.0, out_us=30.0, in_us=25.0)
    assert swap.free_us == (90 - 25) - (20 + 30)
    assert swap._replace(back_us=60.0).free_us < 0


def test_capuchin_takes_the_most_free_time_and_triggers_outside_the_peak() -> None:
    trace = training(6, weight=0, activation=8, states=False)
    live = large_live_bytes(trace)
    budget = int(live.max()) - 4 * PAGE + trace.small_bytes
    plan = Capuchin().plan(trace, slow(50_000.0), budget)
    assert plan.evict == (Move(1, 12),)  # activation 0, the longest idle
    (fetch,) = plan.fetch
    assert fetch.by == 10  # backward of layer 1
    hot = np.flatnonzero(live > budget - trace.small_bytes)
    assert fetch.after not in hot
    assert fetch.after >= min(9, int(hot.max()) + 1)


def test_deepum_fetches_as_far_as_its_degree_and_its_tables_reach() -> None:
    trace = inference(12)
    near, far = (DeepUm(degree=degree).plan(trace, LINK, 20 * PAGE) for degree in (2, 5))
    assert Fetch(0, 2, 2) in near.fetch
    assert all(one.by - one.after <= 2 for one in near.fetch)
    assert Fetch(0, 5, 5) in far.fetch
    assert (near.window, far.window) == (2, 5)
    assert near.order == "fifo"
    assert 0 < near.headroom <= 10 * PAGE


def test_deepum_forgets_what_its_rows_do_not_hold() -> None:
    wide = step([Tensor(1) for _ in range(6)], [Op("a"), Op("b", range(6)), Op("c")])
    whole = DeepUm(degree=1, rows=16, ways=16).plan(wide, LINK, 4 * PAGE)
    assert [one.tensor for one in whole.fetch] == [0, 1, 2, 3, 4, 5]
    little = DeepUm(degree=1, rows=2, ways=2).plan(wide, LINK, 4 * PAGE)
    assert [one.tensor for one in little.fetch] == [0]  # the row of 0 was overwritten


def test_bminf_spaces_what_it_schedules_evenly() -> None:
    assert scheduled(6, 4) == [1, 2, 4, 5]
    assert scheduled(12, 10) == [2, 5, 8, 11]
    assert scheduled(5, 2) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("room", "reloads"), [(4, 10), (6, 8), (8, 6), (10, 4)])
def test_stream_layers_reloads_what_does_not_fit_but_for_two(room: int, reloads: int) -> None:
    trace = inference(12)
    plan = StreamLayers().plan(trace, LINK, room * 4 * PAGE)
    assert len(plan.fetch) == len(plan.evict) == reloads
    assert len(plan.retain) == room - 2
    assert {one.tensor for one in plan.fetch}.isdisjoint(plan.retain)
    assert set(plan.read_mostly) == {one.tensor for one in plan.fetch}


def test_stream_layers_turns_round_in_backward() -> None:
    trace = training(8, weight=4, activation=1, states=False)
    others = large_live_bytes(trace).max() - 8 * 4 * PAGE
    plan = StreamLayers().plan(trace, LINK, int(others) + 4 * 4 * PAGE + trace.small_bytes)
    moving = scheduled(8, 4)
    backward = [one.tensor for one in plan.fetch if 8 <= one.by < 16]
    assert backward == sorted(backward, reverse=True)
    # Forward's last two are still in the buffers when backward begins.
    assert set(backward) == set(moving[:-2])


def test_stream_layers_needs_two_buffers() -> None:
    plan = StreamLayers().plan(inference(12), LINK, 7 * PAGE)
    assert (plan.evict, plan.fetch, plan.retain) == ((), (), ())


def test_optimizer_states_come_for_the_update_in_its_order() -> None:
    plan = OptimizerState().plan(small(), LINK, 40 * PAGE)
    assert plan.evict == tuple(Move(8 + i, N + i) for i in range(N))
    assert plan.fetch == tuple(Fetch(7, 8 + i, N + i) for i in range(N))
    assert plan.retain == tuple(range(N))


def test_lms_pages_out_what_the_queue_reclaimed() -> None:
    trace = inference(5)  # each weight 4 pages
    plan = Lms().plan(trace, LINK, 12 * PAGE)
    assert plan.fetch == ()
    assert set(plan.evict) == {Move(i, i) for i in range(5)}  # a cycle: the queue drops each
    ops = [Op("a", [0]), Op("b", [1]), Op("c", [2]), Op("d", [0])]
    trace = step([Tensor(2), Tensor(6), Tensor(4)], ops)
    # For the 4 pages of tensor 2 the oldest, tensor 0, is too small: tensor 1 leaves, and the
    # other way round.
    plan = Lms().plan(trace, LINK, 8 * PAGE)
    assert set(plan.evict) == {Move(1, 1), Move(2, 2)}
