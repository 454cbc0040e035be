"""``umem trace info``: check a trace and print its figures."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..base.units import format_bytes
from .base import Subparsers

if TYPE_CHECKING:
    from ..trace.info import Info


def add_parser(subparsers: Subparsers) -> None:
    """Add `umem trace info`."""
    parser = subparsers.add_parser(
        "info",
        help="check a trace and print its figures",
        description="Read a trace to its end and print its figures. A malformed trace gives one "
        "line with the location of the error, and exit code 2.",
    )
    parser.add_argument("file", metavar="FILE", help=".jsonl or .jsonl.gz")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def main(args: argparse.Namespace) -> int:
    """Print the figures; return the exit code.

    Raises:
        TraceError: the file is not a valid trace.
    """
    from ..trace.info import examine

    info = examine(args.file)
    print(json.dumps(info.as_dict(), indent=2) if args.json else render(info))
    return 0


def render(info: Info) -> str:
    """Format the figures, one line each."""
    return "\n".join(f"{name:<13} {text}".rstrip() for name, text in _lines(info))


def _lines(info: Info) -> Iterator[tuple[str, str]]:
    yield "device", _plain(info.device) or "unknown"
    yield "source", _plain(info.source) or "unknown"
    if info.note:
        yield "note", _plain(info.note)
    yield "events", f"{info.events}: {info.allocs} allocations, {info.frees} frees"
    timed = f", {info.ops_without_time} without a time" if info.ops_without_time else ""
    yield "ops", f"{info.ops}{timed}"
    yield "steps", f"{info.steps}" if info.steps else "none marked: the trace is one step"
    if info.step_compute_us is not None:
        yield "compute", f"{info.step_compute_us / 1e3:.3f} ms in the last step"
    else:
        yield "compute", f"{info.compute_us / 1e3:.3f} ms"
    yield "peak", f"{format_bytes(info.peak_bytes)} live {_where(info)}"
    for tag, count in info.peak_by_tag.items():
        yield "", f"{format_bytes(count):>12}  {count / info.peak_bytes:6.1%}  {_tag(tag)}"
    yield "at the end", f"{format_bytes(info.live_bytes_at_end)} live"
    yield "small", _small(info)
    for index, block in enumerate(info.largest):
        made = f"{_tag(block['tag'])} {_plain(block['family'])}".rstrip()
        size = format_bytes(block["bytes"])
        yield ("" if index else "largest"), f"{size:>12}  id {block['id']}  {made}"


def _where(info: Info) -> str:
    if info.peak_op is None:
        return "after the last op" if info.ops else ""
    return f"in op {info.peak_op}, {_plain(info.peak_op_name)}"


def _small(info: Info) -> str:
    if not info.allocs:
        return "no tensors"
    share = info.small_bytes / max(info.allocated_bytes, 1)
    return (
        f"{info.small_tensors} of {info.allocs} tensors are below 2 MiB, with {share:.1%} of all "
        "allocated bytes"
    )


def _tag(tag: str) -> str:
    return _plain(tag) or "untagged"


def _plain(text: str) -> str:
    """Keep text from a file on one line."""
    return text if text.isprintable() else text.encode("unicode_escape").decode()
