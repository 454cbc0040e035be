"""umem with torch and other libraries: the allocation loop, autoload, pools, CuPy, NCCL."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

from gpu.children import environment
from gpu.context import Context
from gpu.record import Item, take
from umem.base.units import MIB, format_bytes

BENCH = Path(__file__).resolve().parents[1]
SIZES = (256, 4 * MIB)
PRELUDE = f"""
import sys
sys.path.insert(0, {str(BENCH)!r})
from gpu import software
software.load_if_asked()
"""
ON = """
import torch, umem
umem.enable(device="cuda")
"""
ALLOC_LOOP = """
from pathlib import Path
import torch
from umem.integrations.torch import build as torch_build
from umem.base.native import core
native = torch_build.load(Path({cache!r}))
{on}
torch.empty(1, device="cuda")
for size in {sizes!r}:
    native.bench_cuda_alloc(size, {loops})
    print(size, *[native.bench_cuda_alloc(size, {loops}) for _ in range(3)])
"""
STEP = """
import torch
{before}
net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).cuda()
optimizer = torch.optim.Adam(net.parameters())
net(torch.ones(32, 64, device="cuda")).sum().backward()
optimizer.step()
torch.cuda.synchronize()
"""
PROGRAMS = {
    "autoload": STEP.format(before="")
    + """
import umem
print("on" if umem.is_enabled() else "OFF: umem is not installed as a package of this Python")
print("memory_allocated", torch.cuda.memory_allocated() > 0)
""",
    "accounting": ON
    + """
for name in ("memory_allocated", "memory_reserved", "max_memory_allocated"):
    try:
        print(name, getattr(torch.cuda, name)() >= 0)
    except Exception as error:
        print(name, type(error).__name__, str(error).splitlines()[0])
""",
    "cudnn.benchmark": ON
    + """
torch.backends.cudnn.benchmark = True
net = torch.nn.Conv2d(8, 8, 3, padding=1).cuda()
net(torch.ones(4, 8, 32, 32, device="cuda")).sum().backward()
torch.cuda.synchronize()
print("runs")
""",
    "pool": STEP.format(
        before='import umem\nsession = umem.enable(device="cuda", allocator="pool")\n'
        "torch.ones(1, device='cuda')"
    )
    + """
with session:
    x = torch.ones(1 << 20, device="cuda", requires_grad=True)
    (x * 2).sum().backward()
    torch.cuda.synchronize()
    from umem.base.native import core
    print("in the pool: x", core.owns(x.data_ptr()), "gradient", core.owns(x.grad.data_ptr()))
""",
    "fake backward": """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    net = torch.nn.Linear(16, 16, device="cuda")
    net(torch.ones(4, 16, device="cuda")).sum().backward()
    print("gradients on", net.weight.grad.device, "shape", tuple(net.weight.grad.shape))
print("allocated", torch.cuda.memory_allocated())
""",
    "nccl": ON
    + """
import torch.distributed as dist
dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())
x = torch.ones(1 << 20, device="cuda")
dist.all_reduce(x)
dist.all_gather_into_tensor(torch.empty_like(x), x)
torch.cuda.synchronize()
print("sum", x.sum().item() == 1 << 20)
dist.destroy_process_group()
""",
    "cupy": """
import cupy
from cupy.cuda import memory
block = memory.ManagedMemory(4 << 20)
block.prefetch(cupy.cuda.Stream(), device_id=-1)
cupy.cuda.Device().synchronize()
print("works")
""",
}
QUESTIONS = {
    "autoload": ("17", "does UMEM=1 alone train a step?"),
    "accounting": ("17 accounting", "does torch.cuda's accounting work?"),
    "cudnn.benchmark": ("17 cudnn", "does cudnn.benchmark run?"),
    "pool": ("17 pool", "are a MemPool's allocations in backward umem's?"),
    "cupy": ("18", "does CuPy's ManagedMemory.prefetch to the host work?"),
    "fake backward": ("19", "does a fake backward run beside a GPU?"),
    "nccl": ("20", "do collectives work on managed pointers?"),
}


def run(context: Context) -> None:
    """Fill the record; every program is a process of its own, one at a time."""
    bench = _Torch(context)
    items = [Item("13", "is the allocation loop as fast as torch's?", bench.alloc_loop)]
    for name, (number, question) in QUESTIONS.items():
        items.append(Item(number, question, lambda name=name: bench.ask(name)))  # type: ignore[misc]
    take(context.record, items, context.deadline)


class _Torch:
    def __init__(self, context: Context) -> None:
        self._guard, self._record, self._config = context.guard, context.record, context.config
        self._deadline, self._cache = context.deadline, context.cache

    def alloc_loop(self) -> None:
        values: dict[str, list[float]] = {}

        def take_turn(who: str) -> None:
            code = ALLOC_LOOP.format(
                cache=self._cache or str(Path.home() / ".cache" / "umem"),
                on=ON if who == "umem" else "",
                sizes=SIZES,
                loops=self._config.loops,
            )
            try:
                rows = self._program(code).splitlines()
            except subprocess.CalledProcessError as error:
                raise RuntimeError(f"the loop of {who}: {_last_line(error.stderr)}") from error
            for row in rows:
                size, *times = row.split()
                values.setdefault(f"{who} {size}", []).extend(map(float, times))

        for who in ("torch", "umem", "umem", "torch"):
            take_turn(who)
        words = []
        for size in SIZES:
            label = f"alloc and free of {format_bytes(size)}"
            native = self._record.add(f"{label}, torch", values[f"torch {size}"], "ns").median
            spread = self._record.add(f"{label}, umem", values[f"umem {size}"], "ns", target=native)
            words.append(f"{format_bytes(size)}: {spread.median / native:.2f}x of torch's")
        self._record.decide("13", "is the allocation loop as fast as torch's?", "; ".join(words))

    def ask(self, name: str) -> None:
        """Let a program answer one question in its own words."""
        number, question = QUESTIONS[name]
        reason = _why_not(name)
        if reason is None:
            try:
                answer = ", ".join(
                    self._program(PROGRAMS[name], autoload=name == "autoload").split("\n")
                )
            except subprocess.CalledProcessError as error:
                answer = f"fails (exit code {error.returncode}): {_last_line(error.stderr)}"
            except subprocess.TimeoutExpired as error:
                answer = f"did not end within {error.timeout:.0f} s"
        else:
            answer = f"not asked: {reason}"
        self._record.decide(number, question, answer)

    def _program(self, code: str, autoload: bool = False) -> str:
        """Its output.

        Raises:
            subprocess.CalledProcessError, subprocess.TimeoutExpired: it failed.
        """
        budget = self._guard.room // 2
        with (
            self._guard.share(self._guard.room, "a program under umem") as room,
            tempfile.TemporaryDirectory() as folder,
        ):
            path = Path(folder) / "program.py"
            path.write_text(PRELUDE + code, encoding="utf-8")
            variables = environment(budget, room - budget, self._cache)
            done = subprocess.run(
                [sys.executable, "-W", "ignore", str(path)],
                env=variables | ({"UMEM": "1"} if autoload else {}),
                capture_output=True,
                text=True,
                check=True,
                timeout=max(min(self._deadline.left, 60.0), 5.0),
            )
        return done.stdout.strip()


def _why_not(name: str) -> str | None:
    from gpu import software

    if name == "cupy" and importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed"
    if name in ("nccl", "cupy") and software.asked_for():
        return "the software driver has no such library"
    return None


def _last_line(text: str | None) -> str:
    lines = (text or "").strip().splitlines()
    return lines[-1] if lines else "it said nothing"
