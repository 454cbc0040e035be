"""Wrong or rare uses by programs: each works, or is a clear error, and loses no data."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import _core_testing  # noqa: E402

import umem  # noqa: E402
from umem.base.native import core  # noqa: E402
from umem.errors import ConfigError, StateError  # noqa: E402
from umem.session import session  # noqa: E402

MIB = 1 << 20


def blocks(count: int, mib: int = 2) -> list[torch.Tensor]:
    return [torch.full((mib * MIB // 4,), float(i)) for i in range(count)]


def intact(tensors: list[torch.Tensor]) -> bool:
    return all(bool(t.eq(float(i)).all()) for i, t in enumerate(tensors))


def nothing_is_pinned() -> bool:
    return all(row["pins"] == 0 for row in _core_testing.blocks())


@pytest.mark.parametrize("budget", [0, "0", -1, "-5MiB", "12 parsecs", "1MiB", "", "200%", "1e400"])
def test_bad_budgets(budget: str | int) -> None:
    with pytest.raises(ConfigError, match="budget") as caught:
        umem.enable(budget=budget, device="soft")
    if budget == "1MiB":
        assert "8 MiB" in str(caught.value)  # the floor
        assert "thread" in str(caught.value)  # and why
    assert not umem.is_enabled()


def test_enable_twice() -> None:
    with umem.enable(budget="16MiB", device="soft"):
        umem.enable(budget="16MiB", device="soft")
        with pytest.raises(StateError, match=r"16 MiB.*32 MiB"):
            umem.enable(budget="32MiB", device="soft")
        assert umem.stats().budget_bytes == 16 * MIB


def test_a_session_is_entered_before_its_end_only() -> None:
    session, other = (umem.enable(budget="32MiB", device="soft") for _ in range(2))
    with session, other:
        pass
    for _ in range(2):
        for ended in (session, other):
            with pytest.raises(StateError, match=r"ended; call umem.enable\(\) again"), ended:
                pass
        umem.enable(budget="64MiB", device="soft")
    umem.disable()


def test_an_interrupt_while_umem_is_turned_off_leaves_it_off() -> None:
    def interrupted() -> None:
        umem.disable()  # as a signal handler may
        raise KeyboardInterrupt

    session = umem.enable(budget="32MiB", device="soft")
    kept = blocks(4)
    session.at_end(interrupted)
    with pytest.raises(KeyboardInterrupt):
        umem.disable()
    assert not umem.is_enabled()
    assert intact(kept)
    with umem.enable(budget="32MiB", device="soft"):
        before = umem.stats().allocs
        assert intact(blocks(4))
        assert umem.stats().allocs > before


def test_policies_are_the_same_if_they_are_one_object() -> None:
    class Odd:
        name = "odd"

        def plan(self, step: Any, device: Any, budget: int) -> Any:
            return umem.policies.Plan(step)

        __eq__: Any = torch.Tensor.__eq__
        __hash__ = object.__hash__

    odd = Odd()
    with umem.enable(budget="32MiB", device="soft", policy=odd):
        umem.enable(budget="32MiB", device="soft", policy=odd)
        with pytest.raises(StateError, match="policy=odd, but policy=odd was requested"):
            umem.enable(budget="32MiB", device="soft", policy=Odd())


def test_a_new_budget_leaves_the_origins_of_other_options() -> None:
    with umem.enable(budget="32MiB", device="soft", policy="lru"):
        umem.set_budget("24MiB")
        origins = session.require_session("a test").settings.origins
        assert (origins["policy"], origins["budget"]) == ("policy=", "budget=")
        assert origins["host_budget"] == "host_budget (default)"


def test_numbers_of_numpy_are_numbers() -> None:
    with umem.enable(budget=np.int64(32 << 20), device="soft"):
        umem.set_budget(np.int64(64 << 20))
        assert umem.stats(np.int32(0)).budget_bytes == 64 << 20
        with pytest.raises(ConfigError, match=r"set_budget\(None\): allowed: bytes"):
            umem.set_budget(None)  # type: ignore[arg-type]
        assert umem.stats().budget_bytes == 64 << 20


def test_a_scope_that_is_refused_leaves_the_outer_one() -> None:
    with umem.enable(budget="32MiB", device="soft"), umem.scope("outer"):
        with pytest.raises(ConfigError, match="printable"), umem.scope("\ud800"):
            pass
        tensor = torch.ones(1 << 20)
        assert umem.where(tensor).scope == umem.where(tensor[1 << 19 :]).scope == "outer"


def test_enable_again_with_tensors_of_the_last_session() -> None:
    with umem.enable(budget="8MiB", device="soft"):
        kept = blocks(8)
    assert intact(kept)
    with umem.enable(budget="12MiB", device="soft"):
        more = blocks(8)
        assert intact(kept)
        assert intact(more)
        assert umem.stats().resident_bytes <= 12 * MIB
    assert intact(kept)
    with pytest.raises(StateError, match="still alive"):
        umem.enable(budget="16MiB", device="soft:a100-pcie4")
    del kept, more
    with umem.enable(budget="16MiB", device="soft:a100-pcie4"):
        assert intact(blocks(12))


def test_tensors_of_the_last_session_can_be_resized() -> None:
    with umem.enable(budget="8MiB", device="soft"):
        kept = torch.ones(10)
    kept.resize_(MIB)
    kept.fill_(2.0)
    assert kept.sum().item() == 2 * MIB
    assert not core.owns(kept.data_ptr())


def test_a_tensor_larger_than_the_budget(capfd: pytest.CaptureFixture[str]) -> None:
    with umem.enable(budget="8MiB", device="soft"):
        big = torch.arange(10 * MIB)  # 80 MiB
        assert big.sum().item() == 10 * MIB * (10 * MIB - 1) // 2
        assert torch.equal(big.flip(0).flip(0), big)
        assert umem.stats().peak_resident_bytes <= 8 * MIB
    assert capfd.readouterr().err.count("larger than the budget") == 1


def test_an_op_above_the_budget_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    """Like `stack` of many views, which visits all of them for each row."""
    with umem.enable(budget="8MiB", device="soft"):
        parts = [torch.full((4, MIB // 8), float(n)) for n in range(6)]  # 2 MiB each
        stacked = torch.stack(parts, dim=1)
        assert stacked[:, 5].eq(5).all()
        counted = umem.stats().ops_above_budget
        assert counted >= 1
        note = f"ops that alone needed more than the budget: {counted}"
        assert note in str(umem.summary())
    said = capfd.readouterr().err
    assert said.count("umem: warning: aten::") == 1
    assert "larger than the budget of 8.0 MiB" in said


def test_more_than_both_budgets_is_torchs_out_of_memory_error() -> None:
    with umem.enable(budget="8MiB", device="soft", host_budget="16MiB"):
        held = [torch.ones(n * MIB // 4) for n in (8, 6, 4)]
        with pytest.raises(torch.OutOfMemoryError) as caught:
            torch.empty(10 * MIB // 4)
        text = str(caught.value)
        for part in ("asked for 10.0 MiB", "budget 8.0 MiB", "resident", "evictable", "host"):
            assert part in text
        assert (
            text.index("8.0 MiB input") < text.index("6.0 MiB input") < text.index("4.0 MiB input")
        )
        assert torch.ones(MIB // 4).sum().item() == MIB // 4  # smaller requests still work
        assert all(bool(t.eq(1).all()) for t in held)
        assert umem.stats().ooms == 1
        assert nothing_is_pinned()


def test_exceptions_inside_a_step() -> None:
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x * 1.0

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            raise ValueError("in backward")

    def run(fail: bool) -> str:
        torch.manual_seed(0)
        net = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(6)])
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        for step in range(4):
            optimizer.zero_grad()
            out = net(torch.ones(64, 512))
            if fail and step in (1, 2):
                fails = (
                    (lambda y=out: Broken.apply(y).sum().backward())
                    if step == 1
                    else (lambda: net(torch.ones(64, 511)))
                )
                with pytest.raises((ValueError, RuntimeError)):
                    fails()
                optimizer.zero_grad()
                out = net(torch.ones(64, 512))
            out.square().mean().backward()
            optimizer.step()
        return sum(p.double().sum() for p in net.parameters()).item().hex()

    plain = run(fail=False)
    with umem.enable(budget="8MiB", device="soft"):
        assert run(fail=True) == plain
        gc.collect()
        assert nothing_is_pinned()


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_odd_tensors() -> None:
    with umem.enable(budget="8MiB", device="soft"):
        pressure = blocks(12)
        assert torch.empty(0).numel() == 0
        assert torch.zeros(3, 0, 5).sum().item() == 0
        assert torch.tensor(7).item() == 7
        assert torch.ones(4 * MIB, dtype=torch.bool).all()
        z = torch.complex(torch.ones(MIB), torch.zeros(MIB))
        assert (z * z).real.sum().item() == MIB
        sparse = torch.eye(1000).to_sparse()
        assert torch.sparse.mm(sparse, torch.ones(1000, 1)).sum().item() == 1000
        q = torch.quantize_per_tensor(torch.ones(2 * MIB), 0.5, 0, torch.qint8)
        assert q.dequantize().sum().item() == 2 * MIB
        grown = torch.ones(10)
        grown.resize_(2 * MIB)
        grown.fill_(3.0)
        assert grown.sum().item() == 6 * MIB
        storage = torch.ones(MIB).untyped_storage()
        storage.resize_(8 * MIB)
        assert storage.nbytes() == 8 * MIB
        base = torch.arange(4 * MIB, dtype=torch.float32)
        view = base[MIB : 2 * MIB].view(1024, 1024).t()
        out = torch.empty(1024, 1024)
        torch.add(view, 1, out=out)
        assert torch.equal(out, view.contiguous() + 1)
        image = torch.randn(8, 32, 64, 64).to(memory_format=torch.channels_last)
        assert torch.equal(image.contiguous(), image)
        assert intact(pressure)


def test_numpy_and_dlpack_share_memory_and_may_outlive_the_tensor() -> None:
    np = pytest.importorskip("numpy")
    with umem.enable(budget="8MiB", device="soft"):
        foreign = torch.from_numpy(np.arange(MIB, dtype=np.float32))
        assert not core.owns(foreign.data_ptr())
        tensor = foreign * 2
        array = tensor.numpy()
        capsule = torch.from_dlpack(tensor)
        del tensor
        pressure = blocks(12)
        array[5] = -1
        assert capsule[5].item() == -1
        assert np.array_equal(array, capsule.numpy())
        assert intact(pressure)
    assert array[6] == 12


def test_very_many_small_tensors(nightly: bool) -> None:
    with umem.enable(budget="16MiB", device="soft"):
        count = 1_000_000 if nightly else 200_000
        gc.collect()
        before = umem.stats().live_bytes
        rows = torch.arange(count, dtype=torch.float32)
        kept = [row.clone() for row in rows.unbind()]
        assert sum(t.item() for t in kept[:: count // 1000]) == sum(range(0, count, count // 1000))
        assert umem.stats().live_bytes >= count * 256
        assert umem.stats().peak_resident_bytes <= 16 * MIB
        del kept, rows
        assert umem.stats().live_bytes <= before


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_and_double_backward(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    def run() -> str:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(768, 768) for _ in range(4)]
        x = torch.randn(128, 768, requires_grad=True)
        y = x
        for layer in layers:
            y = checkpoint(lambda v, f=layer: torch.tanh(f(v)), y, use_reentrant=reentrant)
        if not reentrant:
            (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            y = g
        y.square().sum().backward()
        assert x.grad is not None
        return x.grad.double().sum().item().hex()

    plain = run()
    with umem.enable(budget="8MiB", device="soft"):
        assert run() == plain
        assert umem.stats().bytes_out > 0
        assert nothing_is_pinned()


def test_more_threads() -> None:
    def run() -> str:
        torch.manual_seed(0)
        net = torch.nn.Sequential(*[torch.nn.Conv2d(16, 16, 3, padding=1) for _ in range(4)])
        out = net(torch.randn(16, 16, 64, 64))
        out.square().mean().backward()
        return sum(p.grad.double().sum() for p in net.parameters()).item().hex()

    torch.set_num_threads(4)
    plain = run()
    with pytest.raises(ConfigError, match="32 MiB"):  # 4 pages a thread
        umem.enable(budget="16MiB", device="soft")
    with umem.enable(budget="32MiB", device="soft", policy="none"):
        assert run() == plain
    with umem.enable(budget="32MiB", device="soft"):
        assert run() == plain


def test_a_block_above_the_budget_can_be_allocated_again() -> None:
    """Its range keeps its host memory, which counts once."""
    umem.enable(budget="16MiB", host_budget="64MiB", device="soft")
    for mib in (36, 36, 40, 36):
        block = torch.full((mib * MIB,), mib, dtype=torch.uint8)
        assert int(block.min()) == int(block.max()) == mib
        del block
