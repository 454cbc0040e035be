"""``umem plan MODEL --train HOW``: can this model be trained on this device?"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..base.units import format_bytes
from ..errors import ConfigError, NotSupportedError, OutOfMemoryError, PlanError

if TYPE_CHECKING:
    from ..analysis.batch_size import Fit, TensorLines
    from ..analysis.formulas import MemoryEstimate
    from ..base.device_profiles import DeviceProfile
    from ..capture.models.networks import Shape, Source
    from ..capture.models.training import Recorded, Setup
    from ..capture.recording import Recording
    from ..trace.step_trace import Ints, StepTrace

TRAINED = ("full", "lora", "qlora", "none")
TOKENS = 64  # the unit of the largest sequence
# Options with a value; None is the default of all, so that one without --train is noticed.
_COUNTS = {
    "batch": "samples per step (default: 1)",
    "sequence": "tokens per sample (default: the model's, at most 2048)",
    "image": "pixels of a side; of latents, for diffusion (default: the model's)",
    "lora_rank": "rank of LoRA's matrices (default: 16)",
}
_CHOICES = {
    "precision": (
        "NAME",
        "fp32, bf16 (default for lora and none) or amp (else): autocast, float32 weights",
    ),
    "torch_optimizer": ("NAME", "adamw (default), adam, ...-foreach, sgd, momentum or adafactor"),
    "lora_target": ("NAMES", "names of layers with LoRA, by commas (default: all-linear)"),
}

# Options that other values of --train have no use for.
_ONLY = {
    ("lora_rank", "lora_target"): ("lora", "qlora"),
    ("checkpointing", "torch_optimizer"): ("full", "lora", "qlora"),
}


class Point(NamedTuple):
    """A step of some size, as torch's allocator would hold it."""

    found: MemoryEstimate  # at the peak; fragmentation is what torch reserves beyond it
    fits: bool  # in the budget
    step: StepTrace
    asked: Ints  # [m] requested bytes of each tensor
    parameters: int
    trained: int  # of them, those with gradients


@dataclass(frozen=True)
class ModelAnswer:
    """The sizes that fit. Bytes, and µs."""

    model: str
    shape: Shape
    how: Setup
    budget: int
    point: Point
    batch: Fit
    sequence: Fit | None  # in units of TOKENS; None: the model takes none
    positions: int | None
    others: dict[str, Point]  # by option: what needs less at this shape, if it does not fit
    twice: tuple[float, float] | None  # µs of twice the largest batch under umem, and of its ops

    def as_dict(self) -> dict[str, Any]:
        """Return the answer for JSON."""
        longest = self.sequence
        return {
            "model": self.model,
            "parameters": self.point.parameters,
            "trained": self.point.trained,
            **dataclasses.asdict(self.how),
            "targets": list(self.how.targets),
            "precision": self.how.in_precision,
            "batch": self.shape.batch,
            "sequence": self.shape.sequence,
            "image": self.shape.image,
            "budget": self.budget,
            "bytes": dataclasses.asdict(self.point.found),
            "states": self.states(),
            "total_bytes": self.point.found.total,
            "fits": self.point.fits,
            "max_batch": self.batch.batch,
            "max_sequence": None if longest is None else longest.batch * TOKENS,
            "positions": self.positions,
            "twice": self.twice and dict(zip(("step_us", "compute_us"), self.twice, strict=True)),
            "others": {
                option: {
                    "total_bytes": point.found.total,
                    "fits": point.fits,
                    "compute_us": point.step.compute_us,
                }
                for option, point in self.others.items()
            },
        }

    def states(self) -> dict[str, int]:
        """Return the bytes of weights, gradients and optimizer states over the whole step."""
        step, asked = self.point.step, self.point.asked
        tags = {"param": "weights", "grad": "gradients", "optimizer": "optimizer"}
        return {
            name: int(sum(asked[i] for i, each in enumerate(step.tags) if each == tag))
            for tag, name in tags.items()
        }

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield the answer as text: the name of a row, and its text."""
        how, found = self.how, self.point.found
        weights = "no weight" if how.train == "none" else f"{self.point.trained / 1e6:.1f} M"
        yield (
            "model",
            f"{self.model}: {self.point.parameters / 1e6:.1f} M parameters, {weights} trained",
        )
        size = f"batch {self.shape.batch}"
        if self.shape.sequence is not None:
            size += f", {self.shape.sequence} tokens"
        checkpoints = ", with checkpoints" if how.checkpointing else ""
        optimizer = "" if how.train == "none" else f", {how.optimizer}"
        yield "training", f"{how.train}, {how.in_precision}{optimizer}, {size}{checkpoints}"
        for name, bytes_ in self.states().items():
            yield f"  {name}", format_bytes(bytes_)
        for name in ("inputs", "activations", "temp", "fragmentation"):
            if bytes_ := getattr(found, name):
                note = " at the peak" if name in ("activations", "temp") else ""
                yield f"  {name}", format_bytes(bytes_) + note
        yield "plain torch", self._verdict()
        yield "  batch", _most(self.batch.batch, 1, "")
        if self.twice is not None:
            step_us, compute_us = self.twice
            yield (
                "",
                f"{2 * self.batch.batch} with umem: {step_us / 1e3:.2f} ms a step, "
                f"{step_us / compute_us:.2f} x compute",
            )
        if self.sequence is not None:
            known = self.positions or 0
            longest = self.sequence.batch * TOKENS
            more = f"; the model was made for {known}" if 0 < known < longest else ""
            yield "  sequence", _most(longest, TOKENS, " tokens") + more
        for number, (option, point) in enumerate(self.others.items()):
            fits = f"fits, {point.step.compute_us / 1e3:.2f} ms a step" if point.fits else "no fit"
            needs = format_bytes(point.found.total)
            yield "  or with" if number == 0 else "", f"{option}: {needs}, {fits}"

    def _verdict(self) -> str:
        needs = format_bytes(self.point.found.total)
        room = format_bytes(self.budget)
        return f"{'fits' if self.point.fits else 'does not fit'}: needs {needs} of {room}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --train, which makes the program a model, and the options of its training."""
    group = parser.add_argument_group(
        "a model of another library",
        "With --train, the program is a config.json (transformers, diffusers, timm), a folder with "
        "one, a class of transformers or diffusers with its defaults, or a name of timm or "
        "torchvision.",
    )
    text = "train all weights, LoRA adapters, LoRA on 4-bit weights, or only run a forward pass"
    group.add_argument("--train", choices=TRAINED, help=text)
    for name, text in _COUNTS.items():
        group.add_argument(_flag(name), type=int, metavar="N", help=text)
    for name, (metavar, text) in _CHOICES.items():
        group.add_argument(_flag(name), metavar=metavar, help=text)
    text = "recompute each block in backward, by the library's own switch"
    group.add_argument("--checkpointing", action="store_true", default=None, help=text)


