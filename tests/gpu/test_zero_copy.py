"""Tensors that do not fit next to an operator are used on the host: slower, but finite."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from softcuda.load import Softcuda  # noqa: E402
from support.cuda_tensors import full, holds  # noqa: E402

import umem  # noqa: E402

pytestmark = pytest.mark.gpu
MIB = 1 << 20
PREFERRED_LOCATION, ACCESSED_BY = 2, 3  # CUmem_range_attribute
NOWHERE, HOST = -2, -1


def advice(tensor: torch.Tensor) -> tuple[int, int]:
    """The preferred location of a tensor's memory, and the device that it is mapped for."""
    return advice_at(tensor.data_ptr(), tensor.nbytes)


def advice_at(address: int, nbytes: int) -> tuple[int, int]:
    driver = ctypes.CDLL("libcuda.so.1")
    values = []
    for which in (PREFERRED_LOCATION, ACCESSED_BY):
        value = ctypes.c_int(-99)
        at, size = ctypes.c_void_p(address), ctypes.c_size_t(nbytes)
        assert driver.cuMemRangeGetAttribute(ctypes.byref(value), 4, which, at, size) == 0
        values.append(value.value)
    return values[0], values[1]


def test_a_reduction_around_memory_above_the_budget_ends(
    softcuda: Softcuda, program: Callable[..., tuple[str, str]]
) -> None:
    """Without advice each page has left by the time the reduction returns to it."""
    out, err = program(
        """
        load.compute()
        with enable("8MiB"):
            x = torch.zeros(10 * MIB // 4 // 256, 256, device="cuda")
            for row in range(0, len(x), 512):
                x[row:row + 512] = row
            torch.cuda.synchronize()
            before = soft.faults()
            mean = torch.stack([x[:, column].mean() for column in range(64)]).cpu()
            print(soft.faults() - before < 200, umem.stats().hook_errors)
            print(bool(mean.eq(torch.arange(0, len(x), 512).float().mean()).all()))
            print(umem.stats().zero_copy_bytes > 0)
            del x
        """,
        SOFTCUDA_BYTES=str(40 * MIB),
    )
    assert out.split() == ["True", "0", "True", "True"], err
    assert err.count("umem: warning: ") == 1
    assert "is used in the host's memory, slowly" in err


def test_the_advice_ends_after_a_step_without_such_an_operator() -> None:
    with umem.enable(budget="16MiB", device="cuda"):
        a, b = full(1.0, mib=8), full(2.0, mib=8)
        c = a + b  # 24 MiB
        advised = [t for t in (a, b, c) if advice(t) == (HOST, torch.cuda.current_device())]
        assert len(advised) == 1
        umem.step()
        assert advice(advised[0])[0] == HOST  # used so in that step
        umem.step()
        assert [advice(t) for t in (a, b, c)] == [(NOWHERE, NOWHERE)] * 3
        assert holds(a, 1.0)
        assert holds(b, 2.0)
        del a, b, c, advised


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_operators_above_the_budget_lose_nothing(
    softcuda: Softcuda, program: Callable[..., tuple[str, str]], seed: int
) -> None:
    out, err = program(
        """
        load.compute()
        def train(device):
            tensors = [torch.full((2 * MIB,), float(i), device=device) for i in range(4)]
            for turn in range(12):
                i, j, k = turn % 4, (turn * turn + 1) % 4, (turn // 2) % 4
                tensors[i] = tensors[i] + tensors[j]
                tensors[k].add_(tensors[j], alpha=0.5).remainder_(17)
                if turn % 3 == 2:
                    umem.step()
            return [t.cpu() for t in tensors]
        with enable("16MiB"):
            expected = train("cpu")
            got = train("cuda")
            print(all(map(torch.equal, expected, got)), umem.stats().zero_copy_bytes > 0)
            print(umem.stats().hook_errors)
        """,
        SOFTCUDA_SEED=str(seed),
    )
    assert out.split() == ["True", "True", "0"], err


def test_the_advice_ends_where_umem_moves_nothing_any_more() -> None:
    import _core_testing

    with umem.enable(budget="16MiB", device="cuda", policy="lru"):
        a, b = full(1.0, mib=8), full(2.0, mib=8)
        c = a + b
        assert HOST in [advice(t)[0] for t in (a, b, c)]
        _core_testing.set_policy("none")
        assert [advice(t) for t in (a, b, c)] == [(NOWHERE, NOWHERE)] * 3
        del a, b, c


