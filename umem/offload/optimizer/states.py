"""Moves of optimizer state: the part that may leave, and the time of its return."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...capture import op_semantics
from ...errors import NotSupportedError, OutOfMemoryError, StateError
from ...residency import hints
from ...residency.spans import StorageSpan, parts
from ...session import session
from .parts import OfOptimizer

_log = logging.getLogger("umem")

_SHARED = "pool"  # small blocks: their pages also hold bytes of other tensors


class States(OfOptimizer):
    """The states of one optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self._warned = False

    def of(self, parameter: Tensor) -> list[Tensor]:
        """Return the state of the parameter that exists so far; a step may create it.

        Without sparse tensors, such as the momentum of sparse gradients: they have no storage.
        """
        state = self._optimizer.state
        return list(op_semantics.strided([state[parameter]])) if parameter in state else []

    def bytes_of(self, parameter: Tensor) -> int:
        """Return the bytes of its state; before it exists, twice the parameter, as for Adam."""
        found = self.of(parameter)
        return sum(t.nbytes for t in found) if found else 2 * parameter.nbytes

    def all(self) -> list[Tensor]:
        """Return all state in the order of the parameters, then the state that belongs to none."""
        found = [t for p in parameters_of(self._optimizer) for t in self.of(p)]
        return [*found, *op_semantics.strided(self._optimizer.state.values())]

    def bring(self, parameters: Iterable[Tensor]) -> None:
        """Fetch the state and the other tensors of the update, as far as they fit.

        One call, so that no part evicts another. The rest is fetched on demand; all of it while
        umem is off.
        """
        if not session.is_enabled():
            return
        wanted: list[Tensor] = []
        for parameter in parameters:
            wanted += self.of(parameter)
            wanted += op_semantics.strided([parameter.detach(), parameter.grad])
        try:
            hints.prefetch(wanted)
        except OutOfMemoryError:
            _log.debug("the optimizer's state and the tensors of its step do not all fit")

    def send(self, tensors: Iterable[Tensor]) -> None:
        """Evict them, except tensors that the program pinned or excluded, and shared pages."""
        from ...base.native import core

        for part in self._leaving(tensors):
            try:
                core.evict([part.span])
            except StateError:  # an op of another thread has just started to use it
                continue
            except (OutOfMemoryError, NotSupportedError) as error:
                if not self._warned:
                    _log.warning("optimizer state remains on the device: %s", error)
                self._warned = True
                return

    def _leaving(self, tensors: Iterable[Tensor]) -> Iterator[StorageSpan]:
        from ...base.native import core

        for part in parts(list(tensors), "page_optimizer"):
            if not part.nbytes or not core.owns(part.address):
                continue
            at = core.where(*part.span)
            stays = at["tag"] == _SHARED or at["pins"] or at["exempt"]
            if not stays and at["evicted_bytes"] < part.nbytes:
                yield part


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield the parameters in the order of the step."""
    for group in optimizer.param_groups:
        yield from group["params"]


def acting() -> bool:
    """Return whether to move state: not if a plan does, or a graph is being captured."""
    if not session.is_enabled():
        return False
    from ...base.native import core

    if planning() and any(core.plan_status(d)["active"] for d in core.opened_devices()):
        return False
    used = bool(torch.cuda.is_initialized())
    return not (used and torch.cuda.is_current_stream_capturing())


def planning() -> bool:
    """Return whether steps are recorded and planned: then each must run the same operators."""
    from ...base.native import core

    return core.current_options().policy == "planned"
