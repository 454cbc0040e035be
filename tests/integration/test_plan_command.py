"""``umem plan`` as people call it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import schemas

pytest.importorskip("torch")

from umem import cli
from umem.base.units import MIB
from umem.trace.step_builder import read_step

PROGRAM = """
import torch
from torch import nn

def make_step():
    net = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(8)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, foreach=False)
    return net, optimizer, torch.randn(2048, 1024), lambda model, x: model(x).sum()

def reads():
    x = torch.randn(3)
    return lambda: x.sum().item()
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    monkeypatch.chdir(tmp_path)
    name = f"planned_{request.node.name.partition('[')[0]}"
    (tmp_path / f"{name}.py").write_text(PROGRAM)
    return name


def test_text(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", f"{program}:make_step", "--budget", "50%", "--link", "4",
                     "--policy", "auto", "lru"]) == 0  # fmt: skip
    out = capsys.readouterr().out
    for words in ("50% of the peak: does not fit", "a100-pcie4+4GB/s", "activation", "<- best",
                  "would help", "nothing moves", "roofline", "floor"):  # fmt: skip
        assert words in out, out
    assert all(len(line) < 200 for line in out.splitlines())


def test_json_and_the_trace_agree(
    program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "step.jsonl.gz"
    options = ["--json", "--out", str(out), "--device", "h200-pcie5"]
    policies = ["--policy", "auto", "belady", "lru"]
    call = ["plan", f"{program}:make_step", "--budget", "60%", *options, *policies]
    assert cli.main(call) == 0
    answer = schemas.read("plan", capsys.readouterr().out)
    step = read_step(out)
    assert answer["peak_bytes"] == step.peak_bytes == sum(answer["peak_by_tag"].values())
    assert answer["ops"] == step.n_ops
    assert answer["compute_us"] == pytest.approx(step.compute_us)
    assert answer["budget"] == int(0.6 * step.peak_bytes)
    assert answer["raised_from"] is None
    assert not answer["fits"]
    times = [result["step_us"] for result in answer["policies"]]
    assert times == sorted(times)
    assert answer["best_policy"] == answer["policies"][0]["policy"]
    assert answer["floor"]["us"] <= times[0]
    # 8 weights of 4 MiB and their momentum, 8 gradients, activations of 8 MiB before and after.
    assert answer["peak_by_tag"]["param"] == pytest.approx(8 * 4 * MIB, rel=0.01)
    assert answer["peak_by_tag"]["optimizer"] == pytest.approx(8 * 4 * MIB, rel=0.01)
    assert answer["peak"]["phase"] == "backward"
    modules = {holder["module"] for holder in answer["largest_tensors"]}
    assert modules & {f"{layer}.{part}" for layer in range(8) for part in (0, 1)}


def test_what_fits_costs_nothing(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", f"{program}:make_step", "--json", "--policy", "auto"]) == 0
    answer = schemas.read("plan", capsys.readouterr().out)
    assert answer["fits"]
    assert answer["budget"] == 40 << 30  # the device's
    (result,) = answer["policies"]
    assert result["bytes_in"] == 0
    assert result["stall_us"] == pytest.approx(0, abs=1e-3)
    assert answer["floor"]["bound"] == "compute"


def test_a_budget_below_one_op_is_raised(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", f"{program}:make_step", "--budget", "9MiB", "--policy", "lru"]) == 0
    out = capsys.readouterr().out
    assert "raised to" in out
    assert "1.05 times the needs of aten::" in out


def test_times_of_a_run_replace_the_roofline(
    program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run.jsonl"
    call = ["plan", f"{program}:make_step", "--json", "--policy", "lru"]
    assert cli.main([*call, "--out", str(run)]) == 0
    first = schemas.read("plan", capsys.readouterr().out)
    lines = [json.loads(line) for line in run.read_text().splitlines()]
    for line in lines:
        if "us" in line:
            line["us"] *= 3
    run.write_text("\n".join(map(json.dumps, lines)) + "\n")
    assert cli.main([*call, "--times", str(run)]) == 0
    second = schemas.read("plan", capsys.readouterr().out)
    assert second["compute_us"] == pytest.approx(3 * first["compute_us"], rel=0.25)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give either FILE.py:function"),
        (["--policy", "lru", "{}:make_step"], "before --policy, which took '"),
        (["{}"], "allowed: FILE.py:function or pkg.mod:function"),
        (["{}:reads"], "tensor.item()"),
        (["{}:make_step", "--budget", "auto"], "'auto' needs a real device"),
        (["{}:make_step", "--budget", "120%"], "--budget: '120%'"),
        (["{}:make_step", "--device", "a100"], "no device profile 'a100'"),
        (["{}:make_step", "--device", "a100-pcie4", "--profile", "x"], "allowed: one of them"),
        (["{}:make_step", "--policy", "best"], "no policy 'best'"),
        (["{}:make_step", "--recompute", "al"], "allowed: all, auto"),
        (["dir/step.py:make_step"], "there is no file"),
        (["{}:make_step", "--times", "absent.jsonl"], "absent.jsonl"),
        (["{}:make_step", "--policy", "lru", "--out", "no/such/folder.jsonl"], "no/such/folder"),
        (["{}:make_step", "--out", "plan.txt"], "--out plan.txt; allowed: FILE.jsonl"),
        (["{}:absent", "--policy", "best"], "no policy 'best'"),  # before the program runs
        (["--script", "absent.py"], "there is no script 'absent.py'"),
    ],
)
def test_errors_are_one_line(
    program: str, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", *(argument.format(program) for argument in arguments)]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.startswith("umem plan: ")
    assert err.count("\n") == 1


def test_a_script_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        PROGRAM + "import sys\nnet, optimizer, batch, loss_of = make_step()\n"
        "print('a line of the script')\n"
        "for _ in range(int(sys.argv[1])):\n    loss = loss_of(net, batch)\n    loss.backward()\n"
        "    optimizer.step()\n    optimizer.zero_grad()\n    assert loss.item() == 0\n"
    )
    assert cli.main(["plan", "--policy", "lru", "--json", "--script", str(path), "5"]) == 0
    printed = capsys.readouterr()
    answer = schemas.read("plan", printed.out)
    assert "a line of the script" in printed.err
    assert answer["steps"] == 3
    assert answer["remarks"]