def check(args: argparse.Namespace) -> None:
    """Check the options of a model.

    Raises:
        ConfigError: one is given without --train, or for another --train; --train without a model;
            or a count is not above 0.
    """
    names = (*_COUNTS, *_CHOICES, "checkpointing")
    given = [name for name in names if getattr(args, name) is not None]
    if args.train is None:
        if given:
            raise ConfigError(f"{_flag(given[0])} needs --train: {', '.join(TRAINED)}")
        return
    if args.program is None:
        raise ConfigError("--train needs a model, such as umem plan GPT2Config --train full")
    for names, allowed in _ONLY.items():
        for name in sorted(set(given) & set(names)):
            if args.train not in allowed:
                raise ConfigError(f"{_flag(name)} needs --train {' or '.join(allowed)}")
    for name in given:
        if name in _COUNTS and getattr(args, name) < 1:
            raise ConfigError(f"{_flag(name)} {getattr(args, name)}; allowed: 1 and more")


class PlannedModel:
    """A model with its training, recorded at any size.

    Raises:
        ConfigError: there is no such model, or an option has an unknown value.
        NotSupportedError: its library is not installed.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        from ..capture.models import networks, training

        self.how = _training(args)
        training.check(self.how)
        self.source: Source = networks.find(args.program, Path.cwd())
        if self.source.sequence is None and args.sequence is not None:
            raise ConfigError(f"--sequence: {self.source.title} takes no tokens")
        if self.source.sequence is not None and args.image is not None:
            raise ConfigError(f"--image: {self.source.title} takes no pictures")
        sequence = args.sequence or self.source.sequence
        self.shape: Shape = networks.Shape(args.batch or 1, sequence, args.image)

    def record(self) -> Recording:
        """Record the step as umem runs it.

        Raises:
            PlanError: the model cannot be run without data.
        """
        return self._run(self.shape, whole_lists=False).recording

    def answer(self, device: DeviceProfile, budget: int) -> ModelAnswer:
        """Find what fits with plain torch.

        Raises:
            PlanError: the model cannot be run without data at some size.
        """
        shape, length = self.shape, self.shape.sequence
        batches = Sizes(lambda n: self._run(shape._replace(batch=n)), device, budget)
        lengths = Sizes(lambda n: self._run(shape._replace(sequence=n * TOKENS)), device, budget)
        point = batches.at(shape.batch)
        if length is not None and length % TOKENS == 0:
            lengths.known[length // TOKENS] = point
        most = batches.largest(shape.batch)
        return ModelAnswer(
            model=self.source.title,
            shape=shape,
            how=self.how,
            budget=budget,
            point=point,
            batch=most,
            twice=self._twice(most, device, budget),
            sequence=None if length is None else lengths.largest(length // TOKENS),
            positions=self.source.positions,
            others={} if point.fits else dict(self._others(device, budget)),
        )

    def _run(self, shape: Shape, how: Setup | None = None, *, whole_lists: bool = True) -> Recorded:
        from ..capture.models import training

        return training.record(self.source, shape, how or self.how, whole_lists=whole_lists)

    def _twice(self, most: Fit, device: DeviceProfile, budget: int) -> tuple[float, float] | None:
        """Replay twice the largest batch under umem.

        None if that is none or no limit, or if one of its ops needs more than the budget.
        """
        from ..analysis.batch_size import MOST
        from ..capture import roofline
        from ..simulation import replay
        from ..trace.step_builder import last_step

        if not 0 < most.batch < MOST:
            return None
        shape = self.shape._replace(batch=2 * most.batch)
        recording = self._run(shape, whole_lists=False).recording
        step = last_step(recording.device_events(roofline.clock(device)))
        if replay.min_budget(step) > budget:
            return None
        return replay.replay_step(step, "auto", device, budget).step_us, step.compute_us

    def _others(self, device: DeviceProfile, budget: int) -> Iterator[tuple[str, Point]]:
        """Yield options that need less, and the step at this shape with each."""
        for option, how in _smaller(self.how):
            try:
                run = self._run(self.shape, how)
            except (PlanError, NotSupportedError):  # the model has no such switch, or peft is away
                continue
            yield option, point_of(run, device, budget)


class Sizes:
    """A step at several sizes, each recorded once."""

    def __init__(self, run: Callable[[int], Recorded], device: DeviceProfile, budget: int) -> None:
        self._run = run
        self._device, self._budget = device, budget
        self.known: dict[int, Point] = {}

    def at(self, size: int) -> Point:
        """Return the step at this size."""
        if size not in self.known:
            self.known[size] = point_of(self._run(size), self._device, self._budget)
        return self.known[size]

    def largest(self, start: int) -> Fit:
        """Find the largest size that fits, from steps of `start` and twice or half of that.

        See `Fit`.
        """
        from ..analysis import batch_size
        from ..trace.schema import MAX_LIVE_BYTES

        first = max(start, 2)  # 1 would squeeze dimensions away
        try:
            self.at(2 * first)
        except PlanError:  # such as a sequence longer than the table of positions
            first //= 2
        sizes = (first, 2 * first)

        def need(size: int) -> int:
            try:
                return self.at(size).found.total
            except PlanError:
                if size in (1, *sizes):
                    raise
                return MAX_LIVE_BYTES

        return batch_size.largest_batch(need, self._budget, batches=sizes, model=self._lines)

    def _lines(self, first: int, second: int) -> TensorLines | None:
        from ..analysis.batch_size import tensor_lines

        return tensor_lines(self.at, (first, second), lambda step: step.peak_bytes)


def point_of(run: Recorded, device: DeviceProfile, budget: int) -> Point:
    """Return the memory of a recorded step under torch's allocator."""
    from ..analysis import step_memory
    from ..analysis.caching_allocator import replay
    from ..capture import roofline
    from ..trace.step_builder import last_step

    step = last_step(run.recording.device_events(roofline.clock(device)))
    try:
        torch, fits = replay(run.recording.events, budget), True
    except OutOfMemoryError:
        torch, fits = replay(run.recording.events), False
    return Point(
        step_memory.of_step(step, run.recording, torch.peak_reserved),
        fits,
        step,
        step_memory.requested_bytes(step, run.recording),
        run.parameters,
        run.trained,
    )


