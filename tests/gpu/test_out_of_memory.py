"""Out of memory under umem: torch's exception, its observers, and recovery from it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

import umem  # noqa: E402

pytestmark = pytest.mark.gpu
Program = Callable[..., tuple[str, str]]
MIB = 1 << 20
LIMITS = {"budget": "16MiB", "host_budget": "16MiB"}


def fill_up() -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []

    def take_all() -> None:
        while True:
            tensors.append(torch.full((MIB,), float(len(tensors)), device="cuda"))

    with pytest.raises(torch.OutOfMemoryError):
        take_all()
    return tensors


def test_it_is_torchs_exception_and_says_what_holds_the_memory() -> None:
    with umem.enable(device="cuda", **LIMITS):
        tensors = fill_up()
        assert len(tensors) >= 4
        with pytest.raises(torch.OutOfMemoryError) as caught:
            torch.empty(8 * MIB, dtype=torch.uint8, device="cuda")
        message = str(caught.value)
        # torch's own words come first: batch size finders search for them.
        assert message.startswith("CUDA out of memory. Tried to allocate 8.0 MiB. GPU 0 has a ")
        for words in ("asked for 8.0 MiB", "budget 16.0 MiB", "resident", "evictable", "host"):
            assert words in message
        assert torch.cuda.memory_stats()["num_ooms"] == 2 == umem.stats().ooms
        assert all(bool(t.cpu().eq(float(i)).all()) for i, t in enumerate(tensors))
        del tensors[0]
        tensors.append(torch.full((MIB,), 9.0, device="cuda"))
        assert bool(tensors[-1].cpu().eq(9.0).all())
        tensors.clear()


def test_a_refused_block_leaves_no_trace_in_torchs_figures() -> None:
    with umem.enable(device="cuda", **LIMITS):
        kept = torch.ones(MIB, device="cuda")
        torch.cuda.reset_peak_memory_stats()
        reserved = torch.cuda.memory_reserved()
        made = torch.cuda.memory_stats()["allocation.all.allocated"]
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated() == 4 * MIB
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == made
        assert torch.cuda.memory_reserved() <= reserved
        assert bool(kept.cpu().eq(1).all())


@pytest.mark.parametrize("nbytes", [1 << 50, (1 << 62) + 1])
def test_absurd_sizes_are_out_of_memory_too(nbytes: int) -> None:
    with umem.enable(device="cuda", **LIMITS), pytest.raises(torch.OutOfMemoryError):
        torch.empty(nbytes, dtype=torch.uint8, device="cuda")


def test_an_observer_hears_of_it_before_the_exception(program: Program) -> None:
    # In its own process: torch cannot remove an observer.
    program(
        """
        enable("16MiB", host_budget="16MiB")
        torch.cuda.init()
        heard = []
        torch._C._cuda_attach_out_of_memory_observer(
            lambda device, size, total, free: heard.append((device, size, total, free)))
        for size in (MIB << 20, MIB << 10):
            try:
                torch.empty(size, dtype=torch.uint8, device="cuda")
            except torch.OutOfMemoryError:
                pass
        assert [h[:2] for h in heard] == [(0, MIB << 20), (0, MIB << 10)], heard
        assert all(0 < free <= total for _, _, total, free in heard), heard
        """
    )


def test_host_memory_that_two_steps_had_no_use_for_is_given_back() -> None:
    with umem.enable(device="cuda", budget="32MiB"):
        tensors = [torch.ones(MIB * (2 + i) // 4, device="cuda") for i in range(24)]
        assert umem.stats().host_bytes > 128 * MIB
        tensors = tensors[::4]
        for _ in range(4):
            umem.step()
        stats = umem.stats()
        assert stats.host_bytes <= 1.125 * stats.live_bytes
        assert all(bool(tensor.cpu().eq(1).all()) for tensor in tensors)
