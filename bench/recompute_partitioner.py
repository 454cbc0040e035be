"""The ops that torch's own partitioner would recompute, in umem's step.

AOTAutograd traces forward, loss and backward into one graph; `min_cut_rematerialization_partition`
cuts it into a forward and a backward graph, by `torch._functorch.config.activation_memory_budget`.
Tensors that cross the cut are saved, all else runs again. That choice is transferred to umem's
step, op by op, and scored by the same rewriting and the same clock: ops are not fused on either
side, whereas torch.compile would fuse some recomputed ones.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from harness import table
from policies.ratios import geomean
from policies.report import Target
from torch import fx, nn
from torch._functorch import config
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomRuntimeEstimator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import stateless
from torch.utils._pytree import tree_flatten, tree_unflatten

from umem.base.device_profiles import DeviceProfile
from umem.base.units import GIB, PAGE_BYTES
from umem.capture.fake_cuda import replaced
from umem.policies.default.occupancy import capacity, large_live_bytes
from umem.policies.default.planner import Auto
from umem.recompute.planner.candidates import Selection, per_block
from umem.recompute.planner.graph import RecomputeGraph
from umem.recompute.planner.modes import RecomputePlanner
from umem.recompute.planner.rewrite import Rewritten, rewrite
from umem.trace.step_trace import StepTrace

if TYPE_CHECKING:
    from torch import Tensor

Row = dict[str, Any]

BUDGETS = (1.0, 0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0)
# How it reckons an op's time: its own default, and the times of the step, by the roofline.
ESTIMATORS = ("flops", "roofline")
BLOCKS = "per block"
EQUAL = 1.001  # ratios of steps up to here are none
# The ops of the eager step that a graph's functional ops represent.
_EAGER = {"_native_batch_norm_legit_functional": "native_batch_norm"}
_VIEWS = {"_unsafe_view"}  # in addition to the schema's views


class Joint(NamedTuple):
    """A training's forward and backward in one graph."""

    module: fx.GraphModule
    options: dict[str, Any]  # the partitioner's


class Cut(NamedTuple):
    """Result of the partitioner for a joint graph."""

    saved: list[fx.Node]  # for backward, parameters and inputs too
    again: list[fx.Node]  # calls of forward that are in backward


class Choice(NamedTuple):
    """One choice of recomputed ops, in umem's step."""

    way: str  # one of ESTIMATORS, or BLOCKS
    share: float | None  # activation_memory_budget
    new: Rewritten
    # According to torch's graph; absent for BLOCKS. Compared with `new` they show the transfer's
    # loss.
    saved_bytes: int | None = None  # without parameters and inputs
    again_us: float | None = None


class _Loss(Exception):  # noqa: N818 - no error
    """Marker from a step's loss to the start of its gradient."""


class _StepTimes(CustomRuntimeEstimator):
    """Microseconds of the step's ops for the partitioner."""

    def __init__(self, step: StepTrace, ops: dict[str, int]) -> None:
        self.us = {name: float(step.op_us[op]) for name, op in ops.items()}

    def __call__(self, node: fx.Node) -> float:
        """Return the time of an op; a view has the time of its op, an input 0."""
        return max((self.us[name] for name in _origins(node, self.us)), default=0.0)

    def uuid(self) -> None:
        """Do nothing: there is no cache."""


