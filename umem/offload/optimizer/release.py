"""The optimizer's step in the backward pass: each gradient is used and freed immediately.

Source: "How to save memory by fusing the optimizer step into the backward pass", PyTorch tutorials,
2023; Lv et al., "Full parameter fine-tuning for large language models with limited resources"
(LOMO), ACL 2024.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable, graph
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ...base.untraced import untraced
from ...errors import StateError
from .host_update import HostUpdate
from .parts import OfOptimizer, update
from .states import States, acting, parameters_of
from .turns import Turn

_log = logging.getLogger("umem")
_PASS = graph._engine_run_backward.__code__


def _depth() -> int:
    """Return the number of backward passes that this thread's Python code is in."""
    depth, frame = 0, sys._getframe().f_back
    while frame is not None:
        depth += frame.f_code is _PASS
        frame = frame.f_back
    return depth


def processes() -> int:
    """Return how many processes may average their gradients; 1 before they have a group."""
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class _Hook:
    """Gives a parameter's gradient to the one that releases it."""

    def __init__(self, release: Release) -> None:
        self._release = weakref.ref(release)  # the parameter must not keep the optimizer alive

    def __call__(self, parameter: Tensor) -> None:
        if (release := self._release()) is not None:
            release._gradient_is_there(parameter)

    @classmethod
    def is_last(cls, parameter: Tensor) -> bool:
        """Return whether no hook of the program follows, which would find no gradient."""
        hooks = parameter._post_accumulate_grad_hooks or {}
        return isinstance(next(reversed(hooks.values()), None), cls)


class Release(OfOptimizer):
    """Hooks on the parameters of an optimizer, including parameters that are added later.

    Remaining gradients are left to `step()`: those of new parameters, accumulated ones, and those
    that a hook of the program reads after umem's, until `step()` has put umem's after it.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        states: States,
        host: HostUpdate | None,
        takes: Callable[[Tensor, Tensor], bool],
        turn: Turn,
    ) -> None:
        super().__init__(optimizer)
        self._states = states
        self._host, self._takes = host, takes  # the latter: the parameters that the host updates
        self._turn = turn  # each device has its own backward thread
        self._hooks: dict[int, Any] = {}  # by the parameter's id
        self._done: dict[int, Tensor] = {}  # by id, since the last step, in order of gradients
        self._order: list[Tensor] = []  # the order in the step before
        self._paused = False
        # Backward passes that gave gradients and have not ended; by their number, the thread and
        # the passes that it was in: a node of a pass may run another one.
        self._passes: dict[int, tuple[int, int]] = {}
        self._follow()

    def use(self, host: HostUpdate) -> None:
        """Let the host update its parameters, beginning with the next backward pass."""
        self._host = host

    def remove(self) -> None:
        """Keep gradients again, for `step()`."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self._done, self._order = {}, []

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Keep gradients inside the context, so that they accumulate."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def step_begins(self) -> None:
        """Prepare for a closure's backward pass."""
        self._end()

    def step_ended(self) -> None:
        """Update the hooks: groups may have been added, or parameters thawed."""
        self._end()
        self._follow()

    def _end(self) -> None:
        if self._done:
            self._order, self._done = list(self._done.values()), {}

    def _follow(self) -> None:
        mine = {
            id(p): p
            for p in parameters_of(self._optimizer)
            if p.requires_grad and p.is_leaf and not is_lazy(p)  # those take no hook yet
        }
        for key in list(self._hooks):
            if key not in mine or not _Hook.is_last(mine[key]):
                self._hooks.pop(key).remove()
        hook = _Hook(self)
        for key, parameter in mine.items():
            if key not in self._hooks:
                self._hooks[key] = parameter.register_post_accumulate_grad_hook(hook)

    @untraced
    def _gradient_is_there(self, parameter: Tensor) -> None:
        if self._paused or not _Hook.is_last(parameter):
            return
        with self._turn.take("a backward pass that updates parameters"):
            self._begin(torch._C._current_graph_task_id())
            gradient = self._checked(parameter)
            if self._host is not None and self._takes(parameter, gradient):
                self._host.add(parameter, gradient)
                parameter.grad = None
                self._done[id(parameter)] = parameter
                return
            paging = acting()
            if paging:
                self._states.bring([parameter, *self._next(parameter)])
            update(self._optimizer, [parameter])
            parameter.grad = None
            self._done[id(parameter)] = parameter
            if paging:
                self._states.send(self._states.of(parameter))

    def _begin(self, of: int) -> None:
        """Note a gradient of this pass. The program may have gone on after one that failed.

        Raises:
            StateError: gradients are averaged over processes, which began after this was made.
        """
        if of in self._passes:
            return
        if (ranks := processes()) > 1:
            raise StateError(
                f"gradients are averaged over {ranks} processes after they are ready, and "
                "release_gradients=True uses them before; leave it out"
            )
        thread, depth = threading.get_ident(), _depth()
        around = {
            each: (on, at) for each, (on, at) in self._passes.items() if on != thread or at < depth
        }
        if len(around) < len(self._passes) and self._done:
            _log.warning(
                "a backward pass failed after %d parameters had been updated by its gradients "
                "(release_gradients=True)", len(self._done)
            )  # fmt: skip
            self._end()
        self._passes = {**around, of: (thread, depth)}
        Variable._execution_engine.queue_callback(functools.partial(self._passed, of))

    def _passed(self, of: int) -> None:
        self._passes.pop(of, None)
        if self._host is not None and not self._passes:
            with self._turn.take("the end of a backward pass that updates parameters"):
                self._host.submit()  # before the program changes options for the next step

    def _next(self, parameter: Tensor) -> list[Tensor]:
        """Return the parameters whose gradients followed this one's in the last step."""
        at = len(self._done)
        here = at + 1 < len(self._order) and self._order[at] is parameter
        return self._order[at + 1 : at + 2] if here else []

    def _checked(self, parameter: Tensor) -> Tensor:
        """Return the gradient.

        Raises:
            StateError: it cannot be released.
        """
        of = f"a parameter of shape {tuple(parameter.shape)}"
        if parameter.grad is None:
            raise StateError(
                f"another hook took the gradient of {of} before umem.page_optimizer(..., "
                "release_gradients=True) used it; only one optimizer can release it"
            )
        if parameter.grad.requires_grad:
            raise StateError(
                f"the gradient of {of} is needed for a second derivative (create_graph=True), and "
                "release_gradients=True would free it; leave one of them out"
            )
        if id(parameter) in self._done:
            raise StateError(
                f"{of} got a second gradient since the last optimizer.step(), but was updated by "
                "the first one already; with release_gradients=True call step() after each "
                "backward pass, and run all but the last of a step inside "
                "`with paged.accumulate():`"
            )
        return parameter.grad
