"""``umem replay TRACE``: run a recorded step under policies, in virtual time."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..base import device_profiles, nodes
from ..base.progress import progress
from ..base.text_table import aligned
from ..base.units import BYTES_ALLOWED, GIB, format_bytes
from ..config.parsers import SHARE_ALLOWED, parse_budget
from ..errors import ConfigError, UmemError
from ..policies import registry
from . import replay_devices
from .base import add_device, add_host_budget, host_budget_of, policies_of, share_of
from .replay_devices import Failure, Row

if TYPE_CHECKING:
    from ..base.device_profiles import DeviceProfile
    from ..simulation.replay import LoadedTrace, Result
    from .base import Subparsers

BUDGET_ALLOWED = f"a percentage of the trace's peak such as 50%, or {BYTES_ALLOWED}"
HEADER = (
    "", "policy", "budget", "of peak", "device", "step ms", "/compute", "/floor", "stall ms",
    "host ms", "in GiB", "/bound", "out GiB", "faults", "evictions", "unused GiB", "off plan",
)  # fmt: skip
_WORDS = (0, 1, 4)  # columns aligned to the left


def add_parser(subparsers: Subparsers) -> None:
    """Add ``replay`` to the command line."""
    parser = subparsers.add_parser(
        "replay",
        help="replay a recorded trace under policies, budgets and devices",
        description="Replay a trace on a simulated device, with the runtime's own engine, in "
        "virtual time and without data. The last step is repeated until two in a row are nearly "
        "equal; the figures are those of the last repeat. Each device of a trace is replayed "
        "alone, with its own budget. Exit code 1 if a replay failed.",
    )
    parser.add_argument("trace", type=Path, help="a .jsonl or .jsonl.gz file")
    parser.add_argument(
        "--policy",
        nargs="+",
        default=["auto"],
        metavar="POLICY",
        help=f"all, or some of {registry.listed(registry.names())} (default: auto)",
    )
    text = f"{BUDGET_ALLOWED} (default: 50%)".replace("%", "%%")
    parser.add_argument("--budget", nargs="+", default=["50%"], help=text)
    add_device(parser, of_trace=True, several=True)
    parser.add_argument(
        "--node",
        help="treat the trace's devices as those of a node, which share its links while busy: "
        f"{nodes.ALLOWED}",
    )
    parser.add_argument(
        "--busy",
        type=int,
        metavar="N",
        help="devices of the node that are busy (default: those of the trace)",
    )
    add_host_budget(parser)
    parser.add_argument(
        "--optimizer",
        metavar="WHERE",
        help="where parameters are updated; the step is replayed alone, with auto at the best "
        f"of five shares: {SHARE_ALLOWED}".replace("%", "%%"),
    )
    parser.add_argument(
        "--repeat", type=int, metavar="N", help="max repeats of the last step (default: 6)"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object per replay, one per line"
    )


def main(args: argparse.Namespace) -> int:
    """Replay every combination; return 1 if one of them failed.

    Raises:
        UmemError: a bad trace or option, or the native core is missing.
    """
    from ..simulation import replay

    traces = replay.load_devices(args.trace, show=not args.json)
    recorded = next(iter(traces.values())).device
    profiles = _profiles(args, recorded, len(traces))
    policies = policies_of(args.policy, registry.names())
    host = host_budget_of(args.host_budget)
    repeats = replay.REPEATS if args.repeat is None else args.repeat
    if repeats < 1:
        raise ConfigError(f"--repeat {repeats}; allowed: at least 1")
    shares = shares_of(args.optimizer)
    budgets = {
        number: [budget_of(text, trace.peak_bytes) for text in args.budget]
        for number, trace in traces.items()
    }

    def run(trace: LoadedTrace, device: DeviceProfile, budget: int, policy: str) -> Row:
        how = {"host_budget": host, "repeats": repeats}
        try:
            if shares:
                return replay.replay_shares(trace.step, shares, policy, device, budget, **how)[1]
            return replay.replay_step(trace.step, policy, device, budget, **how)
        except UmemError as error:
            return Failure(policy, budget, device.name, str(error))

    count = len(traces) * len(profiles) * len(args.budget) * len(policies)
    rows: dict[int, list[Row]] = {number: [] for number in traces}
    with progress("replays", count, quiet=args.json) as advance:
        for number, trace in traces.items():
            for device, budget, policy in itertools.product(profiles, budgets[number], policies):
                row = run(trace, device, budget, policy)
                rows[number].append(row)
                _show(args, row, number if len(traces) > 1 else None)
                advance(1)
    _finish(args, rows, {number: trace.peak_bytes for number, trace in traces.items()})
    chosen = args.node is not None or args.device or args.profile is not None
    if not chosen and (note := device_note(recorded)):
        print(note, file=sys.stderr if args.json else sys.stdout)
    return int(any(isinstance(row, Failure) for each in rows.values() for row in each))


def _show(args: argparse.Namespace, row: Row, number: int | None) -> None:
    """Print one replay as JSON, if requested."""
    if not args.json:
        return
    fields = row._asdict() if isinstance(row, Failure) else row.as_dict()
    print(json.dumps(fields if number is None else {"trace_device": number, **fields}), flush=True)


def _finish(
    args: argparse.Namespace, rows: Mapping[int, Sequence[Row]], peaks: Mapping[int, int]
) -> None:
    """Print the tables, or the totals of several devices as JSON."""
    if len(rows) == 1:
        if not args.json:
            print(*(render(mine, peaks[number]) for number, mine in rows.items()))
        return
    totals = replay_devices.totals(rows)
    if args.json:
        for total in totals:
            print(json.dumps(total.as_dict()), flush=True)
        return
    for number, mine in rows.items():
        print(f"device {number} of the trace, peak {format_bytes(peaks[number])}")
        print(render(mine, peaks[number]) + "\n")
    print(replay_devices.render(totals))


def render(rows: Sequence[Row], peak: int) -> str:
    """Format a table, one line per replay, the fastest of each budget and device marked."""
    from ..simulation.replay import raised_note

    results = [row for row in rows if not isinstance(row, Failure)]
    best: dict[tuple[str, int], float] = {}
    for row in results:
        key = row.device, row.budget
        best[key] = min(row.step_us, best.get(key, row.step_us))
    lines = [HEADER, *(_cells(row, peak, best[row.device, row.budget]) for row in results)]
    table = aligned(lines, _WORDS) if results else []
    explained = [note(row) for row in results for note in (raised_note, _share_note)]
    notes = dict.fromkeys(note for note in explained if note)
    failed = [
        f"{row.policy}, {format_bytes(row.budget)}, {row.device}: {row.error}"
        for row in rows
        if isinstance(row, Failure)
    ]
    legend = "* fastest; /floor and /bound: relative to proven lower bounds" if results else ""
    return "\n".join(part for part in (*table, legend, *notes, *failed) if part)


def _share_note(row: Result) -> str:
    if row.share is None:
        return ""
    return (
        f"{row.policy} with {format_bytes(row.budget)} on {row.device}: {row.share:.0%} of the "
        "updates on the host; /compute is relative to the step without them"
    )


def _cells(row: Result, peak: int, best: float) -> tuple[str, ...]:
    ops = row.plan_hits + row.plan_misses
    return (
        "*" if row.step_us == best else "",
        row.policy,
        format_bytes(row.budget),
        f"{100 * row.budget / peak:.0f}%",
        row.device,
        f"{row.step_us / 1e3:.2f}",
        _ratio(row.step_us, row.compute_us),
        _ratio(row.step_us, row.floor_us),
        f"{row.stall_us / 1e3:.2f}",
        f"{row.host_us / 1e3:.2f}" if row.host_us else "-",
        f"{row.bytes_in / GIB:.2f}",
        _ratio(row.bytes_in, row.bound_bytes_in),
        f"{row.bytes_out / GIB:.2f}",
        str(row.faults),
        str(row.evictions),
        f"{row.prefetched_unused / GIB:.2f}",
        f"{row.plan_misses} of {ops}" if ops else "-",
    )


def _ratio(value: float, base: float) -> str:
    """Format a ratio; a dash if the base and the value are 0."""
    if base > 0:
        return f"{value / base:.3f}"
    return "-" if value == 0 else "inf"


def _profiles(args: argparse.Namespace, recorded: str, devices: int) -> list[DeviceProfile]:
    if args.node is not None:
        return [replay_devices.profile(args, devices)]
    if args.busy is not None:
        raise ConfigError(f"--busy needs --node; allowed: {nodes.ALLOWED}")
    found = [device_profiles.find(name) for name in args.device or ()]
    if args.profile is not None:
        found.append(device_profiles.load(args.profile))
    if not found:
        found = [device_profiles.find(own_device(recorded))]
    if args.link is not None:
        found = [device_profiles.with_link(device, *args.link) for device in found]
    return found


def device_note(recorded: str) -> str:
    """Say that transfers use another device than the trace's; empty if they use its own."""
    name = own_device(recorded)
    if name == recorded.removeprefix("soft:"):
        return ""
    return (
        f"The trace names the device {recorded or 'of no name'!r}, which is not a device profile: "
        f"transfers use {name}. --device and --profile choose another."
    )


def own_device(recorded: str) -> str:
    """Return the name of the trace's device if it is a profile, else the default profile."""
    own = recorded.removeprefix("soft:")
    return own if own in device_profiles.names() else device_profiles.DEFAULT


def budget_of(text: str, peak: int) -> int:
    """Return the budget in bytes.

    Raises:
        ConfigError: neither bytes nor a percentage above 0 and up to 100.
    """
    try:
        budget = parse_budget(text)
    except ValueError as error:
        raise ConfigError(f"--budget: {error}; allowed: {BUDGET_ALLOWED}") from None
    if budget.percent is not None:
        return int(peak * budget.percent / 100)
    if budget.bytes is None:
        raise ConfigError(f"--budget {text}: a trace has no free memory; allowed: {BUDGET_ALLOWED}")
    return budget.bytes


def shares_of(given: str | None) -> tuple[float, ...]:
    """Return the shares of updates on the host that `--optimizer` sets; none without it.

    Raises:
        ConfigError: it is none of `SHARE_ALLOWED`.
    """
    if given is None:
        return ()
    from ..recompute.planner.host_updates import SHARES

    share = share_of(given)
    return SHARES if share is None else (share,)
