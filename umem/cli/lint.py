"""`umem lint`: list needless memory of a training step, without a GPU."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..base.units import format_bytes
from ..errors import ConfigError
from . import program

if TYPE_CHECKING:
    from ..lint.apply import Checked
    from ..lint.findings import Finding, LintReport
    from .base import Subparsers

_MAX = 10  # shown per kind
_TITLES = {
    "in_place": "in place",
    "duplicate": "duplicate",
    "late": "late",
    "held": "held",
    "unused": "unused",
    "no_gradient": "no gradient",
}
_WIDTH = 12


def add_parser(subparsers: Subparsers) -> None:
    """Add ``lint`` to the command line."""
    parser = subparsers.add_parser(
        "lint",
        help="list needless memory of a training step",
        description="Run training steps on tensors without data and list ops that may be in-place, "
        "tensors of equal values, tensors kept after their last use or across steps, and unused "
        "inputs and parameters; "
        "each with its bytes and the line of the program. No file is changed.",
        usage="umem lint FILE.py:function [options]\n"
        "       umem lint [options] --script train.py [args ...]",
        allow_abbrev=False,
    )
    program.add_arguments(parser, "four")
    text = "also compare the values of buffers, with real tensors"
    parser.add_argument("--values", action="store_true", help=text)
    text = "apply the safe changes, and check with real tensors that results are bit-identical"
    parser.add_argument("--apply", action="store_true", help=text)
    parser.add_argument("--all", action="store_true", help=f"list more than {_MAX} of a kind")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def main(args: argparse.Namespace) -> int:
    """Print the report; return 1 if an applied change altered a result.

    Raises:
        ConfigError: a bad option, or no such function.
        PlanError: the program cannot be run; the message says where.
        NotSupportedError: torch is missing.
    """
    program.check(args, "lint")
    if args.script and (args.apply or args.values):
        option = "--apply" if args.apply else "--values"
        raise ConfigError(
            f"{option} with --script: it needs the model; allowed: FILE.py:function that returns "
            "(model, step) or (model, optimizer, batch, loss_fn)"
        )
    program.need_torch()
    with program.output_aside(args.json):
        report, checked = _lint(args)
    if args.json:
        answer = {**dataclasses.asdict(report), "program": args.program or args.script[0]}
        del answer["unsure"]
        answer["applied"] = None if checked is None else dataclasses.asdict(checked)
        print(json.dumps(answer, indent=1))
    else:
        print("\n".join(_text(report, checked, args.all)))
    return 1 if checked is not None and checked.differing else 0


@program.folder_kept()
def _lint(args: argparse.Namespace) -> tuple[LintReport, Checked | None]:
    from ..capture import program as entry
    from ..lint import apply, findings

    if args.script:
        return findings.lint_script(Path(args.script[0]), args.script[1:]), None
    made = entry.find(args.program, Path.cwd())
    # The function is called several times: each call starts where its file's import ended.
    with program.folder_kept() as folder:

        def make() -> object:
            os.fchdir(folder)
            return made()

        report = findings.lint(make)
        if args.values or args.apply:
            report = apply.with_values(make, report)
        return report, apply.check(make, report.findings) if args.apply else None


def _text(report: LintReport, checked: Checked | None, everything: bool) -> Iterator[str]:
    yield _row("peak", f"{format_bytes(report.peak_bytes)} a step")
    for kind, title in _TITLES.items():
        found = [finding for finding in report.findings if finding.kind == kind]
        shown = found if everything else found[:_MAX]
        for finding in shown:
            yield from _of(title, finding)
        if len(shown) < len(found):
            rest = sum(finding.bytes for finding in found[len(shown) :])
            text = f"{len(found) - len(shown)} more of {format_bytes(rest)} (--all)"
            yield _row("", text)
    if not report.findings:
        yield _row("", "nothing found")
    for refused in report.refused:
        text = f"{_short(refused.line)}: {refused.op} {refused.module} cannot be in-place: "
        yield _row("refused", text + refused.why)
    for remark in report.remarks:
        yield _row("note", remark)
    if report.peak_in_place < report.peak_bytes:
        text = f"{format_bytes(report.peak_in_place)} a step, with every op in-place that may be"
        yield _row("peak", text)
    if checked is not None:
        yield from _applied(checked)


def _of(title: str, finding: Finding) -> Iterator[str]:
    size = format_bytes(finding.bytes)
    if finding.kind == "late":
        size += f", {format_bytes(finding.peak_bytes or 0)} less at the peak without it"
    elif finding.peak_bytes is not None:
        gain = format_bytes(finding.peak_bytes)
        size += f" less to allocate, {gain} less at the peak" if finding.peak_bytes else (
            " less to allocate, none of it at the peak")  # fmt: skip
    yield _row(title, f"{_short(finding.line)}: {finding.what}; {size}")
    safe = "  [--apply]" if finding.safe else ""
    yield _row("", f"  {_short(finding.fix)}{safe}")


def _applied(checked: Checked) -> Iterator[str]:
    for done in checked.done:
        yield _row("applied", _short(done))
    if checked.differing:
        names = ", ".join(checked.differing[:3])
        yield _row("differs", f"{len(checked.differing)} of {checked.compared} tensors: {names}")
        return
    same = f"{checked.compared} losses, gradients and tensors of the model are bit-identical"
    yield _row("checked", f"{same} with and without")
    before, after = format_bytes(checked.peak_before), format_bytes(checked.peak_after)
    yield _row("peak", f"{before} a step before, {after} after")


def _short(text: str) -> str:
    """Shorten paths below the working directory to relative ones."""
    return re.sub(rf"(?<![\w./-]){re.escape(str(Path.cwd()))}{os.sep}", "", text)


def _row(name: str, text: str) -> str:
    return f"{name:<{_WIDTH}} {text}".rstrip()
