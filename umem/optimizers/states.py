"""Moving the state of some parameters: what of it may leave, and what comes."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.optim import Optimizer

from .. import hints, runtime, torch_program
from ..errors import NotSupportedError, OutOfMemoryError, StateError
from ..targets import Part, parts

_log = logging.getLogger("umem")

_SHARED = "pool"  # small blocks: their page has others' bytes


class States:
    """The states of one optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._warned = False

    def of(self, parameter: Tensor) -> list[Tensor]:
        """What there is of the parameter; a step may make it."""
        state = self._optimizer.state
        return list(torch_program.tensors([state[parameter]])) if parameter in state else []

    def bytes_of(self, parameter: Tensor) -> int:
        """Of its state; before there is any, of two tensors as large as itself, as Adam has."""
        found = self.of(parameter)
        return sum(t.nbytes for t in found) if found else 2 * parameter.nbytes

    def all(self) -> list[Tensor]:
        """In the order of the parameters, then what belongs to none."""
        found = [t for p in parameters_of(self._optimizer) for t in self.of(p)]
        return [*found, *torch_program.tensors(self._optimizer.state.values())]

    def bring(self, parameters: Iterable[Tensor]) -> None:
        """To the device with what the update uses beside them, as far as there is room.

        All at once, so that none of it leaves for another part of it. The rest comes on demand.
        """
        wanted: list[Tensor] = []
        for parameter in parameters:
            grad = parameter.grad
            wanted += self.of(parameter)
            wanted.append(parameter.detach())
            if grad is not None and grad.layout == torch.strided:
                wanted.append(grad)
        try:
            hints.prefetch(wanted)
        except OutOfMemoryError:
            _log.debug("not all of the optimizer's state fits beside what its step uses")

    def send(self, tensors: Iterable[Tensor]) -> None:
        """To the host, but for what the program pinned or excluded, and what shares a page."""
        from ..native import core

        for part in self._leaving(tensors):
            try:
                core.evict([part.span])
            except StateError:  # another thread's op has just begun to use it
                continue
            except (OutOfMemoryError, NotSupportedError) as error:
                if not self._warned:
                    _log.warning("optimizer state stays on the device: %s", error)
                self._warned = True
                return

    def _leaving(self, tensors: Iterable[Tensor]) -> Iterator[Part]:
        from ..native import core

        for part in parts(list(tensors), "page_optimizer"):
            if not part.nbytes or not core.owns(part.address):
                continue
            at = core.where(*part.span)
            stays = at["tag"] == _SHARED or at["pins"] or at["exempt"]
            if not stays and at["evicted_bytes"] < part.nbytes:
                yield part


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """In the order of its step."""
    for group in optimizer.param_groups:
        yield from group["params"]


def acting() -> bool:
    """Whether states are to be moved: not while a plan does it, nor where graphs are captured."""
    if not runtime.is_enabled():
        return False
    from ..native import core

    if planning() and core.plan_status()["active"]:
        return False
    used = bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
    return not (used and torch.cuda.is_current_stream_capturing())


def planning() -> bool:
    """Whether steps are recorded and planned, so that each has to run the same operators."""
    from ..native import core

    return core.current_options().policy == "planned"
