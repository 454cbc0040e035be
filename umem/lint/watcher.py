"""A tracer that also notes what decides whether an op may write its result over its input.

In addition to blocks and ops: which tensors autograd saves, and in which call; which tensors
torch's functions get later; the line of each block; and each op that torch has in place as well.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules import module as modules
from torch.utils import _pytree

from ..capture import op_semantics, source_lines
from ..capture.dispatch import FunctionMode
from ..capture.fake_cuda import replaced
from ..capture.recording import Recording
from ..capture.tracer import OpCall, Tracer
from ..trace.ids import BlockId, StorageKey
from ..trace.schema import Op
from .calls import NO_CALL, Call, CallNumber, call_of, in_place, way
from .value_numbering import Values

# They read a tensor's metadata, not its data or its place in autograd's graph.
_ASKS = {"__get__", "size", "dim", "numel", "stride", "untyped_storage", "is_floating_point",
         "is_contiguous", "element_size", "storage_offset", "__len__", "__repr__"}  # fmt: skip
_LASTING = {"param", "optimizer", "grad"}


@dataclass(frozen=True, slots=True)
class Held:
    """A parameter or a buffer of a module."""

    block: BlockId
    bytes: int
    kind: str  # dtype and shape
    place: tuple[Any, ...]  # offset and strides in its block
    buffer: bool
    trainable: bool


@dataclass
class Watched:
    """All notes on a run. A time is an index into the recording's events."""

    recording: Recording
    calls: list[Call] = field(default_factory=list)
    ops_of: dict[CallNumber, int] = field(default_factory=lambda: defaultdict(int))
    lines: dict[BlockId, str] = field(default_factory=dict)  # the source line that made each block
    of_backward: set[BlockId] = field(default_factory=set)  # blocks that the backward pass made
    touched: dict[BlockId, list[int]] = field(default_factory=lambda: defaultdict(list))  # by block
    saved_by: dict[BlockId, set[CallNumber]] = field(default_factory=lambda: defaultdict(set))
    # By block: the time at which a saved tensor was unpacked, and the call that saved it.
    unpacked: dict[BlockId, list[tuple[int, CallNumber]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    asked: set[BlockId] = field(default_factory=set)  # blocks whose value the program read
    # Running statistics that an op has written, which its schema does not say.
    updated: set[BlockId] = field(default_factory=set)
    unfit: dict[str, str] = field(default_factory=dict)  # modules of more than one op, and why
    held: dict[str, Held] = field(default_factory=dict)  # by path, at the end
    built: set[BlockId] = field(default_factory=set)  # what there is before the first step
    gradients: set[str] = field(default_factory=set)  # paths of parameters that got a gradient
    values: Values = field(default_factory=Values)


class Watcher(Tracer):
    """A Tracer that fills `watched`."""

    def __init__(self) -> None:
        super().__init__()
        self.watched = Watched(self.recording)
        self._stack = contextlib.ExitStack()
        self._numbers = 0
        # The call of a torch function that runs: its number, the function, and who called it.
        self._within: tuple[CallNumber, Any, FrameType | None] = (NO_CALL, None, None)
        self._transformed = False  # the call is inside of torch.func, though its op is not
        self._ops = 0
        self._inside: list[tuple[int, int]] = []  # ops and calls when each module began
        self._custom = 0  # nesting depth in custom autograd functions
        self._built: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._hooked: set[str] = set()

    def __enter__(self) -> Any:
        """Watch torch's functions, autograd and modules in addition to the ops."""
        function: Any = torch.autograd.Function
        apply, init = vars(function)["apply"], nn.Module.__init__
        for owner, name, value in (
            (function, "apply", classmethod(self._counting(_of_class(apply)))),
            (nn.Module, "__init__", self._locating(init)),
        ):
            self._stack.enter_context(replaced(owner, name, value))
        for handle in (
            modules.register_module_forward_pre_hook(self._begin_module),
            modules.register_module_forward_hook(self._end_module, always_call=True),
        ):
            self._stack.callback(handle.remove)
        entered = super().__enter__()  # type: ignore[no-untyped-call]
        self._stack.enter_context(saved_tensors_hooks(self._pack, self._unpack))
        self._stack.enter_context(_Functions(self))
        return entered

    def __exit__(self, *error: Any) -> None:
        """Restore torch."""
        self._stack.close()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def begin(self, make: Callable[[], Callable[[], object]]) -> Callable[[], object]:
        """Set up the program; forget the ops recorded meanwhile, which belong to no step."""
        step = super().begin(make)
        watched = self.watched
        watched.calls.clear()
        watched.unpacked.clear()
        watched.touched.clear()
        watched.saved_by.clear()
        watched.unfit.clear()
        watched.updated.clear()
        watched.values.begin()
        self._look_at_modules()
        watched.built.update(self.recording.blocks)
        return step

    def returned(self, value: object) -> None:
        """Note that the program's caller gets these tensors."""
        for tensor in op_semantics.strided(_pytree.tree_leaves(value)):
            self.touch(tensor)

    def end_step(self) -> None:
        """End a step and inspect the modules again."""
        super().end_step()
        self._inside.clear()
        self._look_at_modules()

    def block(
        self, tensor: torch.Tensor, tag: str = "input", family: str = "", on_host: bool = False
    ) -> BlockId:
        """Return the tensor's block; note the source line of a new one."""
        new = self._next
        block = super().block(tensor, tag, family, on_host)
        if block >= new:
            self.watched.lines[block] = source_lines.here()
            if torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled():
                self.watched.of_backward.add(block)
        return block

    def touch(self, tensor: torch.Tensor) -> None:
        """Note that a function other than an op got the tensor, or that its value was read."""
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return  # its ops are seen with the inner tensor
        known = self._live.get(StorageKey(tensor.untyped_storage()._cdata))
        if known is not None:
            self.watched.touched[known[0]].append(len(self.recording.events))

    @contextlib.contextmanager
    def calling(self, func: Any, frame: FrameType | None) -> Iterator[None]:
        """Attribute what runs within the context to one call of a torch function."""
        before = self._within
        self._numbers += 1
        self._within = (CallNumber(self._numbers), func, frame)
        self._transformed = torch._C._functorch.peek_interpreter_stack() is not None
        try:
            yield
        finally:
            self._within = before

    def _call(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.touch(args[0])
            self.watched.asked.add(self.block(args[0]))
        return super()._call(func, args, named)

    def end_op(self, call: OpCall, out: Any) -> None:
        """Record an op that has run, and what the linter wants to know of it."""
        events = self.recording.events
        count = len(events)
        super().end_op(call, out)
        if len(events) == count or not isinstance(events[-1], Op):
            return
        operator, func, args, named, _, known, phase = call
        made = [t for t in op_semantics.strided([out]) if self.block(t) not in known]
        changed = [*op_semantics.strided(operator.written(args, named))]
        now, number = len(events) - 1, self._number()
        statistics: list[torch.Tensor] = []
        if operator.updates_statistics(args):
            statistics += op_semantics.strided(
                args[i] for i in operator.statistics if isinstance(i, int)
            )
        self.watched.updated.update(map(self.block, statistics))
        wrote = [*made, *changed, *statistics]
        self.watched.values.note(func, (args, named), wrote, self.block, now)
        self._ops += 1
        self.watched.ops_of[number] += 1
        if not made or changed or isinstance(out, (list, tuple)) or in_place(func) is None:
            return
        if phase == "optimizer" or (phase == "backward" and not torch.is_grad_enabled()):
            return
        found = call_of(func, args, named, out, self.block)
        found.event, found.number, found.line = now, number, source_lines.here()
        if self._custom:
            found.refuse("it runs inside a custom autograd function")
        elif self._transformed:
            found.refuse("it runs inside of torch.func")
        for position, block in found.blocks.items():
            if self.recording.blocks[block].tag in _LASTING:
                found.over[position] = "its input outlives the step"
        if number != NO_CALL and source_lines.is_direct(self._within[2], self._within[1]):
            found.write = way(self._within[1], operator.bare)
        self.watched.calls.append(found)

    def _number(self) -> CallNumber:
        """Return the number of the call that an op belongs to; NO_CALL in the backward pass."""
        return NO_CALL if torch._C._current_graph_task_id() != -1 else self._within[0]

    def _pack(self, tensor: torch.Tensor) -> Any:
        number = self._number()
        if tensor.layout != torch.strided:
            return tensor.detach(), NO_CALL, NO_CALL
        block = self.block(tensor)
        self.watched.saved_by[block].add(number)
        # Detached, because a result that holds itself would never be freed.
        return tensor.detach(), block, number

    def _unpack(self, packed: Any) -> torch.Tensor:
        tensor, block, number = packed
        self.watched.unpacked[block].append((len(self.recording.events), number))
        kept: torch.Tensor = tensor
        return kept

    def _counting(self, apply: Callable[..., Any]) -> Callable[..., Any]:
        def counted(function: Any, *args: Any, **named: Any) -> Any:
            self._custom += 1
            try:
                return apply(function, *args, **named)
            finally:
                self._custom -= 1

        return counted

    def _locating(self, init: Callable[..., None]) -> Callable[..., None]:
        def located(module: nn.Module, *args: Any, **named: Any) -> None:
            self._built[module] = source_lines.here()
            init(module, *args, **named)

        return located

    def _begin_module(self, _module: nn.Module, _args: object) -> None:
        self._inside.append((self._ops, len(self.watched.calls)))

    def _end_module(self, module: nn.Module, _args: object, _out: object) -> None:
        if not self._inside:
            return
        ops, calls = self._inside.pop()
        if not type(module).__module__.startswith("torch.nn.") or any(module.children()):
            return
        path, made = self.scope.name_of(module), self.watched.calls[calls:]
        if self._ops - ops != 1 or len(made) != 1:
            self.watched.unfit[path] = "it is not one op that torch has in place"
            return
        made[0].module, made[0].module_type = path, type(module).__name__
        made[0].built = self._built.get(module, "")
        made[0].switch = getattr(module, "inplace", None) is False

    def _look_at_modules(self) -> None:
        """Note what the modules hold, and hook the parameters that are new."""
        self.watched.held.clear()
        for module in self.scope.modules():
            prefix = self.scope.name_of(module)
            for name, parameter in module.named_parameters(recurse=False):
                self._hold(f"{prefix}.{name}", parameter, False)
            for name, buffer in module.named_buffers(recurse=False):
                self._hold(f"{prefix}.{name}", buffer, True)

    def _hold(self, path: str, tensor: torch.Tensor, buffer: bool) -> None:
        if tensor.layout != torch.strided:
            return
        block = self.block(tensor)
        size = tensor.numel() * tensor.itemsize
        kind = f"{tensor.dtype} {list(tensor.shape)}"
        place = (tensor.storage_offset(), *tensor.stride())
        self.watched.held[path] = Held(block, size, kind, place, buffer, tensor.requires_grad)
        if tensor.requires_grad and tensor.is_leaf and path not in self._hooked:
            self._hooked.add(path)
            reached: Any = tensor
            reached.register_post_accumulate_grad_hook(lambda _: self.watched.gradients.add(path))


class _Functions(FunctionMode):
    """A mode that reports each call of a torch function to the watcher."""

    def __init__(self, watcher: Watcher) -> None:
        super().__init__()
        self._watcher = watcher

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function."""
        if getattr(func, "__name__", "") in _ASKS:
            return func(*args, **kwargs)
        for tensor in op_semantics.strided([*args, *kwargs.values()]):
            self._watcher.touch(tensor)
        with self._watcher.calling(func, sys._getframe(1)):
            return func(*args, **kwargs)


def _of_class(method: Any) -> Callable[..., Any]:
    """Return a class method as a function of the class; since torch 2.14 one is native."""
    return lambda cls, *args, **named: method.__get__(None, cls)(*args, **named)
