"""Ops on lists of tensors run in parts that fit into the budget, with the same bits."""

from __future__ import annotations

import gc
import inspect
import itertools
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import forkserver

torch = pytest.importorskip("torch")

import umem  # noqa: E402
from umem.base.native import core  # noqa: E402
from umem.capture import list_parts  # noqa: E402
from umem.integrations.torch import list_ops  # noqa: E402

MIB = 1 << 20
SIDE, LAYERS = 724, 8  # 2 MiB a weight
GROUPING = inspect.unwrap(torch.utils._foreach_utils._group_tensors_by_device_and_dtype)
OWN = GROUPING.__code__


def net() -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers = [m for _ in range(LAYERS) for m in (torch.nn.Linear(SIDE, SIDE), torch.nn.ReLU())]
    return torch.nn.Sequential(*layers)


Update = Callable[[torch.nn.Module], Callable[[], object]]


def stepping(name: str, **options: object) -> Update:
    def make(module: torch.nn.Module) -> Callable[[], object]:
        return getattr(torch.optim, name)(module.parameters(), **options).step

    return make


def clipping(norm: float) -> Update:
    def make(module: torch.nn.Module) -> Callable[[], object]:
        return lambda: torch.nn.utils.clip_grad_norm_(
            module.parameters(), 1e-3, norm_type=norm, foreach=True
        )

    return make


def scaling(module: torch.nn.Module) -> Callable[[], object]:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, foreach=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))  # creates its state

    def step() -> None:
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    return step


def averaging(module: torch.nn.Module) -> Callable[[], object]:
    averaged = torch.optim.swa_utils.AveragedModel(
        module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )

    def update() -> None:
        averaged.update_parameters(module)
        with torch.no_grad():
            for mine, mean in zip(module.parameters(), averaged.parameters(), strict=True):
                mine.add_(mean, alpha=0.5)

    return update


