"""The usual steps to make a training fit, and those that umem saves: ``bench/ladder.py``.

The usual advice for a GPU that is too small is a ladder: mixed precision, then weights of 16 bits,
a smaller batch, accumulation of gradients, and an optimizer with less state. Each rung changes the
training. Here a vision transformer is planned on every rung, for GPUs of several sizes: the first
rung that fits by itself, and the first that umem runs at almost full speed.

Writes ladder_<hardware>_<date>.{json,md} to bench/results. All figures are in virtual time, and the
same on every machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from harness import Report, Result, Spread, add_outputs, cases, note, results_folder, table
from policies.training import Kind, Precision, training

from umem.base import device_profiles
from umem.base.native import core
from umem.base.progress import over
from umem.base.units import GIB, format_bytes
from umem.capture import program, roofline
from umem.errors import OutOfMemoryError
from umem.recompute.planner.modes import graph_of
from umem.simulation import replay
from umem.trace.step_builder import last_step

Row = dict[str, Any]

DEVICE = "a100-pcie4"
CARDS = (3, 4, 6, 8, 12, 16, 24)  # GiB
ALMOST = 1.25  # relative to the time when everything fits


@dataclass(frozen=True)
class Rung:
    """A training step; one update takes `batches` of them."""

    title: str
    precision: Precision
    batch: int
    batches: int
    kind: Kind


IMAGES = 64  # per update, except for the smaller batch
LADDER = (
    Rung("float32, AdamW, batch 64", "float32", IMAGES, 1, "adamw"),
    Rung("mixed precision", "amp", IMAGES, 1, "adamw"),
    Rung("bfloat16 weights", "bfloat16", IMAGES, 1, "adamw"),
    Rung("batch 16", "bfloat16", 16, 1, "adamw"),
    Rung("4 batches of 4, accumulated", "bfloat16", 4, 4, "adamw"),
    Rung("SGD with momentum", "bfloat16", 4, 4, "sgd"),
)
SIZE = (224, 24, 1024, 16)  # ViT-L/16: pixels, layers, width, heads
SMALL = (64, 2, 128, 4)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench/ladder.py", description=__doc__)
    add_outputs(parser)
    parser.add_argument("--card", nargs="+", type=int, default=list(CARDS), metavar="GIB")
    args = parser.parse_args(argv)
    folder = results_folder(parser, args)
    size, ladder = (SMALL, LADDER[-2:]) if args.smoke else (SIZE, LADDER)
    with cases(len(ladder) * len(args.card)) as advance:
        rows = [row for rung in ladder for row in over(measured(rung, size, args.card), advance)]
    page = report(rows, args.card)
    print(page.markdown())
    if folder is not None:
        print("\n".join(map(str, page.write(folder))))
    return 0


def measured(rung: Rung, size: tuple[int, int, int, int], cards: Sequence[int]) -> Iterator[Row]:
    """Record the step on fake tensors, and plan it for each card."""
    profile = device_profiles.find(DEVICE)
    recording = program.trace(lambda: _made(rung, size))
    step = last_step(recording.device_events(roofline.clock(profile)))
    graph, _ = graph_of(step, recording)
    images = rung.batch * rung.batches
    for card in cards:
        budget = card * GIB - core.headroom_bytes(card * GIB)
        row = {
            "rung": rung.title,
            "card_gib": card,
            "budget": budget,
            "peak": step.peak_bytes,
            "images": images,
            "compute_us": step.compute_us,
            "fits": replay.resident_budget(step, profile) <= budget,
        }
        try:
            found = replay.simulate_updates(graph, profile, budget)
            row |= {"step_us": found.step_us, "share": found.share}
        except OutOfMemoryError:
            row |= {"step_us": None, "share": None}
        note(f"{rung.title}, {card} GiB")
        yield row


def _made(rung: Rung, size: tuple[int, int, int, int]) -> Any:
    import torch
    from policies import nets

    image, layers, width, heads = size

    def data() -> list[Any]:
        shape = (rung.batch, 3, image, image)
        return [
            (torch.randn(shape), torch.randint(1000, (rung.batch,))) for _ in range(rung.batches)
        ]

    return training(
        lambda: nets.ViT(image, layers, width, heads, 1000), data, rung.precision, rung.kind
    )


def report(rows: Sequence[Row], cards: Sequence[int]) -> Report:
    """Return a table of all rungs by card, and what of the ladder each card needs."""
    page = Report("ladder", {"network": "ViT-L/16", "device": DEVICE, "almost": ALMOST})
    titles = list(dict.fromkeys(row["rung"] for row in rows))
    lines = []
    for title in titles:
        mine = {row["card_gib"]: row for row in rows if row["rung"] == title}
        one = next(iter(mine.values()))
        per_image = one["compute_us"] / one["images"] / 1e3
        cells = [_cell(mine[card]) for card in cards]
        lines.append((title, format_bytes(one["peak"]), f"{per_image:.2f}", *cells))
    head = ("rung", "peak", "ms an image, where all fits", *(f"{card} GiB" for card in cards))
    page.sections = [
        "## Time with umem over the time where all fits",
        "",
        "fits: nothing moves. Each rung also has the changes of those above it.",
        "",
        *table(head, lines),
        "## What each card needs",
        "",
        *table(("card", "by itself", "with umem", "saved"), _needs(rows, cards)),
    ]
    for row in rows:
        if row["rung"] == titles[0] and (ratio := _ratio(row)) is not None:
            name = f"{row['rung']}, {row['card_gib']} GiB: step / compute"
            page.results.append(Result(name, Spread.of([ratio]), "x"))
    page.details = {"rows": list(rows)}
    return page


def _ratio(row: Row) -> float | None:
    return None if row["step_us"] is None else row["step_us"] / row["compute_us"]


def _cell(row: Row) -> str:
    ratio = _ratio(row)
    return "fits" if row["fits"] else "-" if ratio is None else f"{ratio:.2f}"


def _needs(rows: Sequence[Row], cards: Sequence[int]) -> Iterator[tuple[str, ...]]:
    for card in cards:
        mine = [row for row in rows if row["card_gib"] == card]
        alone = next((i for i, row in enumerate(mine) if row["fits"]), len(mine))
        found = (i for i, row in enumerate(mine) if (_ratio(row) or ALMOST + 1) <= ALMOST)
        helped = next(found, len(mine))
        saved = [row["rung"] for row in mine[helped + 1 : alone + 1]]
        yield (
            f"{card} GiB",
            mine[alone]["rung"] if alone < len(mine) else "nothing fits",
            mine[helped]["rung"] if helped < len(mine) else f"none below {ALMOST} x",
            ", ".join(saved) or "-",
        )


if __name__ == "__main__":
    raise SystemExit(main())
