"""Tensors that are views of one block move on their own, as separate ones do."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import umem  # noqa: E402
from umem.base.native import core  # noqa: E402

MIB = 1 << 20
COUNT, SIZE = 8, 1 << 20  # tensors of 4 MiB
STEPS, FIRST = 10, 5  # the first step whose figures count


def separate(count: int) -> list[torch.Tensor]:
    return [torch.full((SIZE,), i / count) for i in range(count)]


def flat(count: int) -> list[torch.Tensor]:
    """The same tensors as views of one block."""
    block = torch.empty(count * SIZE)
    views = list(block.view(count, SIZE).unbind())
    for i, view in enumerate(views):
        view.fill_(i / count)
    return views


def train(make: Callable[[int], list[torch.Tensor]], **options: Any) -> tuple[float, list[int]]:
    """A forward pass over weights, a backward one that makes gradients, an update of each.

    Returns:
        a checksum of all results, and the bytes moved in each step from `FIRST`.
    """
    moved = []
    with umem.enable(device="soft", **options):
        weights, gradients = make(COUNT), make(COUNT)
        for step in range(STEPS):
            before = umem.stats()
            x = torch.full((SIZE,), 1 + step / 64)
            for weight in weights:
                x = x * weight + 0.5
            for weight, gradient in reversed(list(zip(weights, gradients, strict=True))):
                torch.mul(weight, 0.5, out=gradient)
                gradient.add_(x, alpha=1e-3)
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.sub_(gradient, alpha=1e-2)
            umem.step()
            after = umem.stats()
            if step >= FIRST:
                moved.append(after.bytes_in + after.bytes_out - before.bytes_in - before.bytes_out)
        total = sum(float(t.double().sum()) for t in (*weights, *gradients))
        del x, weights, gradients, weight, gradient
        gc.collect()
    return total, moved


# 80 MiB at the peak: weights, gradients, and results of the forward pass.
@pytest.mark.parametrize("policy", ["auto", "lru"])
@pytest.mark.parametrize("mib", [48, pytest.param(40, marks=pytest.mark.nightly), 24])
def test_a_flat_buffer_moves_what_separate_tensors_do(mib: int, policy: str) -> None:
    expected, of_separate = train(separate, budget=mib * MIB, policy=policy)
    total, of_flat = train(flat, budget=mib * MIB, policy=policy)
    assert total == expected
    assert of_separate[-1] > 0
    assert of_flat[-1] <= 1.1 * of_separate[-1]


def test_bits_are_those_of_a_program_with_room() -> None:
    expected, moved = train(flat, budget=200 * MIB)
    assert set(moved) == {0}
    for mib in (16, 32):
        assert train(flat, budget=mib * MIB)[0] == expected


def test_the_plan_is_of_the_parts_and_holds() -> None:
    with umem.enable(device="soft", budget=40 * MIB):
        block = torch.ones(16 * SIZE)
        views = block.view(16, SIZE).unbind()
        hits = []
        for _ in range(8):
            for view in views:
                view.mul_(1.5).sub_(0.25)
            umem.step()
            hits.append(core.plan_status()["complete"])
        assert hits[-1] > 0
        assert core.cut_sizes() == [64 * MIB]
        before = umem.stats()
        for view in views:
            view.mul_(1.5).sub_(0.25)
        umem.step()
        after = umem.stats()
        assert after.faults == before.faults
        # At least the part of 64 MiB that does not fit into 40 moves, and not much more.
        assert 24 * MIB <= after.bytes_in - before.bytes_in <= 40 * MIB
        value = 1.0
        for _ in range(9):
            value = value * 1.5 - 0.25
        assert torch.equal(block, torch.full_like(block, value))
        del block, views, view
        gc.collect()


def test_a_view_is_used_in_a_thread_while_the_block_is_cut() -> None:
    """Cuts are made at the ends of steps, and by ops; another thread runs ops continuously."""
    done = threading.Event()
    errors: list[BaseException] = []
    with umem.enable(device="soft", budget=32 * MIB):
        block, other = torch.ones(16 * SIZE), torch.zeros(16 * SIZE)
        mine = block.view(16, SIZE)[9]

        def work(mine: torch.Tensor) -> None:
            try:
                while not done.is_set():
                    mine.add_(1)
            except BaseException as error:  # noqa: BLE001
                errors.append(error)

        thread = threading.Thread(target=work, args=(mine,))
        thread.start()
        for _ in range(6):
            for i in (*range(9), *range(10, 16)):
                other.view(16, SIZE)[i].add_(block.view(16, SIZE)[i])
            umem.step()
        done.set()
        thread.join()
        assert not errors
        rows = other.view(16, SIZE)
        assert all(float(rows[i].sum()) == (0 if i == 9 else 6 * SIZE) for i in range(16))
        assert float(mine.min()) == float(mine.max()) > 1
        del block, other, mine, rows
        gc.collect()


def test_empty_and_strided_views() -> None:
    with umem.enable(device="soft", budget=24 * MIB, policy="lru"):
        block = torch.arange(8 * SIZE, dtype=torch.float32)
        drive_out = torch.ones(5 * SIZE)
        assert core.where(block.data_ptr(), 32 * MIB)["evicted_bytes"] > 0
        before = umem.stats().bytes_in
        assert block[:0].sum() == 0
        assert umem.stats().bytes_in == before  # it needs no part of the block
        columns = block.view(8, SIZE)[:, :64]  # spread over all of it
        assert columns.sum(1).tolist() == [float(r[:64].sum()) for r in block.view(8, SIZE)]
        assert block[SIZE : 2 * SIZE].sum() == torch.arange(SIZE, 2 * SIZE).float().sum()
        del block, drive_out, columns
        gc.collect()
