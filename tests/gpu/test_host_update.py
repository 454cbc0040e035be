"""Updates on the host of CUDA parameters: copies concurrent with compute, in order on every stream.

On the software driver work is done late and in a random legal order, and unordered accesses are
found: a missing wait shows as wrong bits or as a race.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from softcuda.load import Softcuda  # noqa: E402

import umem  # noqa: E402
from umem.errors import ConfigError, StateError  # noqa: E402

pytestmark = pytest.mark.gpu
MIB = 1 << 20
Program = Callable[..., tuple[str, str]]

TRAIN = """
load.compute()
from umem.offload.optimizer import host_update
host_update.CHUNK_BYTES = 3 * MIB  # several under way
def train(device, make, **page):
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
    net = net.to(device)
    optimizer = make(net.parameters())
    paged = umem.page_optimizer(optimizer, **page) if page else None
    for step in range(4):
        optimizer.zero_grad()
        x = torch.full((16, 512), 0.1 * (step + 1), device=device)
        net(x).square().mean().backward()
        optimizer.step()
    states = [t for s in optimizer.state.values() for t in s.values() if t.numel() > 1]
    where = {t.device.type for t in states}
    if paged:
        paged.remove()
    back = {t.device.type for s in optimizer.state.values() for t in s.values() if t.numel() > 1}
    return [p.detach().cpu() for p in net.parameters()], where, back
"""


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("release", "overlap", "buffers"),
    [
        (False, False, "512MiB"),
        (True, False, "512MiB"),
        (False, True, "512MiB"),
        (False, True, "6MiB"),  # some parameters return before the step does
    ],
)
def test_the_bits_are_those_of_the_hosts_fused_kernel(
    softcuda: Softcuda, program: Program, seed: int, release: bool, overlap: bool, buffers: str
) -> None:
    del softcuda
    out, err = program(
        TRAIN
        + f"""
def adamw(p):
    return torch.optim.AdamW(p, lr=1e-2, fused=True)
with enable("12MiB", policy="lru", optimizer_buffers="{buffers}"):
    plain, _, _ = train("cpu", adamw)
    got, where, back = train(
        "cuda", adamw, update="host", release_gradients={release}, overlap={overlap}
    )
    print(all(map(torch.equal, plain, got)), where, back, umem.stats().hook_errors)
""",
        SOFTCUDA_SEED=str(seed),
    )
    assert out.strip() == "True {'cpu'} {'cuda'} 0", err


def test_states_are_on_a_disk(softcuda: Softcuda, program: Program, tmp_path: Path) -> None:
    del softcuda
    out, err = program(
        TRAIN
        + """
from umem.offload.optimizer import state_file
def adamw(p):
    return torch.optim.AdamW(p, lr=1e-2, fused=True)
reserved = []
class File(state_file.StateFile):
    def close(self):
        reserved.append(self._reserved)
        super().close()
state_file.StateFile = File
with enable("12MiB", policy="lru"):
    plain, _, _ = train("cpu", adamw)
with enable("12MiB", policy="lru", disk=DISK):
    got, where, back = train("cuda", adamw, update="host")
    print(all(map(torch.equal, plain, got)), where, back, reserved, umem.stats().hook_errors)
""".replace("DISK", repr(str(tmp_path)))
    )
    assert out.strip() == f"True {{'cpu'}} {{'cuda'}} [{8 * MIB}] 0", err
    assert "on a GPU the disk has only the states of optimizers" in err


def test_states_move_from_a_disk_that_is_still_writing(
    softcuda: Softcuda, program: Program, tmp_path: Path
) -> None:
    del softcuda
    for name in ("first", "then"):
        (tmp_path / name).mkdir()
    out, err = program(
        """
import os, time
load.compute()
def values(device, enabled, **page):
    torch.manual_seed(0)
    with enabled("first"):
        weight = torch.nn.Parameter(torch.randn(MIB).to(device))
        optimizer = torch.optim.AdamW([weight], lr=1e-2, fused=True)
        paged = umem.page_optimizer(optimizer, **page) if page else None
        for _ in range(2):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
    with enabled("then"):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        if paged:
            paged.remove()
        return [weight.detach().cpu(), optimizer.state[weight]["exp_avg"].cpu()]
plain = values("cpu", lambda _: enable("64MiB", policy="lru"))
real = os.pwritev
def slow(*args):
    time.sleep(0.3)
    return real(*args)
