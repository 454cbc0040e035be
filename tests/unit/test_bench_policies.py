"""The bench of policies: its budgets, its report, and the whole of it on small networks."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.benches import imports
from support.steps import Tensor, make_step

from umem.base.units import GIB, MIB
from umem.trace.step_trace import Kind


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports a module of bench/policies, or of bench, as its scripts do."""
    yield from imports(monkeypatch, "policies")


def row(**given: Any) -> dict[str, Any]:
    about = {
        "workload": "bert_base_b64",
        "device": "a100-pcie4",
        "fraction": "1/2",
        "peak_bytes": 4 * GIB,
        "budget": 2 * GIB,
        "tensors": 100,
        "ops": 50,
        "policy": "auto",
        "step_us": 110.0,
        "floor_us": 100.0,
        "compute_us": 50.0,
        "bytes_in": 2 * GIB,
        "bytes_out": GIB,
        "bound_bytes_in": 2 * GIB,
        "plan_ms": 3.0,
    }
    return {**about, **given}


def test_budgets_below_the_largest_op_are_raised_and_marked(bench: Any) -> None:
    weights = [Tensor(40 * MIB, {i: False}, Kind.PERSISTENT) for i in range(4)]
    found = bench("policies.study").budgets(make_step([1.0] * 4, weights), ("3/4", "1/2", "1/4"))
    assert found == [("3/4", 120 * MIB), ("1/2", 80 * MIB), ("1/4*", 42 * MIB)]


def test_targets_take_means_over_workloads_and_the_highest_of_all(bench: Any) -> None:
    rows = [
        row(step_us=100.0),
        row(step_us=144.0, workload="vgg16_b128", bytes_in=3 * GIB),
        row(step_us=200.0, policy="lru"),
        row(step_us=200.0, policy="lru", workload="vgg16_b128"),
        row(step_us=900.0, device="h200-pcie5"),
    ]
    targets = {t.name: t for t in bench("policies.report").targets(rows)}
    mean = targets["step / floor at 1/2, geomean"]
    assert mean.value == pytest.approx(1.2)
    assert not mean.reached
    over = targets["step / lru's at 1/2, geomean"]
    assert (over.value, over.reached) == (pytest.approx(0.6), True)
    highest = targets["step / floor at 1/2, highest"]
    assert (highest.value, highest.where) == (pytest.approx(1.44), "vgg16_b128, 1/2")
    assert targets["bytes in / bound, highest"].value == pytest.approx(1.5)
    assert targets["bytes in / bound, geomean"].value == pytest.approx(math.sqrt(1.5))
    assert "step / floor at 1/4, geomean" not in targets


def test_raised_budgets_count_as_their_share(bench: Any) -> None:
    (target,) = (
        t
        for t in bench("policies.report").targets([row(fraction="1/4*", step_us=104.0)])
        if t.name == "step / floor at 1/4, geomean"
    )
    assert (target.value, target.reached) == (pytest.approx(1.04), True)


def test_the_ranking_says_whether_it_is_as_published(bench: Any) -> None:
    steps = {"none": 400.0, "deepum": 200.0, "belady": 150.0, "auto": 120.0}
    rows = [row(policy=name, step_us=us) for name, us in steps.items()]
    lines = bench("policies.report").rankings(rows)
    assert "| bert_base_b64 | 1/2 | 8.00 | 4.00 | 3.00 | 2.40 | yes | yes |" in lines
    rows[0]["step_us"] = 100.0
    lines = bench("policies.report").rankings(rows)
    assert "| bert_base_b64 | 1/2 | 2.00 | 4.00 | 3.00 | 2.40 | **no** | yes |" in lines


def test_a_step_that_needs_no_bytes_has_no_ratio(bench: Any) -> None:
    report = bench("policies.report")
    fits = row(bytes_in=0, bound_bytes_in=0)
    assert report.bytes_ratio(fits) is None
    assert "1.10, -" in "\n".join(report.sections([fits]))


def test_a_policy_that_fails_is_said_and_stops_no_other(bench: Any) -> None:
    failed = {key: value for key, value in row(policy="lms").items() if not key.endswith("_us")}
    text = "\n".join(bench("policies.report").sections([row(), {**failed, "error": "E: why"}]))
    assert "| bert_base_b64 | a100-pcie4 | 1/2 | lms | E: why |" in text


def test_a_summary_has_all_that_the_report_says(bench: Any) -> None:
    summary, report = bench("policies.summary"), bench("policies.report")
    failed = {key: value for key, value in row(policy="lms").items() if not key.endswith("_us")}
    rows = [
        row(step_us=1234.5678912, lp_floor_us=101.0),
        {**failed, "error": "E: why"},
        row(policy="lru", faults=3, lp_floor_us=101.0),
        row(fraction="1/4", budget=GIB),
    ]
    stored = json.loads(json.dumps(summary.of(rows)))
    assert len(stored["cases"]) == 2
    again = summary.rows(stored)
    assert again[0]["step_us"] == 1234.568
    assert [made["policy"] for made in again] == ["auto", "lms", "lru", "auto"]
    assert report.sections(again) == report.sections(rows)


def test_every_name_that_the_report_uses_is_a_workload(bench: Any) -> None:
    workloads = bench("policies.workloads")
    assert set(workloads.G10) | set(workloads.CONVOLUTIONAL) <= set(workloads.WORKLOADS)
    assert sum(w.smoke for w in workloads.WORKLOADS.values()) == 2


@pytest.mark.nightly
def test_the_smoke_run_traces_replays_and_reports(
    bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    run = bench("policies.run")
    words = ["--smoke", "--jobs", "1", "--work", str(tmp_path / "work"), "--out", str(tmp_path)]
    assert run.main(words) == 0
    (data,) = tmp_path.glob("policies_*.json")
    record = json.loads(data.read_text())
    rows = bench("policies.summary").rows(record["details"])
    assert len(rows) == 2 * 2 * len(run.SMOKE_POLICIES)
    for made in rows:
        assert made["step_us"] >= made["floor_us"] * (1 - 1e-9)
        assert made["bytes_in"] >= made["bound_bytes_in"] > 0
    (page,) = tmp_path.glob("policies_*.md")
    assert "| resnet_smoke | 1/2 |" in page.read_text()
    capsys.readouterr()
    assert run.main([*words, "--resume"]) == 0  # nothing is redone
    assert "resnet_smoke: done before" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--policy", "lur"], "--policy lur: allowed: auto"),
        (["--device", "x"], "--device x: allowed: "),
        (["--jobs", "0"], "--jobs 0: allowed: 1 and up"),
        (["--workload", "x"], "invalid choice: 'x'"),
    ],
)
def test_bad_words_are_refused(
    bench: Any, capsys: pytest.CaptureFixture[str], words: list[str], reason: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        bench("policies.run").main(words)
    assert stopped.value.code == 2
    assert reason in capsys.readouterr().err
