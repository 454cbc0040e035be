"""A live module's training step on fake tensors: its forward pass, and backward from there."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map_only

from ...capture import program

if TYPE_CHECKING:
    from ...capture.recording import Recording
    from ...capture.tracer import Tracer

_STEPS = 2  # the first one creates tensors that later ones reuse


def step_of(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recording:
    """Record how a step of `model(*args, **kwargs)` uses memory, from sizes alone.

    Backward begins at the outputs: tensors kept by a loss outside of the model are unknown. The
    module is called on fake tensors; its attributes and the random generators are restored.

    Raises:
        PlanError: the module reads values, which fake tensors lack, or fails on them; the message
            says where.
    """
    with _as_it_was(model), program.recording(around=_plain) as found:
        # A number read from a tensor is made up. If a branch on it differs from the program's, the
        # forward pass is seen to deviate, and the rest is kept.
        found.constants = True
        step = found.begin(lambda: _program(found, model, args, kwargs))
        for _ in range(_STEPS):
            with program.explained(f"a step of {type(model).__name__} on fake tensors"):
                step()
            found.end_step()
        return found.finish()


def _plain(_scope: object) -> AbstractContextManager[FakeTensorMode]:
    """Return a mode of fake tensors on the live ones' devices, so that the ops are the same."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def _program(found: Tracer, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def fake(tensor: torch.Tensor) -> torch.Tensor:
        made = found.mode.from_tensor(tensor.detach())
        return made.requires_grad_(tensor.requires_grad)

    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    fakes: dict[str, torch.Tensor] = {
        name: found.mode.from_tensor(tensor) for name, tensor in held.items()
    }
    for tensor in fakes.values():
        found.tag(tensor, "param")
    given, named = tree_map_only(torch.Tensor, fake, (args, kwargs))
    for tensor in tree_leaves((given, named)):
        if isinstance(tensor, torch.Tensor):
            found.tag(tensor, "input")

    def step() -> None:
        for tensor in fakes.values():
            tensor.grad = None
        out = functional_call(model, fakes, given, named)
        wanted = [
            leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor) and leaf.grad_fn
        ]
        if wanted:
            torch.autograd.backward(wanted, [torch.empty_like(leaf) for leaf in wanted])

    return step


@contextlib.contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """Restore the modules' attributes, lists and dictionaries, and the generators at the end."""
    before = [(vars(part), dict(vars(part))) for part in model.modules()]
    values = [value for _, attributes in before for value in attributes.values()]
    lists = [(value, list(value)) for value in values if type(value) is list]
    tables = [(value, dict(value)) for value in values if isinstance(value, dict)]
    seed, states = random.getstate(), _numpy_state()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        for attributes, old in before:
            attributes.clear()
            attributes.update(old)
        for held, items in lists:
            held[:] = items
        for table, old in tables:
            table.clear()
            table.update(old)
        random.setstate(seed)
        if states is not None:
            sys.modules["numpy"].random.set_state(states)


def _numpy_state() -> Any:
    """Return the state of numpy's global generator; None if the program has not loaded numpy."""
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.random.get_state()
