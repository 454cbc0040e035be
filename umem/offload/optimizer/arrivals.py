"""Storages whose new contents are still on the host: an operator that uses one waits for it.

umem's observer sees torch's operators. Compiled code and replays of CUDA graphs use memory without
one; they are detected in other ways, and all contents are brought first.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ...base import locks
from ...base.untraced import untraced
from ...session import session
from . import state_file

# Brings the contents of the storage at this address, on the operator's thread. Returns the
# addresses of the storages that every stream now sees: no operator needs to wait for them.
Bring = Callable[[int], Iterable[int]]

_lock = locks.reentrant()
# By the storage's address: who brings it, one per optimizer, and since which call of `expect`. A
# signal handler may change it between any two lines: entries are added and removed one by one.
_expected: dict[int, dict[tuple[Bring, int], None]] = {}
_calls = itertools.count(1)
_changes = 0
_compiled = False  # torch.compile has compiled code
# `bringing`: this thread's operators do not wait; `waiting`: one of them does.
_here = threading.local()


def expect(storages: Iterable[int], bring: Bring) -> None:
    """Make operators that use these storages call `bring` first."""
    entry = bring, next(_calls)
    with _lock:
        for storage in storages:
            _expected.setdefault(storage, {})[entry] = None
        _tell()
    _listen_to_compilation()
    if _compiled or not session.sees_every_thread():
        all_arrive()


def forget(bring: Bring) -> None:
    """Stop operators from calling `bring`."""
    with _lock:
        known = {entry for entries in list(_expected.values()) for entry in list(entries)}
        for entry in known:
            if entry[0] == bring:
                _is_there(list(_expected), entry)


def all_arrive() -> None:
    """Bring all contents now, and let the disk have all states."""
    for storage in list(_expected):
        _arrive(storage)
    state_file.settle()


@contextlib.contextmanager
def bringing() -> Iterator[None]:
    """Let this thread's operators use storages that have not arrived: they bring them."""
    before, _here.bringing = getattr(_here, "bringing", False), True
    try:
        yield
    finally:
        _here.bringing = before


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Mark within that an operator of this thread waits for contents."""
    before, _here.waiting = is_waiting(), True
    try:
        yield
    finally:
        _here.waiting = before


def is_waiting() -> bool:
    """Return whether an operator of this thread waits: a signal handler may interrupt it."""
    return getattr(_here, "waiting", False)


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


@untraced
def _arrive(storage: int) -> None:
    if getattr(_here, "bringing", False):
        return
    for entry in list(_expected.get(storage, ())):
        there = entry[0](storage)
        with _lock:
            _is_there(there, entry)


def _is_there(storages: Iterable[int], entry: tuple[Bring, int]) -> None:
    """Stop operators from waiting for these because of `entry`; the caller has the lock.

    A later call of `expect` has an entry of its own, which stays.
    """
    known = [storage for storage in storages if entry in _expected.get(storage, ())]
    for storage in known:
        _expected.get(storage, {}).pop(entry, None)
        if not _expected.get(storage) and (added := _expected.pop(storage, None)):
            _expected.setdefault(storage, {}).update(added)
    if known:
        _tell()


def _tell() -> None:
    """Tell the observer, again if a signal handler has changed something meanwhile."""
    from ...base.native import core

    global _changes
    _changes += 1
    while True:
        told = _changes
        core.set_awaited([storage for storage, known in list(_expected.items()) if known], _arrive)
        if told == _changes:
            return
