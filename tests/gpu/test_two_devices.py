"""Plans on two devices of one process."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

pytest.importorskip("torch")

pytestmark = pytest.mark.gpu
Program = Callable[..., tuple[str, str]]

# 8 layers of 4 MiB, half of them on each device.
PIPELINE = """
load.compute() if soft else None
from umem.base.native import core
WIDTH, COUNT = 1024, 8
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


def two_devices(program: Program, code: str, **environ: str) -> str:
    out, err = program(
        code, SOFTCUDA_DEVICES="2", SOFTCUDA_BYTES=str(512 << 20), OMP_NUM_THREADS="1", **environ
    )
    assert "Traceback" not in err, err
    return out


def test_both_devices_of_a_split_model_have_plans(program: Program) -> None:
    two_devices(
        program,
        PIPELINE
        + """
with enable("400MiB", policy="none"):
    step, state = training(("cuda:0", "cuda:1"))
    expected_losses = [step() for _ in range(12)]
    expected = state()
    peaks = [umem.stats(device).peak_live_bytes for device in (0, 1)]
    del step, state
    gc.collect()
print(peaks)
budget = max(peaks) // 2
with enable(budget, policy="auto"):
    step, state = training(("cuda:0", "cuda:1"))
    losses, status, moved = [], [], []
    for _ in range(12):
        losses.append(step())
        status.append([core.plan_status(device) for device in (0, 1)])
        moved.append([umem.stats(d).bytes_in + umem.stats(d).bytes_out for d in (0, 1)])
    for d in (0, 1):
        print(d, [(s[d]["hits"], s[d]["misses"], s[d]["complete"]) for s in status])
        print([(b[d] - a[d]) >> 20 for a, b in zip(moved, moved[1:])])
    assert losses == expected_losses
    assert same(state(), expected)
    assert umem.stats().hook_errors == 0
    del step, state
    gc.collect()
""",
    )
