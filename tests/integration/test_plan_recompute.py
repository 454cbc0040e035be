"""Recompute plans of real networks: ordinals, names, and `umem plan --recompute`."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
from support import schemas
from support.recompute import names_of
from torch import nn

import umem
from umem import cli
from umem.base import device_profiles
from umem.base.units import PAGE_BYTES
from umem.capture import program, roofline
from umem.capture.recording import Recording
from umem.errors import PlanError
from umem.recompute.executor.forward import Prepared, dropping
from umem.recompute.planner.modes import executable, graph_of
from umem.recompute.planner.plan import RecomputePlan
from umem.recompute.planner.rewrite import rewrite
from umem.trace.step_builder import StepBuilder
from umem.trace.step_trace import StepTrace


def convolutions() -> tuple[nn.Module, object]:
    """Four times convolution, norm and ReLU in place, large enough to be worth dropping."""
    layers: list[nn.Module] = []
    for i in range(4):
        layers += [nn.Conv2d(16 if i else 3, 16, 3, 1, 1), nn.BatchNorm2d(16), nn.ReLU(True)]
    net = nn.Sequential(*layers)
    images = torch.randn(16, 3, 64, 64)
    return net, lambda: net(images).sum().backward()


def planned(make: Callable[[], object] = convolutions) -> tuple[Recording, StepTrace]:
    recording = program.trace(make)
    builder = StepBuilder()
    for event in recording.device_events(roofline.clock(device_profiles.find("a100-pcie4"))):
        builder.add(event)
    return recording, builder.step()


def test_ops_of_the_forward_pass_have_their_place_among_all_calls() -> None:
    recording, step = planned()
    graph, ordinals = graph_of(step, recording)
    names = [recording.forward[ordinal] for ordinal in ordinals if ordinal >= 0]
    assert names.count("aten.convolution.default") == 4
    assert graph.forward.sum() == len(names)
    for op, ordinal in enumerate(ordinals):
        if ordinal >= 0:
            bare = step.op_names[op].removeprefix("aten::")
            assert recording.forward[ordinal].startswith(f"aten.{bare}.")
    assert ordinals == sorted(ordinals[: len(names)]) + [-1] * (len(ordinals) - len(names))


def test_norms_and_what_changes_them_in_place_are_dropped_together() -> None:
    recording, step = planned()
    graph, ordinals = graph_of(step, recording)
    assert graph.droppable.sum() == 8  # each layer's convolution and ReLU
    norms = [t for t in np.flatnonzero(graph.droppable) if len(graph.writers[t]) == 2]
    drop = np.zeros(step.n_tensors, bool)
    drop[norms] = True
    plan = executable(rewrite(graph, drop, *np.zeros((2, len(drop)), bool)), recording, ordinals)
    dropped = [plan.names[ordinal] for ordinal in plan.drop]
    assert dropped == ["aten.native_batch_norm.default", "aten.relu_.default"] * 4
    assert plan.keep_below == PAGE_BYTES


def test_a_step_of_another_recording_is_refused() -> None:
    recording, step = planned()
    other = replace(step, op_names=("aten::mm", *step.op_names[1:]))
    with pytest.raises(PlanError, match="not those of the recording"):
        graph_of(other, recording)


class Skips(nn.Module):
    """Activations of 4 MiB that are joined again in reverse order; only autograd holds them.

    Unlike convolutions, its ops take no memory of their own on a CPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(3, 16)
        self.down = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])
        self.norm = nn.BatchNorm1d(16)
        self.up = nn.ModuleList([nn.Linear(32, 16) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        held = [self.into(x)]
        for part in self.down:
            held.append(part(held[-1]).tanh())
        last = [self.norm(held[-1]).relu_()]
        for part in self.up:
            last.append(part(torch.cat([last.pop(), held.pop()], 1)).tanh())
        return last.pop() * held.pop().sigmoid()


def skips() -> tuple[Skips, torch.Tensor]:
    torch.manual_seed(0)
    return Skips(), torch.randn(1 << 16, 3)


def traced_skips() -> tuple[Skips, object]:
    net, x = skips()
    return net, lambda: net(x).square().mean().backward()


@pytest.fixture(scope="module")
def traced() -> tuple[Recording, StepTrace]:
    return planned(traced_skips)


@dataclass
class Ran:
    """A second step of `skips`: its peak, the ops of its backward, and its gradients."""

    peak_bytes: int
    ops: Counter[str]
    gradients: list[bytes]


def ran(plan: RecomputePlan) -> Ran:
    with umem.enable(budget="1GiB", device="soft"):
        net, x = skips()
        for _ in range(2):
            net.zero_grad()
            gc.collect()
            umem.reset_peak_stats()
            with dropping(Prepared(plan)) as tally:
                loss = net(x).square().mean()
            assert tally.mismatch == ""
            ops = Counter(names_of(loss.backward))
        bits = [p.grad.numpy().tobytes() for p in net.parameters() if p.grad is not None]
        found = Ran(umem.stats().peak_live_bytes, ops, bits)
        del net, x, loss
    return found


@cache  # no fixture: it would start before the test sets one thread, which determines the bits
def plainly(names: tuple[str, ...]) -> Ran:
    return ran(RecomputePlan(names, ()))


MIB = 1 << 20


@pytest.mark.parametrize("freed", [0.0, 0.3, 0.6, 1.0])
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(it, marks=pytest.mark.nightly) for it in (1, 2))]
)
def test_a_plan_that_frees_some_values_runs_as_planned(
    traced: tuple[Recording, StepTrace], seed: int, freed: float
) -> None:
    """The gradients' bits, each op's number of reruns, and the peak, up to one activation.

    Autograd unpacks all of a node's saved tensors before its first op, the plan each op's inputs:
    hence the one activation.
    """
    recording, step = traced
    graph, ordinals = graph_of(step, recording)
    drop, keep, free = np.random.default_rng(seed).random((3, step.n_tensors))
    new = rewrite(graph, drop < 0.8, keep < 0.1, free < freed)
    plan = executable(new, recording, ordinals)
    assert bool(plan.free) == (freed > 0)
    plain, found = plainly(recording.forward), ran(plan)
    assert found.gradients == plain.gradients
    again = Counter(plan.names[ordinals[op]] for op in new.origin[new.again])
    assert {name: found.ops[name] - plain.ops[name] for name in again} == again
    assert found.peak_bytes == pytest.approx(new.step.peak_bytes, abs=4.25 * MIB)


