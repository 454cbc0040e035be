"""What umem makes of a driver that keeps the frames of what leaves (docs/decisions/0010)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from softcuda.load import Softcuda  # noqa: E402
from support.cuda_tensors import full, holds  # noqa: E402

import umem  # noqa: E402

pytestmark = pytest.mark.gpu
Program = Callable[..., tuple[str, str]]
MIB = 1 << 20

CYCLE = """
def cycle(held):
    for t in held:
        t.fill_(1.0)
    torch.cuda.synchronize()
"""


def test_the_budget_auto_stays_while_umem_evicts(program: Program, softcuda: Softcuda) -> None:
    """A1: umem's own frames looked like another process, and the budget fell to its minimum."""
    out, _ = program(
        CYCLE
        + """
from umem.session import auto_budget
auto_budget.EVERY_S = 0.0
enable(budget="auto", policy="lru")
held = blocks(44, 16)  # 704 MiB of 512
first = umem.stats().budget_bytes
budgets = []
for _ in range(200):
    cycle(held[:12])
    held.append(held.pop(0))
    umem.step()
    budgets.append(umem.stats().budget_bytes)
assert min(budgets) >= 0.98 * first and max(budgets) <= 1.02 * first, (first, budgets)
assert umem.stats().evictions > 100
print("steady")
""",
        SOFTCUDA_BYTES=str(512 * MIB),
    )
    assert out == "steady\n"


def test_sleep_leaves_the_memory_free(program: Program, softcuda: Softcuda) -> None:
    """A2: a prefetch to the host alone leaves its memory with the driver."""
    out, _ = program(
        """
enable(budget="256MiB")
blocks(1)
gc.collect()
torch.cuda.synchronize()
torch.cuda.empty_cache()
free = lambda: torch.cuda.mem_get_info()[0]
empty = free()
held = blocks(8, 16)
torch.cuda.synchronize()
assert free() <= empty - 128 * MIB
asleep = umem.sleep()
assert free() >= empty - 4 * MIB, (empty, free())
assert asleep.shown_free and asleep.bytes >= 128 * MIB
assert umem.stats().attached_bytes == 0
umem.wake()
assert intact(held)
assert umem.stats().attached_bytes >= 128 * MIB
print("free")
""",
        SOFTCUDA_BYTES=str(512 * MIB),
    )
    assert out == "free\n"


def test_under_the_guard_sleep_gives_back_on_demand(program: Program, softcuda: Softcuda) -> None:
    out, _ = program(
        """
enable(budget="256MiB")
held = blocks(8, 16)
asleep = umem.sleep()
assert not asleep.shown_free and "on demand" in repr(asleep)
before = umem.stats().bytes_in
taken = ctypes.c_uint64()
driver = ctypes.CDLL(None)
assert driver.cuMemAlloc_v2(ctypes.byref(taken), ctypes.c_size_t(480 * MIB)) == 0
assert driver.cuMemFree_v2(taken) == 0
umem.wake()
assert intact(held)
print("given")
""",
        SOFTCUDA_BYTES=str(512 * MIB),
        UMEM_GUARD="1",
    )
    assert out == "given\n"


def test_attached_bytes_are_what_the_driver_counts(program: Program, softcuda: Softcuda) -> None:
    """A3: more than the budget, by what left; never less than what the driver says."""
    out, _ = program(
        CYCLE
        + """
enable(budget="128MiB", policy="lru")
blocks(1)
held = blocks(16, 16)
for _ in range(3):
    cycle(held)
stats = umem.stats()
free, total = torch.cuda.mem_get_info()
assert stats.resident_bytes <= 128 * MIB < stats.attached_bytes
assert abs((total - free) - stats.attached_bytes) <= 32 * MIB, (total - free, stats)
assert "attached" in umem.summary()
print("counted")
""",
        SOFTCUDA_BYTES=str(512 * MIB),
    )
    assert out == "counted\n"


@pytest.mark.usefixtures("umem_on")
def test_fresh_memory_waits_for_nothing(softcuda: Softcuda) -> None:
    """A4: populating it neither discards nor waits for what the program's stream holds."""
    full(1.0, mib=2)
    softcuda.reset()
    kept = [torch.empty(4 * MIB, dtype=torch.uint8, device="cuda") for _ in range(4)]
    assert softcuda.calls("cuMemDiscardAndPrefetchBatchAsync") == 0
    assert softcuda.calls("cuEventRecord") <= len(kept)  # by which the program's stream waits
    del kept


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.usefixtures("umem_on")
def test_reused_memory_keeps_the_last_writes(softcuda: Softcuda, seed: int) -> None:
    """A4: the order after the death of a block, and not after all that was enqueued since."""
    softcuda.seed(seed)
    sizes = (4, 6, 8, 10, 12)
    for i in range(12):
        held = [full(float(j), mib=sizes[(i + j) % 5]) for j in range(8)]
        for j, t in enumerate(held):
            t.fill_(float(i * j))
        assert all(holds(t, float(i * j)) for j, t in enumerate(held)), i
        del held, t


@pytest.mark.usefixtures("umem_on")
def test_a_write_after_read_mostly_does_not_fault(softcuda: Softcuda) -> None:
    """A6: what stays on the device is read-only, until a prefetch maps it anew."""
    x = full(1.0, mib=8)
    umem.advise(x, "read_mostly")
    umem.evict(x)
    umem.prefetch(x)  # on both sides now
    umem.advise(x, "none")
    torch.cuda.synchronize()
    before = softcuda.faults()
    x.fill_(2.0)
    torch.cuda.synchronize()
    assert softcuda.faults() == before
    assert holds(x, 2.0)
    del x


@pytest.mark.usefixtures("umem_on")
def test_dropping_many_units_records_one_event_a_stream(softcuda: Softcuda) -> None:
    """A7: 230 events for one allocation, which overwrote the marks of all last uses."""
    small = [torch.empty(2 * MIB, dtype=torch.uint8, device="cuda") for _ in range(28)]
    del small
    softcuda.reset()
    large = torch.empty(56 * MIB, dtype=torch.uint8, device="cuda")
    assert softcuda.calls("cuEventRecord") <= 6
    assert softcuda.calls("cuMemDiscardBatchAsync") <= 1
    del large


@pytest.mark.usefixtures("umem_on")
def test_a_program_that_fits_moves_nothing_ahead(softcuda: Softcuda) -> None:
    """B5: at 94 % of the budget, warm steps dropped what the next step reuses in place."""

    def step() -> None:
        held = [full(float(i), mib=4) for i in range(15)]
        del held
        umem.step()

    for _ in range(3):
        step()
    softcuda.reset()
    before = umem.stats()
    for _ in range(5):
        step()
    after = umem.stats()
    assert after.bytes_discarded == before.bytes_discarded
    assert after.evictions == before.evictions == 0
    names = ("cuMemPrefetchBatchAsync", "cuMemDiscardBatchAsync", "cuMemAllocManaged", "cuMemFree",
             "cuMemDiscardAndPrefetchBatchAsync")  # fmt: skip
    assert {name: softcuda.calls(name) for name in names} == dict.fromkeys(names, 0)
