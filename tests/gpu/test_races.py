"""The race detector's reports when umem, or its program, omits an order.

Its silence otherwise is checked after every test here (conftest.py).
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator

import pytest

torch = pytest.importorskip("torch")

from softcuda.load import Softcuda  # noqa: E402
from support.cells import Cell  # noqa: E402

import umem  # noqa: E402

pytestmark = pytest.mark.gpu
MIB = 1 << 20
SEEDS = pytest.mark.parametrize("seed", [0, 3])


@pytest.fixture(autouse=True)
def _small_budget(softcuda: Softcuda) -> Iterator[None]:
    with umem.enable(budget=16 * MIB, device="cuda"):
        yield
        torch.cuda.synchronize()


def planted(softcuda: Softcuda, seed: int, work: Callable[[], None]) -> list[str]:
    """The races of `work` as "name uses, name uses", without the addresses."""
    torch.cuda.synchronize()
    assert softcuda.races() == []
    softcuda.seed(seed)
    work()
    torch.cuda.synchronize()
    softcuda.reset()
    pattern = re.compile(
        r"(.*) 0x[0-9a-f]+\+\d+ on [^,]+(, .*) it on (?:stream \d+|the host): "
        "(?:nothing orders|it is freed)"
    )
    found = [pattern.match(line) for line in softcuda.races()]
    return sorted({m[1] + m[2] for m in found if m})


def used_on_a_side_stream(record: bool) -> None:
    """A block that another stream reads while its owner frees it and allocates the next."""
    side, source, target = torch.cuda.Stream(), Cell(6 * MIB), Cell(6 * MIB)
    source.fill()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        target.copy(source)
    target.tensor.record_stream(side)
    if record:
        source.tensor.record_stream(side)
    del source
    again = Cell(6 * MIB)
    again.fill()


@SEEDS
def test_a_reuse_without_record_stream(softcuda: Softcuda, seed: int) -> None:
    races = planted(softcuda, seed, lambda: used_on_a_side_stream(record=False))
    assert "cuMemcpyAsync reads, a fill kernel writes" in races
    assert planted(softcuda, seed, lambda: used_on_a_side_stream(record=True)) == []


@SEEDS
@pytest.mark.parametrize("call", ["cuEventRecord", "cuStreamWaitEvent"])
def test_an_order_that_umem_left_out(softcuda: Softcuda, seed: int, call: str) -> None:
    def work() -> None:
        softcuda.skip(call)
        cells = [Cell(4 * MIB) for _ in range(6)]  # more than the budget
        for _ in range(2):
            for cell in cells:
                cell.fill()
        del cells, cell
        for _ in range(6):
            Cell(6 * MIB).fill()

    races = planted(softcuda, seed, work)
    assert any("a fill kernel writes" in race and "cuMemDiscard" in race for race in races), races


@SEEDS
def test_a_discard_that_is_not_after_the_last_write(softcuda: Softcuda, seed: int) -> None:
    cell, stream = Cell(4 * MIB), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())

    def work() -> None:
        cell.fill()
        pointer, nbytes = ctypes.c_uint64(cell.tensor.data_ptr()), ctypes.c_size_t(4 * MIB)
        result = softcuda.driver.cuMemDiscardBatchAsync(
            ctypes.byref(pointer), ctypes.byref(nbytes), ctypes.c_size_t(1), ctypes.c_uint64(0),
            ctypes.c_void_p(stream.cuda_stream))  # fmt: skip
        assert result == 0, result

    assert planted(softcuda, seed, work) == [
        "a fill kernel writes, cuMemDiscardBatchAsync discards"
    ]
