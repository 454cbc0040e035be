"""``umem estimate``: what training takes, from a few numbers or from the program itself."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import asdict, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import ConfigError
from ..units import BYTES_ALLOWED, format_bytes, parse_bytes, parse_percent
from . import estimate_text, program

if TYPE_CHECKING:
    from ..plan.batch_fit import Fit
    from ..plan.memory_model import Config, Estimate
    from .base import Subparsers

_NUMBER = re.compile(r"[0-9]{1,18}(?:\.[0-9]{1,18})?(?:e\+?[0-9]{1,2})?", re.ASCII)
_MOST_BUDGET = 1 << 46  # half of what a process can address
_SUFFIXES = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
COUNT_ALLOWED = "a whole number above 0, such as 350000, 1.5e9 or 1.5B (K, M, B, T)"
# The options that are counts, and what each says.
_COUNTS = {
    "params": "parameters (default: those of a GPT of these layers)",
    "batch": "samples a step (default: 1; of a program: its own)",
    "layers": "blocks of a transformer",
    "hidden": "its width",
    "heads": "its heads of attention",
    "sequence": "tokens of a sample",
    "vocabulary": "words; with them the logits count",
    "activation_elements": "elements a sample that backward needs, in place of a transformer's",
    "activation_factor": "elements a token, layer and hidden unit (default: 12)",
}
_CHOICES = {
    "optimizer": "sgd, momentum, adagrad, rmsprop, lion, adam (default), adamw or adam8bit",
    "precision": "fp32, mixed (default: half weights, fp32 copy), amp (autocast), bf16 or fp16",
    "checkpointing": "none (default), sqrt (every sqrt(layers) layers) or block (every layer)",
    "attention": "fused (default), or scores: kept for every pair of tokens",
}
_OF_PROGRAM = ("batch",)  # of those above; the others are of a configuration


class Outcome(NamedTuple):
    """All that was found out."""

    program: str | None  # None: a configuration
    config: Config | None
    batch: int | None  # None: the program's own
    peak: str | None  # the op
    found: Estimate
    budget: int | None
    fit: Fit | None


def add_parser(subparsers: Subparsers) -> None:
    """Add ``estimate`` to the command line."""
    parser = subparsers.add_parser(
        "estimate",
        help="memory of a training by kind, and the largest batch, without a GPU",
        description="Say what training takes: parameters, gradients, optimizer, activations. From "
        "numbers by formulas, or from a program by running its step on tensors without data.",
        usage="umem estimate --params 1.5e9 [options]\n"
        "       umem estimate pkg.mod:function [--batch N] [--budget SIZE [--max-batch]]\n"
        "       umem estimate [--budget SIZE] --script train.py [args ...]",
        allow_abbrev=False,
    )
    text = "pkg.mod:function as umem plan takes it; with --batch it is called as function(batch=N)"
    parser.add_argument("program", nargs="?", help=text)
    text = "run a script for three steps of its optimizer; what follows are its arguments"
    parser.add_argument("--script", nargs=argparse.REMAINDER, metavar="SCRIPT", help=text)
    for name, text in _COUNTS.items():
        parser.add_argument(_flag(name), metavar="N", help=text)
    for name, text in _CHOICES.items():
        parser.add_argument(_flag(name), metavar="NAME", help=text)
    text = "gradients are fused into one float32 buffer"
    parser.add_argument("--flat-buffer", action="store_true", help=text)
    text = "memory that lies free in pieces, of a configuration, as 30%%"
    parser.add_argument("--fragmentation", metavar="PERCENT", help=text)
    text = f"of cuBLAS, cuDNN and the like, on top: {BYTES_ALLOWED}"
    parser.add_argument("--workspace", metavar="SIZE", help=text)
    parser.add_argument("--budget", metavar="SIZE", help=f"the memory there is: {BYTES_ALLOWED}")
    text = "the largest batch within the budget"
    parser.add_argument("--max-batch", action="store_true", help=text)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def main(args: argparse.Namespace) -> int:
    """Estimate and print; 0 also where it does not fit, which is an answer.

    Raises:
        ConfigError: a bad option, or no such function.
        PlanError: the program cannot be run without data, or the batch changes nothing.
        NotSupportedError: torch is missing, and a program is given.
    """
    outcome = estimate(args)
    text = json.dumps(as_dict(outcome), indent=1) if args.json else estimate_text.render(outcome)
    print(text)
    return 0


def estimate(args: argparse.Namespace) -> Outcome:
    """Take the options for a program's or for a configuration's."""
    budget = None if args.budget is None else _size("--budget", args.budget)
    if budget is not None and not 0 < budget <= _MOST_BUDGET:
        most = format_bytes(_MOST_BUDGET)
        raise ConfigError(f"--budget {args.budget}; allowed: more than 0 bytes, up to {most}")
    if args.max_batch and budget is None:
        raise ConfigError("--max-batch needs the memory there is; add --budget, such as 24GiB")
    if args.program is None and not args.script:
        return _of_config(args, budget)
    _check_program(args)
    return _of_program(args, budget)


def as_dict(outcome: Outcome) -> dict[str, Any]:
    """For JSON. Sizes in bytes; names are stable."""
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


def _of_config(args: argparse.Namespace, budget: int | None) -> Outcome:
    from ..plan import batch_fit, memory_model

    given: dict[str, Any] = {name: _count(name, getattr(args, name)) for name in _COUNTS}
    given |= {name: getattr(args, name) for name in _CHOICES}
    given["fragmentation"] = None if args.fragmentation is None else _percent(args.fragmentation)
    given["workspace"] = None if args.workspace is None else _size("--workspace", args.workspace)
    given = {name: value for name, value in given.items() if value is not None}
    if not given:
        raise ConfigError(
            "nothing to estimate; give --params, such as 1.5e9, or --layers and --hidden, or a "
            "program, such as examples.gpt:make_step"
        )
    config = memory_model.Config(**given, flat_buffer=args.flat_buffer)

    def at(batch: int) -> Estimate:
        return memory_model.estimate(replace(config, batch=batch))

    if not args.max_batch or budget is None:
        return Outcome(None, config, config.batch, None, at(config.batch), budget, None)
    if at(2).total == at(1).total:
        raise ConfigError(
            "--max-batch: nothing given depends on the batch; add --layers, --hidden and "
            "--sequence, or --activation-elements"
        )
    fit = batch_fit.largest_batch(lambda batch: at(batch).total, budget)
    shown = config.batch if args.batch is not None else max(fit.batch, 1)
    return Outcome(None, replace(config, batch=shown), shown, None, at(shown), budget, fit)


def _check_program(args: argparse.Namespace) -> None:
    if args.program is not None and args.script:
        raise ConfigError("a function and --script are both given; allowed: one of them")
    names = [n for n in (*_COUNTS, *_CHOICES, "fragmentation") if n not in _OF_PROGRAM]
    known = [name for name in names if getattr(args, name) is not None]
    known += ["flat_buffer"] if args.flat_buffer else []
    if known:
        raise ConfigError(
            f"{_flag(known[0])} is of a configuration, and a program says it itself; allowed with "
            "a program: --batch, --workspace, --budget, --max-batch, --json"
        )
    if args.script and (args.max_batch or args.batch is not None):
        option = "--max-batch" if args.max_batch else "--batch"
        raise ConfigError(
            f"{option} is not for a script, whose batch is its own; write a function that takes "
            "batch=N and returns its step (umem estimate pkg.mod:function)"
        )


def _of_program(args: argparse.Namespace, budget: int | None) -> Outcome:
    from ..plan import batch_fit
    from .estimate_program import Program, look

    workspace = 0 if args.workspace is None else _size("--workspace", args.workspace)
    batch = _count("batch", args.batch)
    if batch is None and not args.max_batch:
        name, recording = program.record(args)
        seen = look(recording, workspace)
        return Outcome(name, None, None, seen.peak, seen.found, budget, None)
    if batch is not None and batch > batch_fit.MOST:
        raise ConfigError(f"--batch {args.batch}; allowed of a program: 1 to {batch_fit.MOST}")
    program.need_torch()
    chosen = Program(args.program, Path.cwd(), workspace)
    fit = None
    if args.max_batch and budget is not None:
        fit = batch_fit.largest_batch(
            lambda size: chosen.at(size).found.total, budget, model=chosen.lines
        )
        batch = batch or max(fit.batch, 1)
    seen = chosen.at(batch or 1)
    return Outcome(args.program, None, batch, seen.peak, seen.found, budget, fit)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _count(name: str, text: str | None) -> int | None:
    """A number of things as people write it; bounds are the configuration's."""
    if text is None:
        return None
    word = text.strip().lower()
    factor = _SUFFIXES.get(word[-1:], 1)
    number = _NUMBER.fullmatch(word if factor == 1 else word[:-1])
    exact = Fraction(number[0]) * factor if number else Fraction(0)
    if exact.denominator != 1 or exact <= 0:
        raise ConfigError(f"{_flag(name)} {text}; allowed: {COUNT_ALLOWED}")
    return int(exact)


def _size(option: str, text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}; allowed: {BYTES_ALLOWED}") from None


def _percent(text: str) -> float:
    percent = parse_percent(text)
    if percent is None:
        raise ConfigError(f"--fragmentation {text}; allowed: a percentage, such as 30%")
    return percent
