"""Programs of other libraries under umem: ``python bench/programs/run.py [--smoke]``.

Each program of nets.py runs on the software device at half and a quarter of its peak with the
default policy and others, and without umem, each time in a new process. So does each of
libraries.py. The report has the bits, the CPU time of a step and of the first steps relative to
plain torch's, and the bytes that it moves. Writes
bench/results/programs_<hardware>_<date>.{json,md}.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[0] = str(HERE.parent)  # not this folder: its modules are a package's

from harness import (  # noqa: E402
    Report,
    Result,
    Spread,
    add_outputs,
    cases,
    note,
    quotient,
    results_folder,
    table,
)

from programs.libraries import LIBRARIES  # noqa: E402
from programs.nets import NETS  # noqa: E402
from umem.analysis.bounds import (  # noqa: E402
    lower_bound_bytes_in,
    lower_bound_bytes_out,
    min_budget,
)
from umem.base.progress import Advance, over  # noqa: E402
from umem.base.stats import plan_hit_share  # noqa: E402
from umem.base.units import MIB, PAGE_BYTES  # noqa: E402
from umem.errors import TraceError  # noqa: E402
from umem.simulation import replay  # noqa: E402
from umem.trace.step_trace import StepTrace  # noqa: E402

PROGRAMS = NETS | LIBRARIES
FRACTIONS = {"1/2": 0.5, "1/4": 0.25}
POLICIES = ("auto", "lru", "conv_lru", "belady")
COUNTED = 4  # steps
EARLY = 10  # steps, the first ones
FLOOR = 8 * MIB  # umem's least budget, for one thread
NEAR = 2  # % above the best other policy
WORDS = {
    "bytes": "bytes",
    "ratio": "CPU time",
    "early": f"CPU time of the first {EARLY} steps",
}

Row = dict[str, Any]


def main(argv: list[str] | None = None) -> int:
    args, parser = _arguments(argv)
    if args.worker:
        print(json.dumps(worker(*args.worker)))
        return 0
    folder = results_folder(parser, args)
    names = args.program or (["lstm"] if args.smoke else list(PROGRAMS))
    with cases(len(names) * _runs(args)) as advance:
        rows = [row for name in names for row in _rows(name, args, advance)]
    page = _report(rows, names, args)
    print(page.markdown())
    if folder is not None:
        print("\n".join(map(str, page.write(folder))))
    return int(any(row.get("bits") is False for row in rows))


def _arguments(argv: list[str] | None) -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    parser = argparse.ArgumentParser(prog="bench/programs/run.py", description=__doc__)
    parser.add_argument("--program", nargs="+", choices=list(PROGRAMS), metavar="NAME")
    parser.add_argument("--policy", nargs="+", default=POLICIES)
    parser.add_argument("--rounds", type=int, default=3, help="per variant, in turn")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    add_outputs(parser)
    args = parser.parse_args(argv)
    if args.smoke:
        args.rounds, args.policy = 1, ("auto", "lru")
    return args, parser


def worker(name: str, policy: str, budget: str) -> Row:
    """Run a program in this process; `policy` is plain, trace:FILE or a policy's name."""
    import torch

    import umem

    torch.set_num_threads(1)
    if policy.startswith("trace:"):
        umem.enable(device="soft", budget=int(budget), policy="lru", trace=policy[6:])
    elif policy != "plain":
        umem.enable(device="soft", budget=int(budget), policy=policy)
    torch.manual_seed(0)
    step, first = PROGRAMS[name].build(), PROGRAMS[name].first
    digest = hashlib.sha256()
    times: list[float] = []
    before: Any = None
    for number in range(first + COUNTED):
        if number == first and policy != "plain":
            before = umem.stats()
        begin = time.process_time()
        result = step(number)
        times.append(time.process_time() - begin)
        digest.update(result.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    row: Row = {
        "seconds": statistics.median(times[first:]),
        "early": sum(times[:EARLY]),
        "digest": digest.hexdigest(),
    }
    if before is None:
        return row
    now, steps = umem.stats(), COUNTED
    hits, misses = now.plan_hits - before.plan_hits, now.plan_misses - before.plan_misses
    row |= {
        "in": (now.bytes_in - before.bytes_in) / steps,
        "out": (now.bytes_out - before.bytes_out) / steps,
        "faults": (now.faults - before.faults) / steps,
        "hits": plan_hit_share(hits, misses),
        "peak": now.peak_live_bytes,
    }
    umem.disable()
    return row


def _run(name: str, policy: str, budget: int) -> Row:
    command = [sys.executable, str(Path(__file__)), "--worker", name, policy, str(budget)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise SystemExit(f"{name} with {policy} failed:\n{done.stderr[-2000:]}")
    row: Row = json.loads(done.stdout.splitlines()[-1])
    return row


def _runs(args: argparse.Namespace) -> int:
    """Return the runs of each program: plain torch once a round, and all budgets and policies."""
    return int(args.rounds * (1 + len(FRACTIONS) * len(args.policy)))


def _rows(name: str, args: argparse.Namespace, advance: Advance) -> list[Row]:
    missing = [need for need in PROGRAMS[name].needs if importlib.util.find_spec(need) is None]
    if missing:
        note(f"{name}: not run, it needs {', '.join(missing)}")
        advance(_runs(args))
        return []
    peak, step = _recorded(name)
    least = max(min_budget(step) if step else 0, FLOOR)
    budgets = _budgets(peak, least)
    rows: list[Row] = []
    plain: list[Row] = []
    for _ in range(args.rounds):
        plain.append(_run(name, "plain", 0))
        advance(1 + (len(FRACTIONS) - len(budgets)) * len(args.policy))
        for fraction, budget in budgets.items():
            for policy in over(args.policy, advance):
                note(f"{name}, {fraction}, {policy}")
                row = _run(name, policy, budget)
                row["ratio"] = row["seconds"] / plain[-1]["seconds"]
                row["early"] /= plain[-1]["early"]
                row["bits"] = row["digest"] == plain[-1]["digest"]
                row |= {"program": name, "fraction": fraction, "policy": policy, "budget": budget}
                row["bound"] = _bound(step, budget) if step and PROGRAMS[name].steady else None
                rows.append(row)
    return rows


def _budgets(peak: int, least: int) -> dict[str, int]:
    """Return each budget by its share of the peak, once; `*`: raised to the least that works."""
    found: dict[int, str] = {}
    for fraction, share in FRACTIONS.items():
        budget = int(peak * share) // PAGE_BYTES * PAGE_BYTES
        found.setdefault(max(budget, least), fraction if budget >= least else f"{fraction}*")
    return {fraction: budget for budget, fraction in found.items()}


def _recorded(name: str) -> tuple[int, StepTrace | None]:
    """Record the program with memory for all; return its peak in bytes, and a step if any."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.jsonl"
        row = _run(name, f"trace:{path}", 4 << 30)
        try:
            return row["peak"], replay.load(path).step
        except TraceError as error:  # a program without steps has no bound
            note(f"{name}: no bound: {error}")
            return row["peak"], None


def _bound(step: StepTrace, budget: int) -> float:
    """Return a lower bound of the bytes a step, both ways, as if tensors moved by the byte."""
    return lower_bound_bytes_in(step, budget) + lower_bound_bytes_out(step, budget)


def _report(rows: list[Row], names: list[str], args: argparse.Namespace) -> Report:
    page = Report("programs", {"programs": ", ".join(names), "rounds": args.rounds})
    page.details["rows"] = rows
    merged = _merged(rows)
    lines = [
        f"The last {COUNTED} steps, once all was recorded, planned and tried. CPU: the process's "
        f"time over plain torch's, and that of the first {EARLY} steps together; bound: the least "
        "bytes of any schedule that moves tensors by the byte, from a recorded step; `*`: a budget "
        "raised to the least that the program runs in.",
        "",
    ]
    header = (
        "program",
        "budget",
        "policy",
        "bits",
        "CPU",
        f"first {EARLY}",
        "MiB moved",
        "/ bound",
        "hits",
        "faults",
    )
    lines += table(header, map(_cells, merged))
    page.sections = lines
    for fraction in FRACTIONS:
        for what, words in WORDS.items():
            worst = _worst(merged, fraction, what)
            if worst:
                name = f"auto at {fraction}: {words}, highest"
                above = Spread.of([100 * (worst[0] - 1)])
                page.results.append(Result(name, above, "% above the best other", NEAR, worst[1]))
    return page


def _merged(rows: list[Row]) -> list[Row]:
    """Return one row for all rounds of a case."""
    cases: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        cases.setdefault((row["program"], row["fraction"], row["policy"]), []).append(row)
    merged = []
    for group in cases.values():
        row = dict(group[0])
        for what in ("ratio", "early"):
            row[what] = statistics.median(one[what] for one in group)
        row["bits"] = all(one["bits"] for one in group)
        row["bytes"] = row["in"] + row["out"]
        merged.append(row)
    return merged


def _worst(rows: list[Row], fraction: str, what: str) -> tuple[float, str] | None:
    """Return the highest ratio of auto's figure to the best of the others', and where."""
    found: list[tuple[float, str]] = []
    for row in rows:
        if row["policy"] != "auto" or row["fraction"].rstrip("*") != fraction:
            continue
        others = [
            one[what]
            for one in rows
            if (one["program"], one["fraction"]) == (row["program"], row["fraction"])
            and one["policy"] != "auto"
        ]
        if others and row[what] > 0:
            found.append((quotient(row[what], min(others)), row["program"]))
    return max(found) if found else None


def _cells(row: Row) -> tuple[str, ...]:
    over = "-" if not row["bound"] else f"{row['bytes'] / row['bound']:.2f}"
    hits = "-" if row["hits"] is None else f"{100 * row['hits']:.0f} %"
    return (
        row["program"],
        f"{row['fraction']}, {row['budget'] // MIB} MiB",
        row["policy"],
        "same" if row["bits"] else "**differ**",
        f"{row['ratio']:.2f}",
        f"{row['early']:.2f}",
        f"{row['bytes'] / MIB:.0f}",
        over,
        hits,
        f"{row['faults']:.0f}",
    )


if __name__ == "__main__":
    raise SystemExit(main())
