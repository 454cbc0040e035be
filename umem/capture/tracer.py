"""The tracer: runs a program on fake tensors and records its use of memory.

Fake tensors have shapes and no data, so that a step of any size is recorded in seconds on any
machine. Every op passes `Tracer`, which identifies blocks by their storage: views are neither
blocks nor ops, and a block is freed with its last tensor.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)

from ..trace.ids import BlockId, StorageKey
from ..trace.schema import Alloc, Free, Op, Step
from . import collectives, flops, op_semantics, source_lines
from .dispatch import DispatchMode, entered
from .op_semantics import OpSemantics
from .recording import Block, OpCost, Recording
from .scope import Scope

_SCALAR = "_local_scalar_dense"
# The calls in a program that lead to these ops.
_WAYS = {"aten._local_scalar_dense.default": "tensor.item(), or a branch on a tensor,"}
_NO_OPS = {"prim", "prims", "profiler"}  # namespaces of queries and markers


class OpCall(NamedTuple):
    """An op that runs, and what was known before."""

    operator: OpSemantics
    func: Any
    args: tuple[Any, ...]
    named: dict[str, Any]
    inputs: list[torch.Tensor]
    known: set[BlockId]  # the inputs' blocks
    phase: str


def _is_whole(func: Any) -> bool:
    """Return whether autograd, which inference mode leaves out, would have decomposed the op."""
    if not torch.is_inference_mode_enabled() or not isinstance(func, torch._ops.OpOverload):
        return False
    return func.namespace not in _NO_OPS


def made_up(tensor: torch.Tensor) -> float:
    """Return a number in place of that of a fake tensor, which has none."""
    return 0.0 if tensor.is_floating_point() else 0


class Tracer(DispatchMode):
    """A mode that records while it is entered, inside of a FakeTensorMode."""

    def __init__(self) -> None:
        super().__init__()
        self.recording = Recording()
        self.mode: FakeTensorMode  # makes the tensors; set while it is entered
        self.scope = Scope(self)
        # The side that the program's running constructor asks for; None outside of constructors.
        self.making_on_device: bool | None = None
        self.constants = False  # make up values that fake tensors lack, instead of raising
        self._live: dict[StorageKey, tuple[BlockId, weakref.ref[Any]]] = {}
        self._next = 0
        self._forward: list[str] = []  # overloads called in this step's forward pass

    def begin(self, make: Callable[[], Callable[[], object]]) -> Callable[[], object]:
        """Set the program up; blocks that are still alive afterwards come before the first step."""
        step = make()
        gc.collect()
        self._forward.clear()
        alive = sorted(block for block, _ in self._live.values())
        blocks = self.recording.blocks = {i: self.recording.blocks[i] for i in alive}
        self.recording.events[:] = [Alloc(i, block.bytes) for i, block in blocks.items()]
        self.recording.costs.clear()
        return step

    def returned(self, value: object) -> None:
        """Take what the step returned, before it is let go."""

    def end_step(self) -> None:
        """End a step; free the blocks that only reference cycles keep alive."""
        gc.collect()
        self.scope.end_step()
        self.recording.events.append(Step())
        self.recording.steps += 1
        self.recording.forward = tuple(self._forward)
        self._forward.clear()

    def tag(self, tensor: torch.Tensor, tag: str) -> None:
        """Set the tag of a tensor; a block begins for one that is not known yet.

        A sparse tensor has no storage; those of its parts are results of operators.
        """
        if tensor.layout != torch.strided:
            return
        self.recording.blocks[self.block(tensor)].tag = tag

    def made_in(self, tensor: torch.Tensor, module: str) -> None:
        """Set the module that a tensor belongs to, unless it is known."""
        if tensor.layout != torch.strided:
            return
        block = self.recording.blocks[self.block(tensor)]
        block.module = block.module or module

    def on_host(self, tensor: torch.Tensor, on_host: bool) -> None:
        """Set whether a tensor is in host memory."""
        if tensor.layout != torch.strided:
            return
        self.recording.blocks[self.block(tensor)].on_host = on_host

    @contextlib.contextmanager
    def making(self, on_device: bool) -> Iterator[None]:
        """Place tensors made within the context, in a program that names places itself."""
        before, self.making_on_device = self.making_on_device, on_device
        try:
            yield
        finally:
            self.making_on_device = before

    def resized(self, storage: torch.UntypedStorage) -> None:
        """End the block of a storage whose size has changed; the next use begins a new one."""
        key = StorageKey(storage._cdata)
        known = self._live.get(key)
        if known is not None and self.recording.blocks[known[0]].bytes != storage.nbytes():
            self._died(key, known[0])

    def remark(self, text: str) -> None:
        """Note once where the plan may differ from a run."""
        if text not in self.recording.remarks:
            self.recording.remarks.append(text)

    def finish(self) -> Recording:
        """Return the recording; in a program that never asks for a device everything is on it."""
        if not self.scope.asked_for_cuda:
            for block in self.recording.blocks.values():
                block.on_host = False
        return self.recording

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # A DTensor makes its ops and collectives on this rank's part, which come here then.
        if any(each.__name__ == "DTensor" for each in types):
            return NotImplemented
        return super().__torch_dispatch__(func, types, args, kwargs)

    def dispatch(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Run the op on the fake tensors and record it."""
        if _is_whole(func):
            with entered(self):
                parts = func.decompose(*args, **named)
            if parts is not NotImplemented:
                return parts
        call = self.begin_op(func, args, named)
        out = func(*args, **named) if call is None else self._call(func, args, named)
        if call is not None:
            self.end_op(call, out)
        return out

    def begin_op(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> OpCall | None:
        """Count an op and look at its inputs, before it runs; None if it is not recorded."""
        operator = op_semantics.describe(func)
        phase = self.scope.phase()
        if phase == "forward":
            self._forward.append(operator.overload)
        # lift_fresh only wraps a literal.
        if operator.namespace in _NO_OPS or operator.bare == "lift_fresh":
            return None
        inputs = [*op_semantics.strided([*args, *named.values()])]
        before = {self.block(tensor) for tensor in inputs}
        if phase == "forward":
            self._tag_results_of_functions(inputs)
        return OpCall(operator, func, args, named, inputs, before, phase)

    def _tag_results_of_functions(self, tensors: Iterable[torch.Tensor]) -> None:
        """Tag what a custom function made: its ops had no gradients, but its result has."""
        for tensor in tensors:
            if tensor.requires_grad and not tensor.is_leaf:
                block = self.recording.blocks[self.block(tensor)]
                if block.tag == "temp":
                    block.tag = "activation"

    def end_op(self, call: OpCall, out: Any) -> None:
        """Record an op that has run."""
        if call.operator.bare == _SCALAR:
            return  # a known number, such as the count of an optimizer's steps
        operator, func, args, named, inputs, known, phase = call
        tag, family = self.scope.result_tag(phase, inputs), operator.family
        on_host = self.scope.is_on_host(self.recording.blocks, known)
        outputs = [*op_semantics.strided([out])]
        made = [t for t in outputs if self.block(t, tag, family, on_host) not in known]
        changed = [*op_semantics.strided(operator.written(args, named))]
        if operator.makes_empty or not (made or changed or (inputs and not outputs)):
            return  # it made memory without data, or a view
        writes = [*made, *changed]
        whole = operator.overwrites or "out" in named
        unread = {id(t) for t in changed if whole and op_semantics.is_whole(t)}
        reads = [t for t in inputs if id(t) not in unread]
        if operator.shape_only:
            reads = []
        op = Op(operator.name, self._ids(reads), self._ids(writes), family=family)
        cost = OpCost(
            module=self.scope.module(phase, self.recording.blocks, reads),
            phase=phase,
            flops=flops.flops_of(func, args, named, out),
            bytes=flops.bytes_of(operator.bare, reads, writes),
            precision=flops.precision_of(family, [*inputs, *outputs]),
            ordinal=len(self._forward) - 1 if phase == "forward" else -1,
            exchange=collectives.exchange_of(operator, args),
        )
        self.recording.costs[len(self.recording.events)] = cost
        self.recording.events.append(op)
        for tensor in made:
            self.made_in(tensor, cost.module)
        if operator.of_shards:
            self._tag_exchanged(writes)

    def _tag_exchanged(self, tensors: Iterable[torch.Tensor]) -> None:
        for block in map(self.block, tensors):
            if self.recording.blocks[block].tag in ("input", "temp"):
                self.recording.blocks[block].tag = "comm"

    def _call(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        try:
            return func(*args, **named)
        except DataDependentOutputException as error:
            if self.constants or source_lines.is_torchs(2):
                # The query is torch's own, as for a seed or whether a gradient is finite.
                return made_up(args[0])
            raise source_lines.reads_data(_WAYS.get(str(error.func), str(error.func))) from None
        except (DynamicOutputShapeException, UnsupportedOperatorException) as error:
            raise source_lines.reads_data(
                f"{error.func}, whose result's size is its data,"
            ) from None

    def _ids(self, tensors: Iterable[torch.Tensor]) -> tuple[BlockId, ...]:
        return tuple(dict.fromkeys(map(self.block, tensors)))

    def block(
        self, tensor: torch.Tensor, tag: str = "input", family: str = "", on_host: bool = False
    ) -> BlockId:
        """Return the tensor's block; a storage that is new, or grew, begins a new one.

        The block of a DTensor is that of this rank's part.
        """
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        key = StorageKey(storage._cdata)
        known = self._live.get(key)
        size = storage.nbytes()
        if known is not None:
            block = self.recording.blocks[known[0]]
            if block.bytes == size:
                return known[0]
            self._died(key, known[0])
            tag, family, on_host = block.tag, block.family, block.on_host
        number = BlockId(self._next)
        self._next += 1
        dead = weakref.ref(storage, lambda _: self._died(key, number))
        self._live[key] = (number, dead)
        module = self.scope.running()
        line = source_lines.here()
        self.recording.blocks[number] = Block(size, tag, family, module, on_host, line)
        self.recording.events.append(Alloc(number, size))
        return number

    def _died(self, key: StorageKey, number: BlockId) -> None:
        held = self._live.get(key)
        if held is not None and held[0] == number:
            del self._live[key]
            self._free(number)

    def _free(self, number: BlockId) -> None:
        self.recording.events.append(Free(number))
