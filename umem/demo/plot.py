"""A picture of resident bytes over time against the budget."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from umem.base import extras
from umem.base.paths import check_folder, replacing
from umem.base.units import MIB
from umem.errors import ConfigError

from .runner import DemoRow


def check(path: Path) -> None:
    """Check early that a picture can be written, before anything is measured.

    Raises:
        NotSupportedError: matplotlib is not installed.
        ConfigError: the folder of `path` does not exist, or matplotlib cannot write this type.
    """
    known = sorted(_figure((1, 1)).canvas.get_supported_filetypes())
    if path.suffix[1:].lower() not in known:
        raise ConfigError(f"--plot {path}: unknown picture format; allowed: {', '.join(known)}")
    check_folder(path, "--plot")


def draw(rows: Sequence[DemoRow], path: Path) -> None:
    """Draw a row of panels per workload, one per budget, to `path`; the suffix gives the format.

    Raises:
        ConfigError: the file cannot be written.
        NotSupportedError: matplotlib is not installed.
    """
    names = list(dict.fromkeys(row.workload for row in rows))
    fractions = sorted({row.fraction for row in rows if row.fraction > 1})
    figure = _figure((4.6 * len(fractions), 3.2 * len(names)))
    grid = figure.subplots(len(names), len(fractions), squeeze=False)
    for name, line in zip(names, grid, strict=True):
        for fraction, axes in zip(fractions, line, strict=True):
            axes.set_title(f"{name}, 1/{fraction} of its peak", fontsize=10)
            _draw([r for r in rows if (r.workload, r.fraction) == (name, fraction)], axes)
    handles, labels = grid[0][0].get_legend_handles_labels()
    columns = min(len(labels), 2 * len(fractions))  # more would not fit below the panels
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)
    figure.suptitle("Resident bytes over time against the budget")
    with replacing(path, ConfigError) as part:
        figure.savefig(part, dpi=110)


def _draw(runs: Sequence[DemoRow], axes: Any) -> None:
    """Draw a curve for each run, even one without points, so that colors are alike everywhere."""
    held = next((row for row in runs if row.samples), runs[0])
    curves = [(held, 2, {"label": "held by the program", "color": "silver", "linewidth": 1.0})]
    curves += [(row, 1, {"label": f"resident, {row.policy}", "linewidth": 0.8}) for row in runs]
    for row, column, style in curves:
        seconds = [(sample[0] - row.samples[0][0]) / 1e3 for sample in row.samples]
        axes.plot(seconds, [sample[column] / MIB for sample in row.samples], **style)
    axes.axhline((runs[0].budget_bytes or 0) / MIB, color="crimson", linestyle="--", label="budget")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("s")
    axes.set_ylabel("MiB")


def _figure(size: tuple[float, float]) -> Any:
    module = extras.load("matplotlib.figure", "a picture", extras.DEMO)
    return module.Figure(figsize=size, layout="constrained")
