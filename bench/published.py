"""Peaks that `umem plan MODEL --train` predicts, against peaks that others measured and published.

``python bench/published.py [--smoke]`` writes published_fake-tensors_<date>.{json,md} to
bench/results. The predictions are of tensors without data and a model of torch's allocator: they
depend on no machine, and no constant is fitted to the table. It needs transformers, peft and
torchvision.
"""

from __future__ import annotations

import argparse
import datetime
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from facts import version_facts
from harness import add_outputs, cases, note, results_folder, table, write
from published_cases import CASES, SOURCES, Case

from umem.analysis.caching_allocator import replay
from umem.base.progress import over
from umem.base.units import GIB
from umem.capture.models import networks, training

CLOSE = 0.10  # a larger difference has a reason in the table
LIBRARIES = ("transformers", "peft", "torchvision")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench/published.py", description=__doc__)
    add_outputs(parser)
    args = parser.parse_args(argv)
    folder = results_folder(parser, args)
    chosen = CASES[:1] if args.smoke else CASES
    with cases(len(chosen)) as advance:
        rows = [predicted(case) for case in over(chosen, advance)]
    versions = version_facts() | {name: metadata.version(name) for name in LIBRARIES}
    page = report(rows, versions)
    print(page)
    if folder is not None:
        stem = f"published_fake-tensors_{datetime.date.today().isoformat()}"
        record = {"versions": versions, "sources": SOURCES, "rows": rows}
        print("\n".join(map(str, write(folder, stem, record, page))))
    return 0


def predicted(case: Case) -> dict[str, Any]:
    """Return the case with the peaks that are predicted for it."""
    note(f"{case.model}, {case.said}")
    with tempfile.TemporaryDirectory() as place:
        text = case.config if isinstance(case.config, str) else "config.json"
        if not isinstance(case.config, str):
            (Path(place) / text).write_text(json.dumps(case.config))
        source = networks.find(text, Path(place))
    shape = networks.Shape(case.batch, case.sequence)
    run = training.record(source, shape, case.how, whole_lists=True)
    torch = replay(run.recording.events)
    bytes_ = torch.peak_allocated if case.counter == "allocated" else torch.peak_reserved
    bytes_of_number = 2 if case.how.in_precision == "bf16" else 4
    also = {"": 0, "gradients": run.trained * bytes_of_number, "logits": 4 * _logits(case)}
    ratio = bytes_ / case.measured
    if abs(ratio - 1) > CLOSE and not case.reason:
        note(f"  {ratio:.2f} of the measured peak, for no known reason")
    return {
        **asdict(case),
        "parameters": run.parameters,
        "allocated": torch.peak_allocated,
        "reserved": torch.peak_reserved,
        "predicted": bytes_,
        "ratio": ratio,
        "also_bytes": also[case.also],
        "ratio_with_it": (bytes_ + also[case.also]) / case.measured,
    }


def _logits(case: Case) -> int:
    """Return the number of a language model's outputs in a step."""
    words = case.config.get("vocab_size", 0) if isinstance(case.config, dict) else 0
    return int(words) * case.batch * (case.sequence or 0)


def report(rows: Sequence[dict[str, Any]], versions: dict[str, str]) -> str:
    """Format the page."""
    near, nearer = (
        sum(abs(row[name] - 1) <= CLOSE for row in rows) for name in ("ratio", "ratio_with_it")
    )
    known = ", ".join(f"{name} {versions[name]}" for name in LIBRARIES)
    return "\n".join([
        "# Predicted peaks against published ones",
        "",
        f"umem at commit {versions['commit']}, torch {versions['torch']}, {known}. Tensors without "
        "data: no figure depends on the machine. `python bench/published.py`",
        "",
        f"{near} of {len(rows)} peaks are within {CLOSE:.0%}; {nearer} with the bytes that the "
        "reason names and arithmetic gives.",
        "",
        *lines(rows),
        *(f"{number}. <{url}>" for number, url in enumerate(SOURCES.values(), 1)),
        "",
    ])  # fmt: skip


def lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the table of all rows; the page in docs has the same."""
    numbers = {name: number for number, name in enumerate(SOURCES, 1)}
    head = (
        "model", "training", "counter", "measured", "predicted", "ratio", "with it", "reason",
        "source",
    )  # fmt: skip
    return table(
        head,
        [
            (row["model"], row["said"], row["counter"], _gib(row["measured"]),
             _gib(row["predicted"]), f"{row['ratio']:.2f}",
             f"{row['ratio_with_it']:.2f}" if row["also"] else "",
             row["reason"] if abs(row["ratio"] - 1) > CLOSE else "", f"[{numbers[row['source']]}]")
            for row in rows
        ],
    )  # fmt: skip


def _gib(bytes_: float) -> str:
    return f"{bytes_ / GIB:.2f} GiB"


if __name__ == "__main__":
    raise SystemExit(main())
