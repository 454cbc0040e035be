"""`umem.page_optimizer`: optimizer state is on the device only during `step()`."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from ...errors import ConfigError
from ...session import session
from .parts import is_per_parameter, part_of, update
from .release import Release
from .states import States, acting, parameters_of, planning

_CHUNKS = 8  # chunks that fit the budget: one in use, one arriving, one leaving

_paged: weakref.WeakSet[Optimizer] = weakref.WeakSet()


class _Handle(Protocol):
    def remove(self) -> None: ...


class PagedOptimizer:
    """The effect of `page_optimizer`, until `remove`; also a context manager."""

    def __init__(self, optimizer: Optimizer, release_gradients: bool) -> None:
        self._optimizer = optimizer
        self._states = States(optimizer)
        self._handles: list[_Handle] = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_load_state_dict_post_hook(self._loaded),
        ]
        self._release = Release(optimizer, self._states) if release_gradients else None
        _paged.add(optimizer)
        self._loaded(optimizer)

    def __repr__(self) -> str:
        what = type(self._optimizer).__name__
        how = ", gradients released" if self._release else ""
        return f"<umem.page_optimizer: {what}{how}{'' if self._handles else ', removed'}>"

    def __enter__(self) -> PagedOptimizer:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Restore the optimizer. State on the host comes back when an op needs it."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._release is not None:
            self._release.remove()
        _paged.discard(self._optimizer)

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Accumulate gradients: with released gradients, backward passes inside only add to them.

        The next pass outside, or else `optimizer.step()`, updates by the sum.
        """
        if self._release is None:
            yield
            return
        with self._release.paused():
            yield

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Run all of the step but its last part, which is left to the step itself."""
        if self._release is not None:
            self._release.step_begins()
        closure = any(given is not None for given in (*args[1:], *kwargs.values()))
        if closure or not acting():
            return None  # the backward passes of a closure come first, and need the memory
        due = [p for p in parameters_of(optimizer) if p.grad is not None]
        if planning() or not is_per_parameter(optimizer):
            self._states.bring(due)
            return None
        chunks = self._chunks(due)
        if not chunks:
            return None
        self._states.bring(chunks[0])
        for now, then in itertools.pairwise(chunks):
            self._states.bring([*now, *then])
            update(optimizer, now)
            self._send(now)
        return (part_of(optimizer, chunks[-1]), *args[1:]), kwargs

    def _after_step(self, _optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        if self._release is not None:
            self._release.step_ended()
        if acting():
            self._states.send(self._states.all())

    def _loaded(self, _optimizer: Optimizer) -> None:
        if acting():
            self._states.send(self._states.all())

    def _send(self, parameters: list[Tensor]) -> None:
        self._states.send(t for parameter in parameters for t in self._states.of(parameter))

    def _chunks(self, parameters: list[Tensor]) -> list[list[Tensor]]:
        """Return parts in the order of the parameters: a chunk of state, or one parameter's."""
        most = session.stats().budget_bytes // _CHUNKS
        chunks: list[list[Tensor]] = []
        room = 0
        for parameter in parameters:
            size = self._states.bytes_of(parameter)
            if not chunks or size > room:
                chunks.append([])
                room = most
            chunks[-1].append(parameter)
            room -= size
        return chunks


def page_optimizer(optimizer: Optimizer, *, release_gradients: bool = False) -> PagedOptimizer:
    """Keep an optimizer's state on the host, and bring it to the device around its `step()`.

    The results are bit-identical to the plain step. See docs/optimizer_state.md.

    Args:
        optimizer: of any class; if it wraps another in its attribute `optimizer` or `optim`, that
            one is used.
        release_gradients: update each parameter in the backward pass, as soon as its gradient is
            there, and free the gradient. For the optimizers of torch.optim except LBFGS. `step()`
            then has nothing left to do; it still has to be called after each backward pass.

    Raises:
        ConfigError: not an optimizer, or one that is paged already; with `release_gradients` also
            one whose update is not known to be per parameter, or gradients that processes share.
        StateError: umem is off.
    """
    session.require_session("page_optimizer")
    found = _unwrapped(optimizer)
    if found in _paged:
        raise ConfigError(
            f"umem.page_optimizer({type(found).__name__}): it is paged already; call remove() on "
            "what that call returned"
        )
    if release_gradients:
        _check_release(found)
    return PagedOptimizer(found, release_gradients)


def _unwrapped(optimizer: object) -> Optimizer:
    found: Any = optimizer
    for _ in range(8):  # wrappers of wrappers
        inner = next(
            (x for name in ("optimizer", "optim")
             if isinstance(x := getattr(found, name, None), Optimizer)), None
        )  # fmt: skip
        if inner is None:
            break
        found = inner
    if not isinstance(found, Optimizer):
        raise ConfigError(
            f"umem.page_optimizer(...) was given a {type(optimizer).__name__}; allowed: a "
            "torch.optim.Optimizer, or an object with one in its attribute optimizer or optim"
        )
    return found


def _check_release(optimizer: Optimizer) -> None:
    import torch.distributed as dist

    what = f"umem.page_optimizer({type(optimizer).__name__}, release_gradients=True)"
    if not is_per_parameter(optimizer):
        raise ConfigError(
            f"{what}: only an update of one parameter by its own gradient can run in the backward "
            "pass, which is known of torch.optim's classes other than LBFGS; leave "
            "release_gradients out"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ConfigError(f"{what}: its step is differentiable, and needs all gradients; allowed: "
                          "differentiable=False")  # fmt: skip
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ConfigError(
            f"{what}: gradients are averaged over {dist.get_world_size()} processes after they "
            "are there; leave release_gradients out"
        )
