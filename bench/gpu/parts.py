"""The parts of the bench in the order in which they run, and how long each may take.

A letter is one command: its parts, and what they need of other letters, end within `LONGEST`.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

LONGEST = 480.0  # declared seconds of a letter
START = 8.0  # estimated seconds until a process has imported torch and opened the device

LETTERS = {
    "a": "Open questions about the driver",
    "b": "The driver and its neighbours in figures",
    "c": "Everything fits",
    "d": "Not everything fits",
    "e": "The largest batch",
    "f": "Device bytes against the budget",
    "g": "Where the optimizer updates",
}


@dataclass(frozen=True)
class Part:
    """`module` has its `run`; `raw` parts use the driver themselves, the others start trainings.

    `measuring` is in seconds, without the starts of `processes`. `needs` are the parts whose
    results it uses.
    """

    name: str
    letter: str
    module: str
    title: str
    measuring: float
    processes: int = 1
    raw: bool = False
    needs: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Seconds that the part is declared to take, with the starts of its processes."""
        return self.measuring + self.processes * START

    def load(self) -> Any:
        """Import the module."""
        return importlib.import_module(f"gpu.{self.module}")


def _micro(letter: str, name: str, measuring: float, title: str) -> Part:
    return Part(f"micro_{name}", letter, f"micro_{name}", title, measuring, raw=True)


# `processes` hold a device: of a part that trains, its workers. The starts of the programs that
# `neighbours` asks are a part of its questions.
PARTS = (
    _micro("a", "lanes", 60, "Prefetches on busy streams, as the engine makes them"),
    _micro("a", "release", 60, "Ways to give device memory back"),
    _micro("a", "discard", 40, "What discard and duplicates spare"),
    _micro("a", "gates", 10, "What the driver can do"),
    _micro("b", "bandwidth", 50, "How fast bytes travel"),
    _micro("b", "overlap", 30, "What moving disturbs"),
    _micro("b", "costs", 48, "What single operations cost"),
    Part("neighbours", "b", "neighbours", "umem with torch and other libraries", 100, processes=0),
    Part("sizing", "c", "sizing", "How large the workloads are", 30),
    Part("fits", "c", "fits", "Everything fits", 90, processes=2, needs=("sizing",)),
    Part(
        "outofcore",
        "d",
        "outofcore",
        "Not everything fits",
        280,
        processes=5,
        needs=("micro_bandwidth", "sizing"),
    ),
    Part("maxbatch", "e", "maxbatch", "The largest batch", 120, processes=2),
    Part(
        "peak", "f", "peak", "Device bytes against the budget", 90, processes=2, needs=("sizing",)
    ),
    Part(
        "hostshare",
        "g",
        "hostshare",
        "Where the optimizer updates",
        240,
        processes=2,
        needs=("sizing",),
    ),
)
BEYOND = Part(
    "oversubscription", "", "micro_oversubscribe", "Beyond the device's memory", 60, raw=True
)
BY_NAME = {part.name: part for part in (*PARTS, BEYOND)}


def choose(words: Sequence[str], allow_oversubscription: bool) -> list[Part]:
    """Return the parts that names and letters stand for, in order; no words are all letters.

    Raises:
        ValueError: a part is unknown, or oversubscribes and that is not allowed.
    """
    known = [*PARTS, *([BEYOND] if allow_oversubscription else [])]
    if not words:
        return known
    if BEYOND.name in words and not allow_oversubscription:
        raise ValueError(
            f"{BEYOND.name} can hang a GPU: only with --allow-oversubscription, and only on a "
            "card that nobody else uses"
        )
    for word in words:
        if word not in BY_NAME and word not in LETTERS:
            allowed = ", ".join([*LETTERS, *(part.name for part in known)])
            raise ValueError(f"part {word!r} is unknown; allowed: {allowed}")
    return [part for part in known if part.name in words or part.letter in words]


def commands(chosen: Sequence[Part]) -> list[list[Part]]:
    """Group parts by their letters, each group with what it needs of others before it."""
    groups = []
    for letter in dict.fromkeys(part.letter for part in chosen):
        group = [part for part in chosen if part.letter == letter]
        needed = {name for part in group for name in part.needs}
        wanted = needed | {part.name for part in group}
        groups.append([part for part in BY_NAME.values() if part.name in wanted])
    return groups
