"""What running an operator a second time takes: what it writes, whether it is random."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch

from .. import torch_program

# Batch norm writes its running statistics in training, and most of its schemas do not say so:
# their positions, and that of the flag `training` (None: it always writes).
_HIDDEN: dict[str, tuple[tuple[int, ...], int | None]] = {
    "native_batch_norm": ((3, 4), 5),
    "cudnn_batch_norm": ((3, 4), 5),
    "miopen_batch_norm": ((3, 4), 5),
    "batch_norm_gather_stats": ((3, 4), None),
    "batch_norm_gather_stats_with_counts": ((3, 4), None),
    "batch_norm_update_stats": ((1, 2), None),
}
# Of those that do say so: written for the next step, and not read for this one's output.
_STATISTICS = {"_native_batch_norm_legit": ((3, 4), 5), "_batch_norm_with_update": ((3, 4), None)}
# They keep a state of their own, change what a storage is, or have no data to give.
_NEVER = {"_cudnn_rnn", "_cudnn_init_dropout_state", "miopen_rnn", "set_", "resize_", "resize_as_",
          "record_stream", "_local_scalar_dense", "empty", "empty_like", "empty_strided",
          "empty_permuted", "new_empty", "new_empty_strided",
          "_fused_moving_avg_obs_fq_helper"}  # fmt: skip

Place = int | str  # of an argument: its position or its name


@dataclass(frozen=True)
class Operator:
    """What the schema and the name of an overload say."""

    name: str  # aten.relu_.default
    counts: bool  # among the ops of a plan
    repeatable: bool
    random: bool
    overwrites: bool
    writes: frozenset[Place]  # as the schema says
    statistics: frozenset[Place]  # written when `training` and not needed for the outputs
    training: int | None

    @property
    def may_write(self) -> bool:
        """Whether it writes any of its arguments."""
        return bool(self.writes or self.statistics)

    def updates_statistics(self, args: tuple[Any, ...]) -> bool:
        """Whether this call writes the running statistics."""
        if not self.statistics:
            return False
        return self.training is None or (len(args) > self.training and bool(args[self.training]))

    def written(self, args: tuple[Any, ...], named: Mapping[str, Any]) -> Iterator[torch.Tensor]:
        """The tensors that this call writes."""
        places = self.writes
        if self.updates_statistics(args):
            places = places | self.statistics
        for place in places:
            if isinstance(place, str):
                yield from torch_program.tensors([named.get(place)])
            elif place < len(args):
                yield from torch_program.tensors([args[place]])


def describe(func: Any) -> Operator:
    """What is known of an overload, or of a higher-order operator."""
    schema = getattr(func, "_schema", None)
    if schema is None:  # a higher-order operator: nobody knows
        return Operator(str(func), True, False, False, False, frozenset(), frozenset(), None)
    namespace, _, bare = cast("str", schema.name).partition("::")
    writes: set[Place] = set()
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            writes |= {argument.name} if argument.kwarg_only else {position, argument.name}
    positions, training = _statistics(bare)
    return Operator(
        name=str(func),
        counts=counts(str(func)),
        # Foreign operators may have effects that no schema tells.
        repeatable=namespace == "aten" and bare not in _NEVER,
        random=torch.Tag.nondeterministic_seeded in func.tags,
        overwrites=bare in torch_program.OVERWRITES,
        writes=frozenset(writes) - frozenset(positions),
        statistics=frozenset(positions),
        training=training,
    )


def counts(name: str) -> bool:
    """Whether calls of an overload are numbered.

    Not those that depend on how the program is looked at: autograd detaches what it saves of an
    op's outputs, but for hooks; fake tensors are asked for their device by a call.
    """
    return name != "aten.detach.default" and not name.startswith("prim.")


def _statistics(bare: str) -> tuple[tuple[int, ...], int | None]:
    return _HIDDEN.get(bare) or _STATISTICS.get(bare) or ((), None)
