"""Running a program on fake tensors and recording what it does with memory.

Fake tensors have shapes and no data, so that a step of any size is recorded in seconds on any
machine. Every op passes `Tracer`, which knows blocks by their storage: views are no blocks and no
ops, a block dies when its last tensor does.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode

from .. import torch_program
from ..native import core
from . import flops, surroundings, userline
from .entry import explained, program
from .recording import Block, Born, Died, Recording, StepEnd, Work
from .scope import Scope

STEPS = 2  # the first makes the optimizer's states; the second is what repeats
# They make memory without writing it: no op, and the memory is the next op's.
_EMPTY = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty",
          "new_empty_strided", "resize_", "set_"}  # fmt: skip
# They read the shape of their input and not its data.
_SHAPE_ONLY = {"zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like",
               "new_zeros", "new_ones", "new_full"}  # fmt: skip
_SCALAR = "_local_scalar_dense"
# How people write what ends in these ops.
_WAYS = {"aten._local_scalar_dense.default": "tensor.item(), or a branch on a tensor,"}
_NO_OPS = {"prim", "prims", "profiler"}  # namespaces of what asks and marks


@dataclass(frozen=True)
class _Operator:
    """What the schema and the name of an operator say."""

    name: str  # aten::mm
    bare: str  # mm
    family: str
    counts: bool
    changes: frozenset[int | str]  # the arguments that it writes, by position and by name


class Tracer(TorchDispatchMode):
    """Records while it is entered, inside of a FakeTensorMode."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = Recording()
        self.mode: FakeTensorMode  # that makes the tensors, while it is entered
        self.scope = Scope(self)
        self.making_on_device = False  # what is made now was asked for on the device
        self.constants = False  # a value that fake tensors have not is made up, not an error
        self._operators: dict[Any, _Operator] = {}
        self._live: dict[int, tuple[int, weakref.ref[Any]]] = {}  # by StorageImpl
        self._next = 0
        self._forward: list[str] = []  # of this step

    def begin(self, make: Callable[[], Callable[[], object]]) -> Callable[[], object]:
        """Set the program up; what is left alive afterwards comes before the first step."""
        step = make()
        gc.collect()
        self._forward.clear()
        alive = sorted(block for block, _ in self._live.values())
        self.recording.notes[:] = map(Born, alive)
        self.recording.blocks = {i: self.recording.blocks[i] for i in alive}
        return step

    def end_step(self) -> None:
        """A step has ended: what only cycles of references keep alive goes here."""
        gc.collect()
        self.scope.end_step()
        self.recording.notes.append(StepEnd())
        self.recording.steps += 1
        self.recording.forward = tuple(self._forward)
        self._forward.clear()

    def tag(self, tensor: torch.Tensor, tag: str) -> None:
        """Say what a tensor is for; one that is not known yet begins to live."""
        self.recording.blocks[self.block(tensor)].tag = tag

    def made_in(self, tensor: torch.Tensor, module: str) -> None:
        """Say which module a tensor belongs to, where that is not known."""
        block = self.recording.blocks[self.block(tensor)]
        block.module = block.module or module

    def on_host(self, tensor: torch.Tensor, on_host: bool) -> None:
        """Say that a tensor's memory is, or is not, the host's."""
        self.recording.blocks[self.block(tensor)].on_host = on_host

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """What is made meanwhile is on the device, in a program that says so itself."""
        before, self.making_on_device = self.making_on_device, True
        try:
            yield
        finally:
            self.making_on_device = before

    def remark(self, text: str) -> None:
        """Note once where the plan may differ from a run."""
        if text not in self.recording.remarks:
            self.recording.remarks.append(text)

    def finish(self) -> Recording:
        """The recording; in a program that never asks for a device everything is on it."""
        if not self.scope.asked_for_cuda:
            for block in self.recording.blocks.values():
                block.on_host = False
        return self.recording

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the op on the fake tensors and note it."""
        del types
        named = dict(kwargs or {})
        operator = self._operators.get(func)
        if operator is None:
            operator = self._operators[func] = _describe(func)
        phase = self.scope.phase()
        if phase == "forward":
            self._forward.append(str(func))
        if not operator.counts:
            return func(*args, **named)
        inputs = [*_tensors([*args, *named.values()])]
        before = {self.block(tensor) for tensor in inputs}
        out = self._call(func, args, named)
        if operator.bare == _SCALAR:
            return out  # a number that is known, such as how many steps an optimizer took
        self._note(operator, func, (args, named, out), (inputs, before), phase)
        return out

    def _note(
        self,
        operator: _Operator,
        func: Any,
        call: tuple[tuple[Any, ...], dict[str, Any], Any],
        before: tuple[list[torch.Tensor], set[int]],
        phase: str,
    ) -> None:
        args, named, out = call
        inputs, known = before
        tag, family = self.scope.result_tag(phase, inputs), operator.family
        on_host = self.scope.is_on_host(self.recording.blocks, known)
        outputs = [*_tensors([out])]
        made = [t for t in outputs if self.block(t, tag, family, on_host) not in known]
        changed = [*_tensors(_at(operator.changes, args, named))]
        if operator.bare in _EMPTY or not (made or changed or (inputs and not outputs)):
            return  # memory without data, or a view
        writes = [*made, *changed]
        whole = operator.bare in torch_program.OVERWRITES or "out" in named
        unread = {id(t) for t in changed if whole and torch_program.is_whole(t)}
        reads = [t for t in inputs if id(t) not in unread]
        if operator.bare in _SHAPE_ONLY:
            reads = []
        work = Work(
            name=operator.name,
            reads=self._ids(reads),
            writes=self._ids(writes),
            family=family,
            module=self.scope.module(phase, self.recording.blocks, reads),
            phase=phase,
            flops=flops.flops_of(func, args, named, out),
            bytes=flops.bytes_of(operator.bare, reads, writes),
            precision=flops.precision_of(family, [*inputs, *outputs]),
            ordinal=len(self._forward) - 1 if phase == "forward" else -1,
        )
        self.recording.notes.append(work)
        for tensor in made:
            self.made_in(tensor, work.module)

    def _call(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        try:
            return func(*args, **named)
        except DataDependentOutputException as error:
            if self.constants or userline.is_torchs(2):
                # Torch's own questions: whether a gradient is finite, which seed.
                return 0.0 if args[0].is_floating_point() else 0
            raise userline.reads_data(_WAYS.get(str(error.func), str(error.func))) from None
        except (DynamicOutputShapeException, UnsupportedOperatorException) as error:
            raise userline.reads_data(f"{error.func}, whose result's size is its data,") from None

    def _ids(self, tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(map(self.block, tensors)))

    def block(
        self, tensor: torch.Tensor, tag: str = "input", family: str = "", on_host: bool = False
    ) -> int:
        """The tensor's block; a storage that is new, or grew, begins a new one."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._live.get(key)
        size = storage.nbytes()
        if known is not None:
            block = self.recording.blocks[known[0]]
            if block.bytes == size:
                return block.id
            self._died(key, known[0])
            tag, family, on_host = block.tag, block.family, block.on_host
        number = self._next
        self._next += 1
        dead = weakref.ref(storage, lambda _: self._died(key, number))
        self._live[key] = (number, dead)
        module = self.scope.running()
        self.recording.blocks[number] = Block(number, size, tag, family, module, on_host)
        self.recording.notes.append(Born(number))
        return number

    def _died(self, key: int, number: int) -> None:
        held = self._live.get(key)
        if held is not None and held[0] == number:
            del self._live[key]
            self.recording.notes.append(Died(number))


