"""Formulas for the memory that training takes, before there is a program to trace.

Weights, gradients and optimizer states follow Rajbhandari et al. 2020 (ZeRO, section 3): in mixed
precision with Adam 2 + 2 + 12 bytes per parameter. So do the activations of a transformer: 12
elements per token, layer and hidden unit. Checkpoints every sqrt(l) layers follow Chen et al. 2016.

The maxima of all kinds are added up, although gradients grow while activations shrink: the sum is
an upper bound of the peak of what the formulas count. `step_memory` has the bytes of a traced step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import NamedTuple

from ..errors import ConfigError, did_you_mean


class Precision(NamedTuple):
    """Bytes per number, by kind."""

    weight: int
    gradient: int
    copy: int  # the float32 copy of each weight that the optimizer updates
    activation: int
    state: int  # a number of an optimizer state


PRECISIONS = {
    "fp32": Precision(4, 4, 0, 4, 4),
    "mixed": Precision(2, 2, 4, 2, 4),  # ZeRO, Megatron, apex O2
    "amp": Precision(4, 4, 0, 2, 4),  # torch.autocast: weights stay in float32
    "bf16": Precision(2, 2, 0, 2, 2),  # states as well, as torch's optimizers keep them
    "fp16": Precision(2, 2, 0, 2, 2),
}


class Optimizer(NamedTuple):
    """The states that an optimizer keeps for each parameter."""

    states: int
    bytes: int | None = None  # per state; None: as the precision says


OPTIMIZERS = {
    "sgd": Optimizer(0),
    "momentum": Optimizer(1),
    "adagrad": Optimizer(1),
    "rmsprop": Optimizer(1),
    "lion": Optimizer(1),
    "adam": Optimizer(2),
    "adamw": Optimizer(2),
    "adam8bit": Optimizer(2, 1),  # without the quantization scales, one per block
}
CHECKPOINTING = ("none", "sqrt")
ZERO_FACTOR = 12  # elements per token, layer and hidden unit
_MAX_BYTES = (1 << 63) - 1
_TRANSFORMER = ("layers", "hidden", "sequence")


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes by kind of use."""

    params: int = 0
    grads: int = 0
    optimizer: int = 0
    inputs: int = 0
    activations: int = 0
    temp: int = 0
    workspace: int = 0
    fragmentation: int = 0  # reserved but unused

    @property
    def states(self) -> int:
        """Bytes held for the parameters, independent of the batch."""
        return self.params + self.grads + self.optimizer

    @property
    def total(self) -> int:
        """The sum of all kinds, in bytes."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class Config:
    """A training configuration, as far as it is known; counts are above 0.

    Activations are those of a transformer where `layers`, `hidden` and `sequence` are given, else
    `activation_elements` per sample, else none.

    Raises:
        ConfigError: a name is unknown, or values contradict each other.
    """

    params: int
    optimizer: str = "adam"
    precision: str = "mixed"
    batch: int = 1
    layers: int | None = None
    hidden: int | None = None
    sequence: int | None = None  # tokens per sample
    checkpointing: str = "none"
    activation_elements: int | None = None
    flat_buffer: bool = False  # gradients fused into one float32 buffer, for a norm or a reduction

    def __post_init__(self) -> None:
        _check_name("optimizer", self.optimizer, tuple(OPTIMIZERS))
        _check_name("precision", self.precision, tuple(PRECISIONS))
        _check_name("checkpointing", self.checkpointing, CHECKPOINTING)
        missing = [name for name in _TRANSFORMER if getattr(self, name) is None]
        if self.activation_elements is not None and len(missing) < len(_TRANSFORMER):
            raise ConfigError(
                "activation_elements and a transformer (layers, hidden, sequence) are both given; "
                "allowed: one of them"
            )
        if missing and (len(missing) < len(_TRANSFORMER) or self.checkpointing != "none"):
            raise ConfigError(
                "the activations of a transformer need layers, hidden and sequence; missing: "
                f"{', '.join(missing)}"
            )


def estimate(config: Config) -> MemoryEstimate:
    """Return the bytes of each kind while training with `config`.

    Raises:
        ConfigError: the total is more than any machine has.
    """
    count, precision = config.params, PRECISIONS[config.precision]
    optimizer = OPTIMIZERS[config.optimizer]
    state = precision.state if optimizer.bytes is None else optimizer.bytes
    found = MemoryEstimate(
        params=count * precision.weight,
        grads=count * precision.gradient,
        optimizer=count * (precision.copy + optimizer.states * state),
        activations=activation_bytes(config),
        temp=count * 4 if config.flat_buffer else 0,
    )
    if found.total > _MAX_BYTES:
        raise ConfigError(
            f"this configuration takes {found.total:.3g} bytes; allowed: up to {_MAX_BYTES:.3g}, "
            "which is more than any machine has"
        )
    return found


def activation_bytes(config: Config) -> int:
    """Return the bytes that the layers keep for backward.

    For a transformer: 12 * h * b * s * l elements, and checkpointed by `sqrt` these over sqrt(l).
    """
    size = PRECISIONS[config.precision].activation
    if config.layers is None or config.hidden is None or config.sequence is None:
        return (config.activation_elements or 0) * config.batch * size
    tokens = config.batch * config.sequence
    whole = config.layers * ZERO_FACTOR * config.hidden * tokens * size
    return round(whole / math.sqrt(config.layers)) if config.checkpointing == "sqrt" else whole


def _check_name(option: str, name: str, known: tuple[str, ...]) -> None:
    if name not in known:
        hint = did_you_mean(name, known)
        raise ConfigError(f"no {option} {name!r}{hint}; allowed: {', '.join(known)}")
