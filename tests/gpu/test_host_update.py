"""Updates on the host of CUDA parameters: copies beside compute, in order on every stream.

On the software driver work is done late and in a random legal order, and accesses that nothing
orders are found: a wait that is missing shows as wrong bits or as a race.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

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
@pytest.mark.parametrize("release", [False, True])
def test_the_bits_are_those_of_the_hosts_fused_kernel(
    softcuda: Softcuda, program: Program, seed: int, release: bool
) -> None:
    del softcuda
    out, err = program(
        TRAIN
        + f"""
def adamw(p):
    return torch.optim.AdamW(p, lr=1e-2, fused=True)
with enable("12MiB", policy="lru"):
    plain, _, _ = train("cpu", adamw)
    got, where, back = train("cuda", adamw, update="host", release_gradients={release})
    print(all(map(torch.equal, plain, got)), where, back, umem.stats().hook_errors)
""",
        SOFTCUDA_SEED=str(seed),
    )
    assert out.strip() == "True {'cpu'} {'cuda'} 0", err


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
