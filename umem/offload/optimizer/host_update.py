"""Updates on the host: gradients are copied out, parameters back; optimizer state never moves.

Source: Ren et al., "ZeRO-Offload: Democratizing billion-scale model training", USENIX ATC 2021. In
contrast to it, parameters are copied out too, so that no change by the program is lost.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import weakref
from _thread import start_new_thread
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from ...base import host, locks
from ...errors import StateError
from ...session import session
from ...session.session import host_memory
from . import arrivals, masters, state_file
from .host_memory import Staging, copy_of, layout_of, padded_bytes
from .masters import Master
from .parts import OfOptimizer, part_of, update

CHUNK_BYTES = 32 << 20  # of gradients and parameters, per update
_IN_FLIGHT = 2  # chunks, besides the one being filled: one is updated while another is copied
_log = logging.getLogger("umem")
_OF_KERNELS = ("grad_scale", "found_inf")  # set by GradScaler for fused kernels


@dataclass(eq=False, repr=False)
class _Chunk:
    """Parameters that are updated together."""

    staging: Staging
    values: dict[Tensor, Tensor] = field(default_factory=dict)  # parameter -> its copy
    masters: dict[Tensor, Master] = field(default_factory=dict)  # by the copy
    # Parameter -> its memory when it was copied, and the address: the program may replace both.
    targets: dict[Tensor, Tensor] = field(default_factory=dict)
    storages: dict[Tensor, int] = field(default_factory=dict)
    events: list[torch.cuda.Event] = field(default_factory=list)
    states: dict[Tensor, dict[str, Any]] = field(default_factory=dict)  # by the updated tensor
    file: state_file.StateFile | None = None
    loan: state_file.Loan | None = None  # its states in the file
    call: Callable[[], None] | None = None  # updates it, once
    queued: bool = False  # for the thread
    done: Future[None] = field(default_factory=Future)
    writing: threading.Lock = field(default_factory=threading.Lock)

    def updated(self, value: Tensor) -> Tensor:
        """Return the tensor that the optimizer updates for this copy: its master, or itself."""
        return self.masters[value].values if value in self.masters else value


class HostUpdate(OfOptimizer):
    """The updates of some parameters of one optimizer, by torch's kernels for the host.

    Each added parameter is copied out with its gradient, updated by a thread, and copied back, in
    the order of the calls. In a step only the calling thread touches device memory, at points that
    do not depend on the other thread's speed: each step runs the same operators. At most three
    chunks are in flight, or with `overlap` as many as the option `optimizer_buffers` allows.

    Args:
        optimizer: the optimizer.
        with_masters: keep parameters of lower precision in float32 on the host.
        overlap: return parameters when an operator uses them, after `leave`.
    """

    def __init__(
        self, optimizer: Optimizer, *, with_masters: bool = False, overlap: bool = False
    ) -> None:
        super().__init__(optimizer)
        self._with_masters = with_masters
        self._overlap = overlap
        settings = session.current_settings()
        # Bytes of chunks in flight beyond those two.
        self._room = settings.optimizer_buffers if settings and overlap else 0
        self._lock = locks.reentrant()  # operators of any thread wait for their parameters
        self._works = False  # the thread that has the lock is inside of an operation
        # By device, events of the work when parameters were left; None: not since they were added.
        self._left: dict[torch.device, Any] | None = None
        self._returned: dict[int, Any] = {}  # address of a storage -> event of its copy
        self._open: _Chunk | None = None
        self._flying: deque[_Chunk] = deque()
        self._lanes: dict[torch.device, tuple[Any, Any]] = {}  # streams out and in of GPUs
        if overlap:  # waiting chunks keep their parameters alive
            weakref.finalize(optimizer, self._orphaned).atexit = False
        _all.add(self)
        self._ended = self._failed = 0  # updates of parameters, since the last `_raise`
        self._error: BaseException | None = None

    def adopt(self, parameter: Tensor) -> None:
        """Move the parameter's state to the host for good."""
        state = self._optimizer.state
        if parameter not in state:
            return
        if self._has_master(parameter):
            state[parameter] = masters.raised(state[parameter])
        _to_host(state[parameter], parameter, state_file.current())

    def restore(self, saved: dict[Tensor, dict[str, Any]]) -> None:
        """Restore the states from `masters.in_checkpoint` after the optimizer has loaded them."""
        for parameter, state in saved.items():
            copies = {name: copy_of(value) for name, value in state.items()}
            self._optimizer.state[parameter].update(copies)
            self.adopt(parameter)

    def give_back(self, parameters: Iterable[Tensor]) -> None:
        """Move the states to where `load_state_dict` would put them, as the last step left them."""
        parameters = list(parameters)
        with self._working():
            for parameter in parameters:
                self._let_return(parameter)
        state_file.settle()
        for parameter, known in self.plain_states(parameters, copy=True):
            self._optimizer.state[parameter] = known

    def plain_states(
        self, parameters: Iterable[Tensor], *, copy: bool = False
    ) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Yield the parameters' states as a plain optimizer has them: their types and places."""
        for parameter, group in _with_groups(self._optimizer, parameters):
            if (known := self._optimizer.state.get(parameter)) is None:
                continue
            if self._has_master(parameter):
                known = masters.lowered(known, parameter)
            on_device = group.get("capturable") or group.get("fused")
            places = {
                name: "cpu" if name == "step" and not on_device else parameter.device
                for name, value in known.items()
                if isinstance(value, Tensor)
            }
            moved = {name: known[name].to(place, copy=copy) for name, place in places.items()}
            yield parameter, {**known, **moved}

    def add(self, parameter: Tensor, gradient: Tensor) -> None:
        """Copy a parameter and its gradient out; they are updated by `finish` at the latest.

        The gradient may be freed after the call.

        Raises:
            StateError: a CUDA graph is being captured.
        """
        refuse_capture()
        with self._working():
            self._let_return(parameter)  # no operator has used it since the last step
            self._left = None
            self._add(parameter, gradient)

    def _let_return(self, parameter: Tensor) -> None:
        if self._open is not None and parameter in self._open.values:
            self._submit()  # a backward pass failed, and the program went on
        for chunk in [c for c in tuple(self._flying) if parameter in c.values]:
            self._write_once(chunk)

    def _add(self, parameter: Tensor, gradient: Tensor) -> None:
        both = (parameter, gradient)
        if self._open is not None and not self._open.staging.fits(both):
            self._submit()
        if self._open is None:
            self._open = _Chunk(_stagings.take(padded_bytes(both), pinned=parameter.is_cuda))
        chunk = self._open
        # Fused kernels traverse memory in its order, which must be the same for all tensors.
        strides = layout_of(parameter)
        with torch.no_grad(), self._lane(parameter, out=True) as lane:
            if (event := self._returned.get(_storage(parameter))) is not None:
                lane.wait_event(event)  # its values of the last step, that no operator has used
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
        chunk.targets[parameter] = parameter.detach()
        chunk.storages[parameter] = _storage(parameter)
        chunk.values[parameter] = value  # last: an interrupt leaves it whole, or out

    def leave(self) -> None:
        """Make only the operators that use added parameters wait for them.

        Raises:
            StateError: an update failed since the last call.
        """
        with self._working():
            self._submit()
            storages = {at for chunk in self._flying for at in chunk.storages.values()}
            storages |= self._returned.keys()  # of chunks that had no room to wait
            self._left = {}
            for device, (out, _) in self._lanes.items():
                stream = torch.cuda.current_stream(device)
                stream.wait_stream(out)  # the program may change gradients
                self._left[device] = stream.record_event()
            for chunk in self._flying:  # graphs with the old values are invalid now
                torch.autograd.graph.increment_version(chunk.values)
        arrivals.expect(storages, self._bring)
        with self._lock:
            self._raise()

    def finish(self) -> None:
        """Write back all added parameters; later work on the stream sees the new values.

        An interrupt is raised at the end, so that parameters and states remain consistent; a
        second one is raised immediately, and the next call continues.

        Raises:
            StateError: an update failed.
        """
        with self._working():
            try:
                self._drain()
            except BaseException:
                self._drain()
                raise
            finally:
                if self._overlap and not self._flying:
                    arrivals.forget(self._bring)
            self._raise()

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        """Run an operation; operators within it do not wait for parameters.

        Raises:
            StateError: this thread is giving a chunk of an optimizer to the one that updates.
        """
        refuse_in_order()
        with self._lock:
            before, self._works = self._works, True
            try:
                yield
            finally:
                self._works = before

    def _orphaned(self) -> None:
        """Finish the chunks of a deleted optimizer; its parameters may still be in use."""
        self._open = None  # gradients of a backward pass without a step
        if not self._flying:
            return
        # Not here: the collector calls this on any thread, in the middle of anything, also on the
        # one that updates, and on one that an operator with the lock waits for.
        with contextlib.suppress(RuntimeError):  # the interpreter ends
            start_new_thread(self._end_orphaned, ())

    def _end_orphaned(self) -> None:
        try:
            self.finish()
        except StateError as error:
            _log.warning("%s", error)

    def _raise(self) -> None:
        ended, failed, error = self._ended, self._failed, self._error
        self._ended, self._failed, self._error = 0, 0, None
        if error is not None:
            what = (
                f"the update on the host of {failed} of {ended} parameters"
                if failed
                else "the copy of updated parameters back to the device"
            )
            raise StateError(
                f"{what} failed: {error}; the others have been updated, and the states of these "
                "may have been: load a checkpoint before the next step"
            ) from error

    def _drain(self) -> None:
        self._submit()
        while self._flying:
            self._write_once(self._flying[0])
        state_file.settle()  # the program may read states
        for device, (_, back) in self._lanes.items():
            if self._overlap:  # operators of other streams and threads wait no more
                back.synchronize()
            else:
                torch.cuda.current_stream(device).wait_stream(back)
        self._returned.clear()

    def submit(self) -> None:
        """Begin to update what was added, with the options of this moment."""
        with self._working():
            self._submit()

    def _submit(self) -> None:
        """Give the open chunk to the thread; after an interrupt or an error the next call does."""
        chunk = self._open
        if chunk is None:
            return
        with _order:
            if chunk not in self._flying:
                try:
                    for parameter in chunk.values:
                        self.adopt(parameter)  # it may be elsewhere, or have other strides
                    self._begin(chunk)
                except BaseException as error:
                    if chunk.loan is not None:
                        chunk.loan.end(write=False)
                    chunk.loan = chunk.file = None
                    if isinstance(error, Exception):  # an interrupt leaves it for the next call
                        self._open = None
                    raise
                self._flying.append(chunk)
            self._open = None
            _give_to_thread(chunk)
        while (
            len(self._flying) > _IN_FLIGHT
            and sum(flying.staging.nbytes for flying in self._flying) > self._room
        ):
            self._write_once(self._flying[0])

    def _begin(self, chunk: _Chunk) -> None:
        """Begin to read the chunk's states if a disk has them, and prepare its update."""
        known = [self._optimizer.state.get(parameter, {}) for parameter in chunk.values]
        if (file := state_file.current()) is not None:
            tensors = [t for state in known for t in state.values() if isinstance(t, Tensor)]
            chunk.file, chunk.loan = file, file.lend(tensors)
        part = part_of(self._optimizer, chunk.values)
        updated: dict[Tensor, Tensor] = {}  # parameter -> its substitute in this part
        states: dict[Tensor, dict[str, Any]] = {}
        for parameter, value in chunk.values.items():
            state = self._optimizer.state.get(parameter)
            if chunk.loan is not None and state is not None:
                state = {name: chunk.loan.of(found) for name, found in state.items()}
            if self._has_master(parameter):
                with host_memory():
                    chunk.masters[value] = Master(value, (state or {}).get(masters.NAME))
                state = masters.without(state)
            updated[parameter] = chunk.updated(value)
            if state is not None:
                states[updated[parameter]] = state
        part.state = defaultdict(dict, states)
        part.param_groups = [
            made for group in part.param_groups for made in _for_host(part, group, updated)
        ]
        for name in _OF_KERNELS:
            if isinstance(scale := getattr(part, name, None), Tensor):
                setattr(part, name, copy_of(scale))
        chunk.states = part.state
        chunk.call = _once(functools.partial(_update, part, chunk), chunk.done)

    def _has_master(self, parameter: Tensor) -> bool:
        return self._with_masters and masters.has_master(parameter)

    def _bring(self, storage: int) -> Iterable[int]:
        """Write back the chunks that contain a storage; work on the current stream sees them.

        The next step raises errors: here torch would only print them.

        Returns:
            The addresses of the storages that every stream sees.
        """
        with arrivals.waiting(), self._lock:
            if self._works:
                return []  # an operator of umem's own, or of a handler that interrupts umem
            chunks = [c for c in tuple(self._flying) if storage in c.storages.values()]
            event = self._returned.get(storage)
            devices = {t.device for c in chunks for t in c.targets.values() if t.is_cuda}
            devices |= {event.device} if event is not None else set()
            stream = torch.cuda.current_stream(devices.pop()) if devices else None
            try:
                for chunk in chunks:
                    _elsewhere(functools.partial(self._write_once, chunk, stream))
            except Exception as error:  # noqa: BLE001 - must not reach torch's dispatcher
                self._error = self._error or error
                return []  # the next operator tries again
            if stream is None:
                there = {storage, *(at for chunk in chunks for at in chunk.storages.values())}
                # A storage that parameters are parts of may be in other chunks, too.
                return there.difference(*(c.storages.values() for c in tuple(self._flying)))
            event = self._returned.get(storage)
            if event is not None and not event.query():
                stream.wait_event(event)
                return []
            self._returned.pop(storage, None)
            return [storage]

    def _write_once(self, chunk: _Chunk, stream: Any = None) -> None:
        """Write a chunk back unless another thread does so, which is awaited then."""
        with chunk.writing:
            if chunk in self._flying:
                self._write_back(chunk, stream)

    def _write_back(self, chunk: _Chunk, stream: Any = None) -> None:
        """Copy a chunk back; after an interrupt the next call repeats it.

        Args:
            chunk: one in flight.
            stream: the stream of the operator that needs it; None: this thread's.
        """
        _give_to_thread(chunk)
        error = chunk.done.exception()
        if error is not None:
            self._error = self._error or error
            self._failed += len(chunk.values)
            self._end(chunk)
            return
        optimizer = self._reference()
        with torch.no_grad(), arrivals.bringing():
            for parameter, value in chunk.values.items():
                self._copy_back(chunk, chunk.targets[parameter], value, stream)
        for parameter, value in chunk.values.items():
            state = chunk.states.get(chunk.updated(value), {})
            if value in chunk.masters:
                state = {**state, masters.NAME: chunk.masters[value].kept}
            if chunk.loan is not None:
                state = {name: chunk.loan.kept(found) for name, found in state.items()}
            if state and optimizer is not None:
                optimizer.state[parameter] = state
        self._end(chunk)
        chunk.staging.busy_until(chunk.events)
        _stagings.give(chunk.staging)

    def _end(self, chunk: _Chunk) -> None:
        self._flying.remove(chunk)
        chunk.call = None  # it holds the chunk
        self._ended += len(chunk.values)

    def _copy_back(self, chunk: _Chunk, target: Tensor, value: Tensor, stream: Any = None) -> None:
        with self._lane(target, out=False, stream=stream) as lane:
            target.copy_(value, non_blocking=True)
            if lane is not None:
                target.record_stream(lane)  # the program may have replaced or dropped it
                event = lane.record_event()
                chunk.events.append(event)
                self._returned[_storage(target)] = event

    @contextlib.contextmanager
    def _lane(self, parameter: Tensor, *, out: bool, stream: Any = None) -> Iterator[Any]:
        """Copy concurrently with compute, after the work it has so far; None on a CPU.

        Args:
            parameter: a parameter on the device.
            out: copy to the host.
            stream: the compute stream; None: the current one.
        """
        if not parameter.is_cuda:
            yield None
            return
        device = parameter.device
        if device not in self._lanes:
            self._lanes[device] = (torch.cuda.Stream(device), torch.cuda.Stream(device))
        lane = self._lanes[device][0 if out else 1]
        left = None if out or self._left is None else self._left.get(device)
        if left is None:
            lane.wait_stream(stream or torch.cuda.current_stream(device))
        else:  # concurrent with later operators
            lane.wait_event(left)
        with torch.cuda.stream(lane):
            yield lane


