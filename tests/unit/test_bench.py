"""The bench's harness, over recorded values."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.terminal import on_a_terminal

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports a module of bench/ as its scripts do."""
    monkeypatch.syspath_prepend(str(BENCH))
    names = {path.stem for path in BENCH.glob("*.py")}

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    yield load
    for name in names & set(sys.modules):
        del sys.modules[name]


def test_the_candidates_take_turns_and_none_is_always_first(bench: Any) -> None:
    order: list[str] = []

    def candidate(name: str) -> Any:
        def call() -> float:
            order.append(name)
            return float(len(order))

        return call

    values = bench("harness").interleave({name: candidate(name) for name in "abc"}, 4)
    assert "".join(order) == "abcbcacababc"
    assert values == {"a": [1, 6, 8, 10], "b": [2, 4, 9, 11], "c": [3, 5, 7, 12]}


BARS = """
import subprocess, sys
from harness import cases, interleave, note
with cases(5) as advance:
    note("one")
    subprocess.run([sys.executable, "-c", "from harness import note; note('of another process')"])
    interleave({"a": lambda: 1.0, "b": lambda: 2.0}, 4, advance)
    note("two")
    advance(1)
print("done")
"""


def test_a_terminal_shows_the_cases_that_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("PYTHONPATH", f"{BENCH}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    found = on_a_terminal(sys.executable, "-c", BARS)
    assert (found.code, found.out) == (0, "done\n")
    lines = re.split(r"[\r\n]+", found.terminal)
    assert [line for line in lines if line.startswith("bench: ")] == [
        "bench: one", "bench: of another process", "bench: two",
    ]  # fmt: skip
    # Drawn when a round or a case is done, and at no other time.
    shares = re.findall(r"(\d+)% left", found.terminal)
    assert list(dict.fromkeys(shares)) == ["0", "20", "40", "60", "80", "100"]
    done = subprocess.run([sys.executable, "-c", BARS], capture_output=True, text=True, check=True)
    assert done.stderr == "bench: one\nbench: of another process\nbench: two\n"


def test_a_child_that_is_measured_has_no_terminal(bench: Any) -> None:
    code = "import sys; print(sys.stderr.isatty()); print('why', file=sys.stderr)"
    harness = bench("harness")
    assert harness.output_of([sys.executable, "-c", code]) == "False\n"
    with pytest.raises(SystemExit, match=r"exit code 3\nwhy"):
        harness.output_of([sys.executable, "-c", f"{code}; sys.exit(3)"])


def test_a_smoke_run_of_the_replay_bench_has_all_its_figures(
    bench: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench("replay").main(["--smoke"]) == 0
    page = capsys.readouterr().out
    for name in (case.name for case in bench("replay").CASES):
        assert f"| {name} |" in page


def test_ratios_pair_the_rounds(bench: Any) -> None:
    harness = bench("harness")
    # The machine slows down tenfold: the ratio does not.
    spread = harness.ratios([2.0, 20.0, 3.0, 30.0, 2.5], [1.0, 10.0, 1.0, 10.0, 1.0])
    assert (spread.low, spread.median, spread.high, spread.count) == (2.0, 2.5, 3.0, 5)
    assert harness.differences([3.0], [1.0]) == harness.Spread(2.0, 2.0, 2.0, 1)
    with pytest.raises(ValueError, match="longer"):
        harness.ratios([1.0], [1.0, 2.0])


def test_a_report_says_machine_versions_config_and_targets(bench: Any, tmp_path: Path) -> None:
    harness = bench("harness")
    spread = harness.Spread.of([1.0, 1.1, 1.2])
    report = harness.Report("cpu", {"rounds": 3})
    report.machine["cpu"] = "Some CPU @ 2.0GHz"
    report.machine["cores"] = 2
    report.date = "2026-01-02T03:04:05+00:00"
    report.results += [
        harness.Result("met", spread, "x", 1.2),
        harness.Result("missed", spread, "x", 1.03, "why"),
        harness.Result("free", spread, "ms"),
    ]
    data, text = report.write(tmp_path / "results")
    assert data.name == "cpu_some-cpu-2-0ghz-2c_2026-01-02.json"
    record = json.loads(data.read_text())
    assert [result["reached"] for result in record["results"]] == [True, False, None]
    assert set(record["versions"]) >= {"python", "torch", "umem", "commit"}
    assert set(record["machine"]) == {"cpu", "cores", "memory_gib", "kernel", "thp"}
    assert record["config"] == {"rounds": 3}
    page = text.read_text()
    assert "| met | 1.100 x | 1.050 to 1.150 | 3 | <= 1.2 x | yes |  |" in page
    assert "| missed | 1.100 x | 1.050 to 1.150 | 3 | <= 1.03 x | **no** | why |" in page
    assert "| free | 1.1 ms | 1.1 to 1.1 | 3 | - | - |  |" in page


def test_a_report_is_read_as_it_was_written(bench: Any, tmp_path: Path) -> None:
    harness = bench("harness")
    report = harness.Report("cpu", {"names": ["a, b", "[c,  d]"]})
    report.details = {"ms": [[1.5, 2], []], "by name": [{"x": [None, "{e}, "]}]}
    report.results.append(harness.Result("met", harness.Spread.of([1.0, 1.1]), "x", 1.2))
    data, text = report.write(tmp_path)
    assert harness.Report.load(data) == report
    assert harness.Report.load(data).markdown() == text.read_text()
    assert "   [1.5, 2],\n" in data.read_text()


def test_step_times_carry_targets_and_differences(bench: Any) -> None:
    cpu, harness = bench("cpu"), bench("harness")
    config = cpu.Config(fractions=(1, 4), policies=("lru",), rounds=2)
    report = harness.Report("cpu", {})
    times = {"plain": [10.0, 20.0], "fits, lru": [10.2, 20.4], "1/4, lru": [13.0, 26.0]}
    prints = {"plain": {"loss": "a"}, "fits, lru": {"loss": "a"}, "1/4, lru": {"loss": "b"}}
    cpu._add_ratios("resnet", config, report, times, prints)
    plain, fits, quarter = report.results
    assert (plain.spread.median, plain.target) == (15.0, None)
    assert (fits.reached, fits.note) == (True, "identical")
    assert (quarter.reached, quarter.note) == (False, "NOT IDENTICAL")


def test_the_smoke_run_covers_what_the_bench_measures(bench: Any) -> None:
    cpu = bench("cpu")
    assert {1, 4} <= set(cpu.SMOKE.fractions)
    assert cpu._budget(100 * cpu.MIB + 1, 4) == 24 * cpu.MIB
    assert cpu._budget(100 * cpu.MIB, 1) == cpu.AMPLE


def test_no_rounds_are_refused(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        bench("cpu").main(["--rounds", "0"])
    assert exit_info.value.code == 2
    assert "--rounds 0: allowed: 1 and up" in capsys.readouterr().err
