"""Steps of forward-only programs, such as the `generate` of a library.

No optimizer step ends their steps, and they have no place for `umem.step()`.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections import deque
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ...base.native import core
from .hooks import tag_parameters

_CYCLES = 3  # marked steps that are compared
_TRIES = 3  # calls of a module in which its parameters are tagged
# torch warns that the hook is called for the compiled module too, as intended here.
_EXPECTED = r"Using `torch\.compile\(module\)` when there are global hooks on modules"


class _Calls(NamedTuple):
    """Outermost calls without gradients between two steps that were marked elsewhere."""

    all: int
    repeated: int


class _Returned:
    """The hook of an outermost call; what is copied or pickled in the call has one that is idle."""

    def __init__(self, steps: ForwardSteps | None = None) -> None:
        self._steps = steps
        self.handle: Any = None
        self.gone: Any = None  # called when the module is deleted

    def __call__(self, module: nn.Module, *_args: Any) -> None:
        if self._steps is None:
            return
        self.gone.detach()
        # After an exception torch is in a loop over the hooks, which only the last may leave.
        if next(reversed(module._forward_hooks), self.handle.id) == self.handle.id:
            self.handle.remove()
        else:
            self._steps.left.append(self.handle)
        self._steps.listen()

    def __reduce__(self) -> Any:
        return _Returned, ()


class ForwardSteps:
    """Marks the end of a step when a module called in it without gradients is called again.

    Only outermost calls count: each token of a decoder is a step, and so is each pass over layers
    that the program calls one by one.

    A training step may call a teacher, or roll out a policy, without gradients. It is not split:
    the fewest repeated calls between recent steps, marked by optimizers or `umem.step()`, belong
    to the step. An evaluation has more. Its last call ends where a call with gradients begins, if
    some recent step had no call without gradients, and none had as many.
    """

    def __init__(self) -> None:
        self._called: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        # The calls in which to tag parameters that had no memory yet.
        self._untagged: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._calls = self._repeats = 0
        self._over = 0  # repeated calls of evaluations that are over
        self._trains = False  # a call with gradients came since the last step
        self._per_cycle: deque[_Calls] = deque(maxlen=_CYCLES)
        self._steps = core.steps()
        self.left: list[Any] = []  # handles of hooks that could not be removed when they ran
        self._removed = False
        self._hook = self._outermost
        handle = register_module_forward_pre_hook(self._hook)
        # Always the same entry, so that compiled code with a guard on it remains valid.
        self._key = handle.id
        self._hooks: dict[int, Any] = handle.hooks_dict_ref() or {}
        warnings.filterwarnings("ignore", message=_EXPECTED, category=UserWarning)
        self._filter = warnings.filters[0]

    def remove(self) -> None:
        """Remove the hook from torch, and the filter from the warnings."""
        self._removed = True
        self._hooks.pop(self._key, None)
        self._remove_left()
        filters: Any = warnings.filters  # its type says that it cannot change
        with contextlib.suppress(ValueError):  # the program has other filters by now
            filters.remove(self._filter)

    def _outermost(self, module: nn.Module, _args: Any) -> None:
        """Count an outermost call of a module.

        The hook is removed until the call returns: it would slow down every inner module's call.
        """
        if torch.compiler.is_compiling():
            return
        if not isinstance(module, torch.jit.ScriptModule):  # its submodules call no hooks
            if self._hooks.pop(self._key, None) is None:
                return  # another thread's call came first
            self._remove_left()
            self._listen_after(module)
        left = self._untagged.get(module, _TRIES)
        if left:  # hooks of registration do not see all parameters
            self._untagged[module] = 0 if tag_parameters(module) else left - 1
        self._take_marks()
        if torch.is_grad_enabled():
            self._train()
        else:
            self._forward(module)

    def _listen_after(self, module: nn.Module) -> None:
        # torch calls no hook after an interrupt: this one returns at the module's next call, or
        # when the module is deleted.
        returned = _Returned(self)
        returned.handle = module.register_forward_hook(returned, always_call=True)
        returned.gone = weakref.finalize(module, self.listen)
        returned.gone.atexit = False

    def _remove_left(self) -> None:
        while self.left:
            self.left.pop().remove()

    def listen(self) -> None:
        """Put the hook back once the outermost call has returned."""
        if not self._removed:
            self._hooks[self._key] = self._hook

    def _take_marks(self) -> None:
        """Begin to count again if a step was marked elsewhere."""
        steps = core.steps()
        if steps == self._steps:
            return
        self._steps = steps
        self._per_cycle.append(_Calls(self._calls, self._over + self._repeats))
        self._calls = self._repeats = self._over = 0
        self._trains = False
        self._called.clear()

    def _train(self) -> None:
        recent = [cycle.all for cycle in self._per_cycle] or [self._calls]
        if self._calls > max(recent) and min(recent) == 0 and not self._trains:
            core.guess_step()
            self._steps = core.steps()
        self._trains = True

    def _forward(self, module: nn.Module) -> None:
        self._calls += 1
        usual = min((cycle.repeated for cycle in self._per_cycle), default=0)
        if module not in self._called:
            self._called.add(module)
            if self._repeats > usual:  # an evaluation is over
                self._over += self._repeats
                self._repeats = 0
            return
        self._repeats += 1
        self._called.clear()
        self._called.add(module)
        if self._repeats > usual:
            core.guess_step()
            self._steps = core.steps()