def test_a_driver_that_refuses_the_advice_is_asked_once(softcuda: Softcuda) -> None:
    """Then it is page faults that bring what does not fit."""
    with umem.enable(budget="16MiB", device="cuda"):
        a, b = full(1.0, mib=8), full(2.0, mib=8)
        softcuda.reset()
        softcuda.inject("cuMemAdvise", 1, 801)
        for _ in range(3):
            c = a + b
            assert [advice(t) for t in (a, b, c)] == [(NOWHERE, NOWHERE)] * 3
        # Once for the first half of the advice, twice to take both halves back.
        assert (softcuda.calls("cuMemAdvise"), umem.stats().hook_errors) == (3, 1)
        assert umem.stats().zero_copy_bytes == 0
        assert holds(a, 1.0)
        assert holds(b, 2.0)
        del a, b, c


def test_half_of_the_advice_is_taken_back(softcuda: Softcuda) -> None:
    """The host as preferred location without the mapping would be slower than either."""
    with umem.enable(budget="16MiB", device="cuda"):
        a, b = full(1.0, mib=8), full(2.0, mib=8)
        softcuda.inject("cuMemAdvise", 2, 1)
        c = a + b
        assert [advice(t) for t in (a, b, c)] == [(NOWHERE, NOWHERE)] * 3
        c = a + b  # the driver is called again: the error was not "not supported"
        assert HOST in [advice(t)[0] for t in (a, b, c)]
        del a, b, c


def test_an_end_that_fails_is_tried_again(softcuda: Softcuda) -> None:
    with umem.enable(budget="16MiB", device="cuda"):
        a, b = full(1.0, mib=8), full(2.0, mib=8)
        c = a + b
        umem.step()
        softcuda.inject("cuMemAdvise", 2, 1)
        umem.step()
        assert [advice(t) for t in (a, b, c)] != [(NOWHERE, NOWHERE)] * 3
        umem.step()
        assert [advice(t) for t in (a, b, c)] == [(NOWHERE, NOWHERE)] * 3
        del a, b, c


def test_a_smaller_block_of_the_same_range_does_not_hide_advice() -> None:
    with umem.enable(budget="32MiB", device="cuda"):
        first = full(1.0, mib=36)
        address = first.data_ptr()
        assert advice_at(address + 34 * MIB, 2 * MIB)[0] == HOST
        del first
        second = full(2.0, mib=34)
        assert second.data_ptr() == address
        for _ in range(3):
            umem.step()
        for page in range(0, 36, 2):
            assert advice_at(address + page * MIB, 2 * MIB) == (NOWHERE, NOWHERE)
        del second


def test_nothing_leaves_for_what_can_never_fit() -> None:
    with umem.enable(budget="16MiB", device="cuda"):
        small, large = full(1.0, mib=8), full(2.0, mib=24)
        small.fill_(3.0)
        large.fill_(4.0)
        before = umem.stats()
        for i in range(4):
            large.fill_(float(i))
            small.fill_(float(i))
        now = umem.stats()
        assert (now.evictions, now.bytes_in, now.bytes_out) == (
            before.evictions,
            before.bytes_in,
            before.bytes_out,
        )
        assert now.host_bytes >= 24 * MIB  # it counts towards the host budget
        assert holds(large, 3.0)
        del small, large


def test_the_host_budget_holds() -> None:
    with umem.enable(budget="16MiB", device="cuda", host_budget="32MiB"):
        one = full(1.0, mib=20)
        assert (advice(one)[0], umem.stats().host_bytes) == (HOST, 20 * MIB)
        with pytest.raises(torch.OutOfMemoryError, match="host budget has no room"):
            full(2.0, mib=20)
        assert holds(one, 1.0)
        del one


def test_memory_that_becomes_read_mostly_has_no_other_advice() -> None:
    with umem.enable(budget="16MiB", device="cuda"):
        a, b = full(1.0, mib=8), full(2.0, mib=8)
        c = a + b
        there = next(t for t in (a, b, c) if advice(t)[0] == HOST)
        umem.advise(there, "read_mostly")
        assert advice(there) == (NOWHERE, NOWHERE)
        umem.advise(there, "none")
        del a, b, c, there


def test_the_advice_ends_with_the_session() -> None:
    with umem.enable(budget="16MiB", device="cuda"):
        a, b = full(1.0, mib=8), full(2.0, mib=8)
        c = a + b
    assert [advice(t) for t in (a, b, c)] == [(NOWHERE, NOWHERE)] * 3
    del a, b, c
