"""torch.distributed's NCCL backend under umem: equal bits, no race, and no endless wait.

Ranks are processes. On the software driver they share one machine's memory and each has its own
device (tests/softcuda/nccl), whose kernels wait for all ranks, like NCCL's. On GPUs each rank needs
one.
"""

from __future__ import annotations

import os
import signal
import textwrap
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from support import forkserver  # noqa: E402
from support.gpu import PREAMBLE, PREPARE  # noqa: E402

pytestmark = pytest.mark.gpu

SECONDS = 90  # for a run that hangs
IMPORTED = f"{PREPARE}\nimport torch.distributed.fsdp"

RANK = """
import hashlib
from datetime import timedelta
import torch.distributed as dist
from torch import nn
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if soft:
    load.compute()
def start(**options):
    if budget := os.environ.get("BUDGET"):
        enable(budget=budget, **options)
    torch.cuda.set_device(0 if soft else rank)
    dist.init_process_group("nccl", init_method="file://" + os.environ["STORE"], rank=rank,
                            world_size=world, timeout=timedelta(seconds=60))
def end():
    torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group()
"""

TRAIN = """
start()
torch.manual_seed(0)
net = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(1024, 1024), nn.ReLU()))).cuda()
kind = os.environ["KIND"]
if kind == "fsdp2":
    from torch.distributed.fsdp import fully_shard
    for module in net:
        if isinstance(module, nn.Linear):
            fully_shard(module)
    model = fully_shard(net)
else:
    model = nn.parallel.DistributedDataParallel(
        net, bucket_cap_mb=6, gradient_as_bucket_view=kind == "view"
    )
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
digest = hashlib.sha256()
for step in range(6):
    generator = torch.Generator().manual_seed(100 * step + rank)
    loss = model(torch.randn(64, 1024, generator=generator).cuda()).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    digest.update(loss.detach().cpu().numpy().tobytes())
for parameter in model.parameters():
    whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    digest.update(whole.detach().cpu().numpy().tobytes())
print(digest.hexdigest())
if os.environ.get("BUDGET"):
    stats = umem.stats()
    assert min(stats.bytes_in, stats.bytes_out) > 32 * MIB, stats
    assert stats.peak_resident_bytes <= stats.budget_bytes, stats
    assert stats.plan_hits > 0.8 * (stats.plan_hits + stats.plan_misses), stats
end()
"""


def _enough_devices(world: int) -> bool:
    return bool(os.environ.get("SOFTCUDA_LIB")) or torch.cuda.device_count() >= world


def needs(world: int) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not _enough_devices(world), reason=f"needs {world} devices")


def run(
    code: str, folder: Path, world: int, *, fresh: bool = False, **environ: str
) -> tuple[list[str], str]:
    """Runs `code` on ranks; returns outputs and all errors. AssertionError if one fails.

    fresh: as for `support.gpu.program`.
    """
    store = folder / "store"
    store.unlink(missing_ok=True)
    text = PREAMBLE + RANK + textwrap.dedent(code)
    common = {**os.environ, "STORE": str(store), "WORLD_SIZE": str(world), **environ}
    ranks = [
        forkserver.start(["-c", text], {**common, "RANK": str(rank)}, prepare=IMPORTED, fresh=fresh)
        for rank in range(world)
    ]
    try:
        found = [forkserver.finish(rank, SECONDS) for rank in ranks]
    finally:
        for process in ranks:
            process.send_signal(signal.SIGKILL)
    for process, (out, err) in zip(ranks, found, strict=True):
        assert process.returncode == 0, f"exit {process.returncode}\n{out}{err}"
    return [out for out, _ in found], "".join(err for _, err in found)


