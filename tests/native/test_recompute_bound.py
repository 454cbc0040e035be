"""No replay of a rewritten step is shorter than the bound of all plans to swap and recompute."""

from __future__ import annotations

import random

import numpy as np
import pytest
from support.steptraces import LINK, PAGE, Op, Tensor, step

from umem.recompute.planner.bound import lower_bound_us
from umem.recompute.planner.graph import RecomputeGraph
from umem.recompute.planner.rewrite import rewrite
from umem.simulation import replay
from umem.trace.step_trace import StepTrace


def _training(generator: random.Random) -> StepTrace:
    """Forward, a loss that the program keeps, backward, an optimizer with two states each."""
    n, us = generator.randint(3, 8), generator.choice((20.0, 200.0, 2000.0))
    pages = [generator.randint(2, 12) for _ in range(n)]
    weights, first = list(range(n)), list(range(n, 2 * n))
    second, made = list(range(2 * n, 3 * n)), list(range(3 * n, 4 * n))
    grads, loss = list(range(4 * n, 5 * n)), 5 * n
    tensors = [Tensor(p, None, "param") for p in pages]
    tensors += [Tensor(p, None, "optimizer") for p in pages * 2]
    ops = [Op("linear", [weights[0]], [made[0]], us)]
    ops += [Op("linear", [weights[i], made[i - 1]], [made[i]], us) for i in range(1, n)]
    ops.append(Op("nll_loss", [made[-1]], [loss], us))
    for i in reversed(range(n)):
        behind = [grads[i + 1]] if i + 1 < n else [loss]
        ops.append(Op("linear_backward", [made[i], weights[i], *behind], [grads[i]], 2 * us))
    for i in range(n):
        ops.append(Op("adam_", [grads[i]], [weights[i], first[i], second[i]], us / 4))
    uses = {t: [i for i, op in enumerate(ops) if t in op.touched] for t in [*made, *grads, loss]}
    lives = {t: (at[0], at[-1]) for t, at in uses.items()}
    lives[loss] = lives[loss][0], len(ops) - 1  # in a variable of the program
    tensors += [Tensor(p, lives[t], "activation") for p, t in zip(pages, made, strict=True)]
    tensors += [Tensor(p, lives[t], "grad") for p, t in zip(pages, grads, strict=True)]
    tensors.append(Tensor(generator.randint(2, 16), lives[loss], "activation"))
    return step(tensors, ops)


@pytest.mark.parametrize("seed", range(40))
def test_no_replay_is_below_the_bound(seed: int) -> None:
    pytest.importorskip("highspy")
    generator = random.Random(seed)
    trace = _training(generator)
    graph = RecomputeGraph(trace)
    least = replay.min_budget(trace)
    share = generator.random()
    budget = int(least + share * max(trace.peak_bytes - least, 0)) // PAGE * PAGE
    drop = graph.droppable & np.array([generator.random() < 0.5 for _ in range(trace.n_tensors)])
    bound = lower_bound_us(graph, LINK, budget)
    assert bound >= trace.compute_us
    for chosen in (drop, graph.droppable, np.zeros_like(drop)):
        new = rewrite(graph, chosen, *np.zeros((2, len(chosen)), bool))
        if replay.min_budget(new.step) > budget:
            continue
        found = replay.replay_step(new.step, "auto", LINK, budget)
        assert found.step_us >= bound * (1 - 1e-6)
