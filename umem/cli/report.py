"""``umem report TRACE``: a recorded step under a policy, as one HTML page."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ..base import device_profiles
from ..base.units import with_staging
from ..config.parsers import SHARE_ALLOWED
from ..errors import ConfigError, plain
from ..policies import registry
from . import replay
from .base import add_device, add_host_budget, device_of, host_budget_of, policies_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..base.device_profiles import DeviceProfile
    from ..report.page import Content
    from .base import Subparsers

_CPU_TIMES = (
    "The trace was recorded on the software device: its operators have CPU times, next to which "
    "transfers look free. `umem plan --report` uses a GPU's times."
)


def add_parser(subparsers: Subparsers) -> None:
    """Add ``report`` to the command line."""
    parser = subparsers.add_parser(
        "report",
        help="write an HTML page about a recorded step under a policy",
        description="Replay the last step of a trace under a policy, and write one HTML page, "
        "which needs no network: memory over time, transfers, stalls, the location of each tensor, "
        "policies compared, and findings. Each finding names a setting and its gain in replay.",
    )
    parser.add_argument("trace", type=Path, help="a .jsonl or .jsonl.gz file")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="the page (default: the trace's name, with .html)"
    )
    parser.add_argument("--policy", default=registry.DEFAULT, help="the policy (default: auto)")
    parser.add_argument(
        "--compare", nargs="*", metavar="POLICY",
        help="policies in the table (default: auto, belady, conv_lru and lru)",
    )  # fmt: skip
    text = f"{replay.BUDGET_ALLOWED} (default: 50%)".replace("%", "%%")
    parser.add_argument("--budget", default="50%", help=text)
    add_device(parser, of_trace=True)
    add_host_budget(parser)
    parser.add_argument(
        "--optimizer",
        metavar="WHERE",
        help="where parameters are updated; auto takes the best of five shares: "
        f"{SHARE_ALLOWED}".replace("%", "%%"),
    )
    parser.add_argument(
        "--trace-device", type=int, metavar="N",
        help="which device, if the trace has several (default: the first)",
    )  # fmt: skip
    parser.add_argument(
        "--json", action="store_true", help="print the page's figures as one JSON object"
    )


def main(args: argparse.Namespace) -> int:
    """Write the page.

    Raises:
        UmemError: a bad trace or option, or the native core is missing.
    """
    out = args.out or _beside(args.trace)
    from ..report import page

    if args.out is not None or os.path.exists(args.trace):
        page.check(out, "--out" if args.out is not None else "without --out:")
    registry.make(args.policy)
    compare = args.compare and policies_of(args.compare, registry.names())
    named = args.device is not None or args.profile is not None
    content = of_trace(
        args.trace,
        args.budget,
        args.policy,
        compare=compare,
        host_budget=host_budget_of(args.host_budget),
        shares=replay.shares_of(args.optimizer),
        device=device_of(args) if named else None,
        link=args.link,
        trace_device=args.trace_device,
        show=not args.json,
    )
    page.write(out, [content])
    if args.json:
        print(json.dumps({"page": str(out), **page.figures(content)}, indent=1))
    else:
        print(*(plain(finding.text) for finding in content.findings), sep="\n")
        print(f"Report: {out}")
    return 0


def of_trace(
    path: Path,
    budget: int | str,
    policy: str,
    *,
    title: str | None = None,
    compare: Sequence[str] | None = None,
    host_budget: int = 0,
    shares: Sequence[float] = (),
    device: DeviceProfile | None = None,
    link: Sequence[float] | None = None,
    trace_device: int | None = None,
    partial: bool = False,
    show: bool = False,
) -> Content:
    """Return the content of a trace's page.

    Args:
        path: the trace.
        budget: bytes, or text as `--budget` takes.
        policy: its name.
        title: of the page; None: the trace's name.
        compare: names of policies in the table; None: the usual ones.
        host_budget: bytes that evicted tensors may take; 0 for no limit.
        shares: shares of the updates to try on the host; the best is shown.
        device: the device profile; None: the trace's own if it is one, else the default.
        link: another link for the device that the trace names, as `--link` takes it.
        trace_device: the device of a trace of several; None: the first.
        partial: accept a truncated trace, and keep its complete lines.
        show: draw the progress where standard error is a terminal.

    Raises:
        UmemError: a bad trace or option.
    """
    from ..report import make
    from ..simulation.replay import load_devices, replay_shares

    found = load_devices(path, partial=partial, show=show)
    number = min(found) if trace_device is None else trace_device
    if number not in found:
        raise ConfigError(
            f"--trace-device {number}: the trace has none; allowed: {', '.join(map(str, found))}"
        )
    trace = found[number]
    notes = []
    if len(found) > 1:
        notes.append(f"This is device {number} of {len(found)}; --trace-device chooses another.")
    # A run names its GPU, or the profile of its software device; plans name a profile too.
    own = trace.device.removeprefix("soft:")
    staged = trace.staged and device is None  # another device has no disk
    on_cpu = own in device_profiles.names() and own != device_profiles.DISK
    if on_cpu and not trace.source.startswith("umem plan"):
        notes.append(_CPU_TIMES)
    if device is None:
        if note := replay.device_note(trace.device):
            notes.append(note)
        device = device_profiles.find(replay.own_device(trace.device))
        device = device if link is None else device_profiles.with_link(device, *link)
    step = trace.step
    room = budget if isinstance(budget, int) else replay.budget_of(budget, trace.peak_bytes)
    if shares:
        step, _ = replay_shares(step, shares, policy, device, room, host_budget=host_budget)
    return make.content(
        step,
        device,
        room,
        title=title or path.name,
        policy=policy,
        compared=compare,
        origins=trace.origins,
        host_budget=host_budget,
        staging=with_staging(room) - room if staged else 0,
        notes=notes,
        show=show,
    )


def _beside(trace: Path) -> Path:
    if not trace.name:
        raise ConfigError(f"{trace} is a folder; allowed: a trace, such as t.jsonl")
    name = trace.name.removesuffix(".gz").removesuffix(".jsonl")
    return trace.with_name(f"{name}.html")
