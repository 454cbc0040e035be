"""The record, its order, its text and its page."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re
from pathlib import Path
from typing import Any

import generate_options_doc
import numpy as np
import pytest
from support import synthetic

import umem
from umem.base import device_profiles
from umem.base.stats import Stats
from umem.monitor import summary as text
from umem.policies.default.planner import Auto
from umem.session.planned_step import PlannedStep
from umem.simulation.replay import replay_step
from umem.trace.step_builder import last_step
from umem.trace.step_trace import StepTrace

ROOT = Path(__file__).resolve().parents[2]
NAMES = [field.name for field in dataclasses.fields(Stats)]


def test_the_record_is_that_of_the_native_side() -> None:
    from umem.base.native import core

    definition = (ROOT / "src" / "runtime" / "stats.def").read_text()
    assert re.findall(r"^UMEM_STAT\((\w+),", definition, re.MULTILINE) == NAMES
    assert set(core.stats()) == set(NAMES) == set(core.stats_docs())
    assert isinstance(umem.stats(), Stats)


def test_the_options_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "options.md").read_text()
    assert page == generate_options_doc.render(), "run `make options-doc`"


def test_the_summary_shows_every_figure_that_moves() -> None:
    timed = {f"timed_bytes_{way}": 64 << 20 for way in ("in", "out")}
    timed |= {f"timed_busy_{way}_us": 2000 for way in ("in", "out")}
    zero = Stats(**{**dict.fromkeys(NAMES, 0), "disk_file_bytes": 1, **timed})
    plain = text.Summary(zero, device="soft", policy="lru")
    assert "device soft, policy lru" in plain
    assert "33.6 GB/s  in; 33.6 GB/s out, of the transfers that were timed" in plain
    for name in NAMES:
        changed = dataclasses.replace(zero, **{name: 7 << 20})
        assert text.Summary(changed, device="soft", policy="lru") != plain, name
    for copied in (pickle.loads(pickle.dumps(plain)), copy.deepcopy(plain)):
        assert copied == plain
        assert copied._repr_html_() == plain._repr_html_()


def test_the_summary_counts_in_units() -> None:
    values = {**dict.fromkeys(NAMES, 0), "budget_bytes": 32 << 20, "evictions": 5}
    assert "(virtual)" in text.Summary(Stats(**values), device="soft", policy="lru")
    gpu = text.Summary(Stats(**values), device="cuda", policy="lru")
    assert "(virtual)" not in gpu  # a driver reports neither faults nor stalls
    assert "faults" not in gpu.partition("driver calls failed")[0]
    summary = text.Summary(Stats(**values), device="soft", policy="lru")
    assert re.search(r"^budget +32 MiB  device soft", summary, re.MULTILINE)
    assert "5 evictions" in summary
    assert "of unlimited" in summary


def stats(**values: int) -> Stats:
    return Stats(**{**dict.fromkeys(NAMES, 0), **values})


def test_the_closing_line_has_both_peaks() -> None:
    run = stats(
        steps=3, plan_hits=3, plan_misses=1, bytes_in=5 << 20, peak_resident_bytes=16 << 20,
        budget_bytes=16 << 20, peak_live_bytes=12 << 20,
    )  # fmt: skip
    assert text.closing(run) == (
        "umem: 3 steps, plan hits 75.0 % (3 of 4 ops), 5 MiB in, 0 B out, 0 faults, "
        "peak 16 MiB of 16 MiB, live at most 12 MiB"
    )
    assert text.closing(stats(steps=1)).startswith("umem: 1 step, no plan used, 0 B in")
    # A GPU's driver does not report faults.
    assert text.closing(run, device="cuda") == text.closing(run).replace(" 0 faults,", "")


def test_the_closing_line_says_how_much_a_disk_is_written() -> None:
    run = stats(steps=10, disk_bytes_out=50 << 20, disk_open_us=10_000_000, disk_file_bytes=1)
    assert text.closing(run).endswith(
        "5 MiB a step written to the disk, 0.45 TB a day at this rate"
    )
    more = text.closing(run, disk_writes=400_000_000_000)
    assert "written at more than disk_writes, 0.4 TB a day; docs/disk.md says" in more
    assert "disk_writes" not in text.closing(run, disk_writes=500_000_000_000)
    fast = dataclasses.replace(run, disk_bytes_out=14 << 30)
    assert text.closing(fast).endswith(", 130 TB a day at this rate")
    slow = dataclasses.replace(run, disk_bytes_out=1 << 12)
    assert text.closing(slow).endswith(", 35 MB a day at this rate")
    early = dataclasses.replace(run, disk_open_us=100)
    assert text.closing(early).endswith("a step written to the disk")


def test_advice_says_what_to_change() -> None:
    assert text.advice(stats(budget_bytes=8 << 20, peak_live_bytes=16 << 20)) == []
    short = stats(
        budget_bytes=8 << 20, peak_live_bytes=64 << 20, bytes_in=1, faults=9, evictions=1, steps=4,
        ops_above_budget=2, largest_op_bytes=12 << 20,
    )  # fmt: skip
    assert text.advice(short, "3 recorded steps have no plan: they differ") == [
        "3 recorded steps have no plan: they differ",
        "change first: a budget of 12 MiB: 2 operators alone needed up to that, more than the "
        "budget, and were slow",
    ]
    still = stats(budget_bytes=8 << 20, peak_unmanaged_bytes=2 << 20)
    assert text.advice(still) == [
        "a step used 2 MiB that umem does not manage: tensors made before umem.enable() or in "
        "another pool, or memory of another library (a mapped file, an array)"
    ]
    assert text.advice(dataclasses.replace(still, peak_unmanaged_bytes=1 << 20)) == []
    small = dataclasses.replace(short, peak_small_bytes=40 << 20, largest_op_bytes=0, faults=90)
    assert text.advice(small, "", [("aten::mean", 60), ("aten::add", 30)]) == [
        "aten::mean took 60 of 90 page faults, more than any other",
        "40 MiB of 64 MiB were in tensors below 2 MiB: they move with those in the same page",
        "change first: a budget of about 64 MiB, at which nothing moves; if there is no more "
        "memory, `umem run --report FILE.html` replays the step with recompute=auto and "
        "optimizer=auto",
    ]
    assert len(text.advice(small, "", [("aten::mean", 9)])) == 2
    # The recorded step counts, and not the peak of the program before it.
    plain = dataclasses.replace(small, peak_small_bytes=0)
    assert text.advice(plain, step=text.StepCost(1.04, 20 << 20)) == []
    assert text.advice(plain, step=text.StepCost(1.2, 20 << 20), tried=True) == [
        "change first: a budget of about 20 MiB, at which a step moves nothing"
    ]
    # A disk's transfers take a share of the option.
    staged = dataclasses.replace(plain, disk_file_bytes=1)
    assert text.advice(staged, step=text.StepCost(1.2, 98 << 20), tried=True) == [
        "change first: a budget of about 104 MiB, at which a step moves nothing"
    ]
    # Recomputation and updates on the host are for trainings.
    cost = text.StepCost(1.2, 20 << 20, trains=False)
    assert text.advice(plain, step=cost) == text.advice(plain, step=cost, tried=True)
    roomy = dataclasses.replace(short, peak_live_bytes=1, largest_op_bytes=0)
    assert text.advice(roomy, "they differ") == []
    # One of two devices lacks memory, which the sum of both does not show.
    both = dataclasses.replace(roomy, budget_bytes=2 * short.budget_bytes, peak_live_bytes=1)
    full = dataclasses.replace(short, largest_op_bytes=0, peak_live_bytes=12 << 20)
    cost = text.StepCost(1.2, 11 << 20)
    assert text.advice(both, fullest=full, step=cost, tried=True) == [
        "change first: a budget of about 11 MiB, at which a step moves nothing"
    ]
    assert "a budget of 12 MiB" in text.advice(both, fullest=short)[-1]
    closing = text.closing(short)
    assert closing.count("\numem: ") == closing.count("change first") == 1
    shown = text.Summary(short, device="soft", policy="lru", advice=text.advice(short))
    assert "advice" in shown
    assert shown.count("\n") == closing.count("\n") + text.Summary(
        short, device="soft", policy="lru"
    ).count("\n")
    assert "change first: a budget of 12 MiB" in shown._repr_html_()


def test_what_the_advice_names_is_faster_in_replay() -> None:
    """Over networks and budgets: at least 5 %, as the report would find; else there is none."""
    device = device_profiles.find("a100-pcie4")
    named = 0
    for layers, activation in ((6, 4 << 20), (12, 16 << 20), (24, 32 << 20), (9, 8 << 20)):
        step = last_step(synthetic.training(layers, 2 << 20, activation, 2, optimizer=True))
        for share in (0.3, 0.45, 0.6, 0.75, 0.9):
            budget = max(int(step.peak_bytes * share), 16 << 20)
            run = stats(budget_bytes=budget, peak_live_bytes=2 * step.peak_bytes, bytes_in=1)
            cost = PlannedStep(step, np.zeros(step.n_tensors, int), device, budget).cost(budget)
            if not text.advice(run, step=cost):
                continue
            named += 1
            now, then = (
                replay_step(step, "auto", device, bytes_).step_us
                for bytes_ in (budget, cost.peak_bytes + (8 << 20))
            )
            assert now > 1.04 * then
    assert 4 < named < 20


def test_the_cost_of_an_unchanged_step_is_estimated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    estimated: list[int] = []
    estimate = Auto.estimate_us

    def counted(auto: Auto, step: StepTrace, device: Any, budget: int, **how: bool) -> float:
        estimated.append(budget)
        return estimate(auto, step, device, budget, **how)

    monkeypatch.setattr(Auto, "estimate_us", counted)
    step = last_step(synthetic.training(6, 2 << 20, 4 << 20, 2))
    device = device_profiles.find("a100-pcie4")
    planned = PlannedStep(step, np.zeros(step.n_tensors, int), device, 16 << 20)
    first, *others = [planned.cost(budget) for budget in (32 << 20, 16 << 20, 32 << 20, 16 << 20)]
    assert estimated == [32 << 20, 16 << 20]
    assert first == others[1] != others[0] == others[2]
    assert dataclasses.replace(planned, budget=1).cost(32 << 20) == first
    assert len(estimated) == 3  # the link of the replaced step may differ


def test_a_notebook_shows_the_record_as_a_table() -> None:
    assert "<th>faults</th><td>12,345</td>" in stats(faults=12345)._repr_html_()
