"""What collectives read and write, of which their schemas say nothing."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

import umem  # noqa: E402
from umem.trace.reader import read  # noqa: E402
from umem.trace.schema import Op  # noqa: E402

COUNT = 1 << 20  # elements

# Newer versions of torch have other names for the ones that take whole tensors.
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    if not dist.is_available():
        pytest.skip("torch without distributed")
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


OUT_OF_PLACE: dict[str, Callable[[Any, Any], Any]] = {
    "c10d::allgather_": lambda out, x: dist.all_gather([out], x),
    "c10d::_allgather_base_": dist.all_gather_into_tensor,
    "c10d::reduce_scatter_": lambda out, x: dist.reduce_scatter(out, [x]),
    "c10d::_reduce_scatter_base_": dist.reduce_scatter_tensor,
    "c10d::gather_": lambda out, x: dist.gather(x, [out]),
    "c10d::scatter_": lambda out, x: dist.scatter(out, [x]),
}
IN_PLACE: dict[str, Callable[[Any], Any]] = {
    "c10d::allreduce_": dist.all_reduce,
    "c10d::broadcast_": lambda x: dist.broadcast(x, 0),
    "c10d::reduce_": lambda x: dist.reduce(x, 0),
}


def recorded(name: str, call: Callable[[], Any], path: Path) -> tuple[int, int]:
    """The number of tensors that the collective reads, and of those that it writes."""
    call()
    umem.disable()
    gc.collect()
    _, events = read(path)
    (op,) = [event for event in events if isinstance(event, Op) and event.name == name]
    return len(op.reads), len(op.writes)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", OUT_OF_PLACE)
def test_what_receives_is_written_and_not_read(name: str, tmp_path: Path) -> None:
    umem.enable(budget="64MiB", device="soft", policy="lru", trace=tmp_path / "t.jsonl")
    out, x = torch.empty(COUNT), torch.ones(COUNT)
    found = recorded(name, lambda: OUT_OF_PLACE[name](out, x), tmp_path / "t.jsonl")
    assert torch.equal(out, x)
    assert found == (1, 1)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", IN_PLACE)
def test_what_is_reduced_in_place_is_read_and_written(name: str, tmp_path: Path) -> None:
    umem.enable(budget="64MiB", device="soft", policy="lru", trace=tmp_path / "t.jsonl")
    x = torch.ones(COUNT)
    assert recorded(name, lambda: IN_PLACE[name](x), tmp_path / "t.jsonl") == (1, 1)
    assert torch.all(x == 1)


@pytest.mark.usefixtures("group")
def test_what_receives_into_its_own_input_is_read_too(tmp_path: Path) -> None:
    """The input may be a part of the output, which then must not count as dead before."""
    umem.enable(budget="64MiB", device="soft", policy="lru", trace=tmp_path / "t.jsonl")
    x = torch.ones(COUNT)
    name = "c10d::_allgather_base_"
    call = lambda: dist.all_gather_into_tensor(x, x[:])  # noqa: E731
    assert recorded(name, call, tmp_path / "t.jsonl") == (1, 1)
