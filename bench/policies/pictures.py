"""Step times over budgets by policy, and how far from the floor each policy is."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from policies.ratios import geomean, step_ratio
from policies.study import Row

COLUMNS = 4
COLOURS = 64  # a picture of few lines and letters needs no more, and takes a third of the bytes


def draw(rows: Sequence[Row], device: str, folder: Path, stem: str) -> list[Path]:
    """Two pictures of one device's rows; returns the files, none without rows or matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return []
    mine = [row for row in rows if row["device"] == device and "error" not in row]
    if not mine:
        return []
    made = {"floor": _spread(mine, Figure), "budgets": _budgets(mine, Figure)}
    paths = []
    for name, figure in made.items():
        path = folder / f"{stem}_{device}_{name}.png"
        _save(figure, path)
        paths.append(path)
    return paths


def _save(figure: Any, path: Path) -> None:
    from PIL import Image  # matplotlib needs it, too

    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=90)
    picture = Image.open(drawn).convert("RGB")
    picture.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)


def _spread(rows: Sequence[Row], figure_of: Any) -> Any:
    """Draw a dot per workload and budget, and the geometric mean."""
    policies = sorted(
        dict.fromkeys(row["policy"] for row in rows),
        key=lambda name: geomean(step_ratio(row) for row in rows if row["policy"] == name),
    )
    figure = figure_of(figsize=(7.0, 1.2 + 0.32 * len(policies)), layout="constrained")
    axes = figure.subplots()
    for place, name in enumerate(policies):
        ratios = [step_ratio(row) for row in rows if row["policy"] == name]
        axes.plot(ratios, [place] * len(ratios), "o", color="steelblue", alpha=0.35, markersize=4)
        axes.plot([geomean(ratios)], [place], "|", color="crimson", markersize=14)
    axes.set_yticks(range(len(policies)), policies)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("step / lower bound (log); red: geometric mean")
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_title("How far from the floor: all workloads and budgets", fontsize=10)
    return figure


def _budgets(rows: Sequence[Row], figure_of: Any) -> Any:
    names = list(dict.fromkeys(row["workload"] for row in rows))
    lines = -(-len(names) // COLUMNS)
    figure = figure_of(figsize=(4.0 * COLUMNS, 3.0 * lines), layout="constrained")
    grid = figure.subplots(lines, COLUMNS, squeeze=False).ravel()
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    for axes, name in zip(grid, names, strict=False):
        of_name = [row for row in rows if row["workload"] == name]
        for place, policy in enumerate(policies):
            mine = [row for row in of_name if row["policy"] == policy]
            style = ("-", "--", ":")[place // 10]
            _line(axes, mine, "step_us", label=policy, linestyle=style, color=f"C{place % 10}")
        _line(axes, of_name, "floor_us", label="floor", color="black", linewidth=2)
        axes.set_title(name, fontsize=9)
        axes.set_yscale("log")
    for axes in grid[len(names) :]:
        axes.set_axis_off()
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=8)
    figure.suptitle("Step time over compute time, by the budget's share of the peak")
    return figure


def _line(axes: Any, rows: Sequence[Row], key: str, **style: Any) -> None:
    points = sorted(
        {(row["budget"] / row["peak_bytes"], row[key] / row["compute_us"]) for row in rows}
    )
    axes.plot([x for x, _ in points], [y for _, y in points], marker=".", **style)
