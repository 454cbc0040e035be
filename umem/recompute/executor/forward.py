"""The forward pass of a step that drops, according to a plan, tensors that autograd would keep.

It combines a dispatch mode, which sees the ops below autograd, and saved-tensor hooks, which see
what autograd keeps. Both act on the thread that runs the forward pass.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from ...base import locks
from ...base.units import PAGE_BYTES
from ...capture import op_semantics
from ...capture.dispatch import DispatchMode, entered
from ...capture.op_semantics import OpSemantics, Place, describe, is_counted
from ...errors import StateError
from ...trace.ids import StorageKey
from ..planner.candidates import EXPENSIVE
from ..planner.plan import RecomputePlan
from .saved_hooks import Hook, saved_hooks
from .storage_versions import (
    READ,
    SCRATCH,
    WRITE,
    Node,
    RandomState,
    Ref,
    Value,
    alias,
    changed,
    copied,
    counter_of,
    form_of,
    over,
    rebuild,
    refer,
)

_SMALL = 64 << 10  # bytes of buffers that are copied
# A chain of cheap ops would take a time that is quadratic in its length, if it was rebuilt from its
# begin for each of them: without a plan, the last few of so many are kept. An odd number, so that
# they are others in each link of a chain.
_CHAIN, _CUT = 127, 8


class Rule(Protocol):
    """A choice of the ops of a forward pass to drop."""

    keep_below: int  # smaller results are kept, in bytes

    def drops(self, index: int, operator: OpSemantics) -> bool:
        """Return whether op `index`, in a plan's count, is dropped.

        Raises:
            DeviationError: the op is not the one that was planned, nor are those after it.
        """

    def frees(self, index: int) -> bool:
        """Return whether the rebuilt results of a dropped op are freed after each use."""


class DeviationError(Exception):
    """A forward pass is not the planned one."""


class Prepared:
    """A plan in the form that a forward pass is compared with."""

    def __init__(self, plan: RecomputePlan) -> None:
        counted = [i for i, name in enumerate(plan.names) if is_counted(name)]
        drop, free = frozenset(plan.drop), frozenset(plan.free)
        self._names = [sys.intern(plan.names[i]) for i in counted]
        self._drop = [i in drop for i in counted]
        self._free = [i in free for i in counted]
        self.keep_below = plan.keep_below

    def drops(self, index: int, operator: OpSemantics) -> bool:
        """Return whether the op is dropped, see Rule."""
        if index < len(self._names) and self._names[index] == operator.overload:
            return self._drop[index]
        planned = self._names[index] if index < len(self._names) else "the end"
        raise DeviationError(f"op {index} is {operator.overload}, planned was {planned}")

    def frees(self, index: int) -> bool:
        """Return whether its rebuilt results are freed after each use."""
        return self._free[index]


class Unplanned:
    """The rule for a forward pass without a plan: drop cheap results, or nothing."""

    keep_below = PAGE_BYTES

    def __init__(self, *, cheap: bool) -> None:
        self._cheap = cheap

    def drops(self, index: int, operator: OpSemantics) -> bool:
        """Return whether the op is dropped, see Rule."""
        cut = index % _CHAIN >= _CHAIN - _CUT
        return self._cheap and operator.family not in EXPENSIVE and not cut

    def frees(self, _index: int) -> bool:
        """Return True: the memory counts more than the time of one step."""
        return True


@dataclass
class Tally:
    """The outcome of a forward pass under a plan."""

    ops: int = 0  # compared with the plan
    dropped: int = 0  # tensors that autograd would have kept
    dropped_bytes: int = 0  # in their storages
    refused: int = 0  # ops to drop that cannot run again
    mismatch: str = ""  # first deviation from the plan; everything after it is kept


class _NotRepeatableError(Exception):
    """An op to drop cannot run again and is kept."""


class Observer(Protocol):
    """Learns what autograd saves, and when it asks for it."""

    def saved(self, tensor: torch.Tensor) -> object:
        """Return what lives as long as this saved tensor."""

    def wanted(self, get: Callable[[], torch.Tensor], known: Any) -> torch.Tensor:
        """Return `get()`, the saved tensor or a copy that ops make, and note its use.

        `known` is what `saved` returned.
        """


@contextmanager
def dropping(rule: Rule, observer: Observer | None = None) -> Iterator[Tally]:
    """Run the forward pass within the context according to the rule."""
    mode = _Dropping(rule)
    pack: Hook = mode.pack
    unpack: Hook = _unpack
    if observer is not None:
        pack, unpack = _observed(pack, observer)
    try:
        with saved_hooks(pack, unpack), entered(mode):
            yield mode.tally
    finally:
        mode.tally.ops = mode.counted
        mode.end()


class _Kept:
    """A saved tensor that is kept. It checks versions, as torch does not do with hooks."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        # One with a graph would form a cycle. Another may be given other memory by its `data`.
        self.tensor = tensor if tensor.grad_fn is None else tensor.detach()
        self.version = -1 if tensor.is_inference() else tensor._version

    def unpack(self) -> torch.Tensor:
        if self.version >= 0 and self.tensor._version != self.version:
            raise StateError(changed(self.tensor, self.version, self.tensor._version))
        return self.tensor


