"""Static layouts on a GPU: a step that fits makes no driver calls, and computes the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("torch")

pytestmark = pytest.mark.gpu
Program = Callable[..., tuple[str, str]]

TRAINING = """
import _core_testing
from umem.base.native import core
MOVES = ("cuMemAllocManaged", "cuMemFree", "cuMemPrefetchAsync", "cuMemPrefetchBatchAsync",
         "cuMemDiscardBatchAsync", "cuMemDiscardAndPrefetchBatchAsync")
def training(count=4, width=1024):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(width, width, bias=False, device="cuda") for _ in range(count)]
    net = torch.nn.Sequential(*layers)
    for i, weight in enumerate(net.parameters()):  # a fill: the software driver computes those
        torch.nn.init.constant_(weight, (i + 1) / width)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, foreach=False)
    x = torch.ones(width, width, device="cuda")
    def step():
        optimizer.zero_grad()
        net(x).relu().square().mean().backward()
        optimizer.step()
    return net, step
"""


def test_a_step_that_fits_makes_no_driver_call(program: Program) -> None:
    out, _ = program(
        TRAINING
        + """
enable(budget="256MiB", policy="auto", layout="auto")
net, step = training()
for _ in range(6):
    step()
torch.cuda.synchronize()
_core_testing.instrument()
before = sum(_core_testing.calls(name) for name in MOVES)
for _ in range(3):
    step()
torch.cuda.synchronize()
status = core.layout_status()
assert status["followed"] and status["misses"] == 0 and status["hits"] >= 9 * 4, status
assert sum(_core_testing.calls(name) for name in MOVES) == before
assert umem.stats().hook_errors == 0
print("fine")
"""
    )
    assert out == "fine\n"


def test_short_memory_computes_the_same(program: Program) -> None:
    out, _ = program(
        TRAINING
        + """
import hashlib
def run(layout):
    with umem.enable(budget="28MiB", policy="auto", layout=layout, device="cuda"):
        before = core.layout_status()["hits"]  # of a layout that blocks of another run lie in
        net, step = training()
        for _ in range(8):
            step()
        torch.cuda.synchronize()
        bytes_ = b"".join(p.detach().cpu().numpy().tobytes() for p in net.parameters())
        return hashlib.sha256(bytes_).hexdigest(), core.layout_status()["hits"] - before
(without, none), (with_layout, hits) = run("off"), run("on")
assert with_layout == without
assert hits > 0 and none == 0, (hits, none)
print("fine")
"""
    )
    assert out == "fine\n"
