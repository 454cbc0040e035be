"""Storages whose new contents are still on the host: an operator that uses one waits for it.

umem's observer sees torch's operators. Compiled code and replays of CUDA graphs use memory without
one; they are detected in other ways, and all contents are brought first.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ...session import session

# Brings the contents of the storage at this address, on the operator's thread. Returns the
# addresses of the storages that every stream now sees: no operator needs to wait for them.
Bring = Callable[[int], Iterable[int]]

_lock = threading.RLock()
_expected: dict[int, list[Bring]] = {}  # by the storage's address; one per optimizer
_compiled = False  # torch.compile has compiled code
_here = threading.local()  # `bringing`: this thread's operators do not wait


def expect(storages: Iterable[int], bring: Bring) -> None:
    """Make operators that use these storages call `bring` first."""
    with _lock:
        for storage in storages:
            if bring not in (known := _expected.setdefault(storage, [])):
                known.append(bring)
        _tell()
    _listen_to_compilation()
    if _compiled or not session.sees_every_thread():
        all_arrive()


def forget(bring: Bring) -> None:
    """Stop operators from calling `bring`."""
    with _lock:
        _is_there(list(_expected), bring)


def all_arrive() -> None:
    """Bring all contents now."""
    for storage in list(_expected):
        _arrive(storage)


@contextlib.contextmanager
def bringing() -> Iterator[None]:
    """Let this thread's operators use storages that have not arrived: they bring them."""
    before, _here.bringing = getattr(_here, "bringing", False), True
    try:
        yield
    finally:
        _here.bringing = before


@functools.cache
def watch() -> None:
    """Let all arrive before what uses memory without operators, from now on."""
    os.register_at_fork(before=all_arrive)  # the child has no thread that updates
    graph: Any = torch.cuda.CUDAGraph
    for owner, name in (
        (graph, "replay"),
        (torch, "save"),
        (torch.serialization, "save"),
        (torch.UntypedStorage, "__reduce__"),
        (torch.optim.Optimizer, "__getstate__"),  # copies and pickle read its states directly
    ):
        setattr(owner, name, _after(all_arrive, getattr(owner, name)))
    graph.capture_begin = _after(_arrive_before_capture, graph.capture_begin)


def _listen_to_compilation() -> None:
    """Detect compiled code; repeated because `torch._dynamo.reset` drops callbacks."""
    from torch._dynamo.callback import callback_handler
    from torch._dynamo.utils import counters

    global _compiled
    _compiled = _compiled or counters["stats"]["unique_graphs"] > 0
    if _compiles not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(_compiles)


def _compiles(_: object) -> None:
    global _compiled
    _compiled = True
    all_arrive()


def _arrive_before_capture() -> None:
    """Bring all contents: waiting in the capture for an event from outside would end it."""
    all_arrive()
    if _expected:
        torch.cuda.synchronize()
        all_arrive()


def _after(first: Callable[[], None], method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        first()
        return method(*args, **kwargs)

    return called


def _arrive(storage: int) -> None:
    if getattr(_here, "bringing", False):
        return
    for bring in list(_expected.get(storage, ())):
        there = bring(storage)
        with _lock:
            _is_there(there, bring)


def _is_there(storages: Iterable[int], bring: Bring) -> None:
    """Stop operators from waiting for these because of `bring`; the caller has the lock."""
    known = [storage for storage in storages if bring in _expected.get(storage, ())]
    for storage in known:
        _expected[storage].remove(bring)
        if not _expected[storage]:
            del _expected[storage]
    if known:
        _tell()


def _tell() -> None:
    from ...base.native import core

    core.set_awaited(list(_expected), _arrive)
