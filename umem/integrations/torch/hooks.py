"""Python hooks with which umem observes a torch program.

`Tagger` tags parameters, gradients and optimizer state, which operators cannot distinguish; it
works with either observer. `PythonObserver` does the native observer's work without C++, for
diagnosis: it costs several microseconds an op, sees only the thread that enabled it (and backward
passes on it, as those of CPU tensors), and torch.compile runs uncompiled under it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim import Optimizer
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ...base.native import core
from ...base.replaced import Replaced
from ...base.step_hooks import after_steps, before_steps
from ...base.untraced import untraced
from ...base.wrappers import inner_tensors, is_wrapper
from ...capture import op_semantics
from ...capture.dispatch import DispatchMode

# Steps in which everything is tagged; later 1 in `_TAG_EVERY`, since addresses seldom change.
_TAG_ALWAYS = 3
_TAG_EVERY = 16

_stepping: set[int] = set()  # ids of the optimizers inside their step


class Tagger:
    """A tagger of parameters, gradients and optimizer state in umem's blocks.

    Args:
        step_boundaries: also report the end of each optimizer step, as the native observer does.
    """

    def __init__(self, step_boundaries: bool) -> None:
        self._step_boundaries = step_boundaries
        self._steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._handles: list[Any] = [
            register_module_parameter_registration_hook(self._registered),
            before_steps(self._before_step),
            after_steps(self._after_step),
            Replaced(Optimizer, "load_state_dict", self._loaded),
            Replaced(torch.nn.Module, "_apply", self._applied),
        ]

    def remove(self) -> None:
        """Remove the hooks from torch."""
        for handle in self._handles:
            handle.remove()
        _stepping.clear()

    @untraced
    def _registered(self, _module: object, _name: str, parameter: object) -> None:
        if isinstance(parameter, torch.Tensor):
            _tag(parameter, "param")

    @staticmethod
    def _applied(apply: Any, module: torch.nn.Module, *args: Any, **named: Any) -> Any:
        """Tag what a conversion such as `module.half()` has put in place of the parameters."""
        applied = apply(module, *args, **named)
        if not torch.compiler.is_compiling():
            _tag_own_parameters(module)
        return applied

    @untraced
    def _before_step(self, optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        if torch.is_grad_enabled():
            _stepping.clear()  # not inside another's step: the rest are steps that raised
        _stepping.add(id(optimizer))
        if not self._is_due(optimizer):
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                _tag_parameter(parameter)

    @untraced
    def _after_step(self, optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        _stepping.discard(id(optimizer))
        if self._is_due(optimizer):
            _tag_state(optimizer)
        self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        if self._step_boundaries and not _stepping:
            core.guess_step()

    @untraced
    def _loaded(self, load: Any, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        load(optimizer, state_dict)
        _tag_state(optimizer)
        self._steps.pop(optimizer, None)

    def _is_due(self, optimizer: Optimizer) -> bool:
        steps = self._steps.get(optimizer, 0)
        return steps < _TAG_ALWAYS or steps % _TAG_EVERY == 0


class PythonObserver(DispatchMode):
    """An observer in Python of every op, active from its construction until `remove`."""

    def __init__(self) -> None:
        super().__init__()
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(self)

    def remove(self) -> None:
        """Disable the observer, on the thread that enabled it, with no mode on top of it.

        Raises:
            RuntimeError: inside an operator or another mode, or on another thread; it stays.
        """
        if _get_current_dispatch_mode() is not self:  # torch would take any other mode instead
            raise RuntimeError("the observer is not the current dispatch mode")
        self._stack.close()

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the op; report its start and end."""
        inputs = list(op_semantics.tensors([*args, *kwargs.values()]))
        phase = op_semantics.phase(bool(_stepping))
        op = op_semantics.describe(func)
        written = _addresses(op.written(args, kwargs))
        used = [*written, *([] if op.shape_only else _addresses(inputs))]
        token = core.op_begin(used, op.family, phase, op.overload, 0, len(written))
        try:
            return func(*args, **kwargs)
        finally:
            core.op_end(token, op_semantics.result_tag(phase, inputs))


def _tag_state(optimizer: Optimizer) -> None:
    for tensor in op_semantics.tensors(optimizer.state.values()):
        _tag(tensor, "optimizer")


def _addresses(tensors: Iterable[torch.Tensor]) -> list[int]:
    return [address for address in map(_address, tensors) if address]


def _address(tensor: torch.Tensor) -> int:
    """Return the storage's address; 0 without one (fake, sparse, wrapper tensors)."""
    if isinstance(tensor, FakeTensor):
        return 0
    try:  # not through a subclass: the parameter of a lazy module raises ValueError
        with torch._C.DisableTorchFunctionSubclass():
            return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


@untraced
def tag_parameters(module: torch.nn.Module) -> bool:
    """Tag the parameters of a module and their gradients, however they came there, as in FSDP2.

    Returns:
        False if some have no memory yet, or are tensors that `torch.func.functional_call` put in
        their place.
    """
    known, seen, ahead = True, set(), [module]
    while ahead:
        part = ahead.pop()  # not by `parameters`, which may be the program's own
        if id(part) in seen:
            continue
        seen.add(id(part))
        ahead += [inner for inner in part._modules.values() if inner is not None]
        known &= _tag_own_parameters(part)
    return known


@untraced
def _tag_own_parameters(module: torch.nn.Module) -> bool:
    """Tag those of the module itself; False as in `tag_parameters`."""
    tagged = [_tag_parameter(each) for each in module._parameters.values() if each is not None]
    return all(tagged)


def _tag_parameter(parameter: torch.Tensor) -> bool:
    """Tag the parameter and its gradient; False if it has no memory, or is no parameter."""
    with torch._C.DisableTorchFunction():  # modes of the program do not see it
        if not parameter.is_leaf:
            return False
        if parameter.grad is not None:
            _tag(parameter.grad, "grad")
        return _tag(parameter, "param")


def _tag(tensor: torch.Tensor, tag: str) -> bool:
    """Tag the tensor's memory; False if it has none."""
    address = _address(tensor)
    if address:
        core.tag(address, tag)
        return True
    tagged = [_tag(inner, tag) for _, inner in inner_tensors(tensor)] if is_wrapper(tensor) else []
    return any(tagged)