class _Stagings:
    """Free buffers, shared by all optimizers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spare: list[Staging] = []

    def take(self, at_least: int, *, pinned: bool) -> Staging:
        """Return a buffer for a chunk, or for this many bytes if larger."""
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
        """Keep a buffer for the next chunk, up to the number one optimizer has in flight."""
        with self._lock:
            if len(self._spare) <= _IN_FLIGHT:
                self._spare.append(staging)

    def clear(self) -> None:
        """Free them."""
        with self._lock:
            self._spare.clear()


_stagings = _Stagings()


class _UpdateThread(ThreadPoolExecutor):
    """The thread of updates, whose operators use so many; see `_begin_thread`."""

    def __init__(self, threads: int, near: torch.device | None) -> None:
        super().__init__(1, "umem-host-update", initializer=_begin_thread, initargs=(threads, near))
        self.threads = threads


_thread: _UpdateThread | None = None  # shared by all optimizers
_order = locks.reentrant()  # states arrive in the order of the updates; never entered twice


def end_shared() -> None:
    """Free unused buffers and end the threads; the next chunk creates new ones."""
    global _thread
    state_file.end_shared()
    _stagings.clear()
    thread, _thread = _thread, None
    if thread is not None:
        thread.shutdown()


def _forked() -> None:
    global _thread, _stagings
    # The thread is the parent's, and may hold the lock of the buffers.
    _thread, _stagings = None, _Stagings()


def _let_updates_end() -> None:
    """Wait for the thread, which the child of a fork does not have."""
    for each in list(_all):
        for chunk in tuple(each._flying):
            if chunk.queued:
                chunk.done.exception()


_all: weakref.WeakSet[HostUpdate] = weakref.WeakSet()
os.register_at_fork(before=_let_updates_end, after_in_child=_forked)


def refuse_in_order() -> None:
    """Raise StateError if this thread has `_order`: a signal handler has called an optimizer."""
    if _order._is_owned():  # type: ignore[attr-defined]
        raise StateError(
            "an optimizer that is updated on the host was called in the middle of another one's "
            "step, for example by a signal handler; nothing was changed. Let the handler set a "
            "flag, and call it between two steps"
        )


def _once(call: Callable[[], None], done: Future[None]) -> Callable[[], None]:
    """Return a function whose first call calls `call` and sets `done`."""
    first = threading.Lock()

    def run() -> None:
        if not first.acquire(blocking=False):
            return
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - for whoever writes the chunk back
            done.set_exception(error)
        else:
            done.set_result(None)

    return run


def _give_to_thread(chunk: _Chunk) -> None:
    """Queue the chunk's update, unless it is; an interrupt may leave it queued without a note."""
    global _thread
    if chunk.queued:
        return
    assert chunk.call is not None, "it is in flight"
    settings = session.current_settings()
    threads = settings.optimizer_threads if settings else 0
    if _thread is not None and _thread.threads != threads:  # of a session before
        before, _thread = _thread, None
        before.shutdown()
    if _thread is None:
        near = next((p.device for p in chunk.values if p.is_cuda), None)
        _thread = _UpdateThread(threads, near)
    queued = state_file.submitted(_thread, chunk.call)
    queued.add_done_callback(functools.partial(_tell_failure, chunk.done))
    chunk.queued = True


