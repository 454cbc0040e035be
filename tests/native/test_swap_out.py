"""Swapping out during compute, while dead bytes fill the rest of the budget."""

from __future__ import annotations

from support.steptraces import LINK, PAGE, Op, Tensor, step

from umem.simulation import replay

SIZES = (5, 6, 7, 8, 9, 10, 11, 12)  # in pages; no two alike, so that dead ones are not taken again


def test_ops_do_not_wait_for_it_where_dead_bytes_can_be_dropped() -> None:
    """Tensor 0 leaves for the large tensor in the middle; until then all fit."""
    many = len(SIZES)
    middle, last = many + 1, 2 * many + 2
    tensors = [Tensor(16, (0, last))]
    ops = [Op("make", [], [0], 100.0)]
    for at, pages in enumerate((*SIZES, 30, *SIZES), 1):
        tensors.append(Tensor(pages, (at, at), "temp"))
        ops.append(Op("temp", [], [at], 500.0))
    ops.append(Op("use", [0], [], 100.0))
    trace = step(tensors, ops)
    assert trace.live_bytes.argmax() == middle
    result = replay.replay_step(trace, "auto", LINK, 40 * PAGE)
    assert result.bytes_out == result.bytes_in == 16 * PAGE
    assert result.step_us == trace.compute_us