class _Dropped:
    """A saved tensor that is rebuilt.

    Args:
        ref: its place in a value.
        tensor: the program's.
        turn: taken by each rebuild of a forward pass, whose values may share nodes.
    """

    __slots__ = ("__weakref__", "_counter", "_kept", "_turn", "_version", "ref")

    def __init__(self, ref: Ref, tensor: torch.Tensor, turn: threading.RLock) -> None:
        self.ref = ref
        self._counter, self._version = counter_of(tensor), tensor._version
        self._kept: torch.Tensor | None = None
        self._turn = turn

    def keep(self) -> None:
        """Keep the memory, which is about to be changed, as torch would have kept it."""
        if self.ref.value is None:
            return  # it is kept already
        assert self.ref.value.storage is not None
        storage = self.ref.value.storage()
        if storage is not None:
            self._kept = over(self._counter, storage, self.ref)
            self.ref.value.reads -= 1
            self.ref = replace(self.ref, value=None)  # with all that would rebuild it

    def unpack(self) -> torch.Tensor:
        if self._counter._version != self._version:
            raise StateError(changed(self.ref, self._version, self._counter._version))
        if self._kept is not None:
            return self._kept
        assert self.ref.value is not None
        with self._turn:
            tensor = rebuild(self.ref.value)
            with torch.no_grad():
                return self.ref.shared(tensor)


def _unpack(saved: _Kept | _Dropped) -> torch.Tensor:
    return saved.unpack()


def _observed(
    pack: Callable[[torch.Tensor], _Kept | _Dropped], observer: Observer
) -> tuple[Hook, Hook]:
    def observed(tensor: torch.Tensor) -> Any:
        return pack(tensor), observer.saved(tensor)

    def asked_for(saved: tuple[_Kept | _Dropped, object]) -> torch.Tensor:
        return observer.wanted(saved[0].unpack, saved[1])

    return observed, asked_for


