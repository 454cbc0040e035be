"""The demo's parts without the native core: workloads on plain torch, rows, table, picture."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the demo trains with torch")

import torch
from support import synthetic
from support.frameworks import needs

from umem import cli
from umem.base.units import MIB
from umem.demo import data, plot, runner, table, worker, workloads
from umem.demo.process import RunSpec, WorkerProcess
from umem.errors import ConfigError, NotSupportedError, StateError

pytestmark = needs("sklearn")  # imported by the tests, and not at collection

TINY: dict[str, workloads.Config] = {
    "resnet": workloads.ResNetConfig(width=4, blocks=(1, 1), image=8, batch=64),
    "gpt": workloads.GPTConfig(layers=1, dim=16, heads=2, context=16, batch=16, text=20_000),
}


# --- data ------------------------------------------------------------------------------------


def test_digits_are_whole_and_normalised() -> None:
    images, labels = data.digits(16)
    assert images.shape == (1797, 1, 16, 16)
    assert labels.bincount().min() > 150
    assert abs(float(images.mean())) < 1e-5
    assert abs(float(images.std()) - 1) < 1e-4


def test_stdlib_text_is_sorted_ascii_and_capped(tmp_path: Path) -> None:
    (tmp_path / "b.py").write_text("second")
    (tmp_path / "a.py").write_bytes("fïrst\r\n".encode())
    (tmp_path / "c.txt").write_text("not Python")
    assert data.stdlib_text(8, tmp_path) == "frst\nsec"
    with pytest.raises(NotSupportedError, match=r"holds 11 characters.*needs 12"):
        data.stdlib_text(12, tmp_path)


def test_the_standard_library_has_enough_text() -> None:
    config = workloads.WORKLOADS["gpt"]
    assert isinstance(config, workloads.GPTConfig)
    assert len(data.stdlib_text(config.text)) == config.text


def test_a_missing_package_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(NotSupportedError, match=r"scikit-learn.*pip install '.\[demo\]'"):
        data.need("sklearn.datasets")


# --- workloads -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(TINY))
def test_training_learns_and_repeats_bit_by_bit(name: str) -> None:
    torch.set_num_threads(1)
    prints = []
    for _ in range(2):
        training = workloads.build(TINY[name])
        for _ in range(12):
            training.step()
        assert sum(training.losses[-3:]) < 0.95 * sum(training.losses[:3])
        prints.append(training.fingerprint())
    assert prints[0] == prints[1]
    assert prints[0]["loss"] == training.losses[-1].hex()


@pytest.mark.parametrize("where", ["weight", "optimizer"])
def test_the_fingerprint_sees_one_bit(where: str) -> None:
    training = workloads.build(TINY["gpt"])
    training.step()
    before = training.fingerprint()
    parameter = next(iter(training.net.parameters()))
    tensor = parameter if where == "weight" else training.optimizer.state[parameter]["exp_avg"]
    with torch.no_grad():
        tensor.view(torch.int32)[0, 0] ^= 1
    after = training.fingerprint()
    assert after["state_sha256"] != before["state_sha256"]
    assert after["loss"] == before["loss"]


# --- the worker and its process --------------------------------------------------------------


def test_a_worker_trains_plain_torch_as_this_process_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UMEM", "1")  # must not reach a plain worker
    monkeypatch.setenv("UMEM_BUDGET", "banana")
    with WorkerProcess(RunSpec("gpt")) as process:
        steps = process.step(2)
        assert process.stats() == {}
        final = process.finish()
    torch.set_num_threads(1)
    training = workloads.build(workloads.WORKLOADS["gpt"])
    assert [training.step() for _ in range(2)] == [step["loss"] for step in steps]
    assert final["fingerprint"] == training.fingerprint()
    assert all(step["ms"] > 0 for step in steps)


def test_a_workers_error_is_passed_on() -> None:
    with pytest.raises(StateError, match=r"asked for 'start', failed: .*'nonsense'"):
        WorkerProcess(RunSpec("gpt", budget=64 * MIB, policy="nonsense"))


def test_a_dead_worker_leaves_its_last_words() -> None:
    program = "import sys; sys.stdin.readline(); sys.exit('the frames ran out')"
    heard: list[str] = []
    with pytest.raises(StateError, match=r"exit code 1\):\nthe frames ran out"):
        WorkerProcess(RunSpec("gpt"), on_note=heard.append, command=[sys.executable, "-c", program])
    assert heard == ["the frames ran out"]


def test_a_worker_that_hangs_is_killed() -> None:
    program = "import time; time.sleep(60)"
    with pytest.raises(StateError, match=r"within 0\.5 s and was killed"):
        WorkerProcess(RunSpec("gpt"), timeout=0.5, command=[sys.executable, "-c", program])


def test_prints_of_the_program_do_not_reach_the_replies(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with worker.private_stdout() as replies:
        print("chatter")
        os.write(1, b"of native code\n")
        replies.write("{}")
    os.write(1, b" after it")
    out, err = capfd.readouterr()
    assert (out, err) == ("{} after it", "chatter\nof native code\n")


# --- the runner, over recorded runs ----------------------------------------------------------

PEAK = 100 * MIB + 12345


class Recorded:
    """A worker that reports like a real one: under a budget everything takes twice as long."""

    def __init__(self, spec: RunSpec, on_note: object = None) -> None:
        self.spec = spec
        self.steps = 0
        if spec.trace is not None:
            trace = synthetic.training(6, 4 * MIB, 6 * MIB, 2)
            synthetic.write(Path(spec.trace), trace, "soft:ref")
        self.squeezed = spec.budget not in (None, runner.AMPLE_BYTES)

    def __enter__(self) -> Recorded:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def step(self, count: int = 1) -> list[dict[str, Any]]:
        return [self._step() for _ in range(count)]

    def _step(self) -> dict[str, float]:
        self.steps += 1
        ms = 99.0 if self.steps <= runner.WARM_STEPS else 20.0 if self.squeezed else 10.0
        return {"ms": ms, "loss": 2.5}

    def stats(self) -> dict[str, int]:
        if self.spec.budget is None:
            return {}
        per_step = {"faults": 10, "bytes_in": MIB, "bytes_out": 2 * MIB, "bytes_discarded": 3 * MIB}
        moved = {key: size * self.steps * self.squeezed for key, size in per_step.items()}
        resident = min(self.spec.budget, PEAK)
        return {**moved, "peak_live_bytes": PEAK, "peak_resident_bytes": resident}

    def finish(self) -> dict[str, Any]:
        fingerprint = {"loss": "0x1p0", "state_sha256": "b"}
        samples = [[0.0, 0, 0], [1.0, min(self.spec.budget or 0, PEAK), PEAK]]
        return {"fingerprint": fingerprint, "stats": self.stats(), "samples": samples}


Run = Callable[..., list[runner.DemoRow]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a plan with recorded workers."""

    def rows(plan: runner.DemoPlan, kind: type[Recorded] = Recorded) -> list[runner.DemoRow]:
        monkeypatch.setattr(runner, "WorkerProcess", kind)
        return list(runner.run(plan, lambda _: None))

    return rows


