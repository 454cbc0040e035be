"""Updates on the host: gradients go out, parameters come back, optimizer state never moves.

Source: Ren et al., "ZeRO-Offload: Democratizing billion-scale model training", USENIX ATC 2021. In
contrast to it, parameters go out too, so that nothing that the program did to them is lost.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from ...errors import StateError
from ...session.session import host_memory
from .host_memory import Staging, copy_of, layout_of, padded_bytes
from .parts import OfOptimizer, part_of, update

CHUNK_BYTES = 32 << 20  # of gradients and parameters: what one update takes
_IN_FLIGHT = 2  # chunks: one is updated while another one travels
_OF_KERNELS = ("grad_scale", "found_inf")  # what GradScaler leaves for fused kernels


@dataclass(eq=False)
class _Chunk:
    """Parameters that are updated together."""

    staging: Staging
    values: dict[Tensor, Tensor] = field(default_factory=dict)  # parameter -> its copy
    events: list[torch.cuda.Event] = field(default_factory=list)
    states: dict[Tensor, dict[str, Any]] = field(default_factory=dict)  # of the copies
    done: Future[None] | None = None


class HostUpdate(OfOptimizer):
    """The updates of some parameters of one optimizer, by torch's kernels for the host.

    Each parameter that is added is copied out together with its gradient, updated by a thread, and
    copied back, in the order of the calls. Only the calling thread touches memory of the device, at
    points that do not depend on how fast the other one is: a step runs the same operators each
    time. At most three chunks are under way.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self._open: _Chunk | None = None
        self._flying: deque[_Chunk] = deque()
        self._lanes: tuple[Any, Any] | None = None  # streams out and in, of a GPU
        self._added = self._failed = 0  # parameters, in this step
        self._error: BaseException | None = None

    def adopt(self, parameter: Tensor) -> None:
        """Take the parameter's state to the host, where it stays."""
        state = self._optimizer.state
        if parameter in state:
            _to_host(state[parameter], parameter)

    def give_back(self, parameters: Iterable[Tensor]) -> None:
        """Put the states where `load_state_dict` would."""
        for parameter, group in _with_groups(self._optimizer, parameters):
            known = self._optimizer.state.get(parameter, {})
            on_device = group.get("capturable") or group.get("fused")
            for name, value in known.items():
                if isinstance(value, Tensor):
                    stays = name == "step" and not on_device
                    known[name] = value.to("cpu" if stays else parameter.device, copy=True)

    def add(self, parameter: Tensor) -> None:
        """Copy a parameter and its gradient out; they are updated soon, and at `finish` at last.

        The gradient may be freed after the call.

        Raises:
            StateError: a CUDA graph is being captured.
        """
        refuse_capture()
        gradient = parameter.grad
        assert gradient is not None
        both = (parameter, gradient)
        if self._open is not None and not self._open.staging.fits(both):
            self._submit()
        if self._open is None:
            self._open = _Chunk(_stagings.take(padded_bytes(both), pinned=parameter.is_cuda))
        chunk = self._open
        # Fused kernels go through memory in its order: that of all tensors has to be the same.
        strides = layout_of(parameter)
        with torch.no_grad(), self._lane(parameter, out=True) as lane:
            value = chunk.staging.take(parameter, strides)
            value.copy_(parameter.detach(), non_blocking=True)
            copied = chunk.staging.take(gradient, strides)
            copied.copy_(gradient, non_blocking=True)
            if copied.dtype != value.dtype:
                value.grad_dtype = copied.dtype
            value.grad = copied
            if lane is not None:
                gradient.record_stream(lane)
                chunk.events.append(lane.record_event())
        chunk.values[parameter] = value
        self._added += 1

    def finish(self) -> None:
        """Write back all that was added; work that follows on the stream sees the new values.

        What interrupts it is raised at the end, so that parameters and states fit together; a
        second interrupt is raised at once, and the next call goes on.

        Raises:
            StateError: an update failed.
        """
        try:
            self._drain()
        except BaseException:
            self._drain()
            raise
        added, failed, error = self._added, self._failed, self._error
        self._added, self._failed, self._error = 0, 0, None
        if error is not None:
            raise StateError(
                f"the update on the host of {failed} of {added} parameters failed: {error}; the "
                "others have been updated, and the states of these may have been: load a "
                "checkpoint before the next step"
            ) from error

    def _drain(self) -> None:
        self._submit()
        while self._flying:
            self._write_back()
        if self._lanes is not None:
            torch.cuda.current_stream(self._lanes[1].device).wait_stream(self._lanes[1])

    def _submit(self) -> None:
        chunk, self._open = self._open, None
        if chunk is None:
            return
        for parameter in chunk.values:
            self.adopt(parameter)  # the program may have put it elsewhere, or changed the strides
        part = part_of(self._optimizer, chunk.values)
        states = {chunk.values[p]: self._optimizer.state.get(p) for p in chunk.values}
        part.state = defaultdict(dict, {value: s for value, s in states.items() if s is not None})
        part.param_groups = [
            made for group in part.param_groups for made in _for_host(part, group, chunk.values)
        ]
        for name in _OF_KERNELS:
            if isinstance(scale := getattr(part, name, None), Tensor):
                setattr(part, name, copy_of(scale))
        chunk.states = part.state
        chunk.done = _submitted(part, chunk)
        self._flying.append(chunk)
        if len(self._flying) > _IN_FLIGHT:
            self._write_back()

    def _write_back(self) -> None:
        """Copy the oldest chunk back; what is interrupted is done again by the next call."""
        chunk = self._flying[0]
        assert chunk.done is not None
        error = chunk.done.exception()
        if error is not None:
            self._error = self._error or error
            self._failed += len(chunk.values)
            self._flying.popleft()
            return
        with torch.no_grad():
            for parameter, value in chunk.values.items():
                with self._lane(parameter, out=False) as lane:
                    parameter.copy_(value, non_blocking=True)
                    if lane is not None:
                        chunk.events.append(lane.record_event())
                if state := chunk.states.get(value):
                    self._optimizer.state[parameter] = state
        self._flying.popleft()
        chunk.staging.busy_until(chunk.events)
        _stagings.give(chunk.staging)

    @contextlib.contextmanager
    def _lane(self, parameter: Tensor, *, out: bool) -> Iterator[Any]:
        """Copy beside compute, and behind all that it was given so far; None on a CPU."""
        if not parameter.is_cuda:
            yield None
            return
        if self._lanes is None:
            device = parameter.device
            self._lanes = (torch.cuda.Stream(device), torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
        lane = self._lanes[0 if out else 1]
        lane.wait_stream(torch.cuda.current_stream(parameter.device))
        with torch.cuda.stream(lane):
            yield lane


class _Stagings:
    """Buffers that are not in use, which all optimizers share."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spare: list[Staging] = []

    def take(self, at_least: int, *, pinned: bool) -> Staging:
        """Return a buffer for a chunk, or for so many bytes if they are more."""
        nbytes = max(CHUNK_BYTES, at_least)
        with self._lock:
            found = next((s for s in self._spare if s.pinned == pinned), None)
            if found is not None:
                self._spare.remove(found)
        if found is None:
            return Staging(nbytes, pinned=pinned)
        found.clear(nbytes)
        return found

    def give(self, staging: Staging) -> None:
        """Keep a buffer for the next chunk; not more than one optimizer has under way."""
        with self._lock:
            if len(self._spare) <= _IN_FLIGHT:
                self._spare.append(staging)

    def clear(self) -> None:
        """Free them."""
        with self._lock:
            self._spare.clear()


_stagings = _Stagings()
_thread: ThreadPoolExecutor | None = None  # of all optimizers


def free_buffers() -> None:
    """Free the buffers that no chunk is in; the next one makes its own."""
    _stagings.clear()


def _forked() -> None:
    global _thread, _stagings
    _thread, _stagings = None, _Stagings()  # the thread is the parent's, and may hold the lock


os.register_at_fork(after_in_child=_forked)


def _submitted(part: Optimizer, chunk: _Chunk) -> Future[None]:
    """Let the thread update a chunk; where the interpreter ends, update it here."""
    global _thread
    try:
        if _thread is None:
            _thread = ThreadPoolExecutor(1, "umem-host-update")
        return _thread.submit(_update, part, chunk)
    except RuntimeError:  # no thread begins anything any more
        done: Future[None] = Future()
        try:
            _update(part, chunk)
        except BaseException as error:  # noqa: BLE001 - as of the thread
            done.set_exception(error)
        else:
            done.set_result(None)
        return done


def refuse_capture() -> None:
    """Raise StateError while a CUDA graph is captured."""
    used = bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
    if used and torch.cuda.is_current_stream_capturing():
        raise StateError(
            "a CUDA graph is captured, which cannot hold an update on the host; leave the "
            "optimizer's step, and with released gradients the backward pass, out of the graph, or "
            "update on the device"
        )


def _update(part: Optimizer, chunk: _Chunk) -> None:
    """Update the copies; runs on the thread."""
    for event in chunk.events:
        event.synchronize()
    chunk.events.clear()
    with host_memory():
        update(part, chunk.values.values())
    for value, state in part.state.items():
        _to_host(state, value)


def _to_host(state: dict[str, Any], parameter: Tensor) -> None:
    """Move what the optimizer made of a state to host memory that umem does not manage.

    With the strides of the parameter's copy, where it has its shape.
    """
    from ...base.native import core

    strides = layout_of(parameter)
    for name, value in state.items():
        if not isinstance(value, Tensor):
            continue
        wanted = strides if value.shape == parameter.shape else layout_of(value)
        managed = value.is_cuda or core.owns(value.data_ptr())
        if managed or tuple(value.stride()) != wanted:
            state[name] = copy_of(value, wanted)


def _for_host(
    part: Optimizer, group: dict[str, Any], values: dict[Tensor, Tensor]
) -> Iterator[dict[str, Any]]:
    """Yield the group of copies, with options by which torch's kernels for the host update them.

    Fused kernels take a part of it: some types only, and with momentum either no or all buffers.
    """
    changed: dict[str, Any] = {
        name: value.item()
        for name, value in group.items()
        if isinstance(value, Tensor) and value.dim() == 0
    }
    changed.update({name: False for name in ("foreach", "capturable") if name in group})
    kinds: dict[tuple[bool, bool], list[Tensor]] = {}
    for parameter in group["params"]:
        value = values[parameter]
        begun = part.state.get(value, {}).get("momentum_buffer") is not None
        fused = "fused" in group and _fuses(part, value)
        kinds.setdefault((fused, begun), []).append(value)
    for (fused, _), alike in kinds.items():
        how = {"fused": fused} if "fused" in group else {}
        yield {**group, **changed, **how, "params": alike}


def _fuses(part: Optimizer, value: Tensor) -> bool:
    """Return whether the fused kernel is right for it: SGD's leaves out half-precision values.

    Source: pytorch/pytorch#191763.
    """
    assert value.grad is not None
    half = value.dtype in (torch.float16, torch.bfloat16)
    alike = value.grad.dtype == value.dtype
    return value.is_floating_point() and alike and not (half and isinstance(part, SGD))


def _with_groups(
    optimizer: Optimizer, parameters: Iterable[Tensor]
) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    chosen = {id(parameter) for parameter in parameters}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) in chosen:
                yield parameter, group
