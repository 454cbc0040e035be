"""The reads and writes of collectives, which their schemas omit."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

import numpy as np  # noqa: E402

import umem  # noqa: E402
from umem.base.device_profiles import DeviceProfile  # noqa: E402
from umem.capture import op_semantics  # noqa: E402
from umem.policies.base import Plan, WriteBack  # noqa: E402
from umem.trace.reader import read  # noqa: E402
from umem.trace.schema import Op  # noqa: E402
from umem.trace.step_trace import StepTrace  # noqa: E402

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


def tag_of(tensor: Any) -> str:
    (row,) = umem.tensors(tensor)
    return str(row.tag)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", [*OUT_OF_PLACE, *IN_PLACE])
def test_buffers_of_an_exchange_are_tagged(name: str) -> None:
    """Not what one rank hands out: that may be the batch."""
    umem.enable(budget="64MiB", device="soft", policy="lru")
    out, x = torch.empty(COUNT), torch.ones(COUNT)
    if name in OUT_OF_PLACE:
        OUT_OF_PLACE[name](out, x)
    else:
        IN_PLACE[name](x)
    expected = "input" if name in ("c10d::broadcast_", "c10d::scatter_") else "comm"
    assert tag_of(x) == expected


@pytest.mark.usefixtures("group")
def test_what_an_exchange_uses_keeps_the_tag_that_it_has() -> None:
    umem.enable(budget="64MiB", device="soft", policy="lru")
    weight, named = torch.nn.Parameter(torch.ones(COUNT)), torch.ones(COUNT)
    weight.square().sum().backward()
    umem.tag([named], "kv_cache")
    dist.all_reduce(weight.grad)
    dist.all_reduce(named)
    assert (tag_of(weight.grad), tag_of(named)) == ("grad", "kv_cache")


@pytest.mark.usefixtures("group")
def test_what_a_collective_works_on_stays_until_it_is_used_again() -> None:
    """gloo's threads continue after the op has ended, like NCCL's stream on a GPU."""
    umem.enable(budget="24MiB", device="soft", policy="lru")
    x = torch.ones(COUNT)
    work = dist.all_reduce(x, async_op=True)
    others = [torch.ones(COUNT) for _ in range(8)]  # x was used before these
    assert umem.where(x).resident_bytes == x.nbytes
    work.wait()
    x.add_(1)
    others += [torch.ones(COUNT) for _ in range(8)]
    assert umem.where(x).resident_bytes == 0
    assert torch.all(x == 2)


class Copies:
    """A policy that has what is reduced copied to the host until it is written again."""

    name = "copies"

    def plan(self, trace: StepTrace, _device: DeviceProfile, _budget: int) -> Plan:
        (op,) = np.flatnonzero([name == "c10d::allreduce_" for name in trace.op_names])
        tensor = int(trace.access_tensor[trace.access_start[op]])
        wrote = trace.access_write & (trace.access_tensor == tensor)
        until = int(trace.access_op[wrote].min()) + trace.n_ops
        return Plan(trace, write_back=(WriteBack(int(op), until, tensor),))


@pytest.mark.usefixtures("group")
def test_what_a_collective_may_still_write_is_copied_after_it() -> None:
    """A copy before that is useless: the write drops it, and takes a page fault."""
    umem.enable(budget="64MiB", device="soft", policy=Copies())
    x = torch.zeros(COUNT)
    hits = 0
    for i in range(8):
        x.add_(1)
        before = umem.stats()
        work = dist.all_reduce(x, async_op=True)
        at_work = umem.stats()
        ctypes.memset(x.data_ptr(), 0, x.nbytes)  # as a thread of gloo
        assert umem.stats().faults == at_work.faults
        assert at_work.bytes_out == before.bytes_out
        work.wait()
        assert x.sum().item() == 0
        hits = umem.stats().plan_hits
        copied = umem.stats().bytes_out - before.bytes_out
        assert copied == (x.nbytes if hits else 0), i
        umem.step()
    assert hits >= 9
    assert umem.where(x).resident_bytes == x.nbytes


# They create their results, and a rank reads the others' writes with plain loads.
WRITE_NO_ARGUMENT = {
    "_rendezvous", "_barrier", "barrier", "monitored_barrier_", "send", "isend", "check_for_nan",
    "nccl_put_signal", "nccl_put_with_signal", "nvshmem_put_with_signal", "nccl_wait_signal",
    "nccl_wait_for_signal", "nvshmem_wait_for_signal",
}  # fmt: skip
BY_ANOTHER = {"irecv", "batch_p2p_ops"}  # call operators of c10d, which are known


def test_what_collectives_write_is_known() -> None:
    """According to their schema, or a table; those that return new tensors write no argument.

    A newer torch with a collective that fits neither fails here.
    """
    import torch.distributed._symmetric_memory

    table = op_semantics.RECEIVING | op_semantics.IN_PLACE
    unknown = []
    for schema in torch._C._jit_get_all_schemas():
        space, _, name = schema.name.partition("::")
        if space not in ("c10d", "_c10d_functional", "c10d_functional", "symm_mem"):
            continue
        says = any(a.alias_info and a.alias_info.is_write for a in schema.arguments)
        makes = any(str(result.type) in ("Tensor", "List[Tensor]") for result in schema.returns)
        by_hand = schema.name in table or name in WRITE_NO_ARGUMENT | BY_ANOTHER
        if not (says or by_hand or (makes and not name.endswith("_"))):
            unknown.append(schema.name)
    assert unknown == []


@pytest.mark.usefixtures("group")
def test_what_receives_into_its_own_input_is_read_too(tmp_path: Path) -> None:
    """The input may be a part of the output, which then must not count as dead before."""
    umem.enable(budget="64MiB", device="soft", policy="lru", trace=tmp_path / "t.jsonl")
    x = torch.ones(COUNT)
    name = "c10d::_allgather_base_"
    call = lambda: dist.all_gather_into_tensor(x, x[:])  # noqa: E731
    assert recorded(name, call, tmp_path / "t.jsonl") == (1, 1)