def test_the_runner_takes_budgets_from_the_measured_peak(run: Run) -> None:
    seen: list[RunSpec] = []

    class Seen(Recorded):
        def __init__(self, spec: RunSpec, on_note: object) -> None:
            super().__init__(spec)
            seen.append(spec)

    plan = runner.DemoPlan(workloads=("resnet",), steps=8, device="cuda")
    rows = run(plan, Seen)
    assert {spec.device for spec in seen} == {"cuda"}  # plain torch trains where umem does
    assert len(seen) == len(rows) == plan.runs == 14
    assert [spec.budget for spec in seen[:2]] == [None, runner.AMPLE_BYTES]
    squeezed = [(spec.budget, spec.policy) for spec in seen[2:]]
    sizes = (50 * MIB, 24 * MIB, 12 * MIB)  # whole pages
    assert squeezed == [(size, policy) for size in sizes for policy in runner.POLICIES]
    assert all(row.good for row in rows)
    row = rows[-1]
    assert (row.faults_per_step, row.in_per_step, row.out_per_step) == (10, MIB, 2 * MIB)
    assert (row.discarded_per_step, row.step_ms, row.ratio) == (3 * MIB, 20, 2)
    assert tuple(row.samples[1]) == (1.0, 12 * MIB, PEAK)
    assert row.as_dict()["good"] is True


