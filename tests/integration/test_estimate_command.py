"""``umem estimate`` of programs, and its predictions against traced steps of the bench's nets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from support import schemas
from support.benches import imports

from umem import cli
from umem.analysis import formulas
from umem.analysis.formulas import Config
from umem.base.units import MIB
from umem.capture.program import trace
from umem.cli.estimate_program import look

PROGRAM = """
import os
import torch
from torch import nn

def make_step(batch=64, *, width=1024):
    net = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(8)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, foreach=False)
    return net, optimizer, torch.randn(batch, width), lambda model, x: model(x).sum()

def of_options(**options):
    return make_step(options["batch"])

def normalized(batch):
    net, optimizer, x, loss = make_step(batch)
    net[0].append(nn.BatchNorm1d(1024))
    return net, optimizer, x, loss

def fixed(rows=3):
    return make_step(rows)

def ignores(batch):
    return make_step()

def fails(batch):
    assert batch < 9, "too many"
    return make_step(batch)

def other_ops(batch):
    net, optimizer, x, _ = make_step(batch)
    return net, optimizer, x, lambda model, x: model(x * 2).sum() if batch > 8 else model(x).sum()

def moves(batch):
    os.chdir("data")
    return make_step(batch)
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    monkeypatch.chdir(tmp_path)
    name = f"estimated_{request.node.name.partition('[')[0]}"
    (tmp_path / f"{name}.py").write_text(PROGRAM)
    return name


def _answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert cli.main(["estimate", "--json", *arguments]) == 0
    return schemas.read("estimate", capsys.readouterr().out)


