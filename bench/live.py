"""Bytes that programs move, and those of their traces' replays: ``python bench/live.py``.

Each program trains on the software device under `auto` with a part of its peak memory, in a process
of its own that writes a trace; the trace's last step is then replayed with the same budget. Counts
of bytes do not depend on the machine's load. Writes bench/results/live_<hardware>_<date>.{json,md}.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import (
    Report,
    Result,
    Spread,
    add_outputs,
    cases,
    output_of,
    quotient,
    results_folder,
    table,
)
from policies.other_workloads import volumes
from policies.training import texts, training
from policies.workloads import images, unet

from umem.base.units import GIB, MIB, format_bytes

if TYPE_CHECKING:
    from policies.training import Batch, Made
    from torch import Tensor, nn

SHARES = {"3/4": 0.75, "1/2": 0.5, "1/3": 1 / 3}  # of the peak of live bytes
WARM_UP, STEPS = 12, 4
MOST_APART = 1.05
VOCABULARY, CLASSES = 8192, 100


def _texts(make: Callable[[], nn.Module], *shapes: tuple[int, int]) -> Made:
    return training(make, lambda: texts(VOCABULARY, shapes), "float32", "adamw")


def _gpt(*shapes: tuple[int, int]) -> Made:
    from umem.demo.nets import GPT

    return _texts(lambda: GPT(VOCABULARY, 128, 4, 512, 8), *shapes)


def _bert() -> Made:
    from policies.nets import Bert

    return _texts(lambda: Bert(VOCABULARY, 128, 4, 512, 8), (4, 128))


def _experts() -> Made:
    from policies.other_nets import ExpertBlock, Texts

    def make() -> nn.Module:
        return Texts(VOCABULARY, 512, [ExpertBlock(512, 8, 4) for _ in range(3)])

    return _texts(make, (2, 128))


def _lstm() -> Made:
    import torch

    class Outputs(torch.nn.LSTM):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            out: Tensor = super().forward(x)[0]
            return out

    def data() -> list[Batch]:
        return [(torch.randn(32, 16, 768), torch.randint(768, (32, 16)))]

    return training(lambda: Outputs(768, 768, 3), data, "float32", "adamw")


def _vit() -> Made:
    from policies.nets import ViT

    return images(lambda: ViT(64, 4, 512, 8, CLASSES), 32, 64, classes=CLASSES)


def _resnet() -> Made:
    from nets import ResNet50

    return images(lambda: ResNet50(64, (3, 4, 6, 3), CLASSES), 8, 96, classes=CLASSES)


def _vgg() -> Made:
    from nets import VGG16

    return images(lambda: VGG16(32, 64, CLASSES), 16, 64, classes=CLASSES)


def _densenet() -> Made:
    from policies.nets import DenseNet

    return images(lambda: DenseNet(32, (4, 6, 8, 6), CLASSES), 8, 128, classes=CLASSES)


PROGRAMS: dict[str, Callable[[], Made]] = {
    "GPT": lambda: _gpt((4, 128)),
    "GPT, three batches a step": lambda: _gpt((4, 64), (4, 128), (4, 96)),
    "BERT": _bert,
    "experts": _experts,
    "LSTM": _lstm,
    "ViT": _vit,
    "ResNet-50": _resnet,
    "VGG-16": _vgg,
    "DenseNet": _densenet,
    "U-Net": lambda: unet(4, 128, 32),
    "3-D U-Net": lambda: volumes(1, 48, 16, 4),
}


def worker(name: str, budget: int, trace: str) -> None:
    """Train in this process, and print what a step moved as JSON."""
    import torch

    import umem

    umem.enable(budget=budget, device="soft", policy="auto", trace=trace)
    torch.manual_seed(0)
    net, step = PROGRAMS[name]()
    for _ in range(WARM_UP):
        step()
    before = umem.stats()
    for _ in range(STEPS):
        step()
    after = umem.stats()
    names = ("bytes_in", "bytes_out", "plan_hits", "plan_misses", "evictions", "faults")
    found = {name: (getattr(after, name) - getattr(before, name)) / STEPS for name in names}
    del net, step
    umem.disable()
    print(json.dumps({**found, "peak": after.peak_live_bytes}))


def run(name: str, budget: int, folder: str) -> dict[str, Any]:
    """Run a program with this budget, and replay its step."""
    from umem.base import device_profiles
    from umem.simulation import replay

    trace = Path(folder, "trace.jsonl.gz")
    command = [sys.executable, __file__, "--worker", name, str(budget), str(trace)]
    live = json.loads(output_of(command).splitlines()[-1])
    loaded = replay.load(trace)
    # As live: the CPU computes and moves bytes, so the plan is the one that moves least.
    device = dataclasses.replace(device_profiles.find(loaded.device), hides_transfers=False)
    result = replay.replay_step(loaded.step, "auto", device, budget).as_dict()
    trace.unlink()
    return {"program": name, "budget": budget, "live": live, "replay": result}


def measure(programs: Sequence[str], shares: dict[str, float]) -> list[dict[str, Any]]:
    """Run each program with each share of its peak."""
    rows = []
    with tempfile.TemporaryDirectory() as folder, cases(len(programs)) as advance:
        for name in programs:
            peak = run(name, 8 * GIB, folder)["live"]["peak"]
            for share, part in shares.items():
                budget = int(peak * part) // (2 * MIB) * 2 * MIB
                rows.append({"share": share, "peak": peak, **run(name, budget, folder)})
            advance(1)
    return rows


def ratio(row: dict[str, Any]) -> float:
    """Return the bytes of both directions in a live step, over the replay's."""
    live, replayed = (row[side]["bytes_in"] + row[side]["bytes_out"] for side in ("live", "replay"))
    return quotient(live, replayed)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_outputs(parser)
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=[*PROGRAMS])
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        name, budget, trace = options.worker
        worker(name, int(budget), trace)
        return
    folder = results_folder(parser, options)
    programs = options.programs[:1] if options.smoke else options.programs
    rows = measure(programs, {"1/2": 0.5} if options.smoke else SHARES)
    report = Report("live", {"warm_up": WARM_UP, "steps": STEPS})
    header = ("program", "peak", "budget", "live: in, out", "replay: in, out", "ratio", "off plan")
    cells = [
        (
            row["program"], format_bytes(row["peak"]), row["share"],
            *(
                ", ".join(format_bytes(int(side[way])) for way in ("bytes_in", "bytes_out"))
                for side in (row["live"], row["replay"])
            ),
            f"{ratio(row):.3f}",
            f"{row['live']['plan_misses']:g}",
        )
        for row in rows
    ]  # fmt: skip
    report.sections += table(header, cells)
    report.details["rows"] = rows
    for share in {row["share"]: 0 for row in rows}:
        values = [ratio(row) for row in rows if row["share"] == share]
        apart = max(max(value, quotient(1, value)) for value in values)
        report.results += [
            Result(f"bytes of live steps over those of replays, {share}", Spread.of(values), "x"),
            Result(f"the program that is most apart, {share}", Spread.of([apart]), "x", MOST_APART),
        ]
    print(report.markdown())
    if folder is not None:
        report.write(folder)


if __name__ == "__main__":
    main()