class Spoilt(Recorded):
    """A worker that fails in one of the ways that a run can."""

    kind = ""

    def finish(self) -> dict[str, Any]:
        final = super().finish()
        if self.spec.policy == "conv_lru" and self.spec.budget == 24 * MIB:
            if self.kind == "fails":
                raise StateError("the worker died")
            if self.kind == "over":
                final["stats"]["peak_resident_bytes"] = 24 * MIB + 1
            if self.kind == "differs":
                final["fingerprint"]["state_sha256"] = "c"
        return final


def spoilt(how: str) -> type[Recorded]:
    class Worker(Spoilt):
        kind = how

    return Worker


@pytest.mark.parametrize(
    ("kind", "shown", "told"),
    [
        ("fails", "FAILED", "failed: the worker died"),
        ("over", "24 OVER", "OVER BUDGET"),
        ("differs", "NO", "NOT IDENTICAL"),
    ],
)
def test_one_bad_run_spoils_the_demo_but_not_the_others(
    run: Run, kind: str, shown: str, told: str
) -> None:
    rows = run(runner.DemoPlan(workloads=("resnet",), steps=8), spoilt(kind))
    assert len(rows) == 14
    (bad,) = [row for row in rows if not row.good]
    assert table.brief(bad).startswith("resnet, conv_lru, 1/4: ")
    assert told in table.brief(bad)
    text = table.render(rows)
    (line,) = [line for line in text.splitlines() if shown in line]
    assert "1/4" in line
    assert "conv_lru" in line
    if kind == "fails":
        assert text.endswith("resnet, conv_lru, 1/4: the worker died")


def test_a_peak_measured_under_pressure_is_refused(run: Run) -> None:
    class Moving(Recorded):
        def stats(self) -> dict[str, int]:
            return {**super().stats(), "bytes_out": 1} if self.spec.budget else {}

    with pytest.raises(StateError, match="its peak is unknown"):
        run(runner.DemoPlan(workloads=("gpt",)), Moving)


def test_the_ratio_is_against_the_plain_steps_around_the_run(run: Run) -> None:
    class Slowing(Recorded):
        """Plain torch after its own run: the machine has become three times slower."""

        def _step(self) -> dict[str, float]:
            record = super()._step()
            slow = self.spec.budget is not None or self.steps > 7
            return {**record, "ms": record["ms"] * 3} if slow else record

    plan = runner.DemoPlan(workloads=("gpt",), fractions=(2, 4), policies=("lru",), steps=7)
    ratios = [row.ratio for row in run(plan, Slowing)]
    assert ratios == [1.0, 1.5, 2.0, 2.0]  # the first one after the change sees both


# --- output for people -------------------------------------------------------------------------


def test_the_table_lines_up_and_says_what_is_unknown(run: Run) -> None:
    rows = run(runner.DemoPlan(steps=8))
    lines = table.render(rows).splitlines()
    assert len(lines) == 2 + len(rows) + 3  # header, runs, a rule before each workload and last
    words = [" ".join(line.split()) for line in lines]
    assert words[3] == "resnet - plain torch - - - reference - - - - 10 10 1.00x"
    assert words[-2] == "gpt 1/8 auto 100 12 12 yes 10 1 2 3 20 10 2.00x"
    assert {len(line) for line in lines if line and "torch" not in line} == {len(lines[0])}


def test_a_run_is_told_in_a_line(run: Run) -> None:
    rows = run(runner.DemoPlan(workloads=("gpt",), fractions=(), steps=8))
    assert [table.brief(row) for row in rows] == [
        "gpt, plain torch: 10 ms per step, 1.00x",
        "gpt, lru, all fits: 10 ms per step, 1.00x, identical",
    ]


