"""Plans on two devices of one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("torch")

pytestmark = pytest.mark.gpu
Program = Callable[..., tuple[str, str]]

# 12 layers of 4 MiB, half of them on each device.
PIPELINE = """
load.compute() if soft else None
from umem.base.native import core
WIDTH, COUNT = 1024, 12
def training(devices, count=COUNT):
    torch.manual_seed(0)
    half = count // 2
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(count)]
    first = torch.nn.Sequential(*layers[:half]).to(devices[0])
    second = torch.nn.Sequential(*layers[half:]).to(devices[1])
    parameters = [*first.parameters(), *second.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, foreach=False)
    x = torch.randn(512, WIDTH).to(devices[0])
    def step():
        hidden = first(x).relu().to(devices[1])
        loss = second(hidden).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for device in devices:
            if device != "cpu":
                torch.cuda.synchronize(device)
        return loss.item()
    def state():
        return [p.detach().cpu().clone() for p in parameters]
    return step, state
def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
"""


def two_devices(program: Program, code: str) -> None:
    environ = {"SOFTCUDA_DEVICES": "2", "SOFTCUDA_BYTES": str(512 << 20)}
    _, err = program(code, timeout=300, **environ)
    assert "Traceback" not in err, err


WATCHED = """
def watched(step, count=8):
    losses, status, moved = [], [], []
    for _ in range(count):
        losses.append(step())
        status.append([core.plan_status(device) for device in (0, 1)])
        now = [umem.stats(device) for device in (0, 1)]
        moved.append([s.bytes_in + s.bytes_out for s in now])
    each = [[b - a for a, b in zip(*rows)] for rows in zip(moved, moved[1:])]
    return losses, status, each
def share(status):
    return status["hits"] / max(status["hits"] + status["misses"], 1)
"""


def test_both_devices_of_a_split_model_have_plans(program: Program) -> None:
    """Each moves the bytes of its own half's replay, and the bits are those of a run in memory."""
    two_devices(
        program,
        PIPELINE
        + WATCHED
        + """
with enable("400MiB", policy="none"):
    step, state = training(("cuda:0", "cuda:1"))
    expected_losses = [step() for _ in range(8)]
    expected = state()
    peaks = [umem.stats(device).peak_live_bytes for device in (0, 1)]
    del step, state
    gc.collect()
from umem.session import session
with enable(max(peaks) // 2, policy="auto"):
    step, state = training(("cuda:0", "cuda:1"))
    losses, status, moved = watched(step)
    assert all(share(s) >= 0.95 for at_step in status[3:] for s in at_step), status
    assert all(s["complete"] for s in status[-1]), status
    assert losses == expected_losses
    assert same(state(), expected)
    assert umem.stats().hook_errors == 0
    total, parts = umem.stats(), [umem.stats(device) for device in ("cuda:0", 1)]
    for name in ("budget_bytes", "bytes_in", "plan_hits", "allocs"):
        assert getattr(total, name) == sum(getattr(part, name) for part in parts), name
    assert umem.stats(2).allocs == 0
    planned = [session.planned_step(device) for device in (0, 1)]
    del step, state
    gc.collect()
for one, live in zip(planned, moved[-1], strict=True):
    replayed = umem.simulate(one.trace, device=one.device, budget=one.budget)
    assert replayed.raised_from is None, replayed
    assert 0 < live <= 1.2 * (replayed.bytes_in + replayed.bytes_out), (live, replayed)
""",
    )


