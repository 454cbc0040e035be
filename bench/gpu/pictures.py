"""The report's pictures: rates over sizes, and step times over budgets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu.record import Record
from umem.base.units import MIB
from umem.demo import data

WAYS_OF_TORCH = {"plain": "black", "save_on_cpu": "sienna", "checkpoint": "olive"}


def draw(records: Sequence[Record], folder: Path, stem: str) -> list[Path]:
    """Draw what the records have; returns the files.

    Raises:
        NotSupportedError: matplotlib is not installed.
    """
    found = {record.part: record.details for record in records}
    rates = found.get("micro_bandwidth", {}).get("rates", {})
    trainings = found.get("outofcore", {}).get("outofcore", {})
    paths = []
    if rates:
        paths.append(_save(_rates(rates), folder / f"{stem}_bandwidth.png"))
    if trainings:
        paths.append(_save(_steps(trainings), folder / f"{stem}_outofcore.png"))
    return paths


def _rates(rates: dict[str, list[list[float]]]) -> Any:
    figure = _figure(6.4, 4.0)
    axes = figure.subplots()
    for way, points in rates.items():
        style = "--" if way.startswith("pinned") else "-"
        axes.plot(
            [x / MIB for x, _ in points], [y for _, y in points], style, marker="o", label=way
        )
    axes.set_xscale("log", base=2)
    axes.set_xlabel("MiB")
    axes.set_ylabel("GB/s")
    axes.set_ylim(bottom=0)
    axes.legend()
    axes.set_title("Bytes that travel, by size")
    return figure


def _steps(trainings: dict[str, dict[str, Any]]) -> Any:
    figure = _figure(4.8 * len(trainings), 4.2)
    grid = figure.subplots(1, len(trainings), squeeze=False)[0]
    for axes, (name, training) in zip(grid, trainings.items(), strict=True):
        _draw_training(axes, name, training["rows"])
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    figure.suptitle("Step time by budget")
    return figure


def _draw_training(axes: Any, name: str, rows: list[dict[str, Any]]) -> None:
    budgets = [row for row in rows if row["fraction"] is not None]
    for policy in dict.fromkeys(row["way"] for row in budgets):
        mine = [row for row in budgets if row["way"] == policy and row["step"] is not None]
        times = [row["step"]["median"] for row in mine]
        axes.plot([row["fraction"] for row in mine], times, marker="o", label=policy)
    floor = {row["fraction"]: row["floor_ms"] for row in budgets if row["floor_ms"] is not None}
    axes.plot(list(floor), list(floor.values()), color="crimson", linestyle="--", label="floor")
    for row in rows:
        if row["fraction"] is None and row["step"] is not None:
            colour = WAYS_OF_TORCH[row["way"]]
            axes.axhline(
                row["step"]["median"], color=colour, linestyle=":", label=f"torch: {row['way']}"
            )
    axes.set_title(name, fontsize=10)
    axes.set_xlabel("budget, share of the peak")
    axes.set_ylabel("ms a step")
    axes.set_yscale("log")


def _figure(width: float, height: float) -> Any:
    return data.need("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=110)
    return path
