"""``umem plan`` as people call it."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import forkserver, schemas

pytest.importorskip("torch")

from umem import cli
from umem.analysis import summary
from umem.base.units import MIB
from umem.trace.step_builder import read_step

PROGRAM = """
import atexit
import os

import torch
from torch import nn

def make_step():
    net = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(8)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, foreach=False)
    return net, optimizer, torch.randn(2048, 1024), lambda model, x: model(x).sum()

def reads():
    x = torch.randn(3)
    return lambda: x.sum().item()

def moves():
    os.mkdir("elsewhere")
    os.chdir("elsewhere")
    return make_step()

def noisy():
    print("printed")
    os.write(1, b"written\\n")
    os.system("echo from a child")
    atexit.register(print, "at exit")
    return make_step()
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


def test_files_are_in_the_folder_of_the_command(
    program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--out", "step.jsonl", "--report", "step.html"]
    assert cli.main(["plan", f"{program}:moves", "--policy", "lru", *files]) == 0
    assert {path.name for path in tmp_path.iterdir()} >= {"step.jsonl", "step.html"}
    assert not [*(tmp_path / "elsewhere").iterdir()]
    line = f'"line":"{program}.py:'  # relative to the same folder
    assert line in (tmp_path / "step.jsonl").read_text()


@pytest.mark.parametrize(
    ("name", "who"),
    [("aten::_foreach_norm", "clip_grad_norm_"), ("aten::_foreach_add_", "the optimizer")],
)
def test_the_call_that_takes_all_tensors_at_once_is_named(name: str, who: str) -> None:
    found: Any = SimpleNamespace(
        largest_op=SimpleNamespace(name=name), largest_op_bytes=6 * MIB, peak_bytes=10 * MIB
    )
    unused: Any = None
    (advice,) = summary.advice(found, unused, unused, 10 * MIB, None)
    assert advice.startswith(f"{who} works on all tensors in one op ({name}, 6 MiB)")
    assert f"foreach=False in {who} needs" in advice


def test_the_trace_of_the_times_is_not_replaced(
    program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run.jsonl"
    assert cli.main(["plan", f"{program}:make_step", "--policy", "lru", "--out", str(run)]) == 0
    before = run.read_bytes()
    (tmp_path / "link.jsonl").symlink_to(run)
    for out in ("run.jsonl", "link.jsonl"):
        call = ["plan", f"{program}:make_step", "--policy", "lru", "--times", str(run)]
        assert cli.main([*call, "--out", out]) == 2
        assert f"--out {out} would replace the trace of --times" in capsys.readouterr().err
        assert run.read_bytes() == before


def test_a_file_that_cannot_be_written_costs_no_answer(
    program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out.jsonl").mkdir()
    call = ["plan", f"{program}:make_step", "--policy", "lru", "--json", "--out", "out.jsonl"]
    assert cli.main(call) == 2
    printed = capsys.readouterr()
    assert schemas.read("plan", printed.out)["fits"]
    assert printed.err.startswith("umem plan: out.jsonl: Is a directory; name a file")
    assert [*tmp_path.glob(".*.jsonl")] == []


def test_json_is_alone_on_stdout(program: str, tmp_path: Path) -> None:
    call = ["-m", "umem", "plan", f"{program}:noisy", "--policy", "lru", "--json"]
    done = forkserver.run(call, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert schemas.read("plan", done.stdout)["fits"]
    words = {"printed", "written", "from a child", "at exit"}
    assert words <= set(done.stderr.splitlines())


def test_an_encoding_without_bars_is_no_error(
    program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="latin-1"))
    assert cli.main(["plan", f"{program}:make_step", "--policy", "lru"]) == 0
    assert b"  activation   ??" in written.getvalue()


def test_what_fits_costs_nothing(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    twice = ["--policy", "auto", "auto"]  # a policy is replayed once
    assert cli.main(["plan", f"{program}:make_step", "--json", *twice]) == 0
    answer = schemas.read("plan", capsys.readouterr().out)
    assert answer["fits"]
    assert answer["budget"] == 40 << 30  # the device's
    (result,) = answer["policies"]
    assert result["bytes_in"] == 0
    assert result["stall_us"] == pytest.approx(0, abs=1e-3)
    assert answer["floor"]["bound"] == "compute"


def test_a_step_fits_where_nothing_moves(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", f"{program}:make_step", "--policy", "lru", "--json", "--budget"]

    def at(budget: int) -> dict[str, Any]:
        assert cli.main([*command, f"{budget}B"]) == 0
        return schemas.read("plan", capsys.readouterr().out)

    found = at(1 << 30)
    enough, peak = found["free_from_bytes"], found["peak_bytes"]
    assert peak < enough  # pages are not full
    for budget, moved in ((enough, False), (peak, True)):
        answer = at(budget)
        assert answer["fits"] is not moved
        assert (answer["policies"][0]["bytes_in"] > 0) is moved
    assert cli.main([*command[:-2], "--budget", f"{peak}B"]) == 0
    assert "the peak, whose pages take" in capsys.readouterr().out


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
        # Before the program runs, which would be another error.
        (["{}:reads", "--times", "absent.jsonl"], "absent.jsonl"),
        (["{}:reads", "--out", "no/such.jsonl"], "--out no/such.jsonl: the folder does not exist"),
        (["{}:make_step", "--out", "plan.txt"], "--out plan.txt; allowed: FILE.jsonl"),
        (["{}:absent", "--policy", "best"], "no policy 'best'"),  # before the program runs
        (["{}:absent", "--policy", "all", "lru"], "has no 'absent'"),
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