os.pwritev = slow
def enabled(name):
    return enable("64MiB", policy="lru", disk=os.path.join(DISK, name))
got = values("cuda", enabled, update="host", overlap=True)
print(all(map(torch.equal, plain, got)))
""".replace("DISK", repr(str(tmp_path)))
    )
    assert out.strip() == "True", err


def test_what_is_no_disk_is_refused(softcuda: Softcuda, program: Program) -> None:
    del softcuda
    out, _ = program(
        """
try:
    enable("12MiB", disk="/dev/shm")
except umem.UmemError as error:
    print(error)
"""
    )
    assert "in this machine's memory (tmpfs); allowed: a folder on a disk" in out


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_every_stream_waits_for_a_parameter_that_returns(
    softcuda: Softcuda, program: Program, seed: int
) -> None:
    """Not only the stream of the first waiting operator; gradients may be changed immediately."""
    del softcuda
    out, err = program(
        """
load.compute()
def values(device, side, **page):
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(MIB).to(device))
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
    paged = umem.page_optimizer(optimizer, **page) if page else None
    for _ in range(3):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        weight.grad.zero_()
        first = weight * 2
        with side():
            second = weight * 3
        torch.cuda.synchronize() if device == "cuda" else None
    found = [t.detach().cpu() for t in (first, second, weight)]
    if paged:
        paged.remove()
    return found
import contextlib
with enable("64MiB", policy="lru"):
    stream = torch.cuda.Stream()
    plain = values("cpu", contextlib.nullcontext)
    got = values("cuda", lambda: torch.cuda.stream(stream), update="host", overlap=True)
    print(all(map(torch.equal, plain, got)), umem.stats().hook_errors)
""",
        SOFTCUDA_SEED=str(seed),
    )
    assert out.strip() == "True 0", err


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_a_second_step_begins_with_the_values_of_the_first(
    softcuda: Softcuda, program: Program, seed: int
) -> None:
    """No operator has used the parameters since."""
    del softcuda
    out, err = program(
        """