UPDATES: dict[str, Update] = {
    "AdamW": stepping("AdamW", foreach=True, amsgrad=True),
    "Adam fused": stepping("Adam", fused=True),
    "AdamW capturable": stepping("AdamW", fused=True, amsgrad=True, weight_decay=0.1),
    "SGD": stepping("SGD", lr=0.1, momentum=0.9, foreach=True),
    "SGD fused": stepping("SGD", lr=0.1, momentum=0.9, fused=True),
    "Adagrad": stepping("Adagrad", foreach=True),
    "Adagrad fused": stepping("Adagrad", fused=True),
    "Adafactor": stepping("Adafactor", foreach=True),
    **{
        name: stepping(name, foreach=True)
        for name in ("ASGD", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop")
    },
    "clip": clipping(2.0),
    "clip inf": clipping(float("inf")),
    "scaler": scaling,
    "average": averaging,
}


def train(make: Update, steps: int = 4) -> list[torch.Tensor]:
    module = net()
    update = make(module)
    for step in range(steps):
        x = torch.randn(4, SIDE, generator=torch.Generator().manual_seed(step))
        module(x).square().mean().backward()
        update()
    return [t.detach().clone() for p in module.parameters() for t in (p, p.grad) if t is not None]


def bits(tensors: list[torch.Tensor]) -> list[bytes]:
    """The bytes of each: no tensor of umem's outlives its session."""
    return [tensor.numpy().tobytes() for tensor in tensors]


@pytest.mark.parametrize("name", UPDATES)
def test_bits_are_equal(name: str) -> None:
    plain = train(UPDATES[name])
    with umem.enable(budget="16MiB", device="soft"):
        found = bits(train(UPDATES[name]))
        stats = umem.stats()
        gc.collect()
    assert bits(plain) == found
    assert stats.evictions > 0
    if name != "Adafactor":  # which joins the parts into one list again
        assert stats.ops_above_budget == 0


def tied(how: str) -> Update:
    def make(module: torch.nn.Module) -> Callable[[], object]:
        weights = list(module.parameters())
        if how == "tied by data":
            weights[-2].data = weights[0].data
        else:
            weights.append(weights[0])
        return torch.optim.AdamW(weights, lr=1e-2, weight_decay=0.3, foreach=True).step

    return make


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@pytest.mark.parametrize("how", ["tied by data", "given twice"])
def test_lists_whose_rows_share_memory_stay_whole(how: str) -> None:
    """The order of ops on the shared memory is that of the whole lists."""
    plain = train(tied(how))
    with umem.enable(budget="16MiB", device="soft", policy="lru"):
        found = bits(train(tied(how)))
        assert umem.stats().evictions > 0
        gc.collect()
    assert bits(plain) == found


def parts_of(tensors: list[torch.Tensor]) -> list[int]:
    groups = torch.utils._foreach_utils._group_tensors_by_device_and_dtype([tensors])
    return [len(rows) for (rows,), _ in groups.values()]


def test_lists_are_split_once_not_all_fits() -> None:
    with umem.enable(budget="32MiB", device="soft"):
        few = [torch.zeros(MIB // 4) for _ in range(16)]
        assert parts_of(few) == [16]
        more = [torch.zeros(MIB // 4) for _ in range(32)]
        assert parts_of(few) == [4, 4, 4, 4]
        del more
        assert parts_of(few) == [4, 4, 4, 4]
        assert parts_of([torch.zeros(4 * MIB) for _ in range(2)]) == [1, 1]  # larger than a part
        umem.set_budget("64MiB")
        assert parts_of(few) == [8, 8]
        del few


def test_they_go_by_their_device_and_dtype() -> None:
    with umem.enable(budget="16MiB", device="soft"):
        tensors = [torch.zeros(MIB, dtype=torch.uint8) for _ in range(12)]
        tensors += [torch.zeros(MIB // 2, dtype=torch.half) for _ in range(12)]
        tensors[::2], tensors[1::2] = tensors[:12], tensors[12:]
        other = torch.zeros(16 * MIB)
        groups = torch.utils._foreach_utils._group_tensors_by_device_and_dtype(
            [tensors, [None] * 24], True
        )
        assert set(groups) == {(torch.device("cpu"), t) for t in (torch.uint8, torch.half)}
        seen = [(key[1], rows, nones, at) for key, ((rows, nones), at) in groups.items()]
        assert [len(rows) for _, rows, _, _ in seen] == [2] * 12
        for dtype, rows, nones, at in seen:
            assert all(row is tensors[i] for row, i in zip(rows, at, strict=True))
            assert {row.dtype for row in rows} == {dtype}
            assert nones == [None, None]
        del tensors, other, groups, seen, rows


def test_tensors_of_other_devices_are_left_alone() -> None:
    with umem.enable(budget="16MiB", device="soft"):
        large = torch.zeros(8 * MIB)
        assert parts_of([torch.zeros(4 * MIB, device="meta") for _ in range(4)]) == [4]
        del large


def test_each_device_has_its_own_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = {0: 6, 1: 12}
    monkeypatch.setattr(
        core, "stats", lambda device: {"budget_bytes": 8, "peak_live_bytes": peaks[device]}
    )
    hooks = list_ops.ListOps("cuda")
    try:
        most = [hooks._most(torch.device("cuda", device)) for device in peaks]
    finally:
        hooks.remove()
    assert most == [0, 8 // list_ops._SHARE]  # 18 bytes of 16 together


def test_torch_has_its_own_functions_afterwards() -> None:
    unscale = torch._amp_foreach_non_finite_check_and_unscale_
    with umem.enable(budget="16MiB", device="soft"):
        assert GROUPING.__code__ is not OWN
        assert torch._amp_foreach_non_finite_check_and_unscale_ is not unscale
    assert GROUPING.__code__ is OWN
    assert torch._amp_foreach_non_finite_check_and_unscale_ is unscale


def test_an_inf_in_any_part_is_found() -> None:
    with umem.enable(budget="16MiB", device="soft"):
        grads = [torch.full((MIB // 4,), 2.0) for _ in range(32)]
        grads[5][7] = float("inf")
        found = torch.zeros(1)
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, torch.full((1,), 0.5))
        assert found.item() == 1
        assert all(grad[0].item() == 1 for grad in grads)
        del grads


@pytest.fixture
def compiled() -> Iterator[None]:
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("compiled")
def test_a_compiled_step_is_traced_as_torch_has_it() -> None:
    plain = compiled_clip()
    with umem.enable(budget="16MiB", device="soft"):
        large = torch.zeros(8 * MIB)
        assert compiled_clip() == plain
        del large


def compiled_clip() -> list[float]:
    weights = [torch.ones(4, requires_grad=True) for _ in range(3)]
    for weight in weights:
        weight.grad = torch.ones(4)
    clip = torch.compile(
        lambda: torch.nn.utils.clip_grad_norm_(weights, 1.0, foreach=True), backend="eager"
    )
    clip()
    return [value for weight in weights for value in weight.grad.tolist()]


# Actions of a program before it compiles a step: Dynamo fills its tables at several such moments.
BEFORE = {
    "nothing": "",
    "dynamo is imported": "import torch._dynamo",
    "a session compiled": "with session(): clipped()",
    "dynamo was imported, and a session compiled": """
import torch._dynamo
with session():
    clipped()
""",
    "dynamo was imported in a session": """
with session():
    import torch._dynamo
""",
    "a process group was made in a session": """
import torch._dynamo
from torch.testing._internal.distributed.fake_pg import FakeStore
with session():
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    clipped()
""",
    "a step was captured": """
from umem.capture import program

def step():
    weight = torch.ones(4, device="cuda", requires_grad=True)
    weight.grad = torch.ones(4, device="cuda")
    torch.nn.utils.clip_grad_norm_([weight], 1.0, foreach=True)

program.trace(lambda: step)
""",
}


@pytest.mark.parametrize(
    "where", ["session", pytest.param("contextlib.nullcontext", marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize("before", BEFORE.values(), ids=BEFORE)
def test_a_compiled_clip_is_one_graph(before: str, where: str) -> None:
    program = f"""
import contextlib
import torch
import umem

def session():
    return umem.enable(budget="16MiB", device="soft")

def clipped():
    clip = torch.compile(torch.nn.utils.clip_grad_norm_, backend="eager", fullgraph=True)
    weights = [torch.ones(4, requires_grad=True) for _ in range(4)]
    for weight in weights:
        weight.grad = torch.ones(4)
    return clip(weights, 1.0, foreach=True).item()

{before}
torch.compiler.reset()
with {where}():
    assert clipped() == 4.0
"""
    done = forkserver.run(["-c", program], prepare="import torch, umem.session.session")
    assert done.returncode == 0, done.stderr


@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=20), most=st.integers(1, 20))
def test_parts_are_the_rows_in_their_order(sizes: list[int], most: int) -> None:
    count = len(sizes)
    lists: list_parts.Lists = [[torch.empty(size, dtype=torch.uint8) for size in sizes]]
    lists += [[None] * count, []]
    found = list(list_parts.parts((lists, [*range(count)]), most))
    assert [row for (rows, _, _), _ in found for row in rows] == lists[0]
    assert [i for _, indices in found for i in indices] == [*range(count)]
    taken = [[sizes[i] for i in indices] for _, indices in found]
    for ((rows, nones, empty), indices), part in zip(found, taken, strict=True):
        assert len(rows) == len(nones) == len(indices) > 0
        assert empty == []
        assert len(part) == 1 or sum(part) <= most
    for part, following in itertools.pairwise(taken):
        assert sum(part) + following[0] > most  # none is needlessly small