def test_the_picture_shows_the_runs_of_each_budget(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib draws it")
    rows = run(runner.DemoPlan(workloads=("resnet",), steps=8), spoilt("fails"))
    path = tmp_path / "demo.svg"
    plot.check(path)
    plot.draw(rows, path)
    text = path.read_text(encoding="utf-8")
    for fraction in (2, 4, 8):
        assert f"<!-- resnet, 1/{fraction} of its peak" in text  # glyphs come after it
    for label in ("held by the program", "budget", *(f"resident, {p}" for p in runner.POLICIES)):
        assert f"<!-- {label} " in text


def test_the_legend_of_one_panel_fits_below_it(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib draws it")
    rows = run(runner.DemoPlan(workloads=("gpt",), fractions=(4,), policies=("lru", "auto")))
    path = tmp_path / "demo.svg"
    plot.draw(rows, path)
    text = path.read_text(encoding="utf-8")
    label = r"<!-- (?:held by the program|budget) -->\s*<g transform=\"translate\((\S+)"
    places = re.findall(label, text)
    assert len(places) == 2
    assert all(0 < float(place) < 300 for place in places)


@pytest.mark.parametrize(
    ("name", "words"),
    [("demo.xyz", "unknown picture format.*png"), ("none/demo.png", "folder does not exist")],
)
def test_a_bad_place_for_the_picture_is_refused(tmp_path: Path, name: str, words: str) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib knows the types")
    with pytest.raises(ConfigError, match=words):
        plot.check(tmp_path / name)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--disk", "/dev/shm"], "in this machine's memory"),
        (["--disk", "/no/such"], "No such file"),
        (["--disk", " "], "the path is empty"),
        (
            ["--device", "soft:512MiB"],
            "size; allowed: soft[:PROFILE] or cuda",
        ),
        (["--device", "moon"], "'moon' is not a device"),
    ],
)
def test_a_bad_option_is_told_before_anything_trains(
    words: list[str],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(runner, "WorkerProcess", None)
    assert cli.main(["demo", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"umem demo: {words[0]}")
    assert told in err


def test_too_few_steps_are_one_line_and_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--steps", "2"]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == (
        "",
        "umem demo: --steps 2: the first two warm up; allowed: at least 3\n",
    )


@pytest.mark.parametrize("kind", ["", "differs"])
def test_the_command_prints_its_table_and_writes_its_files(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib draws the demo's picture")
    monkeypatch.setattr(runner, "WorkerProcess", spoilt(kind))
    monkeypatch.chdir(tmp_path)
    words = ["demo", "--workload", "gpt", "--steps", "4", "--report", "demo.html"]
    assert cli.main(words) == (1 if kind else 0)
    out = capsys.readouterr().out
    assert "[14/14] gpt, auto, 1/8: 20 ms per step, 2.00x, identical" in out
    assert "Report of a step of each workload: demo.html" in out
    assert out.endswith(
        "1 of 14 runs failed, differ from plain torch or went over budget.\n" if kind
        else "All 14 runs are bit-identical to plain torch and in budget.\n"
    )  # fmt: skip
    assert (tmp_path / "umem-demo.png").stat().st_size > 10_000
    assert "umem demo: gpt, auto, 1/8 of its peak" in (tmp_path / "demo.html").read_text("utf-8")


def test_the_table_is_there_before_files_that_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib draws the demo's picture")
    monkeypatch.setattr(runner, "WorkerProcess", spoilt(""))
    (tmp_path / "demo.png").mkdir()
    words = ["demo", "--quick", "--workload", "gpt", "--plot", str(tmp_path / "demo.png")]
    assert cli.main(words) == 2
    out, err = capsys.readouterr()
    assert out.endswith("---\n")  # of the table
    assert err.endswith("demo.png: Is a directory; name a file that can be written\n")
    assert cli.main([*words, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["good"]


def test_no_report_is_written_about_a_run_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Untraced(Recorded):
        def __init__(self, spec: RunSpec, on_note: object) -> None:
            if spec.trace is not None:
                raise StateError("no space left")
            super().__init__(spec)

    monkeypatch.setattr(runner, "WorkerProcess", Untraced)
    report = tmp_path / "demo.html"
    words = ["demo", "--quick", "--workload", "gpt", "--json", "--report", str(report)]
    assert cli.main(words) == 2
    err = capsys.readouterr().err
    assert "no trace: no space left" in err
    assert "no report: the run of gpt that it is about failed" in err
    assert not report.exists()


def test_the_policies_that_the_demo_compares_exist() -> None:
    from umem.policies import registry

    assert set(runner.POLICIES) <= set(registry.names())