load.compute()
from umem.offload.optimizer import host_update
host_update.CHUNK_BYTES = 3 * MIB
def values(device, **page):
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(MIB // 4).to(device)) for _ in range(4)]
    optimizer = torch.optim.SGD(weights, lr=1.0, momentum=0.5, fused=True)
    paged = umem.page_optimizer(optimizer, **page) if page else None
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    for _ in range(3):
        optimizer.step()
    found = [weight.detach().cpu() for weight in weights]
    if paged:
        paged.remove()
    return found
with enable("64MiB", policy="lru", optimizer_buffers="6MiB"):
    plain = values("cpu")
    got = values("cuda", update="host", overlap=True)
    print(all(map(torch.equal, plain, got)), umem.stats().hook_errors)
""",
        SOFTCUDA_SEED=str(seed),
    )
    assert out.strip() == "True 0", err


def test_memory_is_not_reused_before_its_parameter_returned(
    softcuda: Softcuda, program: Program
) -> None:
    """A dropped optimizer's parameters return on another thread, for whoever still uses them."""
    del softcuda
    out, err = program(
        """
import gc, time
load.compute()
with enable("64MiB", policy="lru"), torch.cuda.stream(torch.cuda.Stream()):
    weight = torch.nn.Parameter(torch.zeros(MIB, device="cuda"))
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
    paged = umem.page_optimizer(optimizer, update="host", overlap=True)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    host = paged._host
    del weight, optimizer, paged
    gc.collect()
    while host._flying:
        time.sleep(0.01)
    made = [torch.full((MIB,), 5.0, device="cuda") for _ in range(4)]
    torch.cuda.synchronize()
    print(all(bool((one == 5.0).all()) for one in made), umem.stats().hook_errors)
"""
    )
    assert out.strip() == "True 0", err


def test_other_streams_see_what_a_checkpoint_has_brought(
    softcuda: Softcuda, program: Program
) -> None:
    """It is made on another stream than that of the training."""
    del softcuda
    out, err = program(
        """
load.compute()
with enable("64MiB", policy="lru"):
    weight = torch.nn.Parameter(torch.zeros(MIB, device="cuda"))
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
    paged = umem.page_optimizer(optimizer, update="host", overlap=True)
    side = torch.cuda.Stream()
    for _ in range(3):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        side.wait_stream(torch.cuda.current_stream())
        optimizer.state_dict()
        with torch.cuda.stream(side):
            seen = weight * 2
        torch.cuda.synchronize()
        print(seen.unique().tolist(), end=" ")
    paged.remove()
    print(umem.stats().hook_errors)
"""
    )
    assert out.strip() == "[-2.0] [-4.0] [-6.0] 0", err


def test_the_program_moves_to_another_device(program: Program) -> None:
    """The parameters are the same ones, on another device."""
    program(
        """
load.compute() if soft else None
def values(devices, **page):
    torch.manual_seed(0)
    net = torch.nn.Linear(512, 512).to(devices[0])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5, fused=True)
    paged = umem.page_optimizer(optimizer, **page) if page else None
    for device in devices:
        net.to(device)
        for _ in range(3):
            for p in net.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
    found = [p.detach().cpu() for p in net.parameters()]
    if paged:
        paged.remove()
    return found
with enable("64MiB", policy="lru"):
    plain = values(("cpu", "cpu"))
    for overlap in (False, True):
        got = values(("cuda:0", "cuda:1"), update="host", overlap=overlap)
        assert all(map(torch.equal, plain, got)), overlap
    assert umem.stats().hook_errors == 0
""",
        SOFTCUDA_DEVICES="2",
    )


def test_the_device_has_the_states_of_weights_that_are_tied(
    softcuda: Softcuda, program: Program
) -> None:
    """They share memory from a step on whose updates still run."""
    del softcuda
    out, err = program(
        """
load.compute()
def values(device, **page):
    weights = [torch.nn.Parameter(torch.zeros(MIB, device=device)) for _ in range(2)]
    optimizer = torch.optim.SGD(weights, lr=1.0, momentum=0.5, foreach=False)
    paged = umem.page_optimizer(optimizer, **page) if page else None
    for step in range(4):
        for weight in weights:
            weight.grad = torch.ones(MIB, device=device)
        optimizer.step()
        if step == 1:
            shared = torch.zeros(MIB, device=device)
            for weight in weights:
                weight.data = shared
    if paged:
        paged.remove()
    states = [optimizer.state[w]["momentum_buffer"] for w in weights]
    return [t.detach().cpu() for t in (*weights, *states)], {t.device.type for t in states}
with enable("64MiB", policy="lru"):
    plain, _ = values("cpu")
    got, where = values("cuda", update="host", overlap=True)
    print(all(map(torch.equal, plain, got)), where, umem.stats().hook_errors)
"""
    )
    assert out.strip() == "True {'cuda'} 0", err


def test_a_graph_waits_for_all_parameters(softcuda: Softcuda, program: Program) -> None:
    del softcuda
    out, err = program(
        """
load.compute()
with enable("64MiB", policy="lru"):
    weight = torch.nn.Parameter(torch.zeros(MIB, device="cuda"))
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
    paged = umem.page_optimizer(optimizer, update="host", overlap=True)
    result = torch.zeros(MIB, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        result.copy_(weight.detach())
    for step in range(3):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        graph.replay()
        torch.cuda.synchronize()
        print(result[0].item(), end=" ")
    print(umem.stats().hook_errors)
    paged.remove()
"""
    )
    assert out.strip() == "-1.0 -2.0 -3.0 0", err


def test_a_capture_is_refused() -> None:
    with umem.enable(budget="64MiB", device="cuda"):
        parameter = torch.nn.Parameter(torch.zeros(MIB, device="cuda"))
        parameter.grad = torch.zeros_like(parameter)
        optimizer = torch.optim.Adam([parameter], capturable=True)
        paged = umem.page_optimizer(optimizer, update="host")
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            parameter.grad.add_(1.0)
            with pytest.raises(StateError, match="CUDA graph"):
                optimizer.step()
        paged.remove()
        del parameter, optimizer, paged, graph
        gc.collect()


def test_parameters_on_two_devices_are_refused() -> None:
    with umem.enable(budget="64MiB", device="cuda"):
        made = [torch.nn.Parameter(torch.zeros(4, device=d)) for d in ("cuda", "cpu")]
        with pytest.raises(ConfigError, match=r"parameters on 2 devices \(cpu, cuda:0\)"):
            umem.page_optimizer(torch.optim.Adam(made), update="host")
        del made
        gc.collect()
