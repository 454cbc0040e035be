"""Training that needs more memory than the machine has: ``python bench/disk_beyond.py --disk DIR``.

A GPT with AdamW whose tensors take 1.5 times this machine's memory trains with 1/2 and with 1/3 of
the machine's memory as the budget, each in a process of its own. Plain torch cannot train it here,
so the losses of the two are compared with each other. The disk needs room for all tensors.
Writes disk-beyond_<hardware>_<date>.{json,md} to bench/results.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from typing import Any

from harness import Report, Result, Spread, add_outputs, cases, note, output_of, results_folder

from umem.base.units import GIB, MIB, format_bytes

TIMES = 1.5  # this machine's memory
SHARES = {"1/2": 2, "1/3": 3}  # of the machine's memory: budgets
STEPS, SETTLED = 6, 3  # umem records and plans in the first ones
WIDTH, HEADS, TOKENS = 2048, 16, 64
COPIES = 4  # float32: weights, gradients, and two moments


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench/disk_beyond.py", description=__doc__)
    parser.add_argument("--disk", metavar="FOLDER", default=".", help="on a disk (default .)")
    parser.add_argument("--worker", nargs=2, metavar=("BUDGET", "LAYERS"), help=argparse.SUPPRESS)
    add_outputs(parser)
    args = parser.parse_args(argv)
    if args.worker:
        budget, layers = map(int, args.worker)
        train(budget, layers, args.disk, small=args.smoke)
        return 0
    folder = results_folder(parser, args)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # As if it had less, for a look at whether it runs.
    memory = 96 * MIB if args.smoke else memory
    width = WIDTH // 8 if args.smoke else WIDTH
    layers = int(TIMES * memory / (12 * width**2 * 4 * COPIES)) + 1
    found = {}
    with cases(len(SHARES)) as advance:
        for share, by in SHARES.items():
            note(f"{layers} layers, {share} of {format_bytes(memory)}")
            words = ["--worker", str(memory // by), str(layers), "--disk", args.disk]
            words += ["--smoke"] if args.smoke else []
            found[share] = json.loads(output_of([sys.executable, __file__, *words]))
            advance(1)
    report = made(found, memory, layers)
    print(report.markdown())
    if folder is not None:
        print("\n".join(map(str, report.write(folder))))
    return int(not report.details["losses_are_equal"])


def made(found: dict[str, dict[str, Any]], memory: int, layers: int) -> Report:
    """Return the report of all runs."""
    config = {"layers": layers, "width": WIDTH, "tokens": TOKENS, "steps": STEPS}
    report = Report("disk-beyond", config)
    first, *others = (run["losses"] for run in found.values())
    peak = max(run["peak_live_bytes"] for run in found.values())
    report.details |= {
        "memory_bytes": memory, "runs": found, "losses_are_equal": all(o == first for o in others)
    }  # fmt: skip
    equal = "equal" if report.details["losses_are_equal"] else "NOT EQUAL"
    report.sections.append(
        f"Tensors took {format_bytes(peak)} at once, {peak / memory:.2f} times the machine's "
        f"{format_bytes(memory)}. The losses at both budgets are {equal}, to the last bit."
    )
    for share, run in found.items():
        figures = (
            ("step", run["seconds"], "s"),
            ("processor time of a step", run["cpu_seconds"], "s"),
            ("written in a step", [run["out_per_step"] / GIB], "GiB"),
            ("read in a step", [run["in_per_step"] / GIB], "GiB"),
            ("peak RSS / memory", [run["peak_rss"] / memory], "x"),
        )
        for name, values, unit in figures:
            report.results.append(Result(f"{name}, {share}", Spread.of(values), unit))
    return report


def train(budget: int, layers: int, disk: str, *, small: bool) -> None:
    """Train in this process, and print the steps' times and the losses as JSON."""
    import torch
    from torch.nn import functional as F  # noqa: N812  (torch's own convention)

    import umem
    from umem.demo.nets import GPT

    torch.manual_seed(0)
    umem.enable(budget=budget, device="soft", disk=disk)
    net = GPT(512, TOKENS, layers, WIDTH // 8 if small else WIDTH, HEADS)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    random = torch.Generator().manual_seed(1)
    rows, losses = [], []
    for number in range(STEPS):
        if number == STEPS - SETTLED:
            before = umem.stats()
        begin, cpu = time.perf_counter(), time.process_time()
        tokens = torch.randint(0, 512, (1, TOKENS + 1), generator=random)
        loss = F.cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.item()).hex())
        rows.append((time.perf_counter() - begin, time.process_time() - cpu))
        note(f"step {number}: {rows[-1][0]:.0f} s, loss {loss.item():.4f}")
    now = umem.stats()
    found = {
        "seconds": [row[0] for row in rows[-SETTLED:]],
        "cpu_seconds": [row[1] for row in rows[-SETTLED:]],
        "first_seconds": [row[0] for row in rows[:-SETTLED]],
        "losses": losses,
        "parameters": sum(p.numel() for p in net.parameters()),
        "peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
        "peak_live_bytes": now.peak_live_bytes,
        "plan_hits": now.plan_hits - before.plan_hits,
        "plan_misses": now.plan_misses - before.plan_misses,
        "faults": now.faults - before.faults,
        "in_per_step": (now.disk_bytes_in - before.disk_bytes_in) // SETTLED,
        "out_per_step": (now.disk_bytes_out - before.disk_bytes_out) // SETTLED,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    raise SystemExit(main())