def _smaller(how: Setup) -> Iterator[tuple[str, Setup]]:
    """Yield trainings that need less memory, with the option that chooses them."""
    if how.train == "none":
        return
    if not how.checkpointing:
        yield "--checkpointing", dataclasses.replace(how, checkpointing=True)
    if how.in_precision != "bf16":
        yield "--precision bf16", dataclasses.replace(how, precision="bf16")
    for train in TRAINED[TRAINED.index(how.train) + 1 : -1]:
        less = dataclasses.replace(how, train=train)
        yield f"--train {train}", less
        if not how.checkpointing:
            yield (
                f"--train {train} --checkpointing",
                dataclasses.replace(less, checkpointing=True),
            )


def _training(args: argparse.Namespace) -> Setup:
    from ..capture.models.training import Setup

    given = {
        "precision": args.precision,
        "optimizer": args.torch_optimizer,
        "rank": args.lora_rank,
        "targets": args.lora_target and tuple(map(str.strip, args.lora_target.split(","))),
    }
    given = {name: value for name, value in given.items() if value is not None}
    return Setup(args.train, checkpointing=bool(args.checkpointing), **given)


def _most(count: int, unit: int, what: str) -> str:
    from ..analysis.batch_size import MOST

    if not count:
        return f"none: {unit}{what} is too much"
    return f"up to {count}{what}{' and more' if count >= MOST * unit else ''}"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
