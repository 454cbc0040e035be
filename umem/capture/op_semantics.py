"""The effects of torch's operators, and the phase and role of an op that runs.

The one description that the tracer, the executor of recomputation and the Python observer share:
what an operator reads, writes and overwrites, whether it is random, whether it can run again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, cast

import torch

from ..base.strides import is_dense

Place = int | str  # of an argument: its position or its name

# They overwrite a whole tensor without reading it. tools/generate_overwrites.py makes the native
# observer's list from this one.
OVERWRITES = frozenset({
    "copy_", "fill_", "zero_", "uniform_", "normal_", "bernoulli_", "random_", "exponential_",
    "log_normal_", "cauchy_", "geometric_", "_foreach_zero_", "_foreach_copy_",
})  # fmt: skip
# They make or change memory without writing it: the next op does.
_MAKES_EMPTY = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty",
                "new_empty_strided", "resize_", "set_"}  # fmt: skip
# They read the shape of their input and not its data.
SHAPE_ONLY = {"zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like",
              "new_zeros", "new_ones", "new_full"}  # fmt: skip
# Namespaces of ops between ranks, and the ops among them whose schemas do not tell that they write
# their first argument (torch/csrc/distributed/c10d/Ops.cpp): all of it without reading it, or, on
# some rank or all, with its previous contents. The native observer's lists are made from these too.
COLLECTIVES = ("c10d::", "_c10d_functional::")
RECEIVING = frozenset(f"c10d::{name}" for name in (
    "allgather_", "_allgather_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_",
    "reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_", "gather_",
    "scatter_", "alltoall_", "alltoall_base_", "recv_", "recv_any_source_",
))  # fmt: skip
IN_PLACE = frozenset(f"c10d::{name}" for name in (
    "broadcast_", "allreduce_", "allreduce_coalesced_", "reduce_", "gather_into_tensor_",
))  # fmt: skip
# FSDP2's copies into and out of the exchanged tensors. The first writes a part of its second
# argument.
_OF_SHARDS = ("fsdp::all_gather_copy_in", "fsdp::split_with_sizes_copy", "fsdp::chunk_cat",
              "fsdp::chunk_cat_mixed_dtype")  # fmt: skip
# They keep a state of their own, change what a storage is, or return no tensor.
_UNREPEATABLE = {"_cudnn_rnn", "_cudnn_init_dropout_state", "miopen_rnn", "resize_as_",
                 "record_stream", "_local_scalar_dense",
                 "_fused_moving_avg_obs_fq_helper"} | _MAKES_EMPTY  # fmt: skip
# Batch norm writes its running statistics in training: their positions, and that of the flag
# `training` (None: it always writes). Only the schemas of the last two tell it.
_STATISTICS: dict[str, tuple[tuple[int, ...], int | None]] = {
    "native_batch_norm": ((3, 4), 5),
    "cudnn_batch_norm": ((3, 4), 5),
    "miopen_batch_norm": ((3, 4), 5),
    "batch_norm_gather_stats": ((3, 4), None),
    "batch_norm_gather_stats_with_counts": ((3, 4), None),
    "batch_norm_update_stats": ((1, 2), None),
    "_native_batch_norm_legit": ((3, 4), 5),
    "_batch_norm_with_update": ((3, 4), None),
}


@dataclass(frozen=True)
class OpSemantics:
    """The effects of an operator's overload, according to its schema and its name."""

    overload: str  # aten.relu_.default
    name: str  # aten::relu_
    writes: tuple[tuple[int, str], ...]  # position and name of each argument the schema says
    statistics: frozenset[Place]  # positions, written in training and not read for the outputs
    training: int | None  # the position of the flag that says whether statistics are written
    random: bool

    @cached_property
    def namespace(self) -> str:
        """The part of the name before the colons, such as aten."""
        return self.name.partition("::")[0]

    @cached_property
    def bare(self) -> str:
        """The name without its namespace, such as relu_."""
        return self.name.partition("::")[2]

    @cached_property
    def family(self) -> str:
        """The category of the native core: conv, linear, norm, ..."""
        from ..base.native import core

        return core.family_of(self.name)

    @cached_property
    def overwrites(self) -> bool:
        """True if it overwrites all that it changes, without reading it."""
        return self.bare in OVERWRITES or self.name in RECEIVING

    @cached_property
    def collective(self) -> bool:
        """True if it exchanges data between ranks."""
        return self.name.startswith(COLLECTIVES)

    @cached_property
    def of_shards(self) -> bool:
        """True if it writes tensors that ranks exchange, or copies of them."""
        return self.collective or self.name in _OF_SHARDS

    @cached_property
    def makes_empty(self) -> bool:
        """True if it makes or changes memory without writing it."""
        return self.bare in _MAKES_EMPTY

    @cached_property
    def shape_only(self) -> bool:
        """True if it reads the shapes of its inputs and none of their data."""
        return self.bare in SHAPE_ONLY

    @cached_property
    def repeatable(self) -> bool:
        """True if it may run a second time. Foreign operators may have unknown effects."""
        return self.namespace == "aten" and self.bare not in _UNREPEATABLE

    @cached_property
    def counted(self) -> bool:
        """True if a plan numbers its calls; see `is_counted`."""
        return is_counted(self.overload)

    @cached_property
    def data_places(self) -> frozenset[Place]:
        """Positions and names of the arguments that it writes, without the statistics."""
        positions, names = zip(*self.writes, strict=True) if self.writes else ((), ())
        return (frozenset(positions) - self.statistics) | frozenset(names)

    @cached_property
    def may_write(self) -> bool:
        """True if it writes any of its arguments."""
        return bool(self.data_places or self.statistics)

    def written(self, args: tuple[Any, ...], named: Mapping[str, Any]) -> Iterator[torch.Tensor]:
        """Yield the tensors that a call writes according to the schema, in its order."""
        for position, name in self.writes:
            if name in named:
                yield from tensors([named[name]])
            elif position < len(args):
                yield from tensors([args[position]])

    def updates_statistics(self, args: tuple[Any, ...]) -> bool:
        """Return whether a call writes the running statistics."""
        if not self.statistics:
            return False
        return self.training is None or (len(args) > self.training and bool(args[self.training]))

    def written_now(
        self, args: tuple[Any, ...], named: Mapping[str, Any]
    ) -> Iterator[torch.Tensor]:
        """Yield the tensors that a call writes, and in training the statistics."""
        places = self.data_places
        if self.updates_statistics(args):
            places = places | self.statistics
        for place in places:
            if isinstance(place, str):
                yield from tensors([named.get(place)])
            elif place < len(args):
                yield from tensors([args[place]])