class _Dropping(DispatchMode):
    """A mode that numbers the ops, and records how to run dropped ones again."""

    def __init__(self, rule: Rule) -> None:
        super().__init__()
        self.tally = Tally()
        self.counted = 0
        # Weak if the value holds the storage itself and keeps it alive.
        self.live: dict[StorageKey, Value | weakref.ref[Value]] = {}
        # Values that the program has read through another version counter, such as that of `data`.
        self._others: dict[StorageKey, list[weakref.ref[Value]]] = {}
        self._small: list[weakref.ref[Value]] = []  # held, and not trained
        self._rule = rule
        self._matches = True
        self._packing = False
        self._turn = locks.reentrant()
        self._streams: dict[torch.device, int] = {}  # the stream on which the pass began

    def end(self) -> None:
        """End the pass. The next one may update small buffers before this one's backward."""
        with torch._C._DisableTorchDispatch():
            for small in self._small:
                if (value := small()) is not None:
                    _privately(value)
        self._small.clear()
        self.live.clear()

    def pack(self, tensor: torch.Tensor) -> _Kept | _Dropped:
        """Return the object that autograd keeps in place of the tensor."""
        if _is_plain(tensor) and self._is_at_home(tensor.device):
            value = self._find(tensor)
            if value is not None and value.made:
                self.tally.dropped += 1
                if value.handles is None:
                    self.tally.dropped_bytes += tensor.untyped_storage().nbytes()
                with torch._C._DisableTorchDispatch():
                    dropped = _Dropped(refer(tensor, value), tensor, self._turn)
                value.handles = value.handles or weakref.WeakSet()
                value.handles.add(dropped)
                return dropped
            with torch._C._DisableTorchDispatch():  # this mode would cost more than the rest
                return _Kept(tensor)
        self._packing = True
        try:
            return _Kept(tensor)
        finally:
            self._packing = False

    def dispatch(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Run the op, and record it if it is dropped."""
        operator = describe(func)
        if self._is_next_dropped(operator):
            try:
                return self._run_dropped(operator, func, args, named)
            except _NotRepeatableError:
                self.tally.refused += 1
        if operator.may_write and self.live:
            self._before_write(operator, args, named)
        return func(*args, **named)

    def _is_next_dropped(self, operator: OpSemantics) -> bool:
        # No plan counts the ops of hooks, or of a backward pass inside of the forward pass.
        if self._packing or torch._C._current_graph_task_id() != -1 or not operator.counted:
            return False
        index = self.counted
        self.counted += 1
        if not self._matches:
            return False
        try:
            # Without gradients the op is inside of a function with its own backward.
            return self._rule.drops(index, operator) and torch.is_grad_enabled()
        except DeviationError as error:
            self._matches = False
            self.tally.mismatch = str(error)
            return False

    def _run_dropped(
        self, operator: OpSemantics, func: Any, args: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        node, writing = self._node(operator, func, args, named)
        written = [(tensor, tensor._version + 1) for tensor in operator.written_now(args, named)]
        self._before_write(operator, args, named)
        out = func(*args, **named)
        places = {id(tensor): ref for tensor, ref in writing}
        for tensor, version in written:
            if id(tensor) in places:  # not a statistic
                made = self._made(tensor, version, node)
                node.written.append((places[id(tensor)], weakref.ref(made)))
        for index, tensor in enumerate(op_semantics.tensors([out])):
            node.results += 1
            if self._is_new(tensor):
                made = self._made(tensor, tensor._version, node)
                node.outputs.append((index, weakref.ref(made), form_of(tensor)))
        return out

    def _node(
        self, operator: OpSemantics, func: Any, args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[Node, list[tuple[torch.Tensor, Ref]]]:
        """Return the op with its inputs, before it runs, and the arguments that it writes.

        Raises:
            _NotRepeatableError: it cannot run again.
        """
        if not operator.repeatable:
            raise _NotRepeatableError
        tensors = [*op_semantics.tensors([*args, *named.values()])]
        if not all(map(_is_plain, tensors)):
            raise _NotRepeatableError
        if not all(self._is_at_home(tensor.device) for tensor in tensors):
            raise _NotRepeatableError
        random = None
        if operator.random:
            given = [*args, *named.values()]  # some ops take their generator by position
            generator = next((each for each in given if isinstance(each, torch.Generator)), None)
            device = named.get("device") or (tensors[0].device if tensors else "cpu")
            random = RandomState(torch.device(device), generator)
        scratch = operator.statistics if operator.updates_statistics(args) else frozenset()
        free = self._rule.frees(self.counted - 1)  # it is counted already
        node = Node(operator, func, random, scratch, free)
        writing: list[tuple[torch.Tensor, Ref]] = []
        node.args = tuple(self._refs(node, writing, i, value) for i, value in enumerate(args))
        node.named = {key: self._refs(node, writing, key, value) for key, value in named.items()}
        return node, writing

    def _refs(
        self, node: Node, writing: list[tuple[torch.Tensor, Ref]], place: Place, value: Any
    ) -> Any:
        """Return an argument with references in place of its tensors."""
        if isinstance(value, (list, tuple)):
            return type(value)(self._refs(node, writing, place, item) for item in value)
        if not isinstance(value, torch.Tensor):
            return value
        if place in node.scratch:
            ref = refer(value, None, SCRATCH)
        elif place in node.operator.data_places:
            ref = refer(value, self._to_write(node.operator, value), WRITE)
            writing.append((value, ref))
        else:
            ref = refer(value, self._input(value), READ)
        node.refs.append(ref)
        return ref

    def _input(self, tensor: torch.Tensor) -> Value:
        """Return the tensor's value, and hold it if no node makes it."""
        value = self._find(tensor)
        if value is None:
            value = Value(tensor._version, alias(tensor), None)
            value.read_through(tensor)
            key = tensor.untyped_storage()._cdata
            self.live[key] = weakref.ref(value, lambda dead: self._gone(key, dead))
            if not tensor.requires_grad and value.bytes <= _SMALL:
                self._small.append(weakref.ref(value))
        elif value.readers:
            value.read_through(tensor)
        return value

    def _to_write(self, operator: OpSemantics, tensor: torch.Tensor) -> Value | None:
        if operator.overwrites and op_semantics.is_whole(tensor):
            return None
        value = self._find(tensor)
        if value is None or not value.made:
            # A value that the program holds anyway is not worth a copy.
            raise _NotRepeatableError
        return value

    def _made(self, tensor: torch.Tensor, version: int, node: Node) -> Value:
        value = Value(version, None, node)
        storage = tensor.untyped_storage()
        key = storage._cdata
        value.storage = weakref.ref(storage, lambda dead: self._gone(key, dead))
        self.live[key] = value
        return value

    def _is_new(self, tensor: torch.Tensor) -> bool:
        """Return whether an output is the op's own, and large enough to be dropped."""
        if not _is_plain(tensor):
            return False
        storage = tensor.untyped_storage()
        return storage._cdata not in self.live and storage.nbytes() >= self._rule.keep_below

    def _find(self, tensor: torch.Tensor) -> Value | None:
        """Return the tensor's value, if known, and if only ops seen here have changed it."""
        key = tensor.untyped_storage()._cdata
        value = self._at(key)
        if value is not None and value.version != tensor._version:
            # No longer known: a write through another version counter would not be seen.
            with torch._C._DisableTorchDispatch():  # a hook's ops are not the program's
                _privately(value)
            self._others.setdefault(key, []).append(weakref.ref(value))
            del self.live[key]
            return None
        return value

    def _at(self, key: StorageKey) -> Value | None:
        known = self.live.get(key)
        return known() if isinstance(known, weakref.ref) else known

    def _before_write(self, operator: OpSemantics, args: tuple[Any, ...], named: Any) -> None:
        """Copy what the op overwrites for the nodes that read it."""
        for tensor in operator.written_now(args, named):
            if not _has_storage(tensor):
                continue
            value = self._at(key := tensor.untyped_storage()._cdata)
            others = [other() for other in self._others.pop(key, ())]
            with torch._C._DisableTorchDispatch():  # the program's modes would see the copy
                for each in (value, *others):
                    if each is not None:
                        _before_change(each)
            if value is not None:
                self.live.pop(key, None)

    def _gone(self, key: StorageKey, dead: weakref.ref[Any]) -> None:
        known = self.live.get(key)
        if known is dead or (isinstance(known, Value) and known.storage is dead):
            del self.live[key]

    def _is_at_home(self, device: torch.device) -> bool:
        """Return whether the device is supported and on the stream where the pass began.

        A value of another stream would be rebuilt, and its inputs freed, without waiting for it.
        """
        if device.type == "cpu":
            return True
        if device.type != "cuda":
            return False
        stream = int(torch._C._cuda_getCurrentRawStream(device.index))
        return self._streams.setdefault(device, stream) == stream


def _before_change(value: Value) -> None:
    """Keep what a storage holds for nodes, which have read it, by a copy.

    Autograd would have the storage itself.
    """
    _privately(value)
    for dropped in list(value.handles or ()):
        dropped.keep()


def _privately(value: Value) -> None:
    """Copy the content for the nodes that read it, if it is unchanged."""
    if value.held is not None and value.reads and value.unchanged:
        storage = copied(value.held.untyped_storage())
        value.held = refer(value.held, None).in_storage(storage)
        value.version = value.held._version
        value.readers.clear()  # nothing else changes the copy
        value.others.clear()


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether size, strides and offset describe the tensor's layout in its storage."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor.is_nested)
        and not tensor.is_inference()
    )


def _has_storage(tensor: torch.Tensor) -> bool:
    try:
        tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):
        return False
    return True
