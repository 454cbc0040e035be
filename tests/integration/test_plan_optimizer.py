"""`umem plan --optimizer` and `umem replay --optimizer`, on programs of torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import schemas

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from umem import cli  # noqa: E402
from umem.base import device_profiles  # noqa: E402
from umem.capture import program, roofline  # noqa: E402
from umem.recompute.planner.host_updates import candidates  # noqa: E402
from umem.trace.step_builder import last_step  # noqa: E402
from umem.trace.step_trace import StepTrace  # noqa: E402

SIDE = 2048  # 16 MiB of float32
LAYERS = 5
PROGRAM = f"""
import torch

def make_step():
    net = torch.nn.Sequential(*(torch.nn.Linear({SIDE}, {SIDE}) for _ in range({LAYERS})))
    optimizer = torch.optim.AdamW(net.parameters())
    return net, optimizer, torch.randn(64, {SIDE}), lambda net, x: net(x).square().mean()
"""


class Masters(torch.optim.Optimizer):
    """Plain SGD on float32 masters."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: object = None) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"]):
            state = self.state[parameter]
            if not state:
                state["master"] = parameter.float()
            state["master"].add_(parameter.grad.float(), alpha=-0.1)
            parameter.copy_(state["master"])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "single": lambda p: torch.optim.AdamW(p, foreach=False),
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, foreach=True, amsgrad=True),
    "momentum": lambda p: torch.optim.SGD(p, momentum=0.9),
    "plain": lambda p: torch.optim.SGD(p, lr=0.1),
    "adagrad": torch.optim.Adagrad,
    "masters": Masters,
}
# Bytes that the host reads and writes for each byte of a parameter: value, gradient and states.
MOVED = {"foreach": 7, "single": 7, "fused": 7, "momentum": 5, "plain": 3, "adagrad": 5}


def recorded(make: Callable[[Any], torch.optim.Optimizer], clip: bool = False) -> StepTrace:
    def made() -> Any:
        half = make is Masters
        net = nn.Sequential(*(nn.Linear(SIDE, SIDE) for _ in range(LAYERS)))
        net = net.bfloat16() if half else net
        optimizer = make(net.parameters())
        x = torch.randn(64, SIDE, dtype=torch.bfloat16 if half else torch.float32)

        def step() -> None:
            optimizer.zero_grad()
            net(x).square().mean().backward()
            if clip:
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()

        return net, step

    profile = device_profiles.find("a100-pcie4")
    return last_step(program.trace(made).device_events(roofline.clock(profile)))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_weight_of_a_program_is_an_update(name: str) -> None:
    step = recorded(OPTIMIZERS[name])
    found = candidates(step).updates
    size = SIDE * SIDE * (2 if name == "masters" else 4)
    assert [int(step.bytes[p]) for update in found for p, _ in update.pairs] == [size] * LAYERS
    if name == "masters":  # read and write masters of twice the size; gradient in, parameter out
        assert {update.bytes for update in found} == {2 * 2 * size + size + size}
    elif name in MOVED:
        assert {update.bytes for update in found} == {MOVED[name] * size}


def test_clipping_comes_before_the_update() -> None:
    step = recorded(OPTIMIZERS["foreach"], clip=True)
    found = candidates(step).updates
    assert len(found) == LAYERS
    clipped = step.op_names.index("aten::_foreach_mul_")
    for update in found:
        assert min(update.ops) > clipped


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "planned_program.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    given = ["plan", "planned_program:make_step", "--budget", "40%", "--policy", "auto", "--json"]
    assert cli.main([*given, *words]) == 0
    found: dict[str, Any] = schemas.read("plan", capsys.readouterr().out)
    return found


@pytest.mark.usefixtures("here")
def test_the_plan_says_share_step_and_bound(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("highspy")
    assert answer(capsys)["optimizer"] is None
    auto, host, half, device = (
        answer(capsys, "--optimizer", where)["optimizer"]
        for where in ("auto", "host", "50%", "device")
    )
    assert host["share"] == 1.0
    assert 0.3 < half["share"] < 0.7
    assert device["share"] == device["host_us"] == 0
    assert host["bytes"] == LAYERS * SIDE * SIDE * 4
    assert host["host_us"] == pytest.approx(7 * host["bytes"] / 100e3)
    for one in (auto, host, half, device):
        assert one["step_us"] >= one["bound_us"] * (1 - 1e-6)
        assert auto["step_us"] <= one["step_us"] * 1.01
        assert one["compute_us"] == auto["compute_us"]


@pytest.mark.usefixtures("here")
def test_the_plan_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "planned_program:make_step", "--budget", "40%", "--optimizer", "host"]
    assert cli.main(words) == 0
    text = capsys.readouterr().out
    assert "optimizer      100% of 80 MiB of parameters updated on the host" in text
    assert "by a linear program (any share)" in text


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("where", ["gpu", "120%", "0.5"])
def test_a_bad_place_is_named(where: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "planned_program:make_step", "--optimizer", where]) == 2
    error = capsys.readouterr().err
    assert f"--optimizer: '{where}'" in error
    assert "allowed: device, host, auto, or a percentage such as 50%" in error


def test_a_trace_is_replayed_with_updates_on_the_host(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = here / "step.jsonl.gz"
    answer(capsys, "--out", str(trace))
    times = {}
    for where in ("device", "host", "auto"):
        words = ["replay", str(trace), "--budget", "40%", "--optimizer", where, "--json"]
        assert cli.main(words) == 0
        row = schemas.read("replay", capsys.readouterr().out)
        times[where] = row["step_us"]
        assert (row["host_us"] > 0) == (where != "device")
    assert times["auto"] <= min(times.values())
    assert cli.main(["replay", str(trace), "--optimizer", "host"]) == 0
    assert "host ms" in capsys.readouterr().out


def test_a_program_without_an_optimizer_says_so(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "forward_only.py").write_text(
        "import torch\n\ndef make_step():\n    net = torch.nn.Linear(2048, 2048)\n"
        "    x = torch.randn(64, 2048)\n    return net, lambda: net(x).sum()\n"
    )
    assert cli.main(["plan", "forward_only:make_step", "--optimizer", "auto"]) == 0
    assert "no update that the host can do" in capsys.readouterr().out
