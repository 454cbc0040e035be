"""Ranks on paper: FSDP2 shards of a GPT on 8, 64 and 1024 devices: ``bench/scale.py``.

Traces rank 0 of examples/fsdp2_gpt.py on fake tensors, for each number of ranks, and replays its
step while all devices of a node move bytes: a rank's memory, the collectives' time, umem's memory
on each node's host, and the slowdown by the shared links.

Writes scale_<hardware>_<date>.{json,md} to bench/results. All figures are in virtual time with
nominal rates, and the same on every machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from facts import ROOT
from harness import Report, Result, Spread, add_outputs, cases, note, results_folder, table

from umem.base import nodes
from umem.base.native import core
from umem.base.progress import over
from umem.base.units import GIB, format_bytes
from umem.capture import program, roofline
from umem.cli import plan_ranks
from umem.simulation import replay
from umem.trace.step_builder import last_step

Row = dict[str, Any]

RANKS = (8, 64, 1024)


class Case(NamedTuple):
    """A network, the batch of a rank, and the nodes that it is trained on."""

    title: str
    sizes: tuple[int, int, int, int, int]  # vocabulary, context, layers, heads, width
    batch: int
    node: str


CASES = (
    Case("GPT-2 XL, batch 16", (50257, 1024, 48, 25, 1600), 16, "a100-pcie4x4"),
    Case("GPT 13B, batch 8", (50257, 2048, 40, 40, 5120), 8, "h100x8"),
)
SMALL = (Case("small", (512, 128, 2, 4, 1024), 4, "a100-pcie4x4"),)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench/scale.py", description=__doc__)
    add_outputs(parser)
    parser.add_argument("--ranks", nargs="+", type=int, default=list(RANKS), metavar="N")
    args = parser.parse_args(argv)
    folder = results_folder(parser, args)
    chosen = list(itertools.product(SMALL if args.smoke else CASES, args.ranks))
    with cases(len(chosen)) as advance:
        page = report([measured(case, ranks) for case, ranks in over(chosen, advance)])
    print(page.markdown())
    if folder is not None:
        print("\n".join(map(str, page.write(folder))))
    return 0


def measured(case: Case, ranks: int, budget: int | None = None) -> Row:
    """Trace a rank and replay it, with all of its device but for what CUDA itself takes."""
    cluster = plan_ranks.Cluster(nodes.find(case.node), ranks)
    device = cluster.device
    with plan_ranks.as_rank(cluster):
        recording = program.trace(lambda: _made(case))
    clock = roofline.clock(device)
    step = last_step(cluster.events(recording, clock))
    room = (
        device.memory_bytes - core.headroom_bytes(device.memory_bytes) if budget is None else budget
    )
    best = replay.replay_step(step, "auto", device, room)
    found = plan_ranks.answer(cluster, recording, clock, step, [best])
    sizes: dict[str, int] = {}
    for tag, size in zip(step.tags, step.bytes.tolist(), strict=True):
        sizes[tag] = sizes.get(tag, 0) + size
    note(f"{case.title}, {ranks} ranks")
    return {
        "case": case.title,
        **found.as_dict(),
        "budget": best.budget,
        "peak": step.peak_bytes,
        "shard": sizes.get("param", 0) + sizes.get("optimizer", 0),
        "compute_us": step.compute_us,
        "bytes_in": best.bytes_in,
        "bytes_out": best.bytes_out,
        "source": cluster.node.source,
        "replay": dataclasses.asdict(best),
    }


def _made(case: Case) -> Any:
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy

    example = ROOT / "examples"
    make: Any = program.find("fsdp2_gpt:make_sharded", example)
    config: Any = program.find("gpt:Config", example)
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return make(config(*case.sizes), case.batch, mixed)


def report(rows: Sequence[Row]) -> Report:
    """Return a table with a line for each network and number of ranks."""
    page = Report("scale", {row["node"]: row["source"] for row in rows})
    head = (
        "network", "nodes", "ranks", "shard", "peak a rank", "budget", "collectives ms",
        "waited for", "compute ms", "step / compute", "alone", "host a rank", "host a node",
    )  # fmt: skip
    page.sections = [
        "## A rank, and its node",
        "",
        "One rank a device; the batch is of each rank. Weights are gathered in bfloat16, gradients",
        "summed in float32. The shard is weights and states of the optimizer. Compute has in it",
        "what it waits for collectives. Alone: where no other device used the node's links.",
        "",
        *table(head, map(_line, rows)),
    ]
    for row in rows:
        name = f"{row['case']}, {row['ranks']} ranks on {row['node']}: step / compute"
        ratio = row["step_us"] / row["compute_us"]
        page.results.append(Result(name, Spread.of([ratio]), "x"))
    page.details = {"rows": list(rows)}
    return page


def _line(row: Row) -> tuple[str, ...]:
    return (
        row["case"],
        f"{row['nodes_needed']} {row['node']}",
        str(row["ranks"]),
        format_bytes(row["shard"]),
        format_bytes(row["peak"]),
        format_bytes(row["budget"]),
        f"{row['exchange_us'] / 1e3:.0f}",
        f"{row['exposed_us'] / 1e3:.0f}",
        f"{row['compute_us'] / 1e3:.0f}",
        f"{row['step_us'] / row['compute_us']:.2f}",
        f"{row['alone_us'] / row['compute_us']:.2f}",
        f"{row['host_bytes_rank'] / GIB:.1f} GiB",
        f"{row['host_bytes_node'] / GIB:.0f} of {row['host_memory_bytes'] / GIB:.0f} GiB",
    )


if __name__ == "__main__":
    raise SystemExit(main())
