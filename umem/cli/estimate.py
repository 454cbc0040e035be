"""``umem estimate``: memory of a training, from a few numbers or from the program itself."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.units import BYTES_ALLOWED, format_bytes, parse_bytes
from ..errors import ConfigError
from . import estimate_text, program

if TYPE_CHECKING:
    from .base import Subparsers

_NUMBER = re.compile(r"[0-9]{1,18}(?:\.[0-9]{1,18})?(?:e\+?[0-9]{1,2})?", re.ASCII)
_MAX_BUDGET = 1 << 46  # half of a process's address space
_SUFFIXES = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_MAX_COUNT = 10**18
COUNT_ALLOWED = "a whole number from 1 to 1e18, such as 350000, 1.5e9 or 1.5B (K, M, B, T)"
# The options that are counts, and their help texts.
_COUNTS = {
    "params": "number of parameters",
    "batch": "samples per step (default: 1; for a program: its own)",
    "layers": "transformer blocks",
    "hidden": "width of the transformer",
    "sequence": "tokens per sample",
    "activation_elements": "saved elements per sample, instead of those of a transformer",
}
_CHOICES = {
    "optimizer": "sgd, momentum, adagrad, rmsprop, lion, adam (default), adamw or adam8bit",
    "precision": "fp32, mixed (default: half weights, fp32 copy), amp (autocast), bf16 or fp16",
    "checkpointing": "none (default) or sqrt (every sqrt(layers) layers)",
}


def add_parser(subparsers: Subparsers) -> None:
    """Add ``estimate`` to the command line."""
    parser = subparsers.add_parser(
        "estimate",
        help="estimate memory by kind, and the largest batch, without a GPU",
        description="Estimate the memory of parameters, gradients, optimizer and activations: from "
        "numbers by formulas, or from a program by running its step on tensors without data.",
        usage="umem estimate --params 1.5e9 [options]\n"
        "       umem estimate FILE.py:function [--batch N] [--budget SIZE [--max-batch]]\n"
        "       umem estimate [--budget SIZE] --script train.py [args ...]",
        allow_abbrev=False,
    )
    text = "FILE.py:function as for umem plan; with --batch it is called as function(batch=N)"
    parser.add_argument("program", nargs="?", help=text)
    text = "run a script for three steps of its optimizer; its arguments follow"
    parser.add_argument("--script", nargs=argparse.REMAINDER, metavar="SCRIPT", help=text)
    for name, text in _COUNTS.items():
        parser.add_argument(_flag(name), metavar="N", help=text)
    for name, text in _CHOICES.items():
        parser.add_argument(_flag(name), metavar="NAME", help=text)
    text = "gradients are fused into one float32 buffer"
    parser.add_argument("--flat-buffer", action="store_true", help=text)
    text = f"of a program: additional bytes of cuBLAS, cuDNN and the like: {BYTES_ALLOWED}"
    parser.add_argument("--workspace", metavar="SIZE", help=text)
    parser.add_argument("--budget", metavar="SIZE", help=f"available memory: {BYTES_ALLOWED}")
    text = "find the largest batch of a program within the budget"
    parser.add_argument("--max-batch", action="store_true", help=text)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def main(args: argparse.Namespace) -> int:
    """Print the estimate; return 0 even if it does not fit, which is a valid answer.

    Raises:
        ConfigError: a bad option, or no such function.
        PlanError: the program cannot be run without data, or its memory ignores the batch.
        NotSupportedError: torch is missing, and a program is given.
    """
    with program.output_aside(args.json):
        outcome = estimate(args)
    text = json.dumps(as_dict(outcome), indent=1) if args.json else estimate_text.render(outcome)
    print(text)
    return 0


def estimate(args: argparse.Namespace) -> estimate_text.EstimateAnswer:
    """Estimate from the options, for a program or a configuration."""
    budget = None if args.budget is None else _size("--budget", args.budget)
    if budget is not None and not 0 < budget <= _MAX_BUDGET:
        most = format_bytes(_MAX_BUDGET)
        raise ConfigError(f"--budget {args.budget}; allowed: more than 0 bytes, up to {most}")
    if args.max_batch and budget is None:
        raise ConfigError("--max-batch needs the available memory; add --budget, such as 24GiB")
    if args.program is None and not args.script:
        return _of_config(args, budget)
    _check_program(args)
    return _of_program(args, budget)


def as_dict(outcome: estimate_text.EstimateAnswer) -> dict[str, Any]:
    """Return the answer for JSON. Sizes in bytes; names are stable."""
    found, fit = outcome.found, outcome.fit
    answer: dict[str, Any] = {
        "program": outcome.program,
        "config": None if outcome.config is None else asdict(outcome.config),
        "batch": outcome.batch,
        "peak": outcome.peak,
        "bytes": asdict(found),
        "states_bytes": found.states,
        "total_bytes": found.total,
        "budget": outcome.budget,
        "fits": None if outcome.budget is None else found.total <= outcome.budget,
        "max_batch": None,
    }
    if fit is not None:
        answer["max_batch"] = {
            "batch": fit.batch,
            "predicted": fit.predicted,
            "by_tensor": fit.modelled,
            "sample_bytes": round(fit.sample),
            "bytes_by_batch": {str(batch): size for batch, size in fit.needs.items()},
        }
    return answer


def _of_config(args: argparse.Namespace, budget: int | None) -> estimate_text.EstimateAnswer:
    from ..analysis import formulas

    given: dict[str, Any] = {name: _count(name, getattr(args, name)) for name in _COUNTS}
    given |= {name: getattr(args, name) for name in _CHOICES}
    given = {name: value for name, value in given.items() if value is not None}
    if args.max_batch or args.workspace is not None:
        option = "--max-batch" if args.max_batch else "--workspace"
        raise ConfigError(f"{option} needs a program, such as examples/gpt.py:make_step")
    if "params" not in given:
        raise ConfigError(
            "nothing to estimate; give --params, such as 1.5e9, or a program, such as "
            "examples/gpt.py:make_step"
        )
    config = formulas.Config(**given, flat_buffer=args.flat_buffer)
    return estimate_text.EstimateAnswer(
        None, config, config.batch, None, formulas.estimate(config), budget, None
    )


def _check_program(args: argparse.Namespace) -> None:
    program.refuse_script(args, "estimate")
    if args.program is not None and args.script:
        raise ConfigError("a function and --script are both given; allowed: one of them")
    names = (*_COUNTS, *_CHOICES, "flat_buffer")
    known = [name for name in names if getattr(args, name) and name != "batch"]
    if known:
        raise ConfigError(
            f"{_flag(known[0])} describes a configuration, and a program has its own; allowed with "
            "a program: --batch, --workspace, --budget, --max-batch, --json"
        )
    if args.script and (args.max_batch or args.batch is not None):
        option = "--max-batch" if args.max_batch else "--batch"
        raise ConfigError(
            f"{option} does not work with a script, which has its own batch; write a function "
            "that takes batch=N and returns its step (umem estimate FILE.py:function)"
        )


def _of_program(args: argparse.Namespace, budget: int | None) -> estimate_text.EstimateAnswer:
    from ..analysis import batch_size
    from .estimate_program import Program, look

    workspace = 0 if args.workspace is None else _size("--workspace", args.workspace)
    batch = _count("batch", args.batch)
    if batch is None and not args.max_batch:
        name, recording = program.record(args)
        seen = look(recording, workspace)
        return estimate_text.EstimateAnswer(name, None, None, seen.peak, seen.found, budget, None)
    if batch is not None and batch > batch_size.MOST:
        raise ConfigError(f"--batch {args.batch}; allowed for a program: 1 to {batch_size.MOST}")
    program.need_torch()
    chosen = Program(args.program, Path.cwd(), workspace)
    fit = None
    if args.max_batch and budget is not None:
        fit = batch_size.largest_batch(
            lambda size: chosen.at(size).found.total, budget, model=chosen.lines
        )
        batch = batch or fit.batch or min(fit.needs)
    seen = chosen.at(batch or 1)
    return estimate_text.EstimateAnswer(
        args.program, None, batch, seen.peak, seen.found, budget, fit
    )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _count(name: str, text: str | None) -> int | None:
    """Parse a count as people write it."""
    if text is None:
        return None
    word = text.strip().lower()
    factor = _SUFFIXES.get(word[-1:], 1)
    number = _NUMBER.fullmatch(word if factor == 1 else word[:-1])
    exact = Fraction(number[0]) * factor if number else Fraction(0)
    if exact.denominator != 1 or not 0 < exact <= _MAX_COUNT:
        raise ConfigError(f"{_flag(name)} {text}; allowed: {COUNT_ALLOWED}")
    return int(exact)


def _size(option: str, text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}; allowed: {BYTES_ALLOWED}") from None