def test_replicas_on_two_threads_have_plans(program: Program) -> None:
    """nn.DataParallel runs the forward pass of each device on its own thread."""
    two_devices(
        program,
        PIPELINE
        + WATCHED
        + """
if soft:  # whose NCCL has no collectives between the devices of one process
    from torch.nn.parallel import comm
    torch.cuda.nccl.is_available = lambda tensors: False
    comm.broadcast_coalesced = lambda tensors, devices: [
        [tensor if d == tensor.get_device() else tensor.to(f"cuda:{d}") for tensor in tensors]
        for d in devices
    ]
def replicas(count=COUNT):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(count)]
    net = torch.nn.Sequential(*layers).cuda(0)
    parallel = torch.nn.DataParallel(net, device_ids=[0, 1])
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9, foreach=False)
    x = torch.randn(512, WIDTH).cuda(0)
    def step():
        loss = parallel(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize(0), torch.cuda.synchronize(1)
        return loss.item()
    return step, lambda: [p.detach().cpu().clone() for p in net.parameters()]
with enable("400MiB", policy="none"):
    step, state = replicas()
    expected_losses = [step() for _ in range(10)]
    expected = state()
    peaks = [umem.stats(device).peak_live_bytes for device in (0, 1)]
    del step, state
    gc.collect()
with enable(peaks[0] // 2, policy="auto"):
    core.set_device_budget(1, 56 * MIB)  # what one op needs, and less than the peak
    assert 56 * MIB < peaks[1]
    step, state = replicas()
    losses, status, moved = watched(step, 10)
    assert all(share(s) >= 0.95 for at_step in status[3:] for s in at_step), status
    assert all(s["complete"] for s in status[-1]), status
    assert all(bytes > 0 for bytes in moved[-1]), moved
    assert losses == expected_losses
    assert same(state(), expected)
    assert umem.stats().hook_errors == 0
    del step, state
    gc.collect()
""",
    )


def test_the_second_device_may_be_there_unused_and_join_later(program: Program) -> None:
    two_devices(
        program,
        PIPELINE
        + WATCHED
        + """
from umem.session import session
with enable("48MiB", policy="auto"):
    step, state = training(("cuda:0", "cuda:0"))
    losses, status, moved = watched(step, 6)
    assert share(status[-1][0]) == 1 and status[-1][0]["complete"], status
    assert core.opened_devices() == [0] and umem.stats(1).allocs == 0
    assert status[-1][1] == {"plans": [], "active": 0, "complete": 0, "hits": 0, "misses": 0}
    both, _ = training(("cuda:0", "cuda:1"))
    _, status, moved = watched(both, 10)
    assert all(share(s) >= 0.95 for at_step in status[4:] for s in at_step), status
    assert all(s["complete"] for s in status[-1]), status
    del both, _
    gc.collect()
    other = umem.stats(1)
    _, status, _ = watched(step, 12)
    assert share(status[-1][0]) == 1 and status[-1][0]["complete"], status
    assert status[-1][1]["hits"] + status[-1][1]["misses"] == 0, status
    now = umem.stats(1)
    assert (now.bytes_in, now.bytes_out) == (other.bytes_in, other.bytes_out)
    assert not session._current.planner._recording.on  # for neither
    del step, state
    gc.collect()
""",
    )


def test_the_recorder_knows_devices_and_times_the_ops_of_each(program: Program) -> None:
    two_devices(
        program,
        """
from umem.base.native import core
with enable("64MiB", policy="lru"):
    x, y = torch.zeros(MIB, device="cuda:0"), torch.zeros(MIB, device="cuda:1")
    for sink in ("plan", "file"):
        core.record_start(sink)
    z = torch.empty(MIB, device="cuda:1")
    x.add_(1)
    y.mul_(2)
    z.copy_(x)
    for device in (0, 1):
        torch.cuda.synchronize(device)
    taken = core.record_take("plan")
    assert taken["device"][taken["kind"] == 0].tolist() == [0, 1, 1], taken
    times = {name: us for name, us, kind in zip(taken["name"], taken["us"], taken["kind"])
             if kind == 1}
    assert times["aten::add_"] >= 0 and times["aten::mul_"] >= 0, times
    lines = core.record_lines("file", True)[0].decode().splitlines()
    assert ['"device":1' in line for line in lines if '"alloc"' in line] == [False, True, True]
    for sink in ("plan", "file"):
        core.record_stop(sink)
    del x, y, z
""",
    )


def test_the_guard_bounds_each_device_by_its_own_memory(program: Program) -> None:
    two_devices(
        program,
        """
umem.enable(budget="256MiB", guard=True)
def take(mib, device):
    return torch.empty(mib << 20, dtype=torch.uint8, device=f"cuda:{device}")
held = [take(100, device) for device in (0, 1) for _ in range(4)]
try:
    take(200, 1)
except RuntimeError as error:
    assert "UMEM_GUARD" in str(error), error
else:
    raise AssertionError("600 MiB on a device of 512")
""",
    )
