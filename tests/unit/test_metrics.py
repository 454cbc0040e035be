"""`umem top --metrics`: Prometheus's own parser reads it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families as read

from umem.base.native import core
from umem.base.stats import Stats
from umem.cli import main
from umem.monitor import server
from umem.monitor.metrics import COUNTERS, metrics

NAMES = [field.name for field in dataclasses.fields(Stats)]
MEANINGS = {name: f"what {name} is" for name in NAMES}


def sample(pid: int, program: str = "train.py", **stats: int) -> dict[str, Any]:
    return {
        "pid": pid, "socket": str(pid), "program": program, "time": 1.0, "device": "soft",
        "policy": "auto",
        "allocator": "subclass", "stats": {**{name: i for i, name in enumerate(NAMES)}, **stats},
        "tags": {"param": {"blocks": 2, "bytes": 800, "resident_bytes": 300}},
    }  # fmt: skip


def values(text: str) -> dict[str, dict[tuple[str, str], float]]:
    """By metric, process and tag."""
    return {
        family.name: {(s.labels["pid"], s.labels.get("tag", "")): s.value for s in family.samples}
        for family in read(text)
    }


def test_each_field_of_each_process_is_a_metric() -> None:
    found = values(metrics([sample(7), sample(8, bytes_in=5 << 40)], MEANINGS))
    for index, name in enumerate(NAMES):
        assert found[f"umem_{name}"][("7", "")] == index
    assert found["umem_bytes_in"] == {("7", ""): NAMES.index("bytes_in"), ("8", ""): 5 << 40}
    assert found["umem_tag_resident_bytes"] == {("7", "param"): 300, ("8", "param"): 300}


def test_what_only_grows_is_a_counter() -> None:
    families = {family.name: family for family in read(metrics([sample(7)], MEANINGS))}
    kinds = {name: families[f"umem_{name}"].type for name in NAMES}
    assert {name for name, kind in kinds.items() if kind == "counter"} == COUNTERS
    assert {kinds[name] for name in set(NAMES) - COUNTERS} == {"gauge"}
    assert {"disk_bytes_in", "disk_bytes_out", "disk_busy_in_us", "disk_busy_out_us"} <= COUNTERS
    assert not any(name.startswith(("peak_", "largest_")) for name in COUNTERS)  # a reset lowers it
    assert families["umem_faults"].documentation == "what faults is"


def test_processes_of_one_id_are_told_apart() -> None:
    """Equal labels would make Prometheus refuse the sample."""
    text = metrics([sample(7), sample(7) | {"socket": "7-2"}], MEANINGS)
    for family in read(text):
        labels = [tuple(sorted(each.labels.items())) for each in family.samples]
        assert len(set(labels)) == len(labels) == 2


def test_a_gpu_has_no_figure_of_what_its_driver_does_not_report() -> None:
    found = values(metrics([sample(7), sample(8) | {"device": "cuda"}], MEANINGS))
    lacking = {name for name in NAMES if ("8", "") not in found[f"umem_{name}"]}
    assert lacking == {"faults", "stall_us"}
    assert all(("7", "") in found[f"umem_{name}"] for name in NAMES)


def test_names_from_elsewhere_stay_labels() -> None:
    program = 'a"} 1\n\\ b\x1b[2J'
    text = metrics([sample(7, program=program)], MEANINGS)
    assert "\x1b" not in text
    (only,) = next(f for f in read(text) if f.name == "umem_faults").samples
    assert only.labels["program"] == r'a"} 1\n\ b\x1b[2J'


def test_a_live_process_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    server.start(True, lambda: {"device": "soft:a100-pcie4", "policy": "lru", "allocator": ""})
    try:
        assert main(["top", "--metrics", "--all"]) == 0
    finally:
        server.stop()
    shown = capsys.readouterr().out
    found = values(shown)
    assert set(core.stats_docs()) == set(NAMES)
    assert {f"umem_{name}" for name in NAMES} <= found.keys()
    assert f"# HELP umem_faults_total {core.stats_docs()['faults']}" in shown
