"""`umem lint` as people call it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
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


ON_A_GPU = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

net = nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
losses = []
for (batch,) in DataLoader(TensorDataset(torch.randn(4096, 64)), batch_size=256):
    loss = net(batch.cuda()).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
"""


@pytest.mark.parametrize(("kept", "found"), [("detach()", ["held"]), ("detach().cpu()", [])])
def test_tensors_on_the_host_waste_nothing_of_a_gpu(
    kept: str, found: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither the loader's data, which the loader reads, nor copies that were made on purpose."""
    path = tmp_path / "train.py"
    path.write_text(ON_A_GPU.replace("detach()", kept))
    assert cli.main(["lint", "--json", "--script", str(path)]) == 0
    assert [each["kind"] for each in json.loads(capsys.readouterr().out)["findings"]] == found


def test_a_script_whose_optimizers_do_not_step_in_turn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "critic.py"
    made = "other = torch.optim.SGD(nn.Linear(4, 4).parameters(), lr=0.1)\nlosses = []"
    text = SCRIPT.replace("losses = []", made).replace("range(100)", "range(1, 101)")
    twice = "    optimizer.step()\n    if _ % 2 == 0:\n        other.step()"
    path.write_text(text.replace("    optimizer.step()", twice))
    assert cli.main(["lint", "--json", "--script", str(path)]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert "its optimizers do not step in turn" in str(answer["remarks"])
    assert "in_place" in {finding["kind"] for finding in answer["findings"]}


def test_the_folder_of_the_command_is_left_out_of_paths_below_it_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from umem.cli.lint import _short

    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path / "models")
    here = Path.cwd()
    assert _short(f"made at {here}/net.py:3 ({here}/x.py:1)") == "made at net.py:3 (x.py:1)"
    assert _short(f"/site{here}/llama.py:12") == f"/site{here}/llama.py:12"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--script", "x" * 300], "there is no script"),
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


Lint = Callable[..., str]
MORE = """
import torch
from torch import nn

def made(net, rows=512, grow=None):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return net, optimizer, torch.randn(rows, 64), grow or (lambda model, x: model(x).sum())

def clean():
    return made(nn.Linear(64, 64))

def many():
    layers = [part for _ in range(12) for part in (nn.Linear(64, 64), nn.LeakyReLU())]
    return made(nn.Sequential(*layers, nn.Linear(64, 64)))

class Peeking(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.act, self.last = nn.Linear(64, 64), nn.LeakyReLU(), nn.Linear(64, 64)

    def forward(self, x):
        x = self.last(self.act(self.layer(x)))
        return x * 2 if self.act.inplace else x

def peeking():
    return made(Peeking())

def late():
    net = nn.Linear(64, 1024)
    x, y = torch.randn(512, 64), torch.zeros(512, dtype=torch.long)
    def step():
        logits = net(x)
        loss = nn.functional.cross_entropy(logits, y)
        loss.backward()
    return net, step

def fixed():
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    for layer in net[:2]:
        layer.weight.requires_grad_(False)
    return made(net)

class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.a, self.b = (nn.Parameter(torch.ones(64, 64), requires_grad=False) for _ in "ab")

    def forward(self, x):
        first, second = torch.zeros(64, 64), torch.zeros(64, 64)
        return self.layer(x) @ (self.a * first) + x @ (self.b * second)

def masked():
    return made(Masked())

def parsing():
    import argparse
    return made(nn.Linear(64, 64), argparse.ArgumentParser().parse_args().__dict__.get("rows", 8))
"""


@pytest.fixture
def more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    monkeypatch.chdir(tmp_path)
    name = f"more_{request.node.name.partition('[')[0]}"
    (tmp_path / f"{name}.py").write_text(MORE)
    return name


@pytest.fixture
def lint(more: str, capsys: pytest.CaptureFixture[str]) -> Lint:
    """Runs the command on a function of `MORE`; its output."""

    def run(function: str, *flags: str, code: int = 0) -> str:
        assert cli.main(["lint", f"{more}:{function}", *flags]) == code
        return capsys.readouterr().out

    return run


def test_a_program_without_findings_is_told_so(lint: Lint) -> None:
    out = lint("clean")
    assert re.search(r"^ +nothing found$", out, re.MULTILINE), out
    assert "with every op in-place" not in out


def test_the_largest_findings_of_a_kind_are_listed_and_the_others_counted(lint: Lint) -> None:
    out = lint("many")
    assert out.count("inplace=True in LeakyReLU") == 10
    assert "2 more of 256 KiB (--all)" in out
    assert re.search(r"^peak .* a step, with every op in-place that may be$", out, re.MULTILINE)
    out = lint("many", "--all")
    assert out.count("inplace=True in LeakyReLU") == 12
    assert "--all" not in out


def test_a_program_that_computes_otherwise_in_place_is_shown_as_differing(lint: Lint) -> None:
    out = lint("peeking", "--apply", code=1)
    assert re.search(r"^differs +\d+ of \d+ tensors: the loss \(1\), ", out, re.MULTILINE), out
    assert "bit-identical" not in out


@pytest.mark.parametrize("option", ["--values", "--apply"])
def test_a_function_that_parses_arguments_gets_none(option: str, lint: Lint) -> None:
    assert "peak" in lint("parsing", option)


def test_a_late_tensor_says_what_the_peak_would_be_without_it(more: str, lint: Lint) -> None:
    out = lint("late")
    line = 1 + MORE.splitlines().index("        logits = net(x)")
    words = rf"^late +{more}\.py:{line}: .*; 2 MiB, 2 MiB less at the peak"
    assert re.search(words, out, re.MULTILINE), out


def test_fixed_parameters_of_equal_values_are_found_beside_other_duplicates(lint: Lint) -> None:
    out = lint("masked", "--values")
    found = re.findall(r"^duplicate .*", out, re.MULTILINE)
    assert len(found) > 1, out
    assert sum("Masked.a, Masked.b" in line for line in found) == 1, out


def test_what_cannot_be_told_without_values_is_a_note(lint: Lint) -> None:
    out = lint("fixed")
    words = r"^note +2 buffers or fixed parameters have the shape of another"
    assert re.search(words, out, re.MULTILINE), out
