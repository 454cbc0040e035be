"""The place of an op in the program: its phase, its module, and so the role of its results."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as modules
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from ..base.step_hooks import after_steps, before_steps
from ..base.wrappers import inner_tensors, is_wrapper
from ..errors import PlanError
from ..trace.ids import BlockId
from . import op_semantics
from .gpu import Gpu
from .recording import Block, Recording


class Blocks(Protocol):
    """The recorder's blocks, as far as a scope needs them; `tracer.Tracer` has them."""

    recording: Recording
    making_on_device: bool | None
    constants: bool

    def block(self, tensor: torch.Tensor) -> BlockId:
        """Return the id of the tensor's block."""

    def tag(self, tensor: torch.Tensor, tag: str) -> None:
        """Set the tag of a tensor."""

    def made_in(self, tensor: torch.Tensor, module: str) -> None:
        """Set the module that a tensor belongs to, unless it is known."""

    def on_host(self, tensor: torch.Tensor, on_host: bool) -> None:
        """Set whether a tensor is in host memory."""

    def making(self, on_device: bool) -> contextlib.AbstractContextManager[None]:
        """Place the tensors that are made within the context."""

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Note that a storage's size has changed."""

    def remark(self, text: str) -> None:
        """Note once where the plan may differ from a run."""


class Scope(contextlib.ExitStack):
    """Follows modules, optimizers and autograd through torch's global hooks, while entered."""

    def __init__(self, tracer: Blocks) -> None:
        super().__init__()
        self.tracer = tracer
        self.gpu = Gpu()  # what the program is told about it
        self.apart = False  # the program makes all of its parameters itself
        self.asked_for_cuda = False  # the program itself moves things to the device
        self.default_cuda = False  # it makes them there, unless it names another place
        self._last_on_host = True  # where the last op ran that had inputs
        self._running: list[str] = []
        self._backward = ""  # the last module of the backward pass
        self._stepping: list[int] = []  # ids of the optimizers inside their step
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._model: weakref.ref[nn.Module] | None = None
        self._others: Counter[str] = Counter()  # modules beside the model, by type
        self._parameters = WeakTensorKeyDictionary()

    def __enter__(self) -> Scope:
        handles: list[Any] = [
            modules.register_module_parameter_registration_hook(self._parameter),
            modules.register_module_buffer_registration_hook(self._buffer),
            modules.register_module_forward_pre_hook(self._enter),
            modules.register_module_forward_hook(self._leave, always_call=True),
            before_steps(self._before_step),
            after_steps(self._after_step),
        ]
        for handle in handles:
            self.callback(handle.remove)
        return self

    def phase(self) -> str:
        """Return the phase of an op that runs now: forward, backward or optimizer."""
        return op_semantics.phase(bool(self._stepping))

    def result_tag(self, phase: str, inputs: Iterable[torch.Tensor]) -> str:
        """Return the tag of an op's results; gradients and states are tagged once in place."""
        inputs = list(inputs)
        tag = op_semantics.result_tag(phase, inputs)
        return "temp" if tag == "optimizer" and inputs else tag

    def is_stepping(self) -> bool:
        """Return whether an optimizer is inside its step."""
        return bool(self._stepping)

    def running(self) -> str:
        """Return the path of the module that runs now; empty if none does."""
        return self._running[-1] if self._running else ""

    def name_of(self, module: nn.Module) -> str:
        """Return the path of a module in its model; its type if the model is unknown."""
        return self._names.get(module) or type(module).__name__

    def modules(self) -> list[nn.Module]:
        """Return all known modules that are alive, the root of a model before its parts."""
        return list(self._names)

    def module(
        self, phase: str, blocks: Mapping[BlockId, Block], reads: Iterable[torch.Tensor]
    ) -> str:
        """Return the module of an op; in the backward pass, the one whose tensors it reads.

        An op that reads no such tensor, as for a bias's gradient, belongs to the op before it.
        """
        if phase != "backward" or self._running:
            self._backward = ""
            return self.running()
        of_inputs = (blocks[self.tracer.block(tensor)] for tensor in reads)
        known = (b.module for b in of_inputs if b.module and b.tag in ("activation", "param"))
        self._backward = next(known, self._backward)
        return self._backward

    def is_on_host(self, blocks: Mapping[BlockId, Block], inputs: Iterable[BlockId]) -> bool:
        """Return whether an op runs on the host, in a program that uses the device explicitly.

        An op without inputs that the program has not called is a part of another one: it runs where
        the op before it ran.
        """
        held = [blocks[i].on_host for i in inputs]
        if held:
            self._last_on_host = all(held)
            return self._last_on_host
        asked = self.tracer.making_on_device
        return self._last_on_host if asked is None else not asked

    def end_step(self) -> None:
        """Tag the gradients that stay alive; forget what an exception left unfinished."""
        for parameter in list(self._parameters):
            self._tag_gradient(parameter)
        self._running.clear()
        self._stepping.clear()

    def adopt(self, net: nn.Module, *, model: bool = False) -> None:
        """Name a module's parts, and take those parameters that were set without a hook.

        Parts of the program's `model` keep their paths in it. Beside it, those of another module
        begin with "other" and its type. If no model is known, they begin with its type where a
        module that is alive has such a path.
        """
        if model:
            self._model = weakref.ref(net)
            self._names.clear()  # those that ran before it was known get their names once more
        if net in self._names:
            return
        root, before = type(net).__name__, ""
        own = dict(net.named_modules())
        parts = set(own.values())
        taken = {path for part, path in self._names.items() if part not in parts}
        if other := not model and self._model is not None and self._model() is not None:
            self._others[root] += 1
            root = f"other {root}" + (f" {n}" if (n := self._others[root]) > 1 else "")
            before = f"{root}."
        elif not taken.isdisjoint(name or root for name in own):
            numbered = (f"{root} {n}" if n > 1 else root for n in itertools.count(1))
            root = next(free for free in numbered if free not in taken)
            before = f"{root}."
        for name, part in own.items():
            if other and part in self._names:
                continue
            self._names[part] = before + name if name else root
            for held in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
                self._parameter(part, "", held)
                self.tracer.made_in(held, self._names[part])

    def _parameter(self, _module: object, _name: str, parameter: object) -> None:
        if not isinstance(parameter, torch.Tensor):
            return
        self.tracer.tag(parameter, "param")
        if parameter not in self._parameters and parameter.requires_grad and parameter.is_leaf:
            self._check_apart(parameter)
            self._parameters[parameter] = True
            hooked: Any = parameter
            hooked.register_post_accumulate_grad_hook(self._tag_gradient)

    def _check_apart(self, parameter: torch.Tensor) -> None:
        if self.apart and not _is_fake(parameter):
            raise PlanError(
                "the program trains a model that exists already, and its optimizer's states would "
                "lose their values; make the model and the optimizer inside of the function"
            )

    def _buffer(self, _module: object, _name: str, buffer: object) -> None:
        if isinstance(buffer, torch.Tensor):
            self.tracer.tag(buffer, "param")  # its lifetime and its uses are those of weights

    def _enter(self, module: nn.Module, _args: object) -> None:
        if not self._running:
            self.adopt(module)
        self._running.append(self.name_of(module))

    def _leave(self, _module: nn.Module, _args: object, _out: object) -> None:
        if self._running:
            self._running.pop()

    def _before_step(self, optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        self._stepping.append(id(optimizer))
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._check_apart(parameter)
                self.tracer.tag(parameter, "param")
                self._tag_gradient(parameter)

    def _after_step(self, optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        while self._stepping and self._stepping.pop() != id(optimizer):
            pass  # drop the steps inside it that raised
        for tensor in op_semantics.tensors(optimizer.state.values()):
            self.tracer.tag(tensor, "optimizer")

    def _tag_gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self.tracer.tag(parameter.grad, "grad")


def _is_fake(tensor: object) -> bool:
    """Return whether a tensor, or each that it wraps, has no data."""
    if isinstance(tensor, FakeTensor):
        return True
    return is_wrapper(tensor) and all(_is_fake(inner) for _, inner in inner_tensors(tensor))