def _tell_failure(done: Future[None], queued: Future[None]) -> None:
    """Pass on the error of a thread that could not begin."""
    error = queued.exception()
    if error is not None and not done.done():
        done.set_exception(error)


def _begin_thread(threads: int, near: torch.device | None) -> None:
    """Set up the updating thread, and the threads that torch starts for its operators.

    Args:
        threads: the threads per operator; 0: torch's default.
        near: the GPU whose NUMA node to run on.
    """
    if near is not None:
        from ...base.native import core

        allowed = os.sched_getaffinity(0)
        bus_id = core.probe_cuda()["devices"][near.index]["pci_bus_id"]
        os.sched_setaffinity(0, (host.cpus_near(bus_id) & allowed) or allowed)
    if threads:
        before = torch.get_num_threads()  # per thread from here on
        torch.set_num_threads(threads)
        # It also set the default of threads that start later, such as those of backward passes.
        other = threading.Thread(target=torch.set_num_threads, args=(before,))
        other.start()
        other.join()


def refuse_capture() -> None:
    """Raise StateError while a CUDA graph is captured."""
    used = bool(torch.cuda.is_initialized())
    if used and torch.cuda.is_current_stream_capturing():
        raise StateError(
            "a CUDA graph is captured, which cannot contain an update on the host; keep the "
            "optimizer's step, and with released gradients the backward pass, out of the graph, or "
            "update on the device"
        )


