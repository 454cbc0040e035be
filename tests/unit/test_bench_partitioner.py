"""torch's partitioner and umem: its choice in umem's step, and which recomputes less."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from support.benches import imports, module  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from umem.base import device_profiles  # noqa: E402
from umem.capture import program, roofline  # noqa: E402
from umem.demo.nets import GPTBlock  # noqa: E402
from umem.recompute.planner import modes  # noqa: E402
from umem.recompute.planner.graph import RecomputeGraph  # noqa: E402
from umem.trace.step_builder import last_step  # noqa: E402

Made = tuple[nn.Module, Callable[[], None]]
DEVICE = device_profiles.find("a100-pcie4")


@pytest.fixture
def partitioner(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, imported as bench/recompute.py does."""
    for imported in imports(monkeypatch, "policies"):
        yield imported("recompute_partitioner")


def training(net: nn.Module, batch: Tensor) -> Made:
    optimizer = torch.optim.SGD(net.parameters(), 0.1, foreach=False)

    def step() -> None:
        net(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return net, step


def transformer() -> Made:
    blocks = nn.Sequential(*(GPTBlock(128, 4) for _ in range(2)))
    return training(blocks, torch.randn(32, 512, 128))


def convolutional() -> Made:
    """Norms with buffers, and activation functions in place."""
    bottleneck = module("nets").Bottleneck
    blocks = nn.Sequential(nn.Conv2d(3, 64, 3, 1, 1), *(bottleneck(64, 16, 1) for _ in range(2)))
    return training(blocks, torch.randn(32, 3, 64, 64))


def perceptron() -> Made:
    return training(nn.Linear(8, 8), torch.randn(2, 8))


NETS = pytest.mark.parametrize(
    "make", [transformer, pytest.param(convolutional, marks=pytest.mark.nightly)]
)


def graph_of(make: Callable[[], Made]) -> RecomputeGraph:
    recording = program.trace(make)
    return modes.graph_of(last_step(recording.device_events(roofline.clock(DEVICE))), recording)[0]


@NETS
def test_its_choice_costs_as_in_its_graph_and_umems_is_no_longer(
    partitioner: Any, make: Callable[[], Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partitioner, "BUDGETS", (1.0, 0.5, 0.2, 0.0))
    graph = graph_of(make)
    found = list(partitioner.choices(partitioner.joint_graph(make), graph))
    theirs = [choice for choice in found if choice.way != partitioner.BLOCKS]
    assert [choice.share for choice in theirs] == [1.0, 0.5, 0.2, 0.0] * 2
    assert theirs[0].saved_bytes > theirs[3].saved_bytes == 0
    for choice in theirs:
        assert choice.new.recompute_us == pytest.approx(choice.again_us)
    assert theirs[3].new.recompute_us > 0.05 * graph.step.compute_us
    rows = list(partitioner.compared(graph, DEVICE, found))
    assert {row["way"] for row in rows} >= set(partitioner.ESTIMATORS)
    for row in rows:
        assert row["peak_bytes"] < row["whole_peak_bytes"] <= graph.step.peak_bytes
        assert row["umem_peak_bytes"] <= row["peak_bytes"]
        assert row["umem_us"] <= row["step_us"] * partitioner.EQUAL


def test_other_ops_than_the_steps_are_an_error(partitioner: Any) -> None:
    joint = partitioner.joint_graph(perceptron)
    with pytest.raises(ValueError, match=r"op 0 of forward is \['addmm'.*native_layer_norm"):
        partitioner.ops_of(joint, graph_of(transformer))


def test_a_step_without_backward_is_an_error(partitioner: Any) -> None:
    def make() -> Made:
        net, batch = nn.Linear(4, 4), torch.randn(2, 4)
        return net, lambda: net(batch)

    with pytest.raises(ValueError, match="no backward"):
        partitioner.joint_graph(make)


def row(**given: Any) -> dict[str, Any]:
    about = {
        "workload": "unet",
        "device": "a100",
        "way": "flops",
        "share": 0.5,
        "compute_us": 100.0,
        "whole_peak_bytes": 1000,
        "peak_bytes": 500,
        "step_us": 120.0,
        "umem_us": 110.0,
        "saved_bytes": 1 << 30,
        "umem_saved_bytes": 1 << 29,
    }
    return {**about, **given}


def test_the_report_says_who_is_shorter_and_where(partitioner: Any) -> None:
    lost = row(umem_us=None, umem_saved_bytes=None, share=0.1)
    rows = [row(), row(umem_us=120.0), row(umem_us=132.0, share=0.3), lost]
    (target,) = partitioner.targets(rows)
    assert (target.value, target.most, target.where) == (2, 0, "unet, 0.1")
    text = "\n".join(partitioner.section(rows))
    assert "at 4 peaks: umem's step is shorter at 1, equal at 1, longer at 1, and 1 times" in text
    assert "1.100 (highest)" in text
    assert "| unet | a100 | flops | 0.5 | 0.500 | 1.200 | 1.100 | 1.00/0.50 |" in text
    assert "| unet | a100 | flops | 0.1 | 0.500 | 1.200 | none | 1.00/- |" in text