@cache
def describe(func: Any) -> OpSemantics:
    """Return the effects of an overload; only the name of a higher-order operator is known."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return OpSemantics(str(func), f"higher_order::{func.name()}", (), frozenset(), None, False)
    name = cast("str", schema.name)
    positions, training = _STATISTICS.get(name.partition("::")[2], ((), None))
    return OpSemantics(
        overload=str(func),
        name=name,
        writes=_said(schema) or _unsaid(schema),
        statistics=frozenset(positions),
        training=training,
        random=torch.Tag.nondeterministic_seeded in func.tags,
    )


def _said(schema: Any) -> tuple[tuple[int, str], ...]:
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _unsaid(schema: Any) -> tuple[tuple[int, str], ...]:
    """Return the arguments that an op writes although its schema does not tell so."""
    if schema.name in RECEIVING or schema.name in IN_PLACE:
        return ((0, schema.arguments[0].name),)
    return ((1, schema.arguments[1].name),) if schema.name == _OF_SHARDS[0] else ()


def is_counted(overload: str) -> bool:
    """Return whether a plan numbers the calls of an overload.

    It does not number calls that depend on how the program is observed: autograd detaches the
    outputs that it saves, except for hooks; a query for the device of a fake tensor is a call.
    """
    return overload != "aten.detach.default" and not overload.startswith("prim.")


def phase(stepping: bool) -> str:
    """Return the phase of an op that runs now on this thread: forward, backward or optimizer.

    Args:
        stepping: an optimizer is inside its step, or one raised in it.
    """
    if torch._C._current_graph_task_id() != -1:
        return "backward"
    # With gradients on it is the closure of the optimizer's step: a forward pass.
    return "optimizer" if stepping and not torch.is_grad_enabled() else "forward"


def result_tag(phase: str, inputs: Collection[torch.Tensor]) -> str:
    """Return the tag of an op's results; gradients are recognised once they are in place."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        return "activation"
    if phase == "optimizer":
        return "optimizer"
    return "input" if phase == "forward" and not inputs else "temp"


def tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors in arguments or states, also those in lists, tuples and mappings."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors(value)
        elif isinstance(value, Mapping):
            yield from tensors(value.values())


def strided(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield those with a storage: a sparse tensor has none, but consists of others."""
    return (tensor for tensor in tensors(values) if tensor.layout == torch.strided)


def is_whole(tensor: torch.Tensor) -> bool:
    """Return whether the tensor has each element of its storage, and each once."""
    enough = tensor.numel() * tensor.itemsize >= tensor.untyped_storage().nbytes()
    return enough and is_dense(tensor.shape, tensor.stride())