def _update(part: Optimizer, chunk: _Chunk) -> None:
    """Update the copies; runs on the thread."""
    # The collector may run the program's operators here, which must not wait for this.
    with arrivals.bringing():
        with host_memory(), chunk.loan or contextlib.nullcontext():
            for event in chunk.events:
                event.synchronize()
            chunk.events.clear()
            for master in chunk.masters.values():
                master.follow()
            _run(part)
            for master in chunk.masters.values():
                master.round()
        for value, state in part.state.items():
            _to_host(state, value, chunk.file)
        for master in chunk.masters.values():
            if chunk.file is not None and chunk.file.takes(master.values):
                master.kept = chunk.file.keep(master.values, tuple(master.values.stride()))


def _run(part: Optimizer) -> None:
    """Update the part's parameters.

    Only fused kernels take what GradScaler leaves to them: its factor, and whether to do nothing.
    """
    groups = part.param_groups
    scale, overflow = (getattr(part, name, None) for name in _OF_KERNELS)
    if scale is None and overflow is None:
        update(part, _of(groups))
        return
    update(part, _of([group for group in groups if group.get("fused")]))
    others = _of([group for group in groups if not group.get("fused")])
    if overflow is not None and bool(overflow):
        return
    for parameter in others:
        assert parameter.grad is not None
        parameter.grad.div_(1.0 if scale is None else scale)
    for name in _OF_KERNELS:
        setattr(part, name, None)
    update(part, others)