@needs(2)
@pytest.mark.parametrize(
    ("kind", "budget", "seed"),
    [
        pytest.param("ddp", "40MiB", "5", marks=pytest.mark.nightly),
        ("view", "40MiB", "6"),
        ("fsdp2", "24MiB", "5"),
    ],
)
def test_bits_of_a_training_are_equal(kind: str, budget: str, seed: str, tmp_path: Path) -> None:
    plain, _ = run(TRAIN, tmp_path, 2, KIND=kind)
    bits, _ = run(TRAIN, tmp_path, 2, KIND=kind, BUDGET=budget, SOFTCUDA_SEED=seed)
    assert bits == plain


@needs(2)
@pytest.mark.parametrize("seed", ["2", "3"])
def test_what_a_collective_works_on_stays(seed: str, tmp_path: Path) -> None:
    code = """
    start(policy="lru")
    held = [torch.zeros(MIB, device="cuda") for _ in range(2)]
    for step in range(4):
        x = torch.full((MIB,), float(rank), device="cuda")
        work = dist.all_reduce(x, async_op=True)
        held = [y + 1 for y in held * 2][:6]  # x was used before these: it would be the first to go
        work.wait()
        assert bool((x == 1).all())
    assert umem.stats().evictions > 4, umem.stats()
    end()
    """
    _, errors = run(code, tmp_path, 2, BUDGET="24MiB", SOFTCUDA_SEED=seed, SOFTCUDA_LOG="1")
    slow = [line for line in errors.splitlines() if line.startswith("softcuda: slow")]
    assert not [line for line in slow if "nccl" in line], slow


@needs(2)
@pytest.mark.parametrize("seed", ["2", "3"])
def test_mapped_memory_stays_on_the_host_where_a_collective_uses_it(
    seed: str, tmp_path: Path
) -> None:
    """They did not fit when the collectives began, and do while these are under way."""
    code = """
    from umem.errors import StateError
    start(policy="lru", backing="mapped")
    for step in range(3):
        away = [torch.full((3 * MIB,), float(rank), device="cuda") for _ in range(2)]  # 12 MiB
        umem.evict(away)
        here, *others = [torch.full((MIB,), float(rank), device="cuda") for _ in range(4)]
        for other in others:
            umem.pin(other)
        works = [dist.all_reduce(x, async_op=True) for x in (here, *away)]
        assert all(umem.where(x).evicted_bytes == x.nbytes for x in away)
        for other in others:
            umem.unpin(other)
        del others, other
        umem.prefetch(away[0])
        try:
            umem.evict(here)
            raise AssertionError("evicted under a collective")
        except StateError:
            pass
        for work in works:
            work.wait()
        assert all(bool((x == 1).all()) for x in (here, *away))
    end()
    """
    _, errors = run(code, tmp_path, 2, BUDGET="24MiB", SOFTCUDA_SEED=seed)
    assert not errors, errors


# Every collective on memory that is evicted before and after, checked by its expected values.
COLLECTIVES = """
start(policy="lru")
half = dist.new_group(list(range(0, world, 2))) if world > 2 else None
N = MIB  # elements: 4 MiB
def mine(value, count=N):
    return torch.full((count,), float(value), device="cuda")
def pressure():
    "Evicts all else, and is freed at once."
    return [mine(0) for _ in range(8)][0]
def is_all(tensor, value):
    return bool((tensor == value).all())
everyone = sum(range(world))
for _ in range(2):
    x = mine(rank)
    pressure()
    dist.all_reduce(x)
    pressure()
    assert is_all(x, everyone)
    dist.broadcast(x.fill_(rank), src=1)
    assert is_all(x, 1)
    whole = torch.empty(world * N, device="cuda")
    dist.all_gather_into_tensor(whole, mine(rank))
    pressure()
    assert all(is_all(part, r) for r, part in enumerate(whole.chunk(world)))
    part = torch.empty(N, device="cuda")
    dist.reduce_scatter_tensor(part, whole + rank)
    assert is_all(part, rank * world + everyone)
    out = [torch.empty(N, device="cuda") for _ in range(world)]
    dist.all_to_all(out, [mine(10 * rank + r) for r in range(world)])
    pressure()
    assert all(is_all(t, 10 * r + rank) for r, t in enumerate(out))
    # Each receives before it sends, around a ring, in one batch.
    came = torch.empty(N, device="cuda")
    ring = [dist.P2POp(dist.irecv, came, (rank - 1) % world),
            dist.P2POp(dist.isend, mine(rank), (rank + 1) % world)]
    works = dist.batch_isend_irecv(ring)
    pressure()
    for work in works:
        work.wait()
    assert is_all(came, (rank - 1) % world)
    if half is not None and rank % 2 == 0:
        y = mine(rank).to(torch.bfloat16)
        dist.all_reduce(y, op=dist.ReduceOp.MAX, group=half)
        assert is_all(y, world - 2)
if os.environ.get("BUDGET"):
    assert umem.stats().evictions > 15, umem.stats()
end()
"""


