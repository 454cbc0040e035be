"""umem on a driver that keeps the frames of pages that leave (docs/decisions/0010)."""

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


def test_the_budget_auto_stays_while_umem_evicts(
    program: Program, softcuda: Softcuda, nightly: bool
) -> None:
    """A1: umem's own frames looked like another process, and the budget fell to its minimum."""
    cycles = 200 if nightly else 60  # 44 use each block
    out, _ = program(
        CYCLE
        + f"""
from umem.session import auto_budget
auto_budget.EVERY_S = 0.0
enable(budget="auto", policy="lru")
held = blocks(44, 16)  # 704 MiB of 512
first = umem.stats().budget_bytes
budgets = []
for _ in range({cycles}):
    cycle(held[:12])
    held.append(held.pop(0))
    umem.step()
    budgets.append(umem.stats().budget_bytes)
assert min(budgets) >= 0.98 * first and max(budgets) <= 1.02 * first, (first, budgets)
assert umem.stats().evictions > {cycles // 2}
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
assert free() >= empty - 16 * MIB, (empty, free())
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


OVERSUBSCRIBED = (
    CYCLE
    + """
enable(budget="auto", policy="lru")
gpu = torch.cuda.mem_get_info
held = blocks(44, 16)  # 704 MiB of 512: the driver gives frames of some addresses to others
for _ in range(2):
    cycle(held)
assert umem.stats().attached_bytes <= gpu()[1]
"""
)


def test_sleep_leaves_all_free_after_oversubscription(program: Program, softcuda: Softcuda) -> None:
    """More addresses were resident than the device has frames: not all memory is available."""
    out, _ = program(
        OVERSUBSCRIBED
        + """
asleep = umem.sleep()
assert asleep.shown_free
assert gpu()[0] >= gpu()[1] - 16 * MIB, gpu()
assert umem.stats().attached_bytes == 0
umem.wake()
assert all(bool(t.cpu().eq(1.0).all()) for t in held)
print("free")
""",
        SOFTCUDA_BYTES=str(512 * MIB),
    )
    assert out == "free\n"


def test_sleep_by_tag_leaves_what_stays_where_it_is(program: Program, softcuda: Softcuda) -> None:
    out, _ = program(
        OVERSUBSCRIBED
        + """
from umem.base.native import core
for t in held[:30]:
    core.tag(t.data_ptr(), "param")
umem.sleep(["param"])
stats = umem.stats()
assert stats.resident_bytes >= 64 * MIB
before = soft.faults()
for t in held[30:]:
    if umem.where(t).resident_bytes == 16 * MIB:
        ctypes.string_at(t.data_ptr(), 16 * MIB)
assert soft.faults() == before, soft.faults() - before
print("there")
""",
        SOFTCUDA_BYTES=str(512 * MIB),
    )
    assert out == "there\n"


def test_auto_gives_way_after_oversubscription(program: Program, softcuda: Softcuda) -> None:
    out, _ = program(
        """
from umem.session import auto_budget
auto_budget.EVERY_S = 0.0
"""
        + OVERSUBSCRIBED
        + """
umem.step()
first = umem.stats().budget_bytes
del held[8:]
gc.collect()
torch.cuda.empty_cache()
umem.step()
taken = ctypes.c_uint64()
driver = ctypes.CDLL(None)
assert driver.cuMemAlloc_v2(ctypes.byref(taken), ctypes.c_size_t(256 * MIB)) == 0
umem.step()
low = umem.stats().budget_bytes
assert low <= first - 192 * MIB, (first, low)
print("gave way")
""",
        SOFTCUDA_BYTES=str(512 * MIB),
    )
    assert out == "gave way\n"


def test_what_unseen_work_brought_back_is_released_too(
    program: Program, softcuda: Softcuda
) -> None:
    out, _ = program(
        """
enable(budget="256MiB")
gpu = torch.cuda.mem_get_info
held = blocks(8, 16)
umem.sleep()
for t in held:  # as a kernel that no operator started
    ctypes.memset(t.data_ptr(), 0, 16 * MIB)
assert gpu()[0] <= gpu()[1] - 128 * MIB
assert umem.sleep().shown_free
assert gpu()[0] >= gpu()[1] - 16 * MIB, gpu()
print("released")
""",
        SOFTCUDA_BYTES=str(512 * MIB),
    )
    assert out == "released\n"


def test_a_kernel_that_runs_during_a_sleep_gets_memory(
    program: Program, softcuda: Softcuda
) -> None:
    """A kernel that faulted while sleep held all free memory, to give it back, had no frame."""
    out, _ = program(
        """
import threading
enable(budget="256MiB")
held = blocks(8, 16)
addresses = [t.data_ptr() for t in held]
done = threading.Event()
def work():
    while not done.is_set():
        for address in addresses:  # as kernels that no operator started
            ctypes.memset(address, 7, 16 * MIB)
thread = threading.Thread(target=work)
thread.start()
for _ in range(40):
    umem.sleep()
done.set()
thread.join()
assert all(bool(t.view(torch.uint8).cpu().eq(7).all()) for t in held)
print("alive")
""",
        SOFTCUDA_BYTES=str(512 * MIB),
    )
    assert out == "alive\n"


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
    """A3: more than the budget, by the bytes that left; never less than the driver's figure."""
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
    """A4: populating it neither discards nor waits for work of the program's stream."""
    full(1.0, mib=2)
    softcuda.reset()
    kept = [torch.empty(4 * MIB, dtype=torch.uint8, device="cuda") for _ in range(4)]
    assert softcuda.calls("cuMemDiscardAndPrefetchBatchAsync") == 0
    assert softcuda.calls("cuEventRecord") <= len(kept)  # for the wait of the program's stream
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
    """A6: pages that remain on the device are read-only, until a prefetch maps them again."""
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


STEPS = """
enable(budget="96MiB", policy="lru")
done = 0
def step():
    global done
    done += 100  # no block holds what the last one at its place held
    kept = [torch.full((3 * MIB,), float(done + i), device="cuda") for i in range(12)]  # 144 MiB
    while kept:
        x = kept.pop()
        assert bool(x.cpu().eq(float(done + len(kept))).all())
    torch.cuda.synchronize()
    umem.step()
for _ in range(3):
    step()
soft.reset()
before = umem.stats()
for _ in range(4):
    step()
after = umem.stats()
calls = {name: soft.calls(name) for name in ("cuMemAllocManaged", "cuMemFree", "cuMemAlloc")}
assert after.evictions > before.evictions
assert set(calls.values()) == {0}, calls
assert after.hook_errors == 0 and after.resident_bytes <= 96 * MIB
print(after.bytes_discarded - before.bytes_discarded)
"""


@pytest.mark.parametrize("version", ["12080", "13000"])
def test_warm_steps_neither_allocate_nor_free(
    program: Program, softcuda: Softcuda, version: str
) -> None:
    """A5: a driver without discard received the whole cache whenever memory was short."""
    out, _ = program(STEPS, SOFTCUDA_BYTES=str(512 * MIB), SOFTCUDA_VERSION=version)
    assert (int(out) == 0) == (version == "12080")


def test_the_workspace_of_a_matrix_product_stays(program: Program, softcuda: Softcuda) -> None:
    """B4: no operator names it, so it was always the first to leave."""
    out, _ = program(
        """
import _core_testing
from umem.base.native import core
enable(budget="64MiB", policy="lru")
weight = torch.empty(256, 256, device="cuda")
weight @ weight
here = (b for b in _core_testing.blocks() if b["state"] == "device" and b["bytes"] > 2 * MIB)
large = {b["base"]: b for b in here}
if not large:
    print("this torch leaves workspaces to cuBLAS")
    sys.exit()
(workspace,) = large
def state():
    return next(b["state"] for b in _core_testing.blocks() if b["base"] == workspace)
held = blocks(24, 4)
for i in range(100):
    for t in held:
        t.add(1.0)
    if i > 60:
        assert state() == "device", state()
result = torch.empty(large[workspace]["bytes"] // 4, device="cuda")  # the same size
for t in held:
    t.fill_(1.0)
del weight
torch._C._cuda_clearCublasWorkspaces()
reused = torch.empty(large[workspace]["bytes"] // 4, device="cuda")
assert not any(umem.where(t).excluded for t in (result, reused))
print("stays")
"""
    )
    assert out in ("stays\n", "this torch leaves workspaces to cuBLAS\n")


def test_a_smaller_device(program: Program, softcuda: Softcuda) -> None:
    """A3: all of the driver's memory for umem remains within a requested size."""
    out, _ = program(
        CYCLE
        + """
umem.enable(budget="96MiB", device="cuda:160MiB", policy="lru")
held = blocks(24, 16)
for _ in range(3):
    cycle(held)
    stats = umem.stats()
    assert 0 < stats.resident_bytes <= 96 * MIB < stats.attached_bytes <= 160 * MIB, stats
taken = ctypes.c_uint64()
driver = ctypes.CDLL(None)
assert driver.cuMemAlloc_v2(ctypes.byref(taken), ctypes.c_size_t(200 * MIB)) == 2
assert all(bool(t.cpu().eq(1.0).all()) for t in held)
del held
umem.disable()
torch.cuda.empty_cache()
assert torch.cuda.mem_get_info()[0] >= 480 * MIB
umem.enable(budget="auto", device="cuda:160MiB")
held = blocks(1)
assert 64 * MIB < umem.stats().budget_bytes <= 160 * MIB
del held
umem.disable()
umem.enable(budget="50%", device="cuda:160MiB")
held = blocks(1)
assert umem.stats().budget_bytes == 80 * MIB
del held
umem.disable()
umem.enable(budget="64MiB", device="cuda:1GiB")
try:
    blocks(1)
except RuntimeError as error:
    assert "a device of 1.00 GiB was asked for" in str(error), error
    print("small")
""",
        SOFTCUDA_BYTES=str(512 * MIB),
    )
    assert out == "small\n"


def test_the_guard_forbids_a_smaller_device(program: Program) -> None:
    _, err = program(
        """
try:
    umem.enable(budget="64MiB", device="cuda:160MiB", guard=True)
except umem.ConfigError as error:
    print(error, file=sys.stderr)
"""
    )
    assert "which the guard forbids" in err
