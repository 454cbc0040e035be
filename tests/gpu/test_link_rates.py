"""Plans take the rates of the program's own transfers, which are timed by events."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("torch")

pytestmark = pytest.mark.gpu
Program = Callable[..., tuple[str, str]]

# 12 weights of 4 MiB, and their gradients.
TRAINING = """
from umem.base import current_device
from umem.base.native import core
from umem.session import session
def training():
    layers = [torch.nn.Linear(1024, 1024, bias=False, device="cuda") for _ in range(12)]
    net = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, foreach=False)
    x = torch.ones(64, 1024, device="cuda")
    def step():
        net(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
    return step
def rates(profile):
    return profile.bytes_per_us_in, profile.bytes_per_us_out
"""


@pytest.mark.parametrize("backing", ["managed", "mapped"])
def test_a_plan_has_the_rates_of_the_steps_before_it(program: Program, backing: str) -> None:
    program(
        TRAINING
        + f"""
enable(budget="40MiB", policy="auto", backing={backing!r})
nominal = rates(current_device.profile(0))
assert nominal == rates(current_device.profile_of(current_device.gpu_name(0)))
step = training()
while session.planned_step() is None:
    step()
planned, stats = rates(session.planned_step().device), umem.stats()
assert planned == (
    stats.timed_bytes_in / stats.timed_busy_in_us, stats.timed_bytes_out / stats.timed_busy_out_us
)
assert planned[0] != nominal[0] and planned[1] != nominal[1], (planned, nominal)
assert stats.timed_bytes_in <= stats.bytes_in and stats.timed_bytes_out <= stats.bytes_out
assert "GB/s out, of the transfers that were timed" in umem.summary()
"""
    )


def test_a_plan_is_made_again_when_the_link_has_another_rate(program: Program) -> None:
    program(
        TRAINING
        + """
import dataclasses, logging, math
said = []
class Handler(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())
enable(budget="40MiB", policy="auto", log="info")
logging.getLogger("umem").addHandler(Handler())
real, ratio = current_device.profile_of(current_device.gpu_name(0)), 1.0
def profile(device=None):
    return dataclasses.replace(real, bytes_per_us_out=ratio * real.bytes_per_us_out)
current_device.profile = profile
step = training()
def again():
    return sum("made again" in line for line in said)
def steps(count, until=math.inf):
    while count and again() < until:
        step()
        count -= 1
steps(12)
ratio = 1.1
steps(12)
assert again() == 0, said
ratio = 0.5
steps(100, until=1)
assert again() == 1, said
assert session.planned_step().device.bytes_per_us_out == 0.5 * real.bytes_per_us_out
ratio = 0.55
steps(12)
assert again() == 1, said
status = core.plan_status()
assert status["misses"] == 0 and status["complete"] > 0, status
assert umem.stats().hook_errors == 0
"""
    )
