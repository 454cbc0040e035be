"""Plans take the rates of the program's own transfers, which are timed by events."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")

pytestmark = pytest.mark.gpu
Program = Callable[..., tuple[str, str]]

# 12 weights of 4 MiB, and their gradients.
TRAINING = """
import dataclasses, logging, math
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
said = []
class Handler(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())
logging.getLogger("umem").addHandler(Handler())
def again():
    return sum("made again" in line for line in said)
def steps(count, until=math.inf):
    while count and again() < until:
        step()
        count -= 1
"""


@pytest.mark.parametrize("backing", ["managed", "mapped"])
def test_a_plan_has_the_rates_of_the_transfers(program: Program, backing: str) -> None:
    program(
        TRAINING
        + f"""
enable(budget="40MiB", policy="auto", backing={backing!r}, log="info")
real = current_device.profile_of(current_device.gpu_name(0))
def rates(profile):
    return profile.bytes_per_us_in, profile.bytes_per_us_out
assert rates(current_device.profile(0)) == rates(real)
step = training()
def known():
    stats = umem.stats()
    return min(stats.timed_bytes_in, stats.timed_bytes_out) > 0
count = 0
while not known() and count < 200:
    step()
    count += 1
assert known()
stats = umem.stats()
assert stats.timed_bytes_in >= 64 << 20 and stats.timed_bytes_out >= 64 << 20
assert stats.timed_bytes_in <= stats.bytes_in and stats.timed_bytes_out <= stats.bytes_out
assert "GB/s out, of the transfers that were timed" in umem.summary()
# Memory of the CPU is no PCIe link: the plan was, or will be, made with other rates.
steps(200, until=1)
planned = rates(session.planned_step().device)
assert planned[0] != real.bytes_per_us_in and planned[1] != real.bytes_per_us_out, said
assert umem.stats().hook_errors == 0
"""
    )


def test_a_plan_is_made_again_when_the_link_has_another_rate(program: Program) -> None:
    program(
        TRAINING
        + """
enable(budget="40MiB", policy="auto", log="info")
real, ratio = current_device.profile_of(current_device.gpu_name(0)), 1.0
def profile(device=None):
    return dataclasses.replace(real, bytes_per_us_out=ratio * real.bytes_per_us_out)
current_device.profile = profile
step = training()
steps(12)
ratio = 1.1
steps(24)
assert again() == 0, said
ratio = 0.5
steps(100, until=1)
assert again() == 1, said
assert session.planned_step().device.bytes_per_us_out == 0.5 * real.bytes_per_us_out
status = core.plan_status()
assert status["misses"] == 0 and status["complete"] > 0, status
assert umem.stats().hook_errors == 0
"""
    )


def test_a_policy_of_the_programs_own_plans_a_step_once(program: Program) -> None:
    program(
        TRAINING
        + """
from umem.policies.default.planner import Auto
class Own(Auto):
    name, asked = "own", 0
    def plan(self, trace, device, budget):
        self.asked += 1
        return super().plan(trace, device, budget)
own, ratio = Own(), 1.0
enable(budget="40MiB", policy=own, log="info")
real = current_device.profile(0)
current_device.profile = lambda device=None: dataclasses.replace(
    real, bytes_per_us_out=ratio * real.bytes_per_us_out
)
step = training()
steps(12)
asked, ratio = own.asked, 0.5
steps(24)
assert own.asked == asked and again() == 0, said
"""
    )


def test_doctor_measures_the_link(program: Program) -> None:
    program(
        """
from umem.cli import doctor, doctor_link
doctor_link.BYTES = 8 << 20
found = doctor.examine(measure=True)["link"]
assert found["gpu"] == torch.cuda.get_device_name()
rates = ("in_gb_s", "out_gb_s", "in_beside_out_gb_s", "out_beside_in_gb_s")
assert all(0 < found[name] < 1e5 for name in rates)
assert found["link"] == f"--link {found['in_beside_out_gb_s']:g},{found['out_beside_in_gb_s']:g}"
doctor_link.BYTES = 1 << 50
problem = doctor.examine(measure=True)["link"]["problem"]
assert "the link is not measured: " in problem, problem
"""
    )


def test_doctor_measures_no_link_of_managed_memory(program: Program) -> None:
    program(
        """
from umem.cli import doctor
enable(budget="64MiB")
assert "umem is on" in doctor.examine(measure=True)["link"]["problem"]
"""
    )


@pytest.mark.parametrize("version", ["12020", "13000"])
def test_operators_are_timed_by_every_driver_that_umem_accepts(
    program: Program, softcuda: object, tmp_path: Path, version: str
) -> None:
    file = tmp_path / "run.jsonl"
    program(
        TRAINING
        + f"""
import json
with enable(budget="80MiB", trace={str(file)!r}):
    step = training()
    for _ in range(3):
        step()
events = [json.loads(line) for line in open({str(file)!r})]
times = [event["us"] for event in events if event.get("e") == "op" and "mm" in event["name"]]
assert times and min(times) > 0, times
""",
        SOFTCUDA_VERSION=version,
    )
