"""How much memory training takes, by formulas: what is known before there is a program.

Weights, gradients and optimizer states follow Rajbhandari et al. 2020 (ZeRO, section 3): in mixed
precision with Adam 2 + 2 + 12 bytes a parameter. So do the activations of a transformer: 12
elements a token, layer and hidden unit. Scores of attention, where they are kept, follow
Korthikanti et al. 2022; checkpoints every sqrt(l) layers Chen et al. 2016.

Kinds are added up, each at its most, though gradients grow while activations shrink: an upper
bound of the peak for what the formulas count. `step_estimate` has the bytes of a traced step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import NamedTuple

from ..errors import ConfigError
from ..values import did_you_mean


class Precision(NamedTuple):
    """Bytes a number of each kind."""

    weight: int
    gradient: int
    copy: int  # of each weight, in float32, that the optimizer works on
    activation: int
    state: int  # of an optimizer


PRECISIONS = {
    "fp32": Precision(4, 4, 0, 4, 4),
    "mixed": Precision(2, 2, 4, 2, 4),  # ZeRO, Megatron, apex O2
    "amp": Precision(4, 4, 0, 2, 4),  # torch.autocast: weights stay in float32
    "bf16": Precision(2, 2, 0, 2, 2),  # all of it, as torch's optimizers keep states
    "fp16": Precision(2, 2, 0, 2, 2),
}


class Optimizer(NamedTuple):
    """The states that an optimizer keeps of each parameter."""

    states: int
    bytes: int | None = None  # of each; None: as the precision says


OPTIMIZERS = {
    "sgd": Optimizer(0),
    "momentum": Optimizer(1),
    "adagrad": Optimizer(1),
    "rmsprop": Optimizer(1),
    "lion": Optimizer(1),
    "adam": Optimizer(2),
    "adamw": Optimizer(2),
    "adam8bit": Optimizer(2, 1),  # without its scales, one for many elements
}
CHECKPOINTING = ("none", "sqrt", "block")
ATTENTION = ("fused", "scores")  # whether the kernel keeps the scores of every pair of tokens
ZERO_FACTOR = 12  # elements a token, layer and hidden unit
RECOMPUTED = Fraction(1, 3)  # of a step, the forward pass once more: backward is twice as long
_MOST = {
    "params": 10**15, "layers": 10**6, "hidden": 10**7, "heads": 10**6, "vocabulary": 10**9,
    "sequence": 10**9, "batch": 10**9, "activation_elements": 10**15, "activation_factor": 10**4,
}  # fmt: skip
_MOST_BYTES = (1 << 63) - 1
_TRANSFORMER = ("layers", "hidden", "sequence")


@dataclass(frozen=True)
class Estimate:
    """Bytes by what they are for."""

    params: int = 0
    grads: int = 0
    optimizer: int = 0
    inputs: int = 0
    activations: int = 0
    temp: int = 0
    workspace: int = 0
    fragmentation: int = 0  # taken, and used by nothing

    @property
    def states(self) -> int:
        """What training holds for the parameters, whatever the batch."""
        return self.params + self.grads + self.optimizer

    @property
    def total(self) -> int:
        """All of it."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class Config:
    """What is to be trained, as far as it is known. Counts are 1 and more, sizes in bytes.

    Activations are those of a transformer where `layers`, `hidden` and `sequence` are given, else
    `activation_elements` a sample, else none.

    Raises:
        ConfigError: a value is out of bounds or unknown, or values do not go together.
    """

    params: int | None = None  # None: of a GPT with these layers, hidden units and vocabulary
    optimizer: str = "adam"
    precision: str = "mixed"
    batch: int = 1
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    sequence: int | None = None  # tokens of a sample
    vocabulary: int | None = None  # with it the logits count
    checkpointing: str = "none"
    attention: str = "fused"
    activation_factor: int = ZERO_FACTOR
    activation_elements: int | None = None
    flat_buffer: bool = False  # gradients fused into one float32 buffer, for a norm or a reduction
    workspace: int = 0
    fragmentation: float = 0.0  # percent of the total that lies free in pieces

    def __post_init__(self) -> None:
        for name, most in _MOST.items():
            _check_count(name, getattr(self, name), most)
        _check_name("optimizer", self.optimizer, tuple(OPTIMIZERS))
        _check_name("precision", self.precision, tuple(PRECISIONS))
        _check_name("checkpointing", self.checkpointing, CHECKPOINTING)
        _check_name("attention", self.attention, ATTENTION)
        if not 0 <= self.fragmentation <= 99:
            raise ConfigError(f"fragmentation {self.fragmentation:g}%; allowed: 0% to 99%")
        if self.workspace < 0:
            raise ConfigError(f"workspace {self.workspace}; allowed: 0 and more bytes")
        self._check_together()

    def _check_together(self) -> None:
        missing = [name for name in _TRANSFORMER if getattr(self, name) is None]
        if self.params is None and (self.layers is None or self.hidden is None):
            raise ConfigError("params is not given; needed: params, or layers and hidden")
        if self.heads is not None and self.hidden is not None and self.hidden % self.heads:
            raise ConfigError(
                f"heads {self.heads} do not divide hidden {self.hidden}; allowed: a divisor of it"
            )
        if self.attention == "scores" and self.heads is None:
            raise ConfigError("attention scores are kept for each head; heads is needed too")
        if self.activation_elements is not None and len(missing) < len(_TRANSFORMER):
            raise ConfigError(
                "activation_elements and a transformer (layers, hidden, sequence) are both given; "
                "allowed: one of them"
            )
        asks = self.checkpointing != "none" or self.attention != "fused" or self.sequence
        if missing and asks:
            raise ConfigError(
                "activations of a transformer, and what is kept of them, need layers, hidden and "
                f"sequence; missing: {', '.join(missing)}"
            )
        if self.vocabulary is not None and missing and self.params is not None:
            raise ConfigError(f"logits need a sequence; missing: {', '.join(missing)}")


