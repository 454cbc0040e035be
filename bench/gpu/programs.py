"""Programs that answer questions about umem: ``python -m gpu.programs HOW QUESTION ...``.

HOW says how umem is on: `on`, `off`, `autoload` (by UMEM=1 of the environment) or `pool`. Each
answer is a line, the question's name and a tab before it, written at once: the next question may be
the program's end.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable
from typing import Any

from gpu import software
from umem.base.units import MIB

SIZES = (256, 4 * MIB)  # of the allocation loop
TURNS = 6  # of which the first warms up


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gpu.programs", description=__doc__)
    parser.add_argument("umem", choices=("on", "off", "autoload", "pool"))
    parser.add_argument("questions", nargs="+", choices=sorted(ANSWERS), metavar="QUESTION")
    parser.add_argument("--loops", type=int, default=1000, help="allocations of one turn")
    args = parser.parse_args(argv)
    software.load_if_asked()
    if args.umem == "on":
        import umem

        umem.enable(device="cuda")
    for name in args.questions:
        try:
            answer = ANSWERS[name](args.loops)
        except Exception as error:  # noqa: BLE001  (that is an answer too)
            reason = (str(error).splitlines() or [""])[0]
            answer = f"fails: {type(error).__name__}: {reason}"
        print(f"{name}\t{answer}", flush=True)
    return 0


def alloc_loop(loops: int) -> str:
    """Nanoseconds of one allocation and its free by size, as JSON."""
    import torch

    from umem.base.native import core
    from umem.config import settings
    from umem.integrations.torch import build

    assert core is not None  # loads libumem.so, which the extension joins
    native: Any = build.load(settings.load().torch_ext_cache)
    torch.empty(1, device="cuda")
    times = {}
    for size in SIZES:
        times[size] = [native.bench_cuda_alloc(size, loops) for _ in range(TURNS)][1:]
    return json.dumps(times)


def autoload(_: int) -> str:
    """Train a step with nothing but the environment to turn umem on."""
    _train()
    import umem

    if not umem.is_enabled():
        return "OFF: umem is not installed as a package of this Python"
    return f"on, with {umem.stats().live_bytes} live bytes"


def accounting(_: int) -> str:
    """Call torch.cuda's counters."""
    import torch

    names = ("memory_allocated", "memory_reserved", "max_memory_allocated")
    return ", ".join(f"{name} {getattr(torch.cuda, name)() >= 0}" for name in names)


def cudnn_benchmark(_: int) -> str:
    """Let cuDNN try its algorithms, which allocates and frees workspaces."""
    import torch

    torch.backends.cudnn.benchmark = True
    net = torch.nn.Conv2d(8, 8, 3, padding=1).cuda()
    net(torch.ones(4, 8, 32, 32, device="cuda")).sum().backward()
    torch.cuda.synchronize()
    return "runs"


def pool(_: int) -> str:
    """Enable umem after torch's first CUDA call, and train inside the pool."""
    import torch

    import umem
    from umem.base.native import core

    torch.ones(1, device="cuda")
    with umem.enable(device="cuda", allocator="pool"):
        x = torch.ones(1 << 20, device="cuda", requires_grad=True)
        (x * 2).sum().backward()
        torch.cuda.synchronize()
        assert x.grad is not None
        owned = core.owns(x.data_ptr()), core.owns(x.grad.data_ptr())
    return f"in the pool: x {owned[0]}, gradient {owned[1]}"


def fake_backward(_: int) -> str:
    """Train on fake tensors of the GPU."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        net = torch.nn.Linear(16, 16, device="cuda")
        net(torch.ones(4, 16, device="cuda")).sum().backward()
        assert net.weight.grad is not None
        return f"gradients on {net.weight.grad.device}, shape {tuple(net.weight.grad.shape)}"


def nccl(_: int) -> str:
    """Run collectives of one process on managed tensors."""
    import torch

    dist: Any = importlib.import_module("torch.distributed")
    dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())
    x = torch.ones(1 << 20, device="cuda")
    dist.all_reduce(x)
    dist.all_gather_into_tensor(torch.empty_like(x), x)
    torch.cuda.synchronize()
    right = x.sum().item() == 1 << 20
    dist.destroy_process_group()
    return f"the sum is {'right' if right else 'WRONG'}"


def cupy(_: int) -> str:
    """Prefetch CuPy's own managed memory to the host."""
    cupy: Any = importlib.import_module("cupy")
    block = cupy.cuda.memory.ManagedMemory(4 * MIB)
    block.prefetch(cupy.cuda.Stream(), device_id=-1)
    cupy.cuda.Device().synchronize()
    return "works"


def _train() -> None:
    import torch

    layers = torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)
    net = torch.nn.Sequential(*layers).cuda()
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(32, 64, device="cuda")).sum().backward()
    optimizer.step()
    torch.cuda.synchronize()


ANSWERS: dict[str, Callable[[int], str]] = {
    each.__name__: each
    for each in (
        alloc_loop,
        autoload,
        accounting,
        cudnn_benchmark,
        pool,
        fake_backward,
        nccl,
        cupy,
    )
}


if __name__ == "__main__":
    sys.exit(main())
