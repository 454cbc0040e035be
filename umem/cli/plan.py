"""``umem plan``: predict whether a program fits, its slowdown and bottleneck, without a GPU."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.paths import check_folder, replacing
from ..base.progress import over, progress
from ..base.units import BYTES_ALLOWED
from ..config.parsers import SHARE_ALLOWED, parse_budget
from ..errors import ConfigError, TraceError, plain
from ..policies import registry
from . import plan_model, plan_optimizer, plan_ranks, plan_recompute, plan_text, program
from .base import add_device, device_of, policies_of, share_of

if TYPE_CHECKING:
    from ..base.device_profiles import DeviceProfile
    from ..capture.recording import Recording
    from ..report.page import Content
    from ..trace.schema import Op
    from .base import Subparsers

POLICIES = ("auto", "belady", "autoswap", "optimizer_state", "stream_layers", "conv_lru", "lru")
BUDGET_ALLOWED = f"a percentage of the step's peak such as 50%, or {BYTES_ALLOWED}"


def add_parser(subparsers: Subparsers) -> None:
    """Add ``plan`` to the command line."""
    from ..recompute.planner.plan import MODES

    parser = subparsers.add_parser(
        "plan",
        help="predict memory and time of a program, without a GPU",
        description="Run a training step on tensors without data and predict how much memory it "
        "needs, whether that fits a budget, and how slow it is if not. Nothing is allocated.",
        usage="umem plan FILE.py:function [options]\n"
        "       umem plan MODEL --train full [--batch N] [--sequence N] [options]\n"
        "       umem plan [options] --script train.py [args ...]",
        allow_abbrev=False,
    )
    program.add_arguments(parser, "three")
    plan_model.add_arguments(parser)
    text = f"{BUDGET_ALLOWED} (default: the device's memory, with --train less 512 MiB)"
    parser.add_argument("--budget", help=text.replace("%", "%%"))
    add_device(parser)
    plan_ranks.add_arguments(parser)
    text = f"policies to compare, or all (default: {' '.join(POLICIES)})"
    parser.add_argument("--policy", nargs="+", default=list(POLICIES), metavar="NAME", help=text)
    text = f"also evaluate activation recomputation: all, or one of {', '.join(MODES)}"
    parser.add_argument("--recompute", metavar="MODE", help=text)
    text = f"also plan updates on the host, with recomputation: {SHARE_ALLOWED}"
    parser.add_argument("--optimizer", metavar="WHERE", help=text.replace("%", "%%"))
    text = "a trace of the program with op times, which correct the roofline"
    parser.add_argument("--times", type=Path, metavar="TRACE", help=text)
    text = "write the planned steps as a trace (.jsonl, .jsonl.gz), for umem replay"
    parser.add_argument("--out", type=Path, metavar="TRACE", help=text)
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="write an HTML page about the step under the first of the policies (umem report)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def main(args: argparse.Namespace) -> int:
    """Print the plan; return 0 even if the program does not fit.

    Raises:
        ConfigError: a bad option, or no such function.
        PlanError: the program cannot be run without data; the message says where.
        NotSupportedError: torch is missing.
    """
    _check_files(args)
    with program.output_aside(args.json):
        outcome = plan(args)
    text = json.dumps(as_dict(outcome), indent=1) if args.json else plan_text.render(outcome)
    print(text)  # before the files, which may fail
    if args.out is not None:
        _write(args.out, outcome)
    if args.report is not None:
        from ..report import page

        page.write(args.report, [_content(args, outcome)])
    return 0


def plan(args: argparse.Namespace) -> plan_text.PlanAnswer:
    """Trace the program, analyse its memory, and replay it under the policies."""
    _check_program(args)
    cluster = plan_ranks.cluster(args)
    device = device_of(args) if cluster is None else cluster.device
    budget = None if args.budget is None else _budget(args.budget)
    policies = _policies(args)
    modes = plan_recompute.modes(args.recompute)
    share = None if args.optimizer is None else share_of(args.optimizer)
    recorded = None if args.times is None else _ops(args.times)
    began = time.monotonic()
    with plan_ranks.as_rank(cluster):
        name, recording, model = _record(args, device)
    seconds = time.monotonic() - began
    from ..capture import roofline

    clock = roofline.clock(device)
    if recorded is not None:
        clock = roofline.scaled(clock, recording.last_step(), recorded)
    events = recording.device_events(clock) if cluster is None else cluster.events(recording, clock)
    from ..analysis import bounds, summary
    from ..simulation import replay
    from ..trace.step_builder import last_step

    step = last_step(events)

    found = summary.memory(step, recording)
    if budget is None:
        asked = device.memory_bytes - (0 if model is None else _headroom(device))
    else:
        asked = budget.bytes or int(found.peak_bytes * (budget.percent or 0) / 100)
    room = max(asked, replay.min_budget(step))
    floor = bounds.closed_form_floor(step, device, room)
    shares = 0 if args.optimizer is None else replay.shares_tried(share)
    parts = len(policies) + len(modes) + shares
    with progress("planning", parts, quiet=args.json) as advance:
        results = [
            replay.replay_step(step, policy, device, room) for policy in over(policies, advance)
        ]
        results.sort(key=lambda result: result.step_us)
        recomputed = (
            plan_recompute.table(step, recording, device, room, over(modes, advance))
            if modes
            else None
        )
        updated = (
            None
            if args.optimizer is None
            else plan_optimizer.answer(step, recording, device, room, share, advance=advance)
        )
    slowdown = results[0].step_us / step.compute_us if results and step.compute_us else None
    return plan_text.PlanAnswer(
        program=name,
        recording=recording,
        events=events,
        step=step,
        device=device,
        memory=found,
        resident=replay.resident_budget(step, device),
        asked=asked,
        budget=room,
        floor={
            "us": floor.us,
            "bound": floor.bound,
            "op": None if floor.op < 0 else str(summary.place(step, recording, floor.op)),
        },
        results=results,
        hidden_from=summary.hidden_from(step, device),
        advice=summary.advice(found, step, device, room, slowdown),
        seconds=seconds,
        recomputed=recomputed,
        updated=updated,
        model=None if model is None else model.answer(device, asked),
        ranks=None
        if cluster is None
        else plan_ranks.answer(cluster, recording, clock, step, results),
    )


def _content(args: argparse.Namespace, outcome: plan_text.PlanAnswer) -> Content:
    from ..report import make
    from ..trace import origin

    policies = _policies(args)
    known = {
        number: said
        for number, block in outcome.recording.blocks.items()
        if (said := origin.text(origin.keys(block.module, block.line)))
    }
    return make.content(
        outcome.step,
        outcome.device,
        outcome.asked,
        title=outcome.program,
        policy=policies[0],
        compared=[result.policy for result in outcome.results],
        results=outcome.results,
        origins=known,
        notes=[*outcome.recording.remarks, *_model_notes(outcome)],
        show=not args.json,
    )


def _model_notes(outcome: plan_text.PlanAnswer) -> list[str]:
    rows = [] if outcome.model is None else outcome.model.rows()
    return [f"{name.strip()}: {text}" for name, text in rows]


def as_dict(outcome: plan_text.PlanAnswer) -> dict[str, Any]:
    """Return the answer for JSON. Sizes in bytes, times in µs; names are stable."""
    found, step = outcome.memory, outcome.step
    return {
        "program": outcome.program,
        "device": outcome.device.name,
        "steps": outcome.recording.steps,
        "ops": step.n_ops,
        "tensors": step.n_tensors,
        "trace_seconds": outcome.seconds,
        "peak_bytes": found.peak_bytes,
        "peak": dataclasses.asdict(found.peak),
        "peak_by_tag": found.by_tag,
        "largest_tensors": [dataclasses.asdict(holder) for holder in found.largest],
        "bytes_over_time": found.over_time,
        "largest_op": {**dataclasses.asdict(found.largest_op), "bytes": found.largest_op_bytes},
        "budget": outcome.budget,
        "raised_from": outcome.asked if outcome.budget > outcome.asked else None,
        "fits": outcome.resident <= outcome.asked,
        "compute_us": step.compute_us,
        "floor": outcome.floor,
        "free_from_bytes": outcome.resident,
        "hidden_from_bytes": outcome.hidden_from,
        "policies": [result.as_dict() for result in outcome.results],
        "best_policy": outcome.results[0].policy if outcome.results else None,
        "advice": outcome.advice,
        "remarks": outcome.recording.remarks,
        "recompute": None if outcome.recomputed is None else outcome.recomputed.as_dict(),
        "optimizer": None if outcome.updated is None else outcome.updated.as_dict(),
        "ranks": None if outcome.ranks is None else outcome.ranks.as_dict(),
        "model": None if outcome.model is None else outcome.model.as_dict(),
    }


def _budget(text: str) -> Any:
    try:
        budget = parse_budget(text)
    except ValueError as error:
        raise ConfigError(f"--budget: {error}; allowed: {BUDGET_ALLOWED}") from None
    if budget.bytes is None and budget.percent is None:
        raise ConfigError(f"--budget: 'auto' needs a real device; allowed: {BUDGET_ALLOWED}")
    return budget


def _check_files(args: argparse.Namespace) -> None:
    """Check before the program runs, which may take minutes, that the files can be written."""
    if args.report is not None:
        from ..report import page

        page.check(args.report, "--report")
    if args.out is None:
        return
    if not args.out.name.endswith((".jsonl", ".jsonl.gz")):
        raise ConfigError(f"--out {args.out}; allowed: FILE.jsonl or FILE.jsonl.gz")
    check_folder(args.out, "--out")
    if args.times is not None and os.path.realpath(args.out) == os.path.realpath(args.times):
        raise ConfigError(
            f"--out {args.out} would replace the trace of --times; allowed: another file"
        )


def _ops(path: Path) -> list[Op]:
    """Return the ops of a trace."""
    from ..trace.reader import read
    from ..trace.schema import Op

    return [event for event in read(path)[1] if isinstance(event, Op)]


def _record(
    args: argparse.Namespace, device: DeviceProfile
) -> tuple[str, Recording, plan_model.PlannedModel | None]:
    if args.train is None:
        return *program.record(args, device), None
    program.need_torch()
    model = plan_model.PlannedModel(args)
    return f"{args.program} --train {args.train}", model.record(), model


def _headroom(device: DeviceProfile) -> int:
    """Return the bytes that the context and the libraries of a real device take."""
    from ..base.native import core

    return core.headroom_bytes(device.memory_bytes)


def _check_program(args: argparse.Namespace) -> None:
    plan_model.check(args)
    taken = [name for name in args.policy if ":" in name]
    hint = f" before --policy, which took {taken[0]!r} for a name" if taken else ""
    program.check(args, "plan", hint)


def _policies(args: argparse.Namespace) -> list[str]:
    return policies_of(args.policy, [name for name in registry.names() if name != "none"])


def _write(path: Path, outcome: plan_text.PlanAnswer) -> None:
    import torch

    from ..trace import origin
    from ..trace.schema import Alloc, Header
    from ..trace.writer import Writer

    source = f"umem plan, torch {torch.__version__}"
    blocks = outcome.recording.blocks
    header = Header(outcome.device.name, source, plain(outcome.program))
    with replacing(path, TraceError) as part, Writer(part, header) as writer:
        for event in outcome.events:
            if isinstance(event, Alloc) and (block := blocks.get(event.id)) is not None:
                known = origin.keys(block.module, block.line)
                event = dataclasses.replace(event, extra=known)
            writer.write(event)
