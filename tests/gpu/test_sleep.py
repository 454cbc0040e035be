"""Sleep and wake on a GPU, or on the software driver with work that is done late."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from softcuda.load import Softcuda  # noqa: E402
from support.cells import Cell  # noqa: E402
from support.cuda_tensors import full, holds  # noqa: E402

import umem  # noqa: E402
from umem.base.native import core  # noqa: E402
from umem.errors import DriverError, StateError  # noqa: E402

pytestmark = pytest.mark.gpu
Program = Callable[..., tuple[str, str]]
MIB = 1 << 20
SEEDS = pytest.mark.parametrize("seed", [0, 1, 2, 3])
UNKNOWN = 999  # an error of the driver
SPARE = 16 * MIB  # which sleep leaves to kernels that run at the time
SLACK = 4 * MIB  # device memory comes in batches; a GPU's are of 128 MiB


def free() -> int:
    return int(torch.cuda.mem_get_info()[0])


@pytest.mark.usefixtures("umem_on")
def test_the_driver_has_the_memory_when_sleep_returns(softcuda: Softcuda) -> None:
    full(0.0)
    empty = free()
    kept = [full(float(i), mib=4) for i in range(10)]
    del kept[0]  # cached
    torch.cuda.synchronize()
    used = empty - free()
    assert used >= 36 * MIB - SLACK
    asleep = umem.sleep()
    assert free() >= empty - SPARE
    assert asleep.shown_free
    assert asleep.bytes >= 40 * MIB
    assert umem.wake() == 36 * MIB
    torch.cuda.synchronize()
    assert free() <= empty - 36 * MIB + SLACK
    assert all(holds(t, float(i)) for i, t in enumerate(kept, 1))
    assert umem.stats().hook_errors == 0
    del kept


@SEEDS
@pytest.mark.usefixtures("umem_on")
def test_pins_are_back_after_wake(soft: Softcuda | None, seed: int) -> None:
    if soft is not None:
        soft.seed(seed)
    pinned = full(5.0, mib=16)
    with umem.pin(pinned):
        umem.sleep()
        assert umem.where(pinned).evicted_bytes == 16 * MIB
        held = [full(float(i), mib=8) for i in range(8)]  # the whole budget
        umem.wake()
        assert umem.where(pinned).resident_bytes == 16 * MIB
        assert all(holds(t, float(i)) for i, t in enumerate(held))
        assert umem.where(pinned).resident_bytes == 16 * MIB
        with pytest.raises(StateError, match="pinned"):
            umem.evict(pinned)
    assert holds(pinned, 5.0)
    del pinned, held


@SEEDS
@pytest.mark.usefixtures("umem_on")
def test_what_streams_still_write_arrives(soft: Softcuda | None, seed: int) -> None:
    if soft is not None:
        soft.seed(seed)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        cells = [Cell(4 * MIB) for _ in range(4)]
        for _ in range(3):
            for cell in cells:
                cell.fill()
            umem.sleep()
            umem.wake()
    here = [Cell(4 * MIB) for _ in range(3)]
    for cell in here:
        cell.fill()
    umem.sleep(["input", "activation", "temp", "workspace"])
    torch.cuda.current_stream().wait_stream(side)
    assert [cell.wrong() for cell in cells + here] == [None] * 7
    umem.wake()
    assert [cell.wrong() for cell in cells + here] == [None] * 7
    del cells, here, cell
    torch.cuda.synchronize()


@SEEDS
@pytest.mark.usefixtures("umem_on")
def test_discarded_memory_is_written_again(soft: Softcuda | None, seed: int) -> None:
    if soft is not None:
        soft.seed(seed)
    full(0.0)
    lost, kept = Cell(8 * MIB), Cell(8 * MIB)
    core.tag(lost.tensor.data_ptr(), "grad")
    for cell in (lost, kept):
        cell.fill()
    before, out = free(), umem.stats().bytes_out
    umem.sleep(["grad"], keep="discard")
    if soft is not None:
        assert free() >= before + 8 * MIB - SLACK
    assert umem.stats().bytes_out == out
    came = umem.stats().bytes_in
    umem.wake()
    assert umem.where(lost.tensor).resident_bytes == 8 * MIB
    assert umem.stats().bytes_in == came  # no byte came with it
    lost.fill()
    assert (lost.wrong(), kept.wrong()) == (None, None)
    del lost, kept, cell
    torch.cuda.synchronize()


@pytest.mark.usefixtures("umem_on")
def test_not_while_a_graph_is_captured() -> None:
    x = full(1.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.zero_()
        for call in (umem.sleep, umem.wake):
            with pytest.raises(StateError, match="a CUDA graph is being captured"):
                call()
    x.fill_(2.0)
    with umem.sleep():
        pass
    assert holds(x, 2.0)
    graph.replay()  # at the same addresses
    torch.cuda.synchronize()
    assert holds(x, 0.0)
    del graph, x


@pytest.mark.usefixtures("umem_on")
def test_a_driver_that_refuses_is_told_and_loses_nothing(softcuda: Softcuda) -> None:
    kept = [full(float(i), mib=4) for i in range(4)]
    for entry in ("cuMemPrefetchBatchAsync", "cuCtxSynchronize", "cuStreamWaitEvent"):
        softcuda.inject(entry, 1, UNKNOWN)
        with pytest.raises(DriverError):
            umem.sleep()
        softcuda.reset()
        umem.wake()
        assert all(holds(t, float(i)) for i, t in enumerate(kept)), entry
    del kept


def test_auto_follows_what_others_take(program: Program, softcuda: Softcuda) -> None:
    """With a device of 256 MiB, and plain memory of torch in the role of another program's."""
    out, _ = program(
        """
import os
from umem.session import auto_budget
from umem.base.native import core
enable(budget="auto", policy="lru")
x = blocks(10, 8)
torch.cuda.synchronize()
first = umem.stats().budget_bytes
driver = ctypes.CDLL(None)
taken = ctypes.c_uint64()
assert driver.cuMemAlloc_v2(ctypes.byref(taken), ctypes.c_size_t(120 * MIB)) == 0
def step():
    time.sleep(1.1 * auto_budget.EVERY_S)
    umem.step()
    return umem.stats().budget_bytes
low = step()
assert first - 130 * MIB <= low <= first - 110 * MIB, (first, low)
assert step() == low
assert driver.cuMemFree_v2(taken) == 0
grown = [step() for _ in range(auto_budget.PATIENCE)]
assert grown[0] == low and grown[-1] >= first - 4 * MIB, (first, low, grown)
assert intact(x)
print("fine")
""",
        SOFTCUDA_BYTES=str(256 * MIB),
    )
    assert out == "fine\n"