def test_the_kinds_of_a_step(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    answer = _answer(capsys, f"{program}:make_step", "--batch", "2048", "--workspace", "32MiB")
    parameters = 8 * (1024 * 1024 + 1024)
    kinds = answer["bytes"]
    assert kinds["params"] == kinds["optimizer"] == 4 * parameters
    assert kinds["inputs"] == 8 * MIB
    # The peak is at the start of backward: all outputs of layers and of ReLUs except the last's.
    assert kinds["activations"] == pytest.approx(8 * 8 * MIB, rel=0.15)
    assert kinds["workspace"] == 32 * MIB
    assert 0 < kinds["fragmentation"] < 4 * MIB  # 16 small biases and their momentum in segments
    assert answer["total_bytes"] == sum(kinds.values())
    assert answer["batch"] == 2048
    assert "aten::" in answer["peak"]


def test_states_are_those_of_the_formula() -> None:
    examples = pytest.importorskip("examples.gpt")
    seen = look(trace(partial(examples.make_step, examples.SMALL, batch=16)), 0)
    assert seen.found.params % 4 == 0
    formula = formulas.estimate(Config(seen.found.params // 4, precision="fp32"))
    # A counter of steps for each parameter comes on top.
    assert seen.found.optimizer == pytest.approx(formula.optimizer, rel=1e-3)


def test_the_largest_batch_fits_and_the_next_does_not(
    program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("make_step", "of_options"):
        answer = _answer(capsys, f"{program}:{name}", "--max-batch", "--budget", "1GiB")
        fit = answer["max_batch"]
        batch, needs = fit["batch"], fit["bytes_by_batch"]
        assert fit["by_tensor"]
        assert fit["predicted"] == batch == answer["batch"]
        *_, fits, more = needs.items()
        assert list(needs) == ["8", "16", str(batch), str(batch + 1 + batch // 256)]
        assert fits[1] <= 1024 * MIB < more[1]
        assert answer["total_bytes"] == needs[str(batch)]
        assert answer["fits"]


def test_a_step_that_changes_with_its_batch(
    program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = _answer(capsys, f"{program}:other_ops", "--max-batch", "--budget", "1GiB")
    fit = answer["max_batch"]
    assert not fit["by_tensor"]
    batch, needs = fit["batch"], fit["bytes_by_batch"]
    assert needs[str(batch)] <= 1024 * MIB < needs[str(batch + 1 + batch // 256)]


def test_each_batch_starts_in_the_folder_of_the_command(
    program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").mkdir()
    answer = _answer(capsys, f"{program}:moves", "--max-batch", "--budget", "1GiB")
    assert len(answer["max_batch"]["bytes_by_batch"]) > 2
    assert Path.cwd() == tmp_path


def test_nothing_fits(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    call = ["estimate", f"{program}:make_step", "--max-batch", "--budget", "20MiB"]
    assert cli.main(call) == 0
    out = capsys.readouterr().out
    assert "not even a batch of 1 fits" in out
    assert "make_step, batch 1" in out


def test_nothing_fits_a_model_that_refuses_a_batch_of_1(
    program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = _answer(capsys, f"{program}:normalized", "--max-batch", "--budget", "20MiB")
    assert (answer["max_batch"]["batch"], answer["batch"]) == (0, 2)
    words = ["estimate", f"{program}:normalized", "--max-batch", "--budget", "20MiB"]
    assert cli.main(words) == 0
    assert "none: not even a batch of 2 fits" in capsys.readouterr().out


def test_a_script(program: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        PROGRAM + "net, optimizer, batch, loss_of = make_step()\nprint('a line of the script')\n"
        "for _ in range(5):\n"
        "    loss_of(net, batch).backward()\n    optimizer.step()\n    optimizer.zero_grad()\n"
    )
    assert cli.main(["estimate", "--budget", "1GiB", "--script", str(path)]) == 0
    out = capsys.readouterr().out
    assert "a line of the script" in out
    assert "train.py" in out
    assert "1 GiB: fits" in out
    assert cli.main(["estimate", "--json", "--script", str(path)]) == 0
    printed = capsys.readouterr()
    assert schemas.read("estimate", printed.out)["program"].endswith("train.py")
    assert "a line of the script" in printed.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{}:fixed", "--batch", "4"], "takes rows=3; --batch and --max-batch call it as"),
        (["{}:fixed", "--max-batch", "--budget", "1G"], "give it a parameter named batch"),
        (["{}:ignores", "--max-batch", "--budget", "1G"], "does the program use its batch?"),
        (["{}:fails", "--max-batch", "--budget", "1G"], "with batch=16: "),
        (["{}:make_step", "--batch", "0"], "--batch 0; allowed"),
        (["{}:make_step", "--batch", "1e12"], "allowed for a program: 1 to 1048576"),
        (["{}:make_step", "--optimizer", "adam"], "--optimizer describes a configuration"),
        (["{}:absent", "--batch", "2"], "has no 'absent'"),
        (["{}"], "allowed: FILE.py:function or pkg.mod:function"),
    ],
)
def test_errors_are_one_line(
    program: str, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["estimate", *(argument.format(program) for argument in arguments)]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.startswith("umem estimate: ")
    assert err.count("\n") == 1


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """bench/policies/estimate.py."""
    for module in imports(monkeypatch, "policies"):
        yield module("policies.estimate")


# The line through two totals is less exact if the peak moves to another op, or pages are a large
# part of small tensors: see the bench.
@pytest.mark.parametrize(
    "net",
    [
        pytest.param("ResNet-50", marks=pytest.mark.nightly),
        "VGG-16",
        pytest.param("U-Net, 512 x 512", marks=pytest.mark.nightly),
    ],
)
def test_two_batches_predict_a_third(net: str, bench: Any) -> None:
    row = bench.predicted(net, bench.NETS[net])
    assert abs(row["line_error"]) < 0.03
    assert abs(row["tensors_error"]) < 0.001


def test_two_batches_predict_a_third_of_a_gpt(bench: Any) -> None:
    make = partial(bench.nets._gpt2, layers=2, dim=768, heads=12, context=512)
    row = bench.predicted("gpt", bench.Net(make, 64))
    assert abs(row["line_error"]) < 0.03
    assert abs(row["tensors_error"]) < 0.001


@pytest.mark.nightly
def test_the_bench_of_predictions(bench: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("sys.argv", ["estimate.py", "--smoke", "--out", str(tmp_path)])
    bench.main()
    (page,) = tmp_path.glob("estimate_fake-tensors_*.md")
    (data,) = tmp_path.glob("estimate_fake-tensors_*.json")
    assert "| ResNet, 4 blocks | 64 |" in page.read_text()
    assert json.loads(data.read_text())["batches"][0]["tensors_error"] == pytest.approx(0, abs=1e-3)