def _of(groups: Iterable[dict[str, Any]]) -> list[Tensor]:
    return [parameter for group in groups for parameter in group["params"]]


def _storage(parameter: Tensor) -> int:
    return int(parameter.untyped_storage().data_ptr())


def _elsewhere(call: Callable[[], None]) -> None:
    """Call a function on a new thread, without the torch modes of the program's operator.

    Such modes are those of torch.func, of tracing and of inference.
    """
    raised: list[BaseException] = []
    running = threading.Lock()
    running.acquire()

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - raised by the caller
            raised.append(error)
        finally:
            running.release()

    try:
        start_new_thread(run, ())
    except RuntimeError:  # the interpreter ends, and starts no more threads
        call()
        return
    try:
        running.acquire()  # `Thread.join` takes a thread for ended if it was interrupted
    except BaseException:
        running.acquire()  # or the next op writes the same back, too; a second one is raised
        raise
    if raised:
        raise raised[0]


def _to_host(state: dict[str, Any], parameter: Tensor, file: state_file.StateFile | None) -> None:
    """Move a state's tensors to host memory outside umem, or to the file.

    Tensors of the parameter's shape get the strides of its copy.
    """
    from ...base.native import core

    strides = layout_of(parameter)
    for name, value in state.items():
        if not isinstance(value, Tensor) or value.layout != torch.strided:
            continue
        wanted = strides if value.shape == parameter.shape else layout_of(value)
        elsewhere = value.is_cuda or core.owns(value.data_ptr())
        elsewhere = elsewhere or state_file.is_of_another(value, file)
        if elsewhere or tuple(value.stride()) != wanted or (file and file.takes(value)):
            state[name] = copy_of(value, wanted) if file is None else file.keep(value, wanted)


def _for_host(
    part: Optimizer, group: dict[str, Any], values: dict[Tensor, Tensor]
) -> Iterator[dict[str, Any]]:
    """Yield groups of copies with options for torch's host kernels.

    Fused kernels take only some types, and with momentum either no buffers or all.
    """
    changed: dict[str, Any] = {
        name: value.item()
        for name, value in group.items()
        if isinstance(value, Tensor) and value.numel() == 1
    }
    changed.update({  # such as betas, which kernels take as tensors
        name: tuple(copy_of(each) if isinstance(each, Tensor) else each for each in value)
        for name, value in group.items()
        if isinstance(value, tuple)
    })  # fmt: skip
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
    """Return whether the fused kernel is correct here: SGD's skips half-precision values.

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