def estimate(config: Config) -> Estimate:
    """The bytes of each kind while training with `config`.

    Raises:
        ConfigError: they are more than any machine has.
    """
    count = config.params if config.params is not None else transformer_params(config)
    precision = PRECISIONS[config.precision]
    optimizer = OPTIMIZERS[config.optimizer]
    state = precision.state if optimizer.bytes is None else optimizer.bytes
    scores = logits(config)
    found = Estimate(
        params=count * precision.weight,
        grads=count * precision.gradient,
        optimizer=count * (precision.copy + optimizer.states * state),
        # The logits, and their logarithms in float32 that backward needs.
        activations=activation_bytes(config) + scores * (precision.activation + 4),
        # The gradient of a loss in float32, before and after its softmax.
        temp=scores * 8 + (count * 4 if config.flat_buffer else 0),
        workspace=config.workspace,
    )
    share = Fraction(config.fragmentation) / 100
    lost = round(found.total * share / (1 - share))
    total = found.total + lost
    if total > _MOST_BYTES:
        raise ConfigError(
            f"these numbers make {float(total):.3g} bytes; allowed: {_MOST_BYTES:.3g}, which is "
            "more than any machine has"
        )
    return Estimate(**{**vars(found), "fragmentation": lost})


def transformer_params(config: Config) -> int:
    """Of a GPT-2: blocks, tables of tokens and places, a last norm. The head is the first table.

    A block has 12 h^2 + 13 h: four matrices, their biases and two norms.
    """
    layers, hidden = config.layers or 0, config.hidden or 0
    blocks = layers * (12 * hidden * hidden + 13 * hidden)
    return blocks + ((config.vocabulary or 0) + (config.sequence or 0) + 2) * hidden


def activation_bytes(config: Config) -> int:
    """What backward needs of the layers, in bytes; logits are not among it.

    Whole: factor * h * b * s * l elements, and 2 scores and a mask of each pair of tokens and head
    where attention keeps them. Checkpointed by `sqrt`: that over sqrt(l). By `block`: the input of
    every layer, and one layer whole.
    """
    size = PRECISIONS[config.precision].activation
    if config.layers is None or config.hidden is None or config.sequence is None:
        return (config.activation_elements or 0) * config.batch * size
    tokens = config.batch * config.sequence
    layer = config.activation_factor * config.hidden * tokens * size
    if config.attention == "scores":
        layer += (2 * size + 1) * (config.heads or 0) * config.sequence * tokens
    if config.checkpointing == "block":
        return config.layers * config.hidden * tokens * size + layer
    whole = config.layers * layer
    return round(whole / math.sqrt(config.layers)) if config.checkpointing == "sqrt" else whole


def logits(config: Config) -> int:
    """Elements: one a token and word."""
    return config.batch * (config.sequence or 0) * (config.vocabulary or 0)


def _check_count(name: str, value: object, most: int) -> None:
    if value is None:
        return
    if type(value) is not int or not 1 <= value <= most:
        raise ConfigError(f"{name} {value}; allowed: a whole number from 1 to {most:g}")


def _check_name(option: str, name: str, known: tuple[str, ...]) -> None:
    if name not in known:
        hint = did_you_mean(name, known)
        raise ConfigError(f"no {option} {name!r}{hint}; allowed: {', '.join(known)}")
