"""StepTraces made by hand and by hypothesis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from umem.base.device_profiles import DeviceProfile
from umem.base.units import MIB
from umem.trace.step_trace import Kind, StepTrace

PAGE = 2 * MIB
LINK = DeviceProfile("test", 20_000.0, 20_000.0, 45.0, 1 << 40, "made up")  # 20 GB/s each way


@dataclass
class Tensor:
    """`pages` of 2 MiB; 0 is a small tensor of 4 KiB. `life` None: persistent."""

    pages: int
    life: tuple[int, int] | None = None
    tag: str = "activation"
    family: str = ""
    kind: Kind | None = None
    next_alias: int = -1


@dataclass
class Op:
    name: str = "op"
    reads: Sequence[int] = ()
    writes: Sequence[int] = ()
    us: float = 100.0
    touched: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.touched = list(dict.fromkeys((*self.reads, *self.writes)))


def step(tensors: Sequence[Tensor], ops: Sequence[Op]) -> StepTrace:
    """The columns of these tensors and ops."""
    lives = [tensor.life or (0, len(ops) - 1) for tensor in tensors]
    kinds = [
        tensor.kind
        if tensor.kind is not None
        else (Kind.PERSISTENT if tensor.life is None else Kind.TRANSIENT)
        for tensor in tensors
    ]
    return StepTrace(
        op_us=np.array([op.us for op in ops], float),
        op_names=tuple(op.name for op in ops),
        bytes=np.array([tensor.pages * PAGE or 4096 for tensor in tensors], np.int64),
        large=np.array([tensor.pages > 0 for tensor in tensors], bool),
        tags=tuple(tensor.tag for tensor in tensors),
        families=tuple(tensor.family for tensor in tensors),
        kind=np.array([int(kind) for kind in kinds], np.int64),
        first=np.array([life[0] for life in lives], np.int64),
        last=np.array([life[1] for life in lives], np.int64),
        next_alias=np.array([tensor.next_alias for tensor in tensors], np.int64),
        source=np.arange(len(tensors), dtype=np.int64),
        access_start=np.cumsum([0] + [len(op.touched) for op in ops]),
        access_tensor=np.array([t for op in ops for t in op.touched], np.int64),
        access_write=np.array([t in op.writes for op in ops for t in op.touched], bool),
    )


def training(
    layers: int,
    *,
    weight: int = 4,
    activation: int = 8,
    us: float = 1000.0,
    states: bool = True,
    convolutions: Sequence[int] = (),
) -> StepTrace:
    """Forward, backward and update of a stack, sizes in pages.

    The output of layer i is activation i, and layer i reads i - 1. Tensors in the order weights,
    states, activations, their gradients, the weights' gradients.
    """
    n, end = layers, 3 * layers - 1
    back = [2 * n - 1 - i for i in range(n)]  # the op of layer i's backward
    tensors = [Tensor(weight, tag="param") for _ in range(n)]
    tensors += [Tensor(weight if states else 0, tag="optimizer") for _ in range(n)]
    tensors += [Tensor(activation, (i, back[i])) for i in range(n)]
    tensors += [Tensor(activation, (back[i], min(back[i] + 1, 2 * n - 1))) for i in range(n)]
    tensors += [Tensor(weight, (back[i], 2 * n + i), "grad") for i in range(n)]
    ops = []
    for i in range(n):
        name = "convolution" if i in convolutions else "linear"
        ops.append(Op(name, [i, *([2 * n + i - 1] if i else [])], [2 * n + i], us))
    for i in reversed(range(n)):
        name = f"{'convolution' if i in convolutions else 'linear'}_backward"
        came = [3 * n + i + 1] if i < n - 1 else []
        reads = [i, 2 * n + i, *([2 * n + i - 1] if i else []), *came]
        ops.append(Op(name, reads, [3 * n + i, 4 * n + i], 2 * us))
    ops += [Op("update", [4 * n + i], [i, n + i], us / 4) for i in range(n)]
    assert len(ops) == end + 1
    return step(tensors, ops)


def inference(layers: int, *, weight: int = 4, us: float = 1000.0) -> StepTrace:
    """Weights read one an op, each once a step."""
    ops = [Op("linear", [i], [], us) for i in range(layers)]
    return step([Tensor(weight, tag="param") for _ in range(layers)], ops)


@st.composite
def steps(draw: st.DrawFn) -> StepTrace:
    """Any valid step: lives of every kind, small tensors, ops without accesses or time."""
    n = draw(st.integers(1, 14))
    tensors: list[Tensor] = []
    for _ in range(draw(st.integers(1, 12))):
        pages = draw(st.sampled_from([0, 1, 1, 2, 3, 7]))
        tag = draw(st.sampled_from(["param", "optimizer", "activation", "grad", "temp", ""]))
        kind = draw(st.sampled_from([Kind.PERSISTENT, Kind.PERSISTENT, *Kind]))
        begin = draw(st.integers(0, n - 1))
        end = draw(st.integers(begin, n - 1))
        if kind is Kind.PERSISTENT:
            tensors.append(Tensor(pages, None, tag))
        elif kind is Kind.TRANSIENT:
            tensors.append(Tensor(pages, (begin, end), tag))
        else:
            tensors.append(Tensor(pages, (begin, n - 1), tag, kind=Kind.MADE))
            if kind is Kind.CARRIED:
                made = len(tensors) - 1
                tensors.append(Tensor(pages, (0, end), tag, kind=Kind.CARRIED, next_alias=made))
    ops = [_op(draw, tensors, index) for index in range(n)]
    return step(tensors, ops)


def _op(draw: st.DrawFn, tensors: list[Tensor], index: int) -> Op:
    alive = [
        t for t, tensor in enumerate(tensors)
        if tensor.life is None or tensor.life[0] <= index <= tensor.life[1]
    ]  # fmt: skip
    chosen = draw(st.lists(st.sampled_from(alive), max_size=4, unique=True)) if alive else []
    writes = [t for t in chosen if draw(st.booleans())]
    name = draw(st.sampled_from(["linear", "convolution", "linear_backward", "add"]))
    return Op(name, chosen, writes, draw(st.sampled_from([0.0, 50.0, 300.0, 5000.0])))