def trace(
    make: Callable[[], object], steps: int = STEPS, recorder: Tracer | None = None
) -> Recording:
    """Set up and run a program on fake tensors.

    Args:
        make: returns the program, see `entry.program`. It is called under fake tensors: what it
            makes takes no memory.
        steps: how many steps are recorded; the last stands for all that follow.
        recorder: in place of a plain Tracer; for what looks at more than memory.

    Raises:
        PlanError: the program reads data, which fake tensors have not, or does not work on them;
            says where.
    """
    with recording(recorder) as tracer:
        step = tracer.begin(lambda: program(make, tracer.scope))
        for _ in range(steps):
            with explained("a step"):
                step()
            tracer.end_step()
        return tracer.finish()


@contextlib.contextmanager
def recording(
    recorder: Tracer | None = None,
    around: Callable[
        [Scope], contextlib.AbstractContextManager[FakeTensorMode]
    ] = surroundings.like_cuda,
) -> Iterator[Tracer]:
    """A tracer that is on, under fake tensors, with torch as it is where there is a GPU.

    `around` makes the fake tensors' mode, and whatever else a program is to see of torch.
    """
    enabled = gc.isenabled()
    gc.disable()  # else blocks in cycles would die whenever the collector happens to run
    gc.freeze()  # what is there already is not looked through at the end of each step
    tracer = Tracer() if recorder is None else recorder
    try:
        with around(tracer.scope) as tracer.mode, tracer.scope, tracer:
            yield tracer
    finally:
        tracer._live.clear()
        gc.unfreeze()
        if enabled:
            gc.enable()


def _describe(func: Any) -> _Operator:
    schema = getattr(func, "_schema", None)
    if schema is None:  # a higher-order operator
        name = f"higher_order::{func.name()}"
        return _Operator(name, func.name(), core.family_of(name), True, frozenset())
    name = cast("str", schema.name)
    changes: set[int | str] = set()
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            changes |= {argument.name} if argument.kwarg_only else {position, argument.name}
    namespace, _, bare = name.partition("::")
    family = core.family_of(name)
    counts = namespace not in _NO_OPS and bare != "lift_fresh"  # that one wraps a literal
    return _Operator(name, bare, family, counts, frozenset(changes))


def _at(places: frozenset[int | str], args: tuple[Any, ...], named: dict[str, Any]) -> list[Any]:
    positions = (place for place in places if isinstance(place, int))
    names = (place for place in places if isinstance(place, str))
    return [
        *(args[place] for place in sorted(positions) if place < len(args)),
        *(named[name] for name in sorted(names) if name in named),
    ]


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Those with a storage, in lists, tuples and mappings too."""
    return (t for t in torch_program.tensors(values) if t.layout == torch.strided)
