"""The training of a model: its weights, their precision, and the optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from ...base import extras
from ...errors import ConfigError, PlanError, did_you_mean
from ..recording import Recording
from ..tracer import Tracer
from .networks import Network, Shape, Source
from .nf4 import quantize

PRECISIONS = ("fp32", "amp", "bf16")
OPTIMIZERS: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda weights: torch.optim.AdamW(weights, fused=True),
    "adamw-foreach": lambda weights: torch.optim.AdamW(weights, foreach=True),
    "adam": lambda weights: torch.optim.Adam(weights, fused=True),
    "adam-foreach": lambda weights: torch.optim.Adam(weights, foreach=True),
    "sgd": lambda weights: torch.optim.SGD(weights),
    "momentum": lambda weights: torch.optim.SGD(weights, momentum=0.9),
    "adafactor": lambda weights: torch.optim.Adafactor(weights),
}
RANK = 16
_FEW = 0.01  # share of the trained weights that may be without a gradient, as a token for masks
ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class Setup:
    """The choices for a training; the defaults of the command line."""

    train: str = "full"
    precision: str | None = None  # None: `bf16` for lora and none, else `amp`
    optimizer: str = "adamw"
    checkpointing: bool = False
    rank: int = RANK  # of LoRA's matrices
    targets: tuple[str, ...] = (ALL_LINEAR,)  # the layers that have them

    @property
    def in_precision(self) -> str:
        """The precision, by default that of usual scripts.

        `amp` has weights in float32; in `qlora` those that have no 4 bits, as peft prepares them.
        """
        return self.precision or ("amp" if self.train in ("full", "qlora") else "bf16")


class Recorded(NamedTuple):
    """A recorded training, and the sizes of its model."""

    recording: Recording
    parameters: int
    trained: int  # of them, those with gradients


def check(how: Setup) -> None:
    """Check the choices.

    Raises:
        ConfigError: one has an unknown value.
        NotSupportedError: LoRA is asked for, and peft is not installed.
    """
    if how.in_precision not in PRECISIONS:
        hint = did_you_mean(how.in_precision, PRECISIONS)
        raise ConfigError(f"--precision {how.precision}{hint}; allowed: {', '.join(PRECISIONS)}")
    if how.optimizer not in OPTIMIZERS:
        hint = did_you_mean(how.optimizer, [*OPTIMIZERS])
        allowed = ", ".join(OPTIMIZERS)
        raise ConfigError(f"--torch-optimizer {how.optimizer}{hint}; allowed: {allowed}")
    if how.train in ("lora", "qlora"):
        _peft()


def record(source: Source, shape: Shape, how: Setup, *, whole_lists: bool) -> Recorded:
    """Run the training on tensors without data.

    Args:
        source: the model.
        shape: of a step's data.
        how: it is trained.
        whole_lists: optimizers work on all tensors at once, as without umem.

    Raises:
        PlanError: the model cannot be run without data.
        NotSupportedError: LoRA is asked for, and peft is not installed.
    """
    from .. import program

    if how.train in ("lora", "qlora"):
        _peft()  # imported outside of fake tensors: it makes real ones
    recorder = Tracer()
    sizes: list[int] = []
    trained: list[nn.Parameter] = []
    # Constructors read values that they computed, such as rates of dropout by layer.
    recorder.constants = True

    def make() -> object:
        network = source.build(shape)
        sizes.append(sum(weight.numel() for weight in network.model.parameters()))
        made = program_of(network, how)
        if how.train != "none":
            trained.extend(weight for weight in made[0].parameters() if weight.requires_grad)
            sizes.append(sum(weight.numel() for weight in trained))
        recorder.constants = False
        return made

    try:
        recording = program.trace(make, recorder=recorder, whole_lists=whole_lists)
    except PlanError as error:
        if how.in_precision == "amp" and "BF16" in str(error):  # products of experts
            raise PlanError(f"{error}; with --precision bf16 its weights have that type") from None
        raise
    idle = sum(weight.numel() for weight in trained if weight.grad is None)
    if idle > _FEW * sum(sizes[1:]):
        recording.remarks.append(
            f"{idle / 1e6:.1f} M trained weights got no gradient, and no state of an optimizer: a "
            "part of the model, as for pictures, did not run"
        )
    return Recorded(recording, *sizes[:2], *([0] * (2 - len(sizes))))


def program_of(network: Network, how: Setup) -> tuple[Any, ...]:
    """Return a program, in a form that `program.trace` takes."""
    model, batch, run, loss = network
    if how.in_precision == "bf16":
        model.to(torch.bfloat16)
        batch = {
            name: data.bfloat16() if data.is_floating_point() else data
            for name, data in batch.items()
        }
    if how.train == "none":
        model.eval()

        def forward() -> None:
            with torch.no_grad(), _precision(how):
                run(model, {name: data for name, data in batch.items() if name != "labels"})

        return model, forward
    model.train()
    if how.checkpointing:
        _checkpoint(model)
    if how.train != "full":
        model = _with_adapters(model, how)
    weights = [weight for weight in model.parameters() if weight.requires_grad]

    def loss_of(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        with _precision(how):
            return loss(run(model, batch), batch)

    return model, OPTIMIZERS[how.optimizer](weights), batch, loss_of


def _precision(how: Setup) -> contextlib.AbstractContextManager[object]:
    if how.in_precision != "amp":
        return contextlib.nullcontext()
    return torch.autocast("cuda", dtype=torch.bfloat16)


def _checkpoint(model: Any) -> None:
    """Have the model keep the inputs of its blocks only, by its library's own switch."""
    if hasattr(model, "activation_checkpointing_enable"):  # transformers 5
        model.activation_checkpointing_enable({"use_reentrant": False})
    elif hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    elif hasattr(model, "enable_gradient_checkpointing"):
        model.enable_gradient_checkpointing()
    elif hasattr(model, "set_grad_checkpointing"):
        model.set_grad_checkpointing()
    else:
        raise PlanError(
            f"{type(model).__name__} has no switch for checkpoints; --recompute all plans "
            "recomputation by umem instead"
        )


def _with_adapters(model: nn.Module, how: Setup) -> Any:
    """Freeze the model and give it LoRA's matrices; in `qlora` its other weights have 4 bits."""
    layers = _linear(model)
    wanted = layers if how.targets == (ALL_LINEAR,) else list(how.targets)
    names = [name for name, _ in model.named_modules()]
    for target in wanted:  # peft refuses only if it finds none of them
        if not any(name == target or name.endswith(f".{target}") for name in names):
            known = sorted({name.rpartition(".")[2] for name in layers})
            raise ConfigError(
                f"--lora-target {target!r}: {type(model).__name__} has no layer of that name"
                f"{did_you_mean(target, known)}; allowed: {ALL_LINEAR}, {', '.join(known)}"
            )
    if how.train == "qlora":
        whole = {*(getattr(model, "_keep_in_fp32_modules", None) or ())}  # as transformers has it
        for name in layers:
            if whole.isdisjoint(name.split(".")):
                quantize(model, name)
    return _peft().get_peft_model(
        model, _peft().LoraConfig(r=how.rank, lora_alpha=2 * how.rank, target_modules=wanted)
    )


def _linear(model: Any) -> list[str]:
    """Return the names of the linear layers but the one that makes the output."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    found = [
        name
        for name, part in model.named_modules()
        if type(part).__name__ in ("Linear", "Conv1D") and part is not head
    ]
    if not found:
        raise PlanError(f"{type(model).__name__} has no linear layer; allowed: --train full")
    return found


def _peft() -> Any:
    return extras.load("peft", "--train lora", "peft")
