"""The record of a model's training step, taken while the program itself runs it.

Nothing runs that would not have run without umem: a dispatch mode sees the forward pass, hooks of
saved tensors see what autograd keeps, and hooks of the graph's nodes see the backward pass. No mode
is active in backward, where some of torch's formulas are others under any mode.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from ...capture import op_semantics
from ...capture.dispatch import entered
from ...capture.recording import OpCost
from ...capture.tracer import Tracer
from ...trace.schema import Op, Step
from .forward import dropping

if TYPE_CHECKING:
    from ...capture.recording import Recording
    from ...trace.ids import BlockId, StorageKey
    from .forward import Rule, Tally

T = TypeVar("T")

# It belongs to the parameter, and remains after the step.
_ACCUMULATION = "torch::autograd::AccumulateGrad"
_OF_UMEM_OR_TORCH = (str(Path(__file__).parents[2]), str(Path(torch.__file__).parent))
_PRODUCTS = 2  # of a product's backward pass: one for each of its operands


class StepRecorder(Tracer):
    """Records one call of a model, and the backward pass whenever the program runs it.

    The record knows nothing of tensors that a loss outside of the model saves. An error in umem's
    own bookkeeping ends it and leaves the program alone: `failure`.
    """

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.failure = ""  # why the step stays unknown
        self.saw_backward = False
        self._model = weakref.ref(model)
        self._saved: Counter[BlockId] = Counter()  # tensors that autograd keeps
        self._released: set[BlockId] = set()  # by all but autograd
        self._node: _OfNode | None = None  # the one that runs
        # It may release what it has read, as those of compiled code do, before its op is recorded.
        self._freed: list[BlockId] = []
        self._ended = False
        self._aside_depth = 0  # umem's own ops run
        self._noting(self._begin, model, args, kwargs)

    @property
    def lost(self) -> bool:
        """True if no backward pass can follow any more."""
        return not (self.saw_backward or self._saved.total())

    def run(self, forward: Callable[[], Any], rule: Rule) -> tuple[Any, Tally]:
        """Run and record the forward pass, dropping according to the rule; return its result."""
        first = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        with dropping(rule, self) as tally, entered(self):
            out = forward()
        self._noting(self._follow, out, first)
        return out, tally

    def finish(self) -> Recording:
        """End the record and return it; what runs from now on is not part of it."""
        self._ended = True
        self._live.clear()
        self._end_frees()
        self.recording.forward = tuple(self._forward)
        self.recording.steps = 1
        self.recording.events.append(Step())
        return super().finish()

    def dispatch(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Run the op and record it."""
        call = self._noting(self.begin_op, func, args, named)
        out = func(*args, **named)
        if call is not None:
            self._noting(self.end_op, call, out)
        return out

    def saved(self, tensor: Tensor) -> _Saved | None:
        """Count a tensor that autograd saves, until the result is gone."""
        return self._noting(self._save, tensor)

    def wanted(self, get: Callable[[], Tensor], known: _Saved | None) -> Tensor:
        """Return the saved tensor, and note that an op of backward reads it."""
        self._aside_depth += 1
        try:
            tensor = get()
        finally:
            self._aside_depth -= 1
        if known is not None and torch._C._current_graph_task_id() != -1:
            self._noting(self._use, tensor, known)
        return tensor

    def gone(self, block: BlockId) -> None:
        """Note that autograd has released a tensor that it saved."""
        self._saved[block] -= 1
        if not self._saved[block] and block in self._released and not self._ended:
            self._released.discard(block)
            self._free(block)

    def enter(self, node: _OfNode, gradients: Any) -> None:
        """Note that a node of backward begins."""
        if self._ended:
            return
        self._end_frees()  # of a node that raised
        if not self.saw_backward:
            self.saw_backward = True
            Variable._execution_engine.queue_callback(lambda: self._noting(self._tag_gradients))
        self._node = node
        node.reads = self._noting(self._blocks, gradients) or []

    def leave(self, node: _OfNode, results: Any) -> None:
        """Note that a node of backward has ended."""
        if self._node is node:
            self._noting(self._end_node, node, results)
            self._node = None
            self._end_frees()

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for tensor in op_semantics.strided([*model.parameters(), *model.buffers()]):
            self.tag(tensor, "param")
        for tensor in op_semantics.strided(tree_leaves((args, kwargs))):
            self.tag(tensor, "input")
        self._tag_gradients()

    def _save(self, tensor: Tensor) -> _Saved | None:
        if tensor.layout != torch.strided:
            return None
        return _Saved(self, self.block(tensor), self._last_op())

    def _last_op(self) -> int:
        """Return the index of the op that was recorded last, or -1."""
        return next(reversed(self.recording.costs), -1)

    def _use(self, tensor: Tensor, known: _Saved) -> None:
        self.saw_backward = True
        self._stands_for(tensor, known.block)
        if self._node is not None:
            self._node.reads.append(known.block)
            self._node.op = max(self._node.op, known.op)
        else:  # a node that is not hooked
            self._note_op("unknown", [known.block], [], -1)

    def _end_node(self, node: _OfNode, results: Any) -> None:
        self._note_op(node.name, node.reads, self._blocks(results), node.op)

    def _note_op(
        self, name: str, reads: list[BlockId], writes: list[BlockId], forward: int
    ) -> None:
        """Record an op of backward; its operations are those of the op of forward, or none."""
        blocks, costs = self.recording.blocks, self.recording.costs
        known = costs.get(forward)
        products = min(len(writes), _PRODUCTS) if known is not None and known.flops else 0
        costs[len(self.recording.events)] = OpCost(
            module="",
            phase="backward",
            flops=products * (known.flops if known is not None else 0.0),
            bytes=sum(blocks[block].bytes for block in (*reads, *writes)),
            precision=known.precision if known is not None else "fp32",
        )
        family = getattr(self.recording.events[forward], "family", "") if products else ""
        unique = tuple(dict.fromkeys(reads)), tuple(dict.fromkeys(writes))
        self.recording.events.append(Op(name, *unique, family=family))

    def _blocks(self, tensors: Any) -> list[BlockId]:
        return [self.block(tensor, "temp") for tensor in op_semantics.strided([tensors])]

    def _died(self, key: StorageKey, number: BlockId) -> None:
        held = self._live.get(key)
        if held is None or held[0] != number:
            return
        if self._saved[number]:
            del self._live[key]
            self._released.add(number)
        else:
            super()._died(key, number)

    def _free(self, number: BlockId) -> None:
        if self._node is None:
            super()._free(number)
        else:
            self._freed.append(number)

    def _end_frees(self) -> None:
        freed, self._freed = self._freed, []
        for number in freed:
            super()._free(number)

    def _stands_for(self, copy: Tensor, block: BlockId) -> None:
        """Take a copy of a dropped tensor for the tensor."""
        storage = copy.untyped_storage()
        if (key := storage._cdata) in self._live:
            return

        def forget(dead: weakref.ref[Any]) -> None:
            if self._live.get(key) == (block, dead):
                del self._live[key]

        self._live[key] = block, weakref.ref(storage, forget)

    def _follow(self, out: Any, first: int) -> None:
        """Put hooks on the nodes that lead to the results and were made since number `first`."""
        ahead = [leaf.grad_fn for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        seen: set[Any] = set()
        while ahead:
            node = ahead.pop()
            if node is None or node in seen or node.name() == _ACCUMULATION:
                continue
            seen.add(node)
            if node._sequence_nr() >= first:
                hooks = _OfNode(self, node.name())
                node.register_prehook(hooks.before)
                node.register_hook(hooks.after)
                ahead += [before for before, _ in node.next_functions]

    def _tag_gradients(self) -> None:
        model = self._model()
        if model is not None:
            for tensor in op_semantics.strided(p.grad for p in model.parameters() if p.is_leaf):
                self.tag(tensor, "grad")

    def _noting(self, note: Callable[..., T], *given: Any) -> T | None:
        """Return `note(*given)`, or None once the record has ended or inside of umem's own ops.

        An error in umem's bookkeeping ends the record. One of a signal handler is raised.
        """
        if self._ended or self._aside_depth:
            return None
        self._aside_depth += 1
        try:
            with torch._C.DisableTorchFunction():
                return note(*given)
        except Exception as error:
            self._ended = True
            self.failure = f"umem cannot follow it: {type(error).__name__}: {error}"
            if not is_own(error):
                raise
            return None
        finally:
            self._aside_depth -= 1


class _OfNode:
    """The hooks of one node."""

    __slots__ = ("name", "op", "reads", "recorder")

    def __init__(self, recorder: StepRecorder, name: str) -> None:
        self.recorder, self.name = recorder, name
        self.reads: list[BlockId] = []
        self.op = -1  # of the forward pass, in the events

    def before(self, gradients: Any) -> None:
        self.recorder.enter(self, gradients)

    def after(self, results: Any, _gradients: Any) -> None:
        self.recorder.leave(self, results)


class _Saved:
    """Lives as long as autograd keeps a tensor."""

    __slots__ = ("block", "op", "recorder")

    def __init__(self, recorder: StepRecorder, block: BlockId, op: int) -> None:
        self.recorder, self.block, self.op = recorder, block, op
        recorder._saved[block] += 1

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.recorder.gone(self.block)


def is_own(error: BaseException) -> bool:
    """Return whether code of umem or torch raised it, and not a signal handler of the program."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    return place is None or place.tb_frame.f_code.co_filename.startswith(_OF_UMEM_OR_TORCH)
