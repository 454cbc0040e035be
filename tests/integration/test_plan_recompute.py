"""Recompute plans of real networks: ordinals, names, and `umem plan --recompute`."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from umem import cli
from umem.base import device_profiles
from umem.base.units import PAGE_BYTES
from umem.capture import program, roofline
from umem.capture.recording import Recording
from umem.errors import PlanError
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


def planned() -> tuple[Recording, StepTrace]:
    recording = program.trace(convolutions)
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
    assert graph.droppable.sum() == 8  # of each layer the convolution and the ReLU
    norms = [t for t in np.flatnonzero(graph.droppable) if len(graph.writers[t]) == 2]
    drop = np.zeros(step.n_tensors, bool)
    drop[norms] = True
    plan = executable(rewrite(graph, drop, np.zeros_like(drop)), recording, ordinals)
    dropped = [plan.names[ordinal] for ordinal in plan.drop]
    assert dropped == ["aten.native_batch_norm.default", "aten.relu_.default"] * 4
    assert plan.keep_below == PAGE_BYTES


def test_a_step_of_another_recording_is_refused() -> None:
    recording, step = planned()
    other = replace(step, op_names=("aten::mm", *step.op_names[1:]))
    with pytest.raises(PlanError, match="not those of the recording"):
        graph_of(other, recording)


@pytest.mark.parametrize("mode", ["all", "auto"])
def test_umem_plan_compares_ways_to_recompute(
    mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", f"{__name__}:convolutions", "--budget", "60%", "--policy", "auto"]
    assert cli.main([*words, "--recompute", mode, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["recompute"]
    names = [row["mode"] for row in found["modes"]]
    assert names == (["swap", "recompute", "per_block", "auto"] if mode == "all" else [mode])
    steps = {row["mode"]: row["replay"]["step_us"] for row in found["modes"] if row["replay"]}
    assert steps["auto"] == min(steps.values())
    best = next(row for row in found["modes"] if row["mode"] == "auto")
    RecomputePlan.from_dict(best["plan"])
    assert found["lower_bound_us"] is None or found["lower_bound_us"] <= steps["auto"]
    assert cli.main([*words, "--recompute", mode]) == 0
    assert "lower bound" in capsys.readouterr().out


def test_an_unknown_way_is_an_error_before_the_program_runs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["plan", "no.such:program", "--recompute", "perblock"]) != 0
    assert "did you mean per_block" in capsys.readouterr().err
