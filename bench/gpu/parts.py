"""The parts of the bench, in the order in which they run, and how long each may take."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

OVERSUBSCRIPTION = "oversubscription"
LONGEST = 480.0  # seconds of the whole run


@dataclass(frozen=True)
class Part:
    """`module` has its `run`; `raw` parts use the driver themselves, the others start trainings."""

    name: str
    letter: str
    module: str
    seconds: float
    title: str
    raw: bool = False

    def load(self) -> Any:
        """Import the module."""
        return importlib.import_module(f"gpu.{self.module}")


def _micro(name: str, seconds: float, title: str, raw: bool = True) -> Part:
    return Part(f"micro_{name}", "a", f"micro_{name}", seconds, title, raw)


PARTS = (
    _micro("gates", 15, "What the driver can do"),
    _micro("bandwidth", 40, "How fast bytes travel"),
    _micro("discard", 25, "What discard and duplicates spare"),
    _micro("costs", 25, "What single operations cost"),
    _micro("overlap", 25, "What moving disturbs"),
    _micro("torch", 55, "umem beside torch and its neighbours", raw=False),
    Part("sizing", "", "sizing", 25, "How large the workloads are"),
    Part("fits", "b", "fits", 55, "Everything fits"),
    Part("outofcore", "c", "outofcore", 120, "Not everything fits"),
    Part("maxbatch", "d", "maxbatch", 40, "The largest batch"),
    Part("peak", "e", "peak", 45, "Device bytes against the budget"),
)
BEYOND = Part(
    OVERSUBSCRIPTION, "", "micro_oversubscribe", 60, "Beyond the device's memory", raw=True
)
BY_NAME = {part.name: part for part in (*PARTS, BEYOND)}


def choose(text: str | None, allow_oversubscription: bool) -> list[Part]:
    """Return the parts named in a list of names and letters, in order; None is all of them.

    Raises:
        ValueError: a part is unknown, or oversubscribes and that is not allowed.
    """
    known = [*PARTS, *([BEYOND] if allow_oversubscription else [])]
    if text is None:
        return known
    words = [word.strip() for word in text.split(",") if word.strip()]
    if OVERSUBSCRIPTION in words and not allow_oversubscription:
        raise ValueError(
            f"{OVERSUBSCRIPTION} can hang a GPU: only with --allow-oversubscription, and only on a "
            "card that nobody else uses"
        )
    letters = sorted({part.letter for part in PARTS if part.letter})
    for word in words:
        if word not in BY_NAME and word not in letters:
            allowed = ", ".join([*letters, *(part.name for part in known)])
            raise ValueError(f"part {word!r} is unknown; allowed: {allowed}")
    chosen = [part for part in known if part.name in words or part.letter in words]
    if not chosen:
        raise ValueError("no part is named")
    return chosen