def joint_graph(make: Callable[[], tuple[nn.Module, Callable[[], object]]]) -> Joint:
    """Trace a training on fake tensors, from its parameters and its batch to their gradients.

    Args:
        make: as for `umem plan`; the step has one `backward()` of its loss, and the tensors of its
            closure, also in lists and tuples, are the batch.
    """
    found: list[Joint] = []

    def caught(module: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        static = list(range(len(state)))  # as torch.compile declares parameters and buffers
        found.append(Joint(module, {**options, "static_lifetime_input_indices": static}))
        return default_partition(module, inputs, **options)

    with FakeTensorMode(allow_non_fake_inputs=True):
        net, step = make()
        state = {**dict(net.named_parameters()), **dict(net.named_buffers())}
        cells = list(step.__closure__ or ())
        leaves, shape = tree_flatten([cell.cell_contents for cell in cells])
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        batch = [leaves[i] for i in places]

        def fill(tensors: Sequence[Tensor]) -> None:
            for i, tensor in zip(places, tensors, strict=True):
                leaves[i] = tensor
            for cell, contents in zip(cells, tree_unflatten(leaves, shape), strict=True):
                cell.cell_contents = contents

        def loss(*tensors: Tensor) -> Tensor:
            given = dict(zip(state, tensors, strict=False))
            fill(tensors[len(state) :])
            with (
                replaced(torch.Tensor, "backward", _stop),
                stateless._reparametrize_module(net, given),
            ):
                try:
                    step()
                except _Loss as reached:
                    found_loss: Tensor = reached.args[0]
                    return found_loss
            raise ValueError("the step has no backward(); allowed: a training step")

        aot_function(loss, _as_it_is, _as_it_is, caught)(*state.values(), *batch)
        fill(batch)
    return found[0]


def cut(joint: Joint, share: float, estimator: object = "flops") -> Cut:
    """Partition the graph by a share of the activations that torch keeps by default."""
    options = {
        "activation_memory_budget": share,
        "activation_memory_budget_runtime_estimator": estimator,
        "cse": False,  # equal ops are kept, as they run in the step
    }
    with config.patch(options):
        halves = min_cut_rematerialization_partition(joint.module, None, **joint.options)
    kinds = [{node.name: node.op for node in half.graph.nodes} for half in halves]
    nodes = [node for node in joint.module.graph.nodes if node.name in kinds[1]]
    return Cut(
        [node for node in nodes if kinds[1][node.name] == "placeholder"],
        [n for n in nodes if kinds[1][n.name] == kinds[0].get(n.name) == "call_function"],
    )


def ops_of(joint: Joint, graph: RecomputeGraph) -> dict[str, int]:
    """Return the op of the step for each forward node of the graph that is not a view, by name.

    Raises:
        ValueError: they are not the same ops in the same order.
    """
    ops = np.flatnonzero(graph.forward).tolist()
    theirs = [node for node in _forward(joint.module.graph) if not _is_view(node)]
    names = [graph.step.op_names[op].removeprefix("aten::").rstrip("_") for op in ops]
    if names[-1:] == ["ones_like"]:  # the loss's gradient
        names.pop()
    found = [_name(node) for node in theirs]
    if found != names:
        pairs = enumerate(zip(found, names, strict=False))
        where = next((i for i, (a, b) in pairs if a != b), min(len(found), len(names)))
        raise ValueError(
            f"op {where} of forward is {found[where : where + 3]} in torch's graph and "
            f"{names[where : where + 3]} in the step; allowed: the same program in both"
        )
    return {node.name: op for node, op in zip(theirs, ops, strict=False)}


def choices(joint: Joint, graph: RecomputeGraph) -> Iterator[Choice]:
    """Return the partitioner's choices at all budgets, by both estimators, and per block.

    A tensor that ops change in place is kept if any version of it is saved, and outputs of one op
    are kept together; the step cannot drop tensors below 2 MiB. All three favour torch.
    """
    ops = ops_of(joint, graph)
    ways: dict[str, object] = {"flops": "flops", "roofline": _StepTimes(graph.step, ops)}
    for way in ESTIMATORS:
        for share in BUDGETS:
            saved, again = cut(joint, share, ways[way])
            origins = {_origins(node, ops): node for node in saved}
            kept = [ops[name] for names in origins for name in names]
            nbytes = sum(_storage_bytes(node) for names, node in origins.items() if names)
            us = sum(float(graph.step.op_us[ops[n.name]]) for n in again if n.name in ops)
            yield Choice(way, share, rewrite(graph, *selection(graph, kept)), nbytes, us)
    yield Choice(BLOCKS, None, rewrite(graph, *per_block(graph)))


def selection(graph: RecomputeGraph, kept_ops: Sequence[int]) -> Selection:
    """Keep the results of these forward ops, and drop all other droppable ones."""
    kept = np.zeros(graph.step.n_tensors, bool)
    for op in kept_ops:
        kept[[graph.tensor_of[value] for value in graph.outputs[op]]] = True
    return Selection(graph.droppable & ~kept, kept, np.zeros_like(kept))


def compared(
    graph: RecomputeGraph, device: DeviceProfile, found: Sequence[Choice]
) -> Iterator[Row]:
    """Return each choice with umem's shortest in no more memory; neither swaps.

    Each way has only the choices that no other of it beats in both peak and time, and that lower
    the peak. Peaks count large tensors: no choice affects the small ones.
    """
    whole = peak_of(graph.step)
    for choice in _undominated(found):
        peak = peak_of(choice.new.step)
        if peak >= whole:
            continue
        mine = RecomputePlanner(graph, device, budget_of(graph.step, peak)).plan("recompute")
        yield {
            "way": choice.way,
            "share": choice.share,
            "compute_us": graph.step.compute_us,
            "whole_peak_bytes": whole,
            "peak_bytes": peak,
            "step_us": choice.new.step.compute_us,
            "saved_bytes": _kept_bytes(choice.new),
            "saved_bytes_of_graph": choice.saved_bytes,
            "again_us": choice.new.recompute_us,
            "again_us_of_graph": choice.again_us,
            "umem_us": None if mine is None else mine.step.compute_us,
            "umem_peak_bytes": None if mine is None else peak_of(mine.step),
            "umem_saved_bytes": None if mine is None else _kept_bytes(mine),
        }


def fastest(found: Sequence[Choice], device: DeviceProfile, budget: int) -> Rewritten:
    """Return torch's choice with the min estimated time when the rest is swapped."""
    theirs = [one.new for one in _undominated([one for one in found if one.way != BLOCKS])]
    return min(theirs, key=lambda new: Auto().estimate_us(new.step, device, budget, compare=False))


def targets(rows: Sequence[Row]) -> list[Target]:
    """Check how often umem's choice is slower than each other one, on each device: never."""
    found = []
    for device, way in dict.fromkeys((row["device"], row["way"]) for row in rows):
        mine = [row for row in rows if (row["device"], row["way"]) == (device, way)]
        slower = [row for row in mine if ratio(row) > EQUAL]
        name = f"{device}: of {len(mine)} peaks of {_words(way)}, where umem's choice is slower"
        worst = max(slower, key=ratio, default=None)
        where = "" if worst is None else f"{worst['workload']}, {_share(worst)}"
        found.append(Target(name, len(slower), 0, where))
    return found


def section(rows: Sequence[Row]) -> list[str]:
    """Compare the recomputed time at the same peak, in words and row by row."""
    lines = ["## Compared with torch's partitioner, and per block", ""]
    lines += [
        "Steps over compute without any swapping, both on the same ops and clock. `flops`,"
        " `roofline`: torch's `activation_memory_budget` with its own estimate of times and with"
        " umem's; umem's choice has no higher peak than the other's. `none`: umem finds no way."
        " Saved: GiB between forward and backward, of theirs and of umem's.",
        "",
    ]
    for way in dict.fromkeys(row["way"] for row in rows):
        lines += [_verdict(way, [row for row in rows if row["way"] == way]), ""]
    header = ("workload", "device", "way", "budget", "peak of whole", "theirs", "umem", "saved")
    return [*lines, *table(header, map(_cells, rows))]


def ratio(row: Row) -> float:
    """umem's step over the other's; infinite where umem finds none."""
    return float("inf") if row["umem_us"] is None else float(row["umem_us"] / row["step_us"])


def _verdict(way: str, rows: Sequence[Row]) -> str:
    ratios = [ratio(row) for row in rows if row["umem_us"] is not None]
    less = sum(one < 1 / EQUAL for one in ratios)
    equal = sum(1 / EQUAL <= one <= EQUAL for one in ratios)
    text = (
        f"Against {_words(way)}, at {len(rows)} peaks: umem's step is shorter at {less}, equal at "
        f"{equal}, longer at {len(ratios) - less - equal}, and {len(rows) - len(ratios)} times it "
        "finds none."
    )
    if not ratios:
        return text
    mean, most = geomean(ratios), max(ratios)
    return f"{text} Its step over the other's: {mean:.3f} (geomean), {most:.3f} (highest)."


def _cells(row: Row) -> tuple[str, ...]:
    compute, mine = row["compute_us"], row["umem_us"]
    saved = [row["saved_bytes"], row["umem_saved_bytes"]]
    return (
        row["workload"],
        row["device"],
        row["way"],
        _share(row),
        f"{row['peak_bytes'] / row['whole_peak_bytes']:.3f}",
        f"{row['step_us'] / compute:.3f}",
        "none" if mine is None else f"{mine / compute:.3f}",
        "/".join("-" if nbytes is None else f"{nbytes / GIB:.2f}" for nbytes in saved),
    )


def _words(way: str) -> str:
    return "checkpoints per block" if way == BLOCKS else f"torch's partitioner ({way})"


def _share(row: Row) -> str:
    return "-" if row["share"] is None else f"{row['share']:g}"


def budget_of(step: StepTrace, peak: int) -> int:
    """Return the largest budget at which umem's plan has at most `peak` bytes of large tensors."""
    pieces = step.pieces
    budget = peak // PAGE_BYTES * PAGE_BYTES
    while capacity(pieces, budget + PAGE_BYTES) <= peak:
        budget += PAGE_BYTES
    return budget


def peak_of(step: StepTrace) -> int:
    """Return the peak of the bytes of large tensors."""
    return int(large_live_bytes(step).max(initial=0))


def _undominated(found: Sequence[Choice]) -> list[Choice]:
    def place(choice: Choice) -> tuple[int, float]:
        return peak_of(choice.new.step), choice.new.step.compute_us

    best: list[Choice] = []
    for choice in sorted(found, key=lambda one: (one.way, place(one))):
        last = best[-1] if best else None
        if last is None or last.way != choice.way or place(choice)[1] < place(last)[1]:
            best.append(choice)
    return best


def _kept_bytes(new: Rewritten) -> int:
    """Return the bytes kept by forward that backward reads, or derives other tensors from."""
    graph, n = new.graph, new.graph.step.n_tensors
    first = int(np.flatnonzero(~new.again)[graph.forward.sum()])  # backward's
    held = (new.step.last[:n] > first) & graph.made & graph.step.large
    return int(graph.step.bytes[held].sum())


def _forward(graph: fx.Graph) -> Iterator[fx.Node]:
    """Return the calls before the first one that needs a gradient."""
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if any(source.name.startswith("tangents") for source in node.all_input_nodes):
            return
        yield node


def _is_view(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return True
    return bool(getattr(node.target, "is_view", False)) or _name(node) in _VIEWS


def _name(node: fx.Node) -> str:
    bare: str = getattr(node.target, "_opname", str(node.target))
    return _EAGER.get(bare, bare).rstrip("_")


def _origins(node: fx.Node, known: Any) -> frozenset[str]:
    """Return the names of the forward ops that a node is, views, or is computed from.

    The last applies to backward's own ops that need no gradient: torch may run them in forward, and
    save their results instead of their inputs.
    """
    stack, found = [node], set()
    while stack:
        now = stack.pop()
        if now.name in known:
            found.add(now.name)
        elif now.op == "call_function":
            stack += now.all_input_nodes
    return frozenset(found)


def _storage_bytes(node: fx.Node) -> int:
    value = node.meta["val"]
    return int(value.untyped_storage().nbytes()) if isinstance(value, torch.Tensor) else 0


def _stop(loss: Tensor, *_args: Any, **_kwargs: Any) -> None:
    raise _Loss(loss)


def _as_it_is(gm: fx.GraphModule, example_inputs: Any) -> fx.GraphModule:
    del example_inputs
    return gm
