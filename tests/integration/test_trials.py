"""Programs of several threads, optimizers and ranks: equal bits, and plans that are followed.

`make test-distributed` runs all trials, at each budget.
"""

from __future__ import annotations

import pytest

pytest.importorskip("torch.distributed")

from distributed import model, trial

MIB = 1 << 20
COURSE = trial.Course(batch=1)  # what a batch computes takes no part in what is tested


# torch 2.13 gives all_gather_into_tensor another name. Each peak is that of live bytes, of the rank
# with the most.
@pytest.mark.filterwarnings("ignore:`torch.distributed.all_gather_into_tensor` is deprecated")
@pytest.mark.parametrize(
    ("name", "peak_mib", "share"),
    [
        ("foreach", 117, 4),
        pytest.param("fused", 113, 4, marks=pytest.mark.nightly),
        pytest.param("side_thread", 129, 2, marks=pytest.mark.nightly),
        pytest.param("in_backward", 103, 4, marks=pytest.mark.nightly),
        pytest.param("optimizers12", 121, 4, marks=pytest.mark.nightly),
        ("adversaries", 121, 2),
        pytest.param("all_gather", 127, 2, marks=pytest.mark.nightly),
        pytest.param("ddp", 151, 2, marks=pytest.mark.nightly),
        pytest.param("fsdp1", 125, 2, marks=pytest.mark.nightly),
        pytest.param("fsdp2", 110, 2, marks=pytest.mark.nightly),
    ],
)
def test_bits_are_equal_and_plans_hold(name: str, peak_mib: int, share: int) -> None:
    plain = trial.run(name, "plain", course=COURSE)
    budget = peak_mib // share * MIB
    found = trial.run(name, f"1/{share}", bytes_of_budget=budget, course=COURSE)
    assert not plain.error
    assert not found.error
    assert found.bits == plain.bits
    assert found.peak_live_bytes >= 0.9 * peak_mib * MIB  # else it is no such part of it
    assert found.hit_share is not None
    assert found.hit_share >= 0.95
    for rank in found.ranks:
        counted = rank.complete[trial.FIRST :]
        assert sum(plan > 0 for plan in counted) >= 0.85 * len(counted)  # all but one


def test_views_of_a_bucket_move_alone() -> None:
    """All gradients are views of two buckets, and each op uses one of them."""
    peak_mib = 126
    plain = trial.run("ddp_view", "plain", course=COURSE)
    budget = peak_mib // 4 * MIB
    found = trial.run("ddp_view", "1/4", bytes_of_budget=budget, course=COURSE)
    assert not plain.error
    assert not found.error
    assert found.bits == plain.bits
    assert found.peak_live_bytes >= 0.9 * peak_mib * MIB
    assert found.hit_share is not None
    assert found.hit_share >= 0.95
    assert found.each("bytes_in") <= 1.5 * found.peak_live_bytes  # ten times it with whole buckets


def test_steps_are_found_where_a_net_has_many_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 runs its own function in each block's forward pass; all parameters are small."""
    monkeypatch.setattr(model, "WIDTH", 64)
    monkeypatch.setattr(model, "BLOCKS", 16)
    found = trial.run("fsdp2", "small", bytes_of_budget=16 * MIB, course=COURSE)
    assert not found.error
    for rank in found.ranks:
        assert [counters["steps"] for counters in rank.counters] == [1] * trial.STEPS
    assert found.hit_share is not None
    assert found.hit_share >= 0.95
