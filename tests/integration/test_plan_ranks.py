"""``umem plan --ranks``: a distributed program, as its first rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import schemas

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from umem import cli
from umem.base import nodes
from umem.capture import collectives
from umem.capture.fake_ranks import as_rank_0
from umem.capture.recording import Exchange
from umem.errors import PlanError
from umem.trace.ids import BlockId
from umem.trace.schema import Event, Op, Step

PROGRAM = """
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

def _net():
    return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4)))

def _step(net):
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    return net, optimizer, torch.randn(512, 1024), lambda model, x: model(x).sum()

def plain():
    return _step(_net())

def sharded():
    dist.init_process_group("nccl", rank=int(os.environ["RANK"]))
    net = _net()
    for layer in net:
        fully_shard(layer)
    fully_shard(net)
    return _step(net)

def tensor_parallel():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
    from torch.distributed.tensor.parallel import parallelize_module
    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("data", "parts"))["parts"]
    net = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024))
    parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return _step(net)
"""
MIB = 1 << 20
WEIGHTS = 4 * 4 * MIB  # `_net`'s


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks") / "planned_ranks.py"
    path.write_text(PROGRAM)
    return path


@pytest.fixture
def plan(module: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    monkeypatch.chdir(module.parent)

    def planned(name: str, *options: str) -> dict[str, Any]:
        call = ["plan", f"planned_ranks:{name}", "--json", "--policy", "auto", *options]
        assert cli.main(call) == 0
        answer: dict[str, Any] = schemas.read("plan", capsys.readouterr().out)
        return answer

    return planned


def test_one_rank_is_planned_as_without_ranks(plan: Any) -> None:
    alone = plan("plain", "--device", "h200-pcie5", "--budget", "50%")
    one = plan("plain", "--node", "h200x8", "--ranks", "1", "--budget", "50%")
    for answer in (alone, one):
        del answer["trace_seconds"], answer["policies"][0]["events_per_s"]
    ranks = one.pop("ranks")
    assert alone.pop("ranks") is None
    assert one == alone
    assert ranks["nodes"] == ranks["nodes_needed"] == 1
    assert ranks["exchanged_bytes"] == 0
    assert ranks["step_us"] == ranks["alone_us"] == one["policies"][0]["step_us"]


def test_more_ranks_on_a_node_share_its_links_and_memory(plan: Any) -> None:
    rows = [plan("plain", "--node", "h200x8", "--ranks", str(n), "--budget", "50%")["ranks"]
            for n in (1, 2, 8, 9)]  # fmt: skip
    assert [row["link_gb_s_in"] for row in rows] == [55, 27.5, 27.5, 27.5]
    assert [row["nodes"] for row in rows] == [1, 1, 1, 2]
    times = [row["step_us"] for row in rows]
    assert times == sorted(times)
    assert times[0] < times[1] == times[2]
    assert rows[2]["alone_us"] == pytest.approx(times[0])
    assert rows[0]["host_bytes_rank"] > 0
    assert [row["host_bytes_node"] for row in rows] == [
        busy * row["host_bytes_rank"] for busy, row in zip((1, 2, 8, 8), rows, strict=True)
    ]


def test_shards_get_smaller_with_more_ranks(plan: Any) -> None:
    rows = [plan("sharded", "--node", "h200x8", "--ranks", str(n)) for n in (2, 8, 64)]
    peaks = [row["peak_bytes"] for row in rows]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[0] > peaks[1]
    for row, ranks in zip(rows, (2, 8, 64), strict=True):
        # Each weight is gathered before forward and backward, and its gradient is scattered. The
        # last block is gathered once: backward uses it immediately.
        share = (ranks - 1) / ranks * WEIGHTS
        assert 2 * share <= row["ranks"]["exchanged_bytes"] <= 3 * share
        assert row["ranks"]["exchange_us"] > 0
        assert row["ranks"]["exposed_us"] <= row["ranks"]["exchange_us"] + 100
    assert rows[1]["peak_by_tag"]["param"] == pytest.approx(WEIGHTS / 8, rel=0.02)
    assert rows[1]["peak_by_tag"]["optimizer"] == pytest.approx(2 * WEIGHTS / 8, rel=0.02)


def test_tensor_parallel_has_the_parts_of_one_rank(plan: Any) -> None:
    answer = plan("tensor_parallel", "--node", "h200x8", "--ranks", "8")
    assert answer["peak_by_tag"]["param"] == pytest.approx(2 * 4 * MIB / 4, rel=0.02)
    # Only the sum over the four parts of the output of 2 MiB.
    assert answer["ranks"]["exchanged_bytes"] == pytest.approx(2 * 3 / 4 * 2 * MIB)


def test_the_text_says_what_a_node_needs(
    module: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(module.parent)
    call = ["plan", "planned_ranks:sharded", "--node", "a100-pcie4x4", "--budget", "60%"]
    assert cli.main([*call, "--policy", "auto"]) == 0
    out = capsys.readouterr().out
    for words in ("4 on 1 x a100-pcie4x4, 4 busy on each", "12.5 GB/s in", "compute waits for",
                  "times that of a device with its own link", "a node of 512 GiB"):  # fmt: skip
        assert words in out, out
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(("ranks_beside", "nodes"), [(2.9, 2), (1.5, 4), (0.9, None)])
def test_a_host_that_is_too_small_needs_more_nodes(
    plan: Any, tmp_path: Path, ranks_beside: float, nodes: int | None
) -> None:
    """No rank's bytes are on two hosts."""
    node = tmp_path / "small.toml"

    def answer(memory: int) -> Any:
        node.write_text(
            f'name = "small"\ndevice = "a100-pcie4"\ndevices = 4\nmemory = "{memory}MiB"\n'
            'peer_gb_s = 25\nnetwork_gb_s = 25\nsource = "by hand"\n'
        )
        return plan("plain", "--node", str(node), "--budget", "50%")["ranks"]

    needed = answer(1 << 20)["host_bytes_rank"] / MIB
    ranks = answer(int(ranks_beside * needed / 0.9))
    assert not ranks["host_fits"]
    assert ranks["nodes"] == 1
    assert ranks["nodes_needed"] == nodes


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--ranks", "8"], "--ranks needs --node"),
        (["--node", "h200x8", "--ranks", "0"], "allowed: at least 1"),
        (["--node", "h200x8", "--device", "h200-pcie5"], "--node has its own device"),
        (["--node", "h200x9"], "did you mean h200x8"),
    ],
)
def test_options_that_do_not_go_together(
    options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", "no:matter", *options]) == 2
    assert says in capsys.readouterr().err


def _op(name: str, reads: list[int], writes: list[int], us: float) -> Op:
    return Op(name, tuple(map(BlockId, reads)), tuple(map(BlockId, writes)), us)


def test_a_collective_runs_beside_compute_and_its_result_is_waited_for() -> None:
    gather, compute = "c10d::_allgather_base_", "aten::mm"
    events: list[Event] = [
        _op(gather, [1], [2], 10),  # 0 to 10
        _op(compute, [2], [3], 5),  # waits for 10, to 15; the next may begin at 10
        _op(gather, [1], [4], 8),  # 10 to 18
        _op(compute, [3], [5], 2),  # 15 to 17
        _op(compute, [4, 5], [6], 1),  # waits for 1
        _op("c10d::_reduce_scatter_base_", [6], [7], 4),  # 19 to 23: its input is there at 19
        Step(),
    ]
    times = [event.us for event in collectives.beside_compute(events) if isinstance(event, Op)]
    assert times == [0, 15, 0, 2, 2, 0, 4]  # the end of the step waits for the last one


def test_the_time_of_a_ring_by_the_nodes_that_it_passes() -> None:
    node = nodes.find("h200x8")  # 450 GB/s in a node, 400 GB/s between
    assert Exchange(450e3, tuple(range(8))).us(node) == 1.0
    assert Exchange(400e3, tuple(range(64))).us(node) == 1.0
    assert Exchange(50e3, (0, 8, 16)).us(node) == 1.0  # one adapter of eight


def test_a_program_with_ranks_of_its_own_gets_no_others() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        with pytest.raises(PlanError, match="a process group exists already"), as_rank_0(4):
            pytest.fail("there are two ranks")
        assert dist.get_world_size() == 2
    finally:
        dist.destroy_process_group()


def test_a_mesh_may_be_made_by_its_class() -> None:
    with as_rank_0(4):
        dist.init_process_group("nccl")  # exists already
        mesh = DeviceMesh("cuda", torch.arange(4).view(2, 2), mesh_dim_names=("one", "two"))
        assert mesh.size() == dist.get_world_size() == 4
        assert mesh["two"].mesh.tolist() == [0, 1]
        assert mesh.device_type == "cpu"
    assert not dist.is_initialized()
