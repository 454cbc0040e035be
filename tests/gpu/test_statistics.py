"""torch's own memory statistics under umem: torch.cuda.memory and torch.accelerator."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

import umem  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("umem_on")]
Program = Callable[..., tuple[str, str]]
MIB = 1 << 20
CORE = "        from umem.base.native import core\n"


def empty(mib: int) -> torch.Tensor:
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")


@pytest.fixture(autouse=True)
def _fresh_figures(umem_on: object) -> None:
    torch.cuda.init()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.reset_accumulated_memory_stats()


def test_allocated_and_its_maximum() -> None:
    x = empty(8)
    assert torch.cuda.memory_allocated() == 8 * MIB == umem.stats().live_bytes
    y = empty(4)
    assert torch.cuda.memory_allocated() == 12 * MIB
    del x
    assert torch.cuda.memory_allocated() == 4 * MIB
    assert torch.cuda.max_memory_allocated() == 12 * MIB
    del y
    assert torch.cuda.memory_allocated() == 0


def test_reserved_and_its_maximum_include_what_is_cached() -> None:
    x, y = empty(8), empty(4)
    assert torch.cuda.memory_reserved() == 12 * MIB
    del x, y
    assert torch.cuda.memory_reserved() == 12 * MIB
    assert umem.stats().cached_bytes == 12 * MIB
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0
    assert torch.cuda.max_memory_reserved() == 12 * MIB


def test_small_requests_share_a_segment() -> None:
    small = [torch.empty(1000, dtype=torch.uint8, device="cuda") for _ in range(10)]
    stats = torch.cuda.memory_stats()
    assert stats["allocation.small_pool.current"] == 10
    assert stats["allocation.large_pool.current"] == 0
    assert stats["segment.small_pool.current"] == 1
    assert stats["requested_bytes.all.current"] == 10_000
    assert 10_000 <= stats["allocated_bytes.all.current"] <= 10 * 1024
    assert stats["reserved_bytes.all.current"] == 2 * MIB
    del small


def test_memory_stats_has_every_counter_of_torch() -> None:
    empty(2)
    x = empty(4)
    stats = torch.cuda.memory_stats()
    for metric in ("allocation", "segment", "active", "inactive_split", "allocated_bytes",
                   "reserved_bytes", "active_bytes", "inactive_split_bytes",
                   "requested_bytes"):  # fmt: skip
        for pool in ("all", "small_pool", "large_pool"):
            for figure in ("current", "peak", "allocated", "freed"):
                assert f"{metric}.{pool}.{figure}" in stats
    assert stats["allocation.all.allocated"] == 2
    assert stats["allocation.all.freed"] == 1
    assert stats["allocated_bytes.large_pool.allocated"] == 6 * MIB
    assert stats["active_bytes.all.current"] == 4 * MIB
    assert stats["num_device_alloc"] == 2
    assert stats["num_ooms"] == 0
    nested = torch.cuda.memory_stats_as_nested_dict()
    assert nested["allocation"]["all"]["current"] == 1
    del x


def test_memory_summary_shows_them() -> None:
    x = empty(8)
    text = torch.cuda.memory_summary()
    (line,) = [line for line in text.splitlines() if line.startswith("| Allocated memory ")]
    assert line.split("|")[2].split() == ["8192", "KiB"]
    assert "| Allocated memory " in torch.cuda.memory_summary(abbreviated=True)
    del x


def test_reset_of_peaks_and_of_sums() -> None:
    x = empty(8)
    del x
    y = empty(2)
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == 2 * MIB
    torch.cuda.reset_accumulated_memory_stats()
    stats = torch.cuda.memory_stats()
    assert stats["allocation.all.allocated"] == stats["allocation.all.freed"] == 0
    assert stats["allocated_bytes.all.current"] == 2 * MIB
    assert stats["num_device_alloc"] == 0
    del y


@pytest.mark.parametrize("reset", ["reset_max_memory_allocated", "reset_max_memory_cached"])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_old_names_of_resets(reset: str) -> None:
    x = empty(8)
    del x
    torch.cuda.empty_cache()
    getattr(torch.cuda, reset)()
    assert torch.cuda.max_memory_allocated() == 0
    assert torch.cuda.max_memory_reserved() == 0


def test_empty_cache_leaves_what_is_live() -> None:
    x = torch.full((MIB,), 7.0, device="cuda")
    y = empty(8)
    del y
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 4 * MIB
    assert umem.stats().cached_bytes == 0
    assert bool(x.cpu().eq(7).all())
    del x


def test_mem_get_info_is_the_devices() -> None:
    free, total = torch.cuda.mem_get_info()
    assert 0 < free <= total == torch.cuda.get_device_properties(0).total_memory


def test_memory_fraction_is_the_budget() -> None:
    total = torch.cuda.mem_get_info()[1]
    x = empty(2)
    assert torch.cuda.get_per_process_memory_fraction() == pytest.approx(64 * MIB / total)
    torch.cuda.set_per_process_memory_fraction(48 * MIB / total)
    assert umem.stats().budget_bytes == pytest.approx(48 * MIB, abs=2 * MIB)
    assert torch.cuda.get_per_process_memory_fraction() == 48 * MIB / total
    torch.cuda.set_per_process_memory_fraction(1.0)  # torch's own pools keep theirs
    umem.set_budget("64MiB")
    assert torch.cuda.get_per_process_memory_fraction() == pytest.approx(64 * MIB / total)
    del x


@pytest.mark.parametrize("budget", ["auto", "64MiB"])
def test_torchs_setting_bounds_a_budget_that_is_found(program: Program, budget: str) -> None:
    program(
        f"""
        enable({budget!r})
        x = torch.ones(4, device="cuda")
        total = torch.cuda.mem_get_info()[1]
        found = umem.stats().budget_bytes
        assert found == (64 * MIB if {budget!r} == "64MiB" else total // 4), found
        umem.step()
        assert umem.stats().budget_bytes == found
        """,
        fresh=True,
        PYTORCH_CUDA_ALLOC_CONF="per_process_memory_fraction:0.25",
    )


def test_without_caching_torch_makes_its_blocks_itself(program: Program) -> None:
    program(
        CORE
        + """
        enable()
        x = torch.full((MIB,), 1.0, device="cuda")
        torch.cuda.caching_allocator_enable(False)
        before = umem.stats().live_bytes
        plain = torch.full((MIB,), 2.0, device="cuda")
        raw = torch.cuda.caching_allocator_alloc(4 * MIB)
        assert umem.stats().live_bytes == before
        assert not core.owns(plain.data_ptr()) and not core.owns(raw)
        assert bool(plain.cpu().eq(2).all())
        torch.cuda.caching_allocator_delete(raw)
        del plain
        torch.cuda.caching_allocator_enable(True)
        again = torch.full((MIB,), 3.0, device="cuda")
        assert core.owns(again.data_ptr()) and bool(again.cpu().eq(3).all())
        """,
    )


@pytest.mark.parametrize(
    ("fraction", "words"),
    [(0.0, "above 0 and up to 1"), (1e-9, "below the floor")],
)
def test_memory_fractions_that_cannot_be_are_refused(fraction: float, words: str) -> None:
    x = empty(2)
    with pytest.raises(ValueError, match=words):
        torch.cuda.set_per_process_memory_fraction(fraction)
    assert umem.stats().budget_bytes == 64 * MIB
    del x


@pytest.mark.parametrize(
    ("accelerator", "cuda"),
    [
        ("memory_allocated", "memory_allocated"),
        ("max_memory_allocated", "max_memory_allocated"),
        ("memory_reserved", "memory_reserved"),
        ("max_memory_reserved", "max_memory_reserved"),
    ],
)
def test_torch_accelerator_has_the_same_figures(accelerator: str, cuda: str) -> None:
    x, y = empty(8), empty(4)
    del y
    ours: Callable[[], object] = getattr(torch.accelerator, accelerator)
    assert ours() == getattr(torch.cuda, cuda)()
    assert torch.accelerator.memory_allocated() == 8 * MIB
    del x


def test_the_statistics_of_torch_accelerator_are_among_those_of_torch_cuda() -> None:
    x = empty(8)
    assert torch.accelerator.memory_stats().items() <= torch.cuda.memory_stats().items()
    assert torch.accelerator.memory_stats()["allocated_bytes.all.current"] == 8 * MIB
    del x


def test_torch_accelerator_empties_and_resets() -> None:
    x = empty(8)
    del x
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    torch.accelerator.reset_accumulated_memory_stats()
    assert torch.accelerator.max_memory_reserved() == 0
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == 0


def test_cudnn_benchmark_asks_for_the_largest_block() -> None:
    x = torch.zeros(1, 3, 32, 32, device="cuda")
    weight = torch.zeros(4, 3, 3, 3, device="cuda")
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        assert torch.nn.functional.conv2d(x, weight).shape == (1, 4, 30, 30)
    finally:
        torch.backends.cudnn.benchmark = before
    del x, weight


def test_the_profiler_sees_memory() -> None:
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(
        activities=activities, profile_memory=True, acc_events=True
    ) as profile:
        x = empty(8)
        del x
    usage = [event.self_device_memory_usage for event in profile.events()]
    assert max(usage) == 8 * MIB
    assert min(usage) == -8 * MIB


def test_memory_of_the_host_is_not_unmanaged() -> None:
    umem.reset_peak_stats()
    (empty(4).cpu() + 1).cuda().add_(1)
    assert umem.stats().peak_unmanaged_bytes == 0
