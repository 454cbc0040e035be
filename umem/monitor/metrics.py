"""Samples of processes in Prometheus's text format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from ..base.stats import Stats
from ..errors import plain

# Statistics that only grow while umem is on; all others are gauges.
COUNTERS = frozenset(
    (
        "bytes_in",
        "bytes_out",
        "bytes_discarded",
        "faults",
        "evictions",
        "prefetches",
        "prefetched_unused_bytes",
        "stall_us",
        "disk_bytes_in",
        "disk_bytes_out",
        "disk_busy_in_us",
        "disk_busy_out_us",
        "plan_hits",
        "plan_misses",
        "plans_rolled_back",
        "allocs",
        "frees",
        "ooms",
        "steps",
        "capture_skips",
        "hook_errors",
        "zero_copy_bytes",
        "ops_above_budget",
        "advice_ignored",
    )
)
_NOT_OF_A_GPU = ("faults", "stall_us")  # its driver reports neither
# Containers that share the directory may have processes of the same ID, but not of the same socket.
OF_A_PROCESS = ("pid", "socket", "program", "device", "policy", "allocator")
_OF_A_TAG = {
    "blocks": "blocks with this tag",
    "bytes": "bytes in blocks with this tag",
    "resident_bytes": "of these, on the device",
}
Sample = Mapping[str, Any]  # sent by umem/monitor/server.py
_Value = tuple[dict[str, str], int]  # labels and value


def is_measured(name: str, device: str) -> bool:
    """Return whether the device measures the statistic; else it is 0, which says nothing."""
    return device != "cuda" or name not in _NOT_OF_A_GPU


def growth(now: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    """Return what each counter has grown by; from 0 if umem was turned on again in between."""
    restarted = any(now[name] < before[name] for name in COUNTERS)
    return {name: now[name] - (0 if restarted else before[name]) for name in COUNTERS}


def metrics(samples: Sequence[Sample], meanings: Mapping[str, str]) -> str:
    """Format samples of one or more processes, one metric for each field of `umem.stats()`.

    A metric is named `umem_` and the field, and ends in `_total` if it only grows. Its labels are
    the process, the name of its socket, its program, device, policy and allocator; `umem_tag_*`
    have the tag in addition. Processes that do not measure a field are left out of its metric.
    Prometheus's text format, version 0.0.4:
    https://prometheus.io/docs/instrumenting/exposition_formats/

    Args:
        samples: the answers of the processes.
        meanings: a sentence for each field.
    """
    lines: list[str] = []
    for field in fields(Stats):
        kind = "counter" if field.name in COUNTERS else "gauge"
        values = (
            (_labels(sample), sample["stats"][field.name])
            for sample in samples
            if is_measured(field.name, sample["device"])
        )
        lines += _metric(field.name, kind, meanings[field.name], values)
    for name, meaning in _OF_A_TAG.items():
        lines += _metric(f"tag_{name}", "gauge", meaning, _of_tags(samples, name))
    return "\n".join(lines) + "\n"


def _of_tags(samples: Iterable[Sample], name: str) -> Iterator[_Value]:
    for sample in samples:
        for tag, row in sample["tags"].items():
            yield {**_labels(sample), "tag": tag}, row[name]


def _labels(sample: Sample) -> dict[str, str]:
    return {name: str(sample[name]) for name in OF_A_PROCESS}


def _metric(name: str, kind: str, meaning: str, values: Iterable[_Value]) -> Iterator[str]:
    full = f"umem_{name}_total" if kind == "counter" else f"umem_{name}"
    help_text = meaning.replace("\\", r"\\").replace("\n", r"\n")
    yield f"# HELP {full} {help_text}"
    yield f"# TYPE {full} {kind}"
    for labels, value in values:
        inside = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
        yield f"{full}{{{inside}}} {value}"


def _escaped(text: str) -> str:
    return plain(text).replace("\\", r"\\").replace('"', r"\"")
