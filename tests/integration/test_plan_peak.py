"""Peaks against torch's own MemTracker, and a step of a network far beyond this machine."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.distributed._tools.mem_tracker import MemTracker  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812

from umem.analysis import summary  # noqa: E402
from umem.base.units import GIB  # noqa: E402
from umem.capture import program, roofline  # noqa: E402
from umem.trace.schema import Alloc, Free  # noqa: E402
from umem.trace.step_builder import StepBuilder  # noqa: E402


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        y = self.down(F.gelu(self.up(self.norm2(x))))
        return x + y


def _made(layers: int, width: int, heads: int, shape: tuple[int, int]) -> Any:
    torch.set_default_dtype(torch.bfloat16)
    try:
        net = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        batch = torch.randn(*shape, width)
    finally:
        torch.set_default_dtype(torch.float32)
    optimizer = torch.optim.AdamW(net.parameters(), foreach=True)
    return net, optimizer, batch, lambda model, x: model(x).float().square().mean()


def _convolutions() -> Any:
    net = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(4),
        nn.Flatten(), nn.Linear(1024, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, foreach=True)
    batch = torch.randn(16, 3, 64, 64), torch.randint(10, (16,))
    return net, optimizer, batch, lambda model, b: F.cross_entropy(model(b[0]), b[1])


def _tracked(make: Callable[[], Any]) -> int:
    """The peak that torch's MemTracker sees in the second step."""
    with FakeTensorMode():
        net, optimizer, batch, loss_of = make()
        tracker = MemTracker()
        inputs = batch if isinstance(batch, tuple) else (batch,)
        tracker.track_external(net, optimizer, *inputs)
        with tracker as tracker:
            for step in range(2):
                optimizer.zero_grad(set_to_none=True)
                loss_of(net, batch).backward()
                optimizer.step()
                if step == 0:
                    tracker.reset_mod_stats()
        peak = tracker.get_tracker_snapshot("peak")
    return int(next(iter(peak.values()))["Total"])


@pytest.mark.parametrize(
    "make", [_convolutions, lambda: _made(4, 256, 4, (4, 128))], ids=["convolutions", "transformer"]
)
def test_the_peak_is_that_of_memtracker(make: Callable[[], Any]) -> None:
    recording = program.trace(make)
    live, peak = 0, 0
    for event in recording.events:
        if isinstance(event, (Alloc, Free)):
            size = recording.blocks[event.id].bytes
            live += size if isinstance(event, Alloc) else -size
            peak = max(peak, live)
    assert peak == pytest.approx(_tracked(make), rel=0.02)


def test_five_billion_parameters_in_seconds() -> None:
    """A study on this network: 51.66 GiB, of which 18 states and 9 weights; 515 TFLOP."""
    from umem.base import device_profiles

    began = time.process_time()
    recording = program.trace(lambda: _made(24, 4096, 32, (4, 2048)))
    device = device_profiles.find("a100-pcie4")
    builder = StepBuilder()
    for event in recording.device_events(roofline.clock(device)):
        builder.add(event)
    step = builder.step()
    found = summary.memory(step, recording)
    seconds = time.process_time() - began
    assert seconds < 30, "the aim is 10 s on a quiet machine"
    assert found.peak_bytes == pytest.approx(51.66 * GIB, rel=0.01)
    assert found.by_tag["param"] == pytest.approx(9 * GIB, rel=0.01)
    assert found.by_tag["optimizer"] == pytest.approx(18 * GIB, rel=0.01)
    assert found.by_tag["activation"] == pytest.approx(24.1 * GIB, rel=0.01)
    flops = sum(cost.flops for _, cost in recording.last_step())
    assert flops * 2 == pytest.approx(515e12, rel=0.02)
    assert found.peak.phase in ("forward", "backward")
    assert found.largest_op.phase == "optimizer"
    assert [len(values) for values in found.over_time.values()] == [60] * len(found.over_time)


@pytest.mark.nightly
def test_the_example_trains() -> None:
    path = Path(__file__).parents[2] / "examples" / "gpt.py"
    runs = [
        subprocess.run([sys.executable, path], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert runs[0] == runs[1]
    losses = [float(line.split()[-1]) for line in runs[0].splitlines()[:-1]]
    assert losses[-1] < losses[0] - 0.5
    assert runs[0].splitlines()[-1].startswith("final loss=0x1.")
