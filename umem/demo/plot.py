"""A picture of resident bytes over time against the budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from umem.base import extras
from umem.base.paths import check_folder
from umem.base.units import MIB
from umem.errors import ConfigError

Curve = Sequence[tuple[float, int]]


@dataclass(frozen=True)
class Panel:
    """One budget in bytes: resident bytes by policy, and the bytes held by the program.

    Curves are points of (ms, bytes).
    """

    title: str
    budget: int
    held: Curve
    resident: Mapping[str, Curve]


def check(path: Path) -> None:
    """Check early that a picture can be written, before anything is measured.

    Raises:
        NotSupportedError: matplotlib is not installed.
        ConfigError: the folder of `path` does not exist, or matplotlib cannot write this type.
    """
    figure = _matplotlib("matplotlib.figure").Figure()
    canvas = _matplotlib("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)
    known = sorted(canvas.get_supported_filetypes())
    if path.suffix[1:].lower() not in known:
        raise ConfigError(f"--plot {path}: unknown picture format; allowed: {', '.join(known)}")
    check_folder(path, "--plot")


def draw(rows: Sequence[Sequence[Panel]], path: Path) -> None:
    """Draw one row of panels per workload and write it to `path`; the suffix gives the format.

    Raises:
        NotSupportedError: matplotlib is not installed.
    """
    columns = max(len(row) for row in rows)
    size = (4.6 * columns, 3.2 * len(rows))
    figure = _matplotlib("matplotlib.figure").Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(rows), columns, squeeze=False)
    for panels, axes_row in zip(rows, grid, strict=True):
        for panel, axes in zip(panels, axes_row, strict=False):
            _draw_panel(panel, axes)
        for axes in axes_row[len(panels) :]:
            axes.set_axis_off()
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    figure.suptitle("Resident bytes over time against the budget")
    figure.savefig(path, dpi=110)


def _draw_panel(panel: Panel, axes: Any) -> None:
    _draw_curve(axes, panel.held, label="held by the program", color="silver", linewidth=1.0)
    for name, points in panel.resident.items():
        _draw_curve(axes, points, label=f"resident, {name}", linewidth=0.8)
    axes.axhline(panel.budget / MIB, color="crimson", linestyle="--", label="budget")
    axes.set_ylim(bottom=0)
    axes.set_title(panel.title, fontsize=10)
    axes.set_xlabel("s")
    axes.set_ylabel("MiB")


def _draw_curve(axes: Any, points: Curve, **style: Any) -> None:
    """Draw a curve, even without points, so that it has the same name and color in every panel."""
    origin = points[0][0] if points else 0.0
    times = [(ms - origin) / 1e3 for ms, _ in points]
    axes.plot(times, [size / MIB for _, size in points], **style)


def _matplotlib(module: str) -> Any:
    return extras.load(module, "a picture", extras.DEMO)
