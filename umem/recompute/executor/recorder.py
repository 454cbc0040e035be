"""The record of a model's training step, taken while the program itself runs it.

Nothing runs that would not have run without umem: a dispatch mode sees the forward pass, hooks of
saved tensors see what autograd keeps, and hooks of the graph's nodes see the backward pass.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode, _push_mode
from torch.utils._pytree import tree_leaves

from ...capture.recording import OpCost
from ...capture.tracer import Tracer, strided
from ...trace.schema import Free, Op, Step
from .forward import dropping

if TYPE_CHECKING:
    from ...capture.recording import Recording
    from ...trace.ids import BlockId, StorageKey
    from .forward import Rule, Tally

# These nodes of a graph are not hooked: accumulation is the parameters' own, and compiled code is
# compiled when it first runs, on fake tensors.
_LEFT_ALONE = ("torch::autograd::AccumulateGrad", "CompiledFunctionBackward")


class StepRecorder(Tracer):
    """Records one call of a model, and the backward pass whenever the program runs it.

    The record knows nothing of tensors that a loss outside of the model saves. An error in umem's
    own bookkeeping ends it and leaves the program alone: `failure`.
    """

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.failure = ""  # why the step stays unknown
        self.saw_backward = False
        self._saved: Counter[BlockId] = Counter()  # tensors that autograd keeps
        self._released: set[BlockId] = set()  # by all but autograd
        self._parameters = [weakref.ref(parameter) for parameter in model.parameters()]
        self._ended = False
        self._aside_depth = 0  # umem's own ops run
        with self._own():
            for tensor in strided([*model.parameters(), *model.buffers()]):
                self.tag(tensor, "param")
            for tensor in strided(tree_leaves((args, kwargs))):
                self.tag(tensor, "input")
            self._tag_gradients()

    @property
    def lost(self) -> bool:
        """True if no backward pass can follow any more."""
        return not (self.saw_backward or self._saved.total())

    def run(self, forward: Callable[[], Any], rule: Rule) -> tuple[Any, Tally]:
        """Run and record the forward pass, dropping according to the rule; return its result."""
        first = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        with dropping(rule, self) as tally, self:
            out = forward()
        with self._own():
            self._follow(out, first)
        return out, tally

    def finish(self) -> Recording:
        """End the record and return it; what runs from now on is not part of it."""
        self._ended = True
        self._live.clear()
        self.recording.forward = tuple(self._forward)
        self.recording.steps = 1
        self.recording.events.append(Step())
        return super().finish()

    def dispatch(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Run the op and record it."""
        call = None
        with self._own() as on:
            if on:
                call = self.begin_op(func, args, named)
        out = func(*args, **named)
        if call is not None:
            with self._own() as on:
                if on:
                    self.end_op(call, out)
        return out

    def saved(self, tensor: torch.Tensor) -> object:
        """Count a tensor that autograd saves, until the result is gone."""
        with self._own() as on:
            if on and tensor.layout == torch.strided:
                return _Saved(self, self.block(tensor))
        return None

    def wanted(self, get: Callable[[], torch.Tensor], known: _Saved | None) -> torch.Tensor:
        """Return the saved tensor, and note that an op of backward reads it."""
        with self._aside():
            tensor = get()
        with self._own() as on:
            if on and known is not None and torch._C._current_graph_task_id() != -1:
                self.saw_backward = True
                self._stands_for(tensor, known.block)
                if _get_current_dispatch_mode() is not self:
                    self._used(known.block)
        return tensor

    def gone(self, block: BlockId) -> None:
        """Note that autograd has released a tensor that it saved."""
        self._saved[block] -= 1
        if not self._saved[block] and block in self._released and not self._ended:
            self._released.discard(block)
            self.recording.events.append(Free(block))

    def _died(self, key: StorageKey, number: BlockId) -> None:
        held = self._live.get(key)
        if held is None or held[0] != number:
            return
        if self._saved[number]:
            del self._live[key]
            self._released.add(number)
        else:
            super()._died(key, number)

    def _stands_for(self, copy: torch.Tensor, block: BlockId) -> None:
        """Take a copy of a dropped tensor for the tensor."""
        storage = copy.untyped_storage()
        if (key := storage._cdata) in self._live:
            return

        def forget(dead: weakref.ref[Any]) -> None:
            if self._live.get(key) == (block, dead):
                del self._live[key]

        self._live[key] = block, weakref.ref(storage, forget)

    def _used(self, block: BlockId) -> None:
        """Note a use by an op of backward that is not seen itself."""
        size = self.recording.blocks[block].bytes
        self.recording.costs[len(self.recording.events)] = OpCost("", "backward", 0.0, size, "fp32")
        self.recording.events.append(Op("unknown", (block,), ()))

    def _follow(self, out: Any, first: int) -> None:
        """Put hooks on the nodes that lead to the results and were made since number `first`."""
        results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        ahead = [result.grad_fn for result in results]
        seen: set[Any] = set()
        while ahead:
            node = ahead.pop()
            if node is None or node in seen or node.name() in _LEFT_ALONE:
                continue
            seen.add(node)
            if node._sequence_nr() >= first:
                hooks = _OfNode(self)
                node.register_prehook(hooks.before)
                node.register_hook(hooks.after)
                ahead += [before for before, _ in node.next_functions]

    def entered(self) -> bool:
        """Begin an op of backward; return whether the recorder is to leave at its end."""
        if self._ended or _get_current_dispatch_mode() is self:
            return False
        if not self.saw_backward:
            self.saw_backward = True
            Variable._execution_engine.queue_callback(self._tag_gradients)
        _push_mode(self)
        return True

    def left(self) -> None:
        """End an op of backward; after one that raises, torch restores the modes itself."""
        if _get_current_dispatch_mode() is self:
            _pop_mode(None)

    def _tag_gradients(self) -> None:
        with self._own() as on:
            known = [parameter() for parameter in self._parameters]
            for tensor in strided(p.grad for p in known if on and p is not None):
                self.tag(tensor, "grad")

    @contextmanager
    def _own(self) -> Iterator[bool]:
        """Yield whether the record goes on; end it at an error within, and do not record that."""
        if self._ended or self._aside_depth:
            yield False
            return
        try:
            with self._aside(), torch._C.DisableTorchFunction():
                yield True
        except Exception as error:  # noqa: BLE001 - the program goes on, whatever it is
            self.failure = f"umem cannot follow it: {type(error).__name__}: {error}"
            self._ended = True

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Run umem's own ops within, which are not part of the record."""
        self._aside_depth += 1
        try:
            yield
        finally:
            self._aside_depth -= 1


class _OfNode:
    """The hooks of one node."""

    __slots__ = ("entered", "recorder")

    def __init__(self, recorder: StepRecorder) -> None:
        self.recorder, self.entered = recorder, False

    def before(self, _gradients: Any) -> None:
        self.entered = self.recorder.entered()

    def after(self, _inputs: Any, _outputs: Any) -> None:
        if self.entered:
            self.entered = False
            self.recorder.left()


class _Saved:
    """Lives as long as autograd keeps a tensor."""

    __slots__ = ("block", "recorder")

    def __init__(self, recorder: StepRecorder, block: BlockId) -> None:
        self.recorder, self.block = recorder, block
        recorder._saved[block] += 1

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.recorder.gone(self.block)