@pytest.mark.parametrize(
    ("world", "seed"), [pytest.param(2, "0", marks=needs(2)), pytest.param(4, "7", marks=needs(4))]
)
def test_every_collective_on_memory_that_moves(world: int, seed: str, tmp_path: Path) -> None:
    run(COLLECTIVES, tmp_path, world, BUDGET="24MiB" if world == 2 else "48MiB", SOFTCUDA_SEED=seed)


# A collective that waits for the other rank blocks rank 0's stream. Rank 0's host must not wait
# then, since the other rank arrives only after the second communicator's collective. That one's
# memory is plain: a transfer of it would wait for the evictions before it.
LATE = """
start(policy="lru")
first, second = dist.new_group(range(world)), dist.new_group(range(world))
a = torch.ones(MIB, device="cuda")
with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
    b = torch.ones(8, device="cuda")
for group in (first, second):
    dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
torch.cuda.synchronize()
side = torch.cuda.Stream()
before = torch.cuda.current_stream().record_event()
if rank == 0:
    dist.all_reduce(a, group=first, async_op=True).wait()
    a.mul_(2)
    held = [torch.zeros(MIB, device="cuda") for _ in range(10)]  # evicts: a, then these
    del held[::2]
    held += [torch.zeros(MIB, device="cuda") for _ in range(4)]  # in the place of what was freed
    for mib in range(2, 26, 2):  # and ranges that go back to the driver
        torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")
    side.wait_event(before)
    with torch.cuda.stream(side):
        dist.all_reduce(b, group=second)
    torch.cuda.current_stream().wait_stream(side)
else:
    time.sleep(0.5)
    dist.all_reduce(b, group=second)
    assert b.cpu().sum() == 8 * world
    dist.all_reduce(a, group=first)
torch.cuda.synchronize()
assert a[0] == (2 * world if rank == 0 else world)
assert b.cpu().sum() == 8 * world
end()
"""


@needs(2)
@pytest.mark.parametrize("seed", ["0", "2", "3"])
def test_nothing_waits_for_a_collective_that_waits_for_another_rank(
    seed: str, tmp_path: Path
) -> None:
    run(LATE, tmp_path, 2, BUDGET="24MiB", SOFTCUDA_SEED=seed)


# Torch gives each segment of its allocator to ncclCommRegister, which takes no managed memory.
@needs(2)
def test_no_managed_memory_is_registered(tmp_path: Path) -> None:
    code = """
    start(policy="lru")
    x = torch.ones(MIB, device="cuda")
    dist.all_reduce(x)
    y = torch.ones(MIB, device="cuda")
    with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
        plain = torch.ones(MIB, device="cuda")
    for tensor in (y, plain):
        dist.all_reduce(tensor)
    del x
    torch.cuda.empty_cache()
    assert y.sum() == plain.sum() == world * MIB
    end()
    """
    hook = {"TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": "1"}
    run(code, tmp_path, 2, fresh=True, BUDGET="24MiB", **hook)
