"""Memory over time as a few lines of text."""

from __future__ import annotations

from collections.abc import Sequence

from umem.base.units import format_bytes

_EIGHTHS = " ▁▂▃▄▅▆▇█"


def lines(resident: Sequence[int], budget: int, width: int, height: int = 6) -> list[str]:
    """Return a picture of resident bytes against the budget, which is its upper edge.

    Args:
        resident: samples in time order, at least one; of several in a column the largest is drawn.
        budget: bytes.
        width: columns of the picture.
        height: lines of the picture, below the line with the budget.
    """
    columns = [
        max(resident[i * len(resident) // width : max((i + 1) * len(resident) // width, 1)] or [0])
        for i in range(min(width, len(resident)))
    ] if len(resident) > width else [*resident]  # fmt: skip
    eighths = [round(8 * height * count / budget) for count in columns]
    drawn = [f"{format_bytes(budget)} budget ".ljust(len(columns), "─")]
    for row in reversed(range(height)):
        drawn.append("".join(_EIGHTHS[min(8, max(0, level - 8 * row))] for level in eighths))
    now, most = format_bytes(resident[-1]), format_bytes(max(resident))
    return [*drawn, f"on the device: {now}, at most {most}"]
