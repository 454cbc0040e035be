"""`umem lint` as people call it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support import schemas

pytest.importorskip("torch")

from umem import cli

PROGRAM = """
import os
import torch
from torch import nn

class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.ones(64, 64).tril())

    def forward(self, x):
        return x @ self.mask

def make_step():
    layers = [nn.Linear(64, 64), nn.LeakyReLU(), Masked()]
    net = nn.Sequential(*layers, nn.Linear(64, 64), nn.ELU(), Masked())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return net, optimizer, torch.randn(512, 64), lambda model, x: model(x).sum()

def step_alone():
    _, _, x, _ = make_step()
    return lambda: x.sum()

runs = []

def unlike():
    runs.append(0)
    net, optimizer, x, loss = make_step()
    return net, optimizer, x * len(runs), loss

def reads():
    x = torch.randn(3)
    return lambda: x.sum().item()

def moves():
    os.chdir("data")
    return make_step()
"""

SCRIPT = """
import torch
from torch import nn

net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
losses = []
for _ in range(100):
    loss = net(torch.randn(256, 64)).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss)
    print(loss.item())
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    monkeypatch.chdir(tmp_path)
    name = f"advised_{request.node.name.partition('[')[0]}"
    (tmp_path / f"{name}.py").write_text(PROGRAM)
    return name


def test_text(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["lint", f"{program}:make_step"]) == 0
    out = capsys.readouterr().out
    for words in (
        f"inplace=True in LeakyReLU 1, made at {program}.py:15  [--apply]",
        "128 KiB less to allocate",
        f"duplicate    {program}.py:9: 2 tensors of equal values: 2.mask, 5.mask; 16 KiB",
        "elu 4 cannot be in-place: the in-place form rounds gradients otherwise",
    ):
        assert words in out, out
    assert "applied" not in out
    assert (Path.cwd() / f"{program}.py").read_text() == PROGRAM


def test_lines_and_each_run_of_the_program_are_relative_to_the_folder_of_the_command(
    program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").mkdir()
    for options in ((), ("--values",), ("--apply",)):
        assert cli.main(["lint", f"{program}:moves", *options]) == 0
        assert f" {program}.py:9: 2 tensors of equal values" in capsys.readouterr().out


def test_applying_is_checked(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["lint", f"{program}:make_step", "--apply", "--json"]) == 0
    answer = schemas.read("lint", capsys.readouterr().out)
    applied = answer["applied"]
    assert len(applied["done"]) == 2
    assert applied["differing"] == []
    assert applied["compared"] == 2 + 2 * 4 + 6  # losses, gradients of 2 steps, the net's tensors
    kinds = [finding["kind"] for finding in answer["findings"]]
    assert kinds == ["in_place", "duplicate"]
    assert applied["peak_before"] == answer["peak_bytes"]
    assert applied["peak_before"] - applied["peak_after"] >= 64 * 64 * 4
    assert cli.main(["lint", f"{program}:make_step", "--apply"]) == 0
    out = capsys.readouterr().out
    assert "16 losses, gradients and tensors of the model are bit-identical" in out


def test_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    assert cli.main(["lint", "--json", "--script", str(path)]) == 0
    answer = json.loads(capsys.readouterr().out)
    by_kind = {finding["kind"]: finding for finding in answer["findings"]}
    assert by_kind["in_place"]["modules"] == ["1"]
    assert by_kind["held"]["line"] == f"{path}:9"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["{}:reads"], r"tensor\.item\(\)"),
        (["{}:step_alone", "--apply"], r"return \(model, step\)"),
        (["{}:unlike", "--apply"], "with equal seeds differ"),
        (["{}:make_stop"], "did you mean make_step"),
        ([], "give either FILE.py:function"),
        (["--apply", "--script", "train.py"], "--apply with --script: it needs the model"),
    ],
)
def test_errors_are_one_line(
    program: str, args: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["lint", *(arg.format(program) for arg in args)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("umem lint: ")
    assert error.count("\n") == 1
    assert re.search(words, error), error