def test_freed_copies_lower_the_peak_as_planned(traced: tuple[Recording, StepTrace]) -> None:
    """Activations that the encoder also needs are idle in between."""
    recording, step = traced
    graph, ordinals = graph_of(step, recording)
    nothing = np.zeros(step.n_tensors, bool)
    kept, freed = (rewrite(graph, graph.droppable, nothing, free) for free in (nothing, ~nothing))
    found = [ran(executable(new, recording, ordinals)).peak_bytes for new in (kept, freed)]
    assert kept.step.peak_bytes - freed.step.peak_bytes >= 16 * MIB
    assert found[0] - found[1] >= 16 * MIB


@pytest.mark.parametrize("mode", ["all", "auto"])
def test_umem_plan_compares_ways_to_recompute(
    mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", f"{__name__}:convolutions", "--budget", "60%", "--policy", "auto"]
    assert cli.main([*words, "--recompute", mode, "--json"]) == 0
    found = schemas.read("plan", capsys.readouterr().out)["recompute"]
    names = [row["mode"] for row in found["modes"]]
    assert names == (["swap", "recompute", "per_block", "auto"] if mode == "all" else [mode])
    steps = {row["mode"]: row["replay"]["step_us"] for row in found["modes"] if row["replay"]}
    assert steps["auto"] == min(steps.values())
    best = next(row for row in found["modes"] if row["mode"] == "auto")
    assert RecomputePlan(**best["plan"]).as_dict() == best["plan"]
    assert (found["lower_bound_us"] is None) == bool(found["lower_bound_missing"])
    assert found["lower_bound_us"] is None or found["lower_bound_us"] <= steps["auto"]
    assert cli.main([*words, "--recompute", mode]) == 0
    assert "lower bound" in capsys.readouterr().out


def test_an_unknown_way_is_an_error_before_the_program_runs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["plan", "no.such:program", "--recompute", "perblock"]) != 0
    assert "did you mean per_block" in capsys.readouterr().err
