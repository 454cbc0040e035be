"""The display of `umem top` for two samples, and `umem.summary()` in a notebook."""

from __future__ import annotations

import dataclasses
from typing import Any

from umem.base.stats import Stats
from umem.base.units import GIB, MIB
from umem.monitor import summary as text
from umem.monitor import top

NAMES = [field.name for field in dataclasses.fields(Stats)]


def sample(seconds: float, pid: int = 7, program: str = "train.py", **stats: int) -> dict[str, Any]:
    return {
        "pid": pid, "socket": str(pid), "program": program, "time": seconds, "device": "soft",
        "policy": "auto", "allocator": "subclass", "stats": {**dict.fromkeys(NAMES, 0), **stats},
        "tags": {
            "param": {"blocks": 2, "bytes": 8 * MIB, "resident_bytes": 2 * MIB},
            "grad": {"blocks": 0, "bytes": 0, "resident_bytes": 0},
            "cached": {"blocks": 1, "bytes": 10 * MIB, "resident_bytes": 10 * MIB},
        },
    }  # fmt: skip


def test_rates_are_of_the_time_between() -> None:
    view = top.view(
        sample(12.0, bytes_in=5 * GIB, bytes_out=2 * GIB, plan_hits=190, plan_misses=20, steps=4),
        sample(10.0, bytes_in=1 * GIB, bytes_out=2 * GIB, plan_hits=100, plan_misses=10),
    )
    assert view["in_bytes_per_s"] == 2 * GIB
    assert view["out_bytes_per_s"] == 0
    assert view["steps_per_s"] == 2
    assert view["plan_hit_share"] == 0.9
    shown = top.render(view)
    assert "lane in   5 GiB, 2 GiB/s" in shown
    assert "90.0 % of ops as planned (190 of 210 in total)" in shown


def test_counters_that_begin_again_are_counted_from_0() -> None:
    view = top.view(
        sample(12.0, bytes_in=GIB, steps=10, plan_hits=8, plan_misses=2),
        sample(10.0, bytes_in=5 * GIB, steps=4, plan_hits=100, plan_misses=3),
    )
    assert view["in_bytes_per_s"] == GIB / 2
    assert view["steps_per_s"] == 5
    assert view["plan_hit_share"] == 0.8


def test_without_an_earlier_sample_there_are_no_rates() -> None:
    now = sample(12.0, bytes_in=GIB, plan_hits=3, plan_misses=1)
    for before in (None, sample(10.0, pid=8)):
        view = top.view(now, before)
        assert view["in_bytes_per_s"] is None
        assert view["plan_hit_share"] == 0.75
        assert "/s" not in top.render(view)


def test_the_view_shows_the_budget_and_tags_with_bytes() -> None:
    now = sample(1.0, budget_bytes=64 * MIB, resident_bytes=32 * MIB, asleep_bytes=6 * MIB,
                 pinned_bytes=10 * MIB)  # fmt: skip
    lines = top.render(top.view(now, None)).splitlines()
    assert "resident  [" + "#" * 15 + "." * 15 + "] 32 MiB of 64 MiB (50 %)" in lines
    assert any("pinned 10 MiB, asleep 6 MiB" in line for line in lines)
    tags = [line.split() for line in lines[-2:]]
    assert tags[0][:2] == ["cached", "1"]
    assert " ".join(tags[1]) == "param 2 8 MiB 2 MiB 6 MiB"


def test_figures_that_a_hostile_peer_chose_are_shown() -> None:
    now = sample(2e-300, bytes_in=2**63 - 1, budget_bytes=1, resident_bytes=2**63 - 1)
    now["tags"]["param"]["resident_bytes"] = 2**62
    assert "lane in   8388608.00 TiB" in top.render(top.view(now, sample(1e-300)))


def ranks(*steps: float, moved: tuple[int, ...] = (0, 0, 0)) -> list[dict[str, Any]]:
    """Views of processes 1, 2, ... over one second."""
    found = []
    for pid, (n, count) in enumerate(zip(steps, moved, strict=False), 1):
        now = sample(1.0, pid=pid, program=f"[rank {pid - 1} of {len(steps)}] x.py", bytes_in=count,
                     steps=round(1000 * n), resident_bytes=MIB, budget_bytes=4 * MIB)  # fmt: skip
        found.append(top.view(now, sample(-999.0, pid=pid)))
    return found


