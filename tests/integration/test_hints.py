"""Hints on tensors and modules, and their reports, on the software device."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from support.filled import MIB, Net, full  # noqa: E402

import umem  # noqa: E402
from umem.errors import ConfigError, OutOfMemoryError, StateError  # noqa: E402


def press(mib: int) -> None:
    """Creates and uses enough to evict everything that may leave."""
    for i in range(mib // 4):
        assert full(4, i).sum().item() == i * MIB
    held = [full(4, i) for i in range(mib // 4)]
    assert [t[0].item() for t in held] == list(range(mib // 4))


@pytest.mark.usefixtures("on")
def test_a_module_is_its_parameters_and_buffers_each_once() -> None:
    net = Net()
    rows = {row.name: row for row in umem.tensors(net)}
    assert set(rows) == {"first.weight", "first.bias", "second.weight", "second.bias", "mask"}
    assert rows["first.weight"].bytes == rows["first.weight"].resident_bytes == 4 * MIB
    assert (rows["first.weight"].tag, rows["first.bias"].tag) == ("param", "pool")
    out = umem.stats().bytes_out
    assert umem.evict(net)
    assert umem.stats().bytes_out - out == 3 * 4 * MIB + 2 * MIB  # and one page of small ones
    assert all(row.evicted_bytes == row.bytes for row in umem.tensors(net))
    assert umem.prefetch(net)
    assert all(row.resident_bytes == row.bytes for row in umem.tensors(net))
    assert net.mask.sum().item() == 1024 * 1024


@pytest.mark.usefixtures("on")
def test_states_of_an_optimizer_are_named_by_their_place() -> None:
    weights = [full(4, i).float() for i in range(3)]
    optimizer = torch.optim.Adam(weights)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert umem.evict(weights)
    came_in = umem.stats().bytes_in
    names = {row.name for row in umem.tensors(optimizer.state)}
    assert {"0.exp_avg", "2.exp_avg_sq"} <= names
    umem.evict(optimizer.state)
    assert umem.stats().bytes_in == came_in  # no name is made of a weight's values


@pytest.mark.usefixtures("on")
def test_views_move_what_they_touch() -> None:
    whole = torch.arange(40 * MIB // 4, dtype=torch.float32)  # one piece, above the budget
    del whole
    umem.set_budget("160MiB")
    large = full(128)  # two pieces of 64 MiB
    assert umem.evict(large[: 16 * MIB])  # elements: 64 MiB
    assert umem.where(large).evicted_bytes == 64 * MIB
    assert umem.where(large[16 * MIB :]).evicted_bytes == 0
    square = full(128).view(2, -1)
    column = square[:, :3]  # its span covers the first piece and the second
    assert umem.evict(column)
    assert umem.where(square).evicted_bytes == 128 * MIB
    assert square.sum().item() == 32 * MIB


@pytest.mark.usefixtures("on")
def test_pinned_tensors_stay_and_others_leave() -> None:
    pinned, other = full(8, 3.0), full(8, 4.0)
    handle = umem.pin(pinned)
    assert handle
    press(40)
    assert umem.where(pinned).evicted_bytes == 0
    assert umem.where(other).resident_bytes == 0
    with pytest.raises(StateError, match=r"pinned.*umem\.unpin"):
        umem.evict([other, pinned])
    assert umem.unpin(pinned)
    handle.remove()  # it ended already
    press(40)
    assert umem.where(pinned).resident_bytes == 0
    assert pinned.sum().item() == 3.0 * 2 * MIB


@pytest.mark.usefixtures("on")
def test_pins_count_and_end_with_the_memory() -> None:
    t = full(4)
    with umem.pin(t):
        umem.pin(t)
        assert umem.where(t).pins == 2
    assert umem.where(t).pins == 1
    assert umem.where(t[:10]).pins == 1  # its unit's
    with pytest.raises(StateError, match="not pinned"):
        umem.unpin(t[:10])
    umem.unpin(t)
    with pytest.raises(StateError, match=r"float32\[1048576\] of 4 MiB is not pinned"):
        umem.unpin(t)
    umem.pin(t)
    del t
    again = full(4)  # in the same place
    assert umem.where(again).pins == 0
    umem.pin([full(20)])
    umem.pin([full(20)])  # the first one was freed


@pytest.mark.usefixtures("on")
def test_a_small_tensor_ends_its_own_pin_only() -> None:
    one, two = torch.ones(10), torch.ones(10)
    umem.pin(one)
    umem.pin(two)
    assert umem.where(one).pins == 2  # they share a page
    del one
    assert umem.where(two).pins == 1


@pytest.mark.usefixtures("on")
def test_more_pins_than_the_budget_has_are_refused_by_name() -> None:
    net = Net()
    umem.keep(net)  # 12 MiB, and a page of small ones
    t = full(12)
    with pytest.raises(OutOfMemoryError) as caught:
        umem.pin(t)
    text = str(caught.value)
    assert "cannot pin 12.0 MiB more" in text
    assert "8.0 MiB stay free" in text
    assert "first.weight" in text
    assert umem.where(t).pins == 0
    with pytest.raises(OutOfMemoryError, match="budget cannot be that low"):
        umem.set_budget("20MiB")
    assert umem.stats().budget_bytes == 32 * MIB
    umem.set_budget("40MiB")
    umem.pin(t)
    del net
    umem.set_budget("32MiB")


@pytest.mark.usefixtures("on")
def test_a_budget_below_what_is_excluded_says_so() -> None:
    t = full(24)
    excluded = umem.exclude(t)
    umem.prefetch(t)
    with pytest.raises(OutOfMemoryError, match=r"umem\.exclude"):
        umem.set_budget("16MiB")
    assert umem.stats().budget_bytes == 32 * MIB
    excluded.remove()
    umem.set_budget("16MiB")


@pytest.mark.usefixtures("on")
def test_a_pin_brings_the_tensor_in() -> None:
    t = full(8)
    umem.evict(t)
    assert umem.where(t).resident_bytes == 0
    umem.pin(t)
    assert umem.where(t).resident_bytes == 8 * MIB


def train(budget: str | None, **hints: bool) -> tuple[list[float], int]:
    """Losses, and how often weights were away where a step ended."""
    torch.manual_seed(0)
    linear, relu = torch.nn.Linear, torch.nn.ReLU
    layers = [torch.nn.Sequential(linear(512, 1024), relu(), linear(1024, 512)) for _ in range(4)]
    net = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
    if budget and hints.get("keep"):
        assert umem.keep(net[0])
    if budget and hints.get("exclude"):
        assert umem.exclude(net[0])
    losses, away = [], 0
    x = torch.randn(16, 512)
    for _ in range(6):
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if budget:
            away += sum(row.evicted_bytes > 0 for row in umem.tensors(net[0]))
    return losses, away


@pytest.mark.parametrize("policy", ["lru", "auto", "vdnn_all", "autoswap", "stream_layers"])
@pytest.mark.parametrize("hint", ["keep", "exclude"])
def test_plans_leave_alone_what_is_kept_or_excluded(policy: str, hint: str) -> None:
    plain, _ = train(None)
    with umem.enable(budget="20MiB", device="soft", policy=policy):
        without, before = train("20MiB")
        kept, away = train("20MiB", **{hint: True})
        stats = umem.stats()
    assert plain == without == kept
    assert away == 0
    assert stats.evictions > 0
    if policy in ("lru", "auto"):
        assert before > 0  # so the hint did it


@pytest.mark.usefixtures("on")
def test_excluded_by_rule_now_and_later() -> None:
    small, large = full(4), full(8)
    with umem.exclude(min_bytes="6MiB") as rule:
        later = full(6)
        assert rule
        assert [umem.where(t).excluded for t in (small, large, later)] == [False, True, True]
        press(40)
        assert umem.where(large).evicted_bytes == umem.where(later).evicted_bytes == 0
        assert umem.where(small).resident_bytes == 0
        assert umem.evict(large)  # by the program's own word it leaves
    assert not umem.where(large).excluded
    press(40)
    assert umem.where(later).resident_bytes == 0


@pytest.mark.usefixtures("on")
def test_excluded_by_tag_and_predicate() -> None:
    net = Net()
    other = full(4)
    with umem.exclude(tag="param"):
        assert umem.where(net.first.weight).excluded
        assert not umem.where(other).excluded
        assert not umem.where(net.first.bias).excluded  # a pool's
    with umem.exclude(net, predicate=lambda row: "second" in row.name, min_bytes="1MiB"):
        chosen = [row.name for row in umem.tensors(net) if row.excluded]
        assert chosen == ["second.weight"]
    assert not umem.exclude(net, tag="grad")
    assert not any(row.excluded for row in umem.tensors(net))


@pytest.mark.usefixtures("on")
def test_what_is_freed_while_a_predicate_is_asked_is_left_out() -> None:
    kept, passing = full(4), [full(4)]

    def chosen(row: umem.TensorPlacement) -> bool:
        passing.clear()
        return row.bytes == 4 * MIB

    with umem.exclude(predicate=chosen):
        assert umem.where(kept).excluded
    assert not umem.where(kept).excluded
    del kept


@pytest.mark.usefixtures("on")
def test_everything_excluded_still_trains() -> None:
    umem.exclude(min_bytes=0)
    held = [full(4, i) for i in range(16)]  # twice the budget
    assert [t.sum().item() for t in held] == [i * MIB for i in range(16)]
    assert umem.stats().evictions == 0


@pytest.mark.usefixtures("on")
def test_discard_lets_whole_pages_go_without_a_transfer() -> None:
    t = full(10)
    assert umem.discard(t) == 10 * MIB
    row = umem.where(t)
    assert (row.discarded_bytes, row.resident_bytes) == (10 * MIB, 0)
    assert umem.evict(t)  # there is nothing to move
    held = full(20)  # fits next to the rest of t
    assert umem.stats().bytes_out == 0
    press(40)
    moved = umem.stats().bytes_in
    del held
    t.fill_(7.0)
    assert umem.stats().bytes_in == moved
    assert umem.where(t).discarded_bytes == 0
    assert t.sum().item() == 7.0 * t.numel()


@pytest.mark.usefixtures("on")
def test_discard_of_a_view_takes_no_other_byte() -> None:
    t = torch.arange(12 * MIB // 4, dtype=torch.float32)
    begin, end = MIB // 4 + 3, 11 * MIB // 4 - 5  # pages 1 to 4
    assert umem.discard(t[begin:end]) == 8 * MIB
    press(40)
    assert torch.equal(t[:begin], torch.arange(begin, dtype=torch.float32))
    assert torch.equal(t[end:], torch.arange(end, len(t), dtype=torch.float32))


@pytest.mark.usefixtures("on")
def test_discard_of_all_takes_the_last_page_too() -> None:
    t = full(5)
    neighbour = full(5, 2.0)
    assert umem.discard(t) == 6 * MIB  # no other tensor is on its last page
    press(40)
    assert neighbour.sum().item() == 2.0 * neighbour.numel()


@pytest.mark.usefixtures("on")
def test_discard_refuses_what_would_lose_data() -> None:
    weight = torch.nn.Parameter(full(4))
    with pytest.raises(ConfigError, match="requires grad"):
        umem.discard(weight)
    with pytest.raises(ConfigError, match="holes"):
        umem.discard(full(16).view(4, -1)[:, :-1])
    small = torch.ones(1000)
    with pytest.raises(ConfigError, match=r"no page of 2 MiB to itself"):
        umem.discard(small)
    with pytest.raises(ConfigError, match=r"no page"):
        umem.discard([full(4), small])
    saved = full(4)
    loss = (weight * saved).sum()
    umem.discard(saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert umem.discard(weight.detach()) == 4 * MIB


@pytest.mark.usefixtures("on")
def test_expanded_and_transposed_views_are_dense() -> None:
    t = full(4).view(1024, 1024)
    assert umem.discard(t.t()) == 4 * MIB
    row = full(4).view(1, -1).expand(3, -1)
    assert umem.where(row).bytes == 4 * MIB
    assert umem.discard(row) == 4 * MIB


def test_foreign_empty_and_freed_tensors_are_no_error() -> None:
    foreign = torch.ones(MIB)
    umem.enable(budget="32MiB", device="soft")
    freed = full(4)
    freed.untyped_storage().resize_(0)
    meta = torch.ones(10, device="meta")
    targets: list[Any] = [foreign, freed, full(4)[:0], torch.ones(0), meta, [], {}]
    targets.append(torch.nn.LazyLinear(3))
    for target in (*targets, torch.nn.ReLU()):
        assert not umem.prefetch(target)
        assert not umem.evict(target)
        assert not umem.advise(target, "read_mostly")
        assert not umem.pin(target)
        assert not umem.unpin(target)
        assert not umem.keep(target)
        assert not umem.exclude(target)
        assert umem.discard(target) == 0
        assert not any(row.held for row in umem.tensors(target))
    assert foreign.sum().item() == MIB


@pytest.mark.usefixtures("on")
def test_what_is_no_tensor_is_refused() -> None:
    sparse = torch.eye(10).to_sparse()
    for target in (3, "weights", None, [torch.ones(3), 4.0], torch.nn.Linear):
        for hint in (umem.prefetch, umem.evict, umem.pin, umem.keep, umem.discard, umem.where):
            with pytest.raises(ConfigError, match=r"allowed: a tensor"):
                hint(target)
    with pytest.raises(ConfigError, match=r"values\(\)"):
        umem.evict(sparse)
    assert umem.evict(sparse.values())
    with pytest.raises(ConfigError, match=r"umem\.tensors"):
        umem.where([torch.ones(3)])
    for bad in ({}, {"tag": "weight"}, {"min_bytes": "12 parsecs"}, {"max_bytes": -1},
                {"min_bytes": 9, "max_bytes": 8}, {"predicate": 3}):  # fmt: skip
        with pytest.raises(ConfigError):
            umem.exclude(**bad)
    with pytest.raises(ConfigError, match="allowed: param"):
        umem.exclude(full(4), tag="weight")
    with pytest.raises(ConfigError, match=r"'params'\): allowed: param"):
        umem.exclude(tag="params")  # a rule: no target


def test_the_memory_of_freed_tensors_is_given_back_when_asked_for() -> None:
    with umem.enable(budget="16MiB", device="soft", policy="lru"):
        scalar = torch.zeros(())
        made = [torch.zeros(MIB) for _ in range(16)]  # 4 MiB each
        del made
        assert umem.stats().host_bytes > 0
        assert umem.empty_cache() >= 64 * MIB
        stats = umem.stats()
        assert stats.host_bytes == 0
        assert stats.cached_bytes < 2 * MIB  # beside the scalar
        assert umem.empty_cache() == 0
        assert scalar == 0


def test_off_is_an_error_for_hints_and_none_for_questions() -> None:
    umem.enable(budget="32MiB", device="soft")
    t = full(4)
    handle = umem.pin(t)
    umem.disable()
    for hint in (umem.prefetch, umem.evict, umem.pin, umem.unpin, umem.keep, umem.discard,
                 umem.exclude):  # fmt: skip
        with pytest.raises(StateError, match=r"umem\.enable\(\)"):
            hint(t)
    assert umem.where(t).pins == 0  # pins ended with umem
    handle.remove()
    with umem.scope("nothing"):
        assert not umem.where(torch.ones(MIB)).held
    with umem.enable(budget="32MiB", device="soft"):
        assert umem.evict(t)
    assert t.sum().item() == MIB


def test_under_none_hints_lose_nothing() -> None:
    with umem.enable(budget="32MiB", device="soft", policy="none"):
        t, u = full(4, 2.0), full(4, 3.0)
        umem.pin(t)
        umem.evict(u)
        assert umem.discard(full(4)) == 4 * MIB
        press(48)
        assert t.sum().item() == 2.0 * MIB
        assert u.sum().item() == 3.0 * MIB
        umem.discard(t)
        t.fill_(5.0)
        press(48)
        assert t.sum().item() == 5.0 * MIB
        assert umem.where(t).discarded_bytes == 0


@pytest.mark.usefixtures("on")
def test_a_pin_that_was_removed_is_removed_no_more() -> None:
    tensor = full(4)
    first, second = umem.pin(tensor), umem.pin(tensor)
    assert repr(first) == "<umem.pin: in force>"
    first.remove()
    first.remove()  # and not the second's
    assert not first
    assert repr(first) == "<umem.pin: nothing>"
    press(64)
    assert umem.tensors([tensor])[0].evicted_bytes == 0
    second.remove()
    press(64)
    assert umem.tensors([tensor])[0].evicted_bytes > 0


@pytest.mark.usefixtures("on")
def test_tensors_of_inference_are_discarded_though_they_have_no_version() -> None:
    with torch.inference_mode():
        tensor = torch.ones(MIB)
        assert umem.discard(tensor) == 4 * MIB
        assert umem.where(tensor).discarded_bytes == 4 * MIB
        press(64)
        assert umem.where(tensor).bytes == 4 * MIB


@pytest.mark.usefixtures("on")
def test_fake_tensors_have_no_memory_to_move() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        tensor = torch.empty(MIB)
    assert not umem.pin(tensor)
    assert not umem.evict(tensor)
    assert not umem.tensors([tensor])[0].held
