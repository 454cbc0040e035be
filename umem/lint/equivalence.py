"""Bitwise comparison of an op and its in-place form on a few values, with their gradients.

Torch's derivatives differ between the forms: leaky_relu keeps its input and leaky_relu_ its result;
gelu_ keeps a copy of its input; elu_ computes the gradient from the result and rounds otherwise.
Instead of a list of them, both forms run here on small tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree

from .calls import Call, Spec, in_place

_EDGE = 7  # in the tensors tried, along each dimension that is not 1
# Tried together with random values: kinks, limits and changes of sign.
_VALUES = (0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 3.0, -3.0, 6.0, 20.0, -20.0, 1e-30, -1e-30, 1e30,
           float("inf"), -float("inf"), float("nan"))  # fmt: skip
_TRIED = 2 * len(_VALUES)  # as many are random
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of a trial of writing over one argument."""

    why_not: str  # empty where results are equal and nothing is copied
    keeps_result: bool  # the in-place form saves its result for the backward pass


class Prober:
    """A cache of trials: each kind of call is tried once."""

    def __init__(self) -> None:
        self._known: dict[Any, Verdict] = {}

    def verdict(self, call: Call, position: int) -> Verdict:
        """Return whether the result may be written over the argument at `position`, 0 or 1."""
        leaves, shape = _pytree.tree_flatten((call.args, call.named))
        kinds = [
            (leaf.dtype, leaf.requires_grad, tuple(size == 1 for size in leaf.shape))
            if isinstance(leaf, Spec)
            else (type(leaf).__name__, repr(leaf))
            for leaf in leaves
        ]
        key = (call.func, str(shape), str(kinds), call.grad, position)
        if key not in self._known:
            with torch.random.fork_rng(devices=[]):
                self._known[key] = _try(call, position)
        return self._known[key]


def _try(call: Call, position: int) -> Verdict:
    torch.default_generator.manual_seed(0)  # `torch.manual_seed` seeds GPUs as well
    specs = [arg for arg in call.args if isinstance(arg, Spec)]
    fewest = min((math.prod(_shape(spec)) for spec in specs), default=_TRIED)
    keeps_result = False
    # Each element of a small tensor takes each value in turn.
    orders = [torch.randperm(_TRIED) for _ in call.args]
    for begin in range(0, _TRIED, fewest):
        given = [
            _tensor(arg, order.roll(begin)) if isinstance(arg, Spec) else arg
            for arg, order in zip(call.args, orders, strict=True)
        ]
        verdict = _tried(call, position, given)
        keeps_result |= verdict.keeps_result
        if verdict.why_not:
            break
    return Verdict(verdict.why_not, keeps_result)


def _tried(call: Call, position: int, given: list[Any]) -> Verdict:
    form = in_place(call.func)
    try:
        wanted = _run(call.func, given, call, None)
        swapped = [given[1], given[0], *given[2:]] if position == 1 else given
        got = _run(form, swapped, call, 0)
    except (RuntimeError, IndexError, NotImplementedError) as error:
        return Verdict(f"torch refuses: {str(error).splitlines()[0]}", False)
    if position == 1:
        got.gradients[:2] = got.gradients[1::-1]
    if not _same([wanted.result], [got.result]):
        return Verdict("the in-place form gives other results", False)
    if got.copies:
        return Verdict("its own backward pass needs its input", False)
    if not _same(wanted.gradients, got.gradients):
        return Verdict("the in-place form rounds gradients otherwise", got.keeps_result)
    return Verdict("", got.keeps_result)


@dataclass
class _Ran:
    result: torch.Tensor
    gradients: list[torch.Tensor | None]
    copies: bool  # something was saved that is neither an argument nor the result
    keeps_result: bool


def _run(func: Any, given: list[Any], call: Call, over: int | None) -> _Ran:
    """Run a form of the op and its backward pass; `over` is the argument that it writes."""
    saved: set[int] = set()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.add(tensor.untyped_storage().data_ptr())
        return tensor.detach()

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    leaves = [_leaf(arg) if isinstance(arg, torch.Tensor) else None for arg in given]
    with torch.set_grad_enabled(call.grad):
        # The tensor written in place must not be a leaf.
        used = [
            arg if leaf is None else (leaf * 1 if leaf.requires_grad else leaf.clone())
            for leaf, arg in zip(leaves, given, strict=True)
        ]
        with saved_tensors_hooks(pack, unpack):
            result = func(*used, **call.named)
    tensors = [arg for arg in used if isinstance(arg, torch.Tensor)]
    known = {tensor.untyped_storage().data_ptr() for tensor in [*tensors, result]}
    gradients: list[torch.Tensor | None] = [None] * len(leaves)
    wanted = [i for i, leaf in enumerate(leaves) if leaf is not None and leaf.requires_grad]
    values = result.detach().clone()
    if result.requires_grad and wanted:
        seed = torch.linspace(-2, 2, result.numel(), dtype=torch.float64)
        seed = seed.to(result.dtype).reshape(result.shape)
        inputs = [leaves[i] for i in wanted]
        found = torch.autograd.grad(result, inputs, seed, allow_unused=True)  # type: ignore[arg-type]
        for index, gradient in zip(wanted, found, strict=True):
            gradients[index] = gradient
    written = over is not None and used[over].untyped_storage().data_ptr() in saved
    return _Ran(values, gradients, not saved <= known, written)


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _shape(spec: Spec) -> list[int]:
    return [1 if size == 1 else _EDGE for size in spec.shape]


def _tensor(spec: Spec, order: torch.Tensor) -> torch.Tensor:
    """Return random values, and the first of `_VALUES` in this order that there is room for."""
    shape = _shape(spec)
    if not (spec.dtype.is_floating_point or spec.dtype.is_complex):
        return torch.randint(0, 2, shape).to(spec.dtype)
    flat = torch.randn(shape, dtype=torch.float64).flatten() * 2
    tried = torch.randn(_TRIED, dtype=torch.float64) * 2
    tried[: len(_VALUES)] = torch.tensor(_VALUES, dtype=torch.float64)
    count = min(_TRIED, flat.numel())
    flat[:count] = tried[order[:count]]
    return flat.reshape(shape).to(spec.dtype).requires_grad_(spec.requires_grad)


def _same(some: list[torch.Tensor | None], others: list[torch.Tensor | None]) -> bool:
    for one, other in zip(some, others, strict=True):
        if one is None or other is None:
            if one is not other:
                return False
        elif not torch.equal(_bits(one), _bits(other)):
            return False
    return True


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return flat.contiguous().view(_BITS[flat.itemsize])
