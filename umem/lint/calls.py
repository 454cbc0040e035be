"""Calls of ops that torch has in place as well, and the arguments each could write over."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NewType

import torch
from torch import nn
from torch.utils import _pytree

from ..capture.op_semantics import describe
from ..trace.ids import BlockId

# A call of a torch function in the program; many ops may belong to it.
CallNumber = NewType("CallNumber", int)
NO_CALL = CallNumber(-1)  # an unknown call


@dataclass(frozen=True, slots=True)
class Spec:
    """An argument that is a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(slots=True)
class Call:
    """One call of the op."""

    func: Any
    args: tuple[Any, ...]  # with a Spec for a tensor
    named: dict[str, Any]
    grad: bool  # whether gradients were on
    result: BlockId
    blocks: dict[int, BlockId]  # blocks of the tensor arguments, by position
    over: dict[int, str] = field(default_factory=dict)  # by position: why not, or "" if it may
    event: int = 0  # the index of its Op in the recording
    line: str = ""
    number: CallNumber = NO_CALL  # NO_CALL in a recomputation
    write: str = ""  # the call written in place; empty if the call is not the user's
    module: str = ""  # the path of torch's module that consists of this op alone
    module_type: str = ""
    built: str = ""  # the line that made the module
    switch: bool = False  # whether the module has `inplace`, and it is off

    @property
    def bare(self) -> str:
        """The name of the op, such as relu."""
        name: str = self.func._schema.name.partition("::")[2]
        return name

    def refuse(self, why: str) -> None:
        """Refuse to write over any of the arguments."""
        self.over = dict.fromkeys(self.over, why)


@functools.cache
def in_place(func: Any) -> Any:
    """Return the op's form that writes its first argument; None if torch has none.

    An op with random results differs in place: `dropout_` draws other numbers than
    `native_dropout`, and keeps a mask of the input's dtype.
    """
    namespace, _, name = func._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), f"{name}_", None)
    form = getattr(packet, func._overloadname, None)
    if form is None or describe(func).random:
        return None
    mine, its = func._schema.arguments, form._schema.arguments
    same = [(a.name, str(a.type)) for a in mine] == [(a.name, str(a.type)) for a in its]
    return form if same and its and its[0].alias_info is not None else None


def call_of(
    func: Any,
    args: tuple[Any, ...],
    named: dict[str, Any],
    out: torch.Tensor,
    block_of: Callable[[torch.Tensor], BlockId],
) -> Call:
    """Return the call, with what the tensors themselves forbid."""
    blocks = {i: block_of(arg) for i, arg in enumerate(args) if isinstance(arg, torch.Tensor)}
    found = Call(
        func=func,
        args=_pytree.tree_map_only(torch.Tensor, _spec, args),
        named=_pytree.tree_map_only(torch.Tensor, _spec, named),
        grad=torch.is_grad_enabled(),
        result=block_of(out),
        blocks=blocks,
    )
    for position in blocks if _is_plain(args, named) else {}:
        found.over[position] = _why_not(args[position], out)
    if len(blocks) == 2 and blocks[0] == blocks.get(1):
        found.refuse("both operands are one tensor")
    return found


def way(func: Any, bare: str) -> str:
    """Return how a call is written in place; empty if torch's function has no such form."""
    name: str = getattr(func, "__name__", "")
    if "inplace" in getattr(getattr(func, "__code__", None), "co_varnames", ()):
        return f"{name}(..., inplace=True)"
    has = name.strip("_") == bare and hasattr(torch.Tensor, f"{bare}_")
    return f"{bare}_()" if has else ""


def _is_plain(args: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Return whether the tensors are the first one or two arguments and nothing else."""
    places = [i for i, arg in enumerate(args) if isinstance(arg, torch.Tensor)]
    rest = _pytree.tree_leaves([[a for i, a in enumerate(args) if i not in places], named])
    return places in ([0], [0, 1]) and not any(isinstance(item, torch.Tensor) for item in rest)


def _spec(tensor: torch.Tensor) -> Spec:
    return Spec(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


def _why_not(argument: torch.Tensor, out: torch.Tensor) -> str:
    if (argument.shape, argument.dtype) != (out.shape, out.dtype):
        return "its input has another shape or dtype than its result"
    if isinstance(argument, nn.Parameter) or (argument.is_leaf and argument.requires_grad):
        return "its input is a leaf of autograd"
    if argument._is_view():
        return "its input is a view, whose gradient autograd would have to copy"
    size = argument.numel() * argument.itemsize
    if argument.stride() != out.stride() or size != argument.untyped_storage().nbytes():
        return "its input is laid out otherwise than its result"
    hooks: Any = argument
    if argument.retains_grad or hooks._backward_hooks:
        return "the gradient of its input is requested"
    return ""