def test_processes_are_summed_and_the_slowest_is_named() -> None:
    found = top.overall(ranks(3.0, 2.0, 3.0, moved=(1000 * MIB, 0, 2000 * MIB)))
    assert found["slowest"] == "2"
    assert found["sum"]["resident_bytes"] == 3 * MIB
    assert found["sum"]["in_bytes_per_s"] == 3 * MIB
    lines = top.render_all(found).splitlines()
    assert lines[0] == "umem top: 3 processes"
    assert lines[4].split() == [
        "2", "1", "MiB", "4", "MiB", "0", "B", "0", "B", "0", "B", "0", "2.00", "-",
        "[rank", "1", "of", "3]", "x.py",
    ]  # fmt: skip
    assert lines[6].split()[:5] == ["sum", "3", "MiB", "12", "MiB"]
    assert lines[-1] == "slowest: 2 [rank 1 of 3] x.py"


def test_of_ranks_in_lockstep_the_slowest_moves_the_most() -> None:
    assert top.overall(ranks(3.0, 2.99, 3.0, moved=(5, 0, 9)))["slowest"] == "3"


def stepping(*steps: int, moved: tuple[int, ...] = (0, 0, 0)) -> list[dict[str, Any]]:
    """Views of processes 1, 2, ... over a second, before which each made 5 steps."""
    return [
        top.view(sample(1.0, pid, steps=5 + n, bytes_in=count), sample(0.0, pid, steps=5))
        for pid, (n, count) in enumerate(zip(steps, moved, strict=False), 1)
    ]


def test_a_rank_without_a_step_in_the_interval_is_the_slowest() -> None:
    assert top.overall(stepping(3, 0, 3, moved=(9, 0, 9)))["slowest"] == "2"


def test_a_step_more_or_less_in_the_interval_is_no_difference() -> None:
    assert top.overall(stepping(1, 2, 1, moved=(0, 9, 5)))["slowest"] == "2"
    assert top.overall(stepping(0, 1, moved=(0, 9)))["slowest"] == "2"
    assert top.overall(stepping(1, 3, moved=(0, 9)))["slowest"] == "1"


def test_a_process_alone_or_without_steps_is_not_the_slowest() -> None:
    assert top.overall(ranks(3.0))["slowest"] is None
    assert top.overall(ranks(3.0, 0.0))["slowest"] is None
    unknown = top.overall([top.view(sample(1.0, pid=n, program="x\x1b"), None) for n in (1, 2)])
    assert unknown["slowest"] is None
    assert "\x1b" not in top.render_all(unknown)


def test_of_two_processes_of_one_id_one_is_the_slowest() -> None:
    fast, slow = ranks(3.0, 2.0)
    found = top.overall([fast, {**slow, "pid": fast["pid"], "socket": "1-2"}])
    assert found["slowest"] == "1-2"
    lines = top.render_all(found).splitlines()
    assert [line.split()[0] for line in lines[3:5]] == ["1", "1-2"]
    assert [line for line in lines if "slowest" in line] == ["slowest: 1-2 [rank 1 of 2] x.py"]


def test_a_gpu_shows_no_faults() -> None:
    """Its driver does not report them."""
    soft = top.view(sample(1.0), sample(0.0))
    gpu = top.view(sample(1.0) | {"device": "cuda"}, sample(0.0))
    assert (soft["faults_per_s"], gpu["faults_per_s"]) == (0, None)
    assert "faults    0, 0 a second" in top.render(soft)
    assert "faults" not in top.render(gpu)
    assert top.overall([soft, gpu])["sum"]["faults_per_s"] == 0
    assert top.overall([gpu])["sum"]["faults_per_s"] is None


def test_a_programs_name_moves_no_cursor() -> None:
    shown = top.render(top.view(sample(1.0, program="x\x1b[2J\n.py"), None))
    assert "\x1b" not in shown
    assert r"x\x1b[2J\n.py" in shown


def test_a_summary_is_text_and_a_table() -> None:
    stats = Stats(**{**dict.fromkeys(NAMES, 0), "budget_bytes": 32 * MIB, "evictions": 5})
    words: Any = {"device": "soft", "policy": "<lru>", "allocator": "subclass: a & b"}
    summary = text.Summary(stats, **words)
    assert summary == str(summary) == repr(summary)
    table = summary._repr_html_()
    assert "<tr><th>budget</th><td style='text-align: right'>32 MiB</td>" in table
    assert "policy &lt;lru&gt;" in table
    assert "a &amp; b" in table
    assert table.count("<tr>") == len(summary.splitlines())
