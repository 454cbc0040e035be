"""Devices whose memory is the host's (GB10, Jetson): what is free, and that nothing moves."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("torch")

from umem.base import host

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("softcuda")]
Program = Callable[..., tuple[str, str]]
MIB = 1 << 20
WARNING = "host and device share one memory"
# All but 64 MiB of the device: the budget `auto` keeps an eighth of the free memory free.
CACHE = {"SOFTCUDA_BYTES": str(256 * MIB), "SOFTCUDA_PAGE_CACHE": str(192 * MIB)}
INTEGRATED = CACHE | {"SOFTCUDA_INTEGRATED": "1"}

TRAIN = """
load.compute()
def train(device):
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(6))).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=True)
    for step in range(4):
        optimizer.zero_grad()
        net(torch.full((16, 1024), 0.1 * (step + 1), device=device)).square().mean().backward()
        optimizer.step()
    return [p.detach().cpu() for p in net.parameters()]
"""


def budget(program: Program, environ: dict[str, str]) -> tuple[int, int, str]:
    """Return the budget `auto`, the free memory that it follows, and standard error."""
    out, err = program(
        """
        from umem._core import device_memory
        enable("auto")
        kept = blocks(1)
        print(umem.stats().budget_bytes, device_memory()[0]["free_bytes"])
        """,
        **environ,
    )
    first, free = map(int, out.split())
    return first, free, err


def test_the_page_cache_counts_as_free(program: Program) -> None:
    assert budget(program, INTEGRATED)[:2] == (224 * MIB, 256 * MIB)


def test_a_device_with_memory_of_its_own_has_what_the_driver_says(program: Program) -> None:
    first, free, err = budget(program, CACHE)
    assert first == 56 * MIB
    assert free < 64 * MIB
    assert err == ""


def test_no_more_is_free_than_the_host_has(program: Program) -> None:
    total = host.meminfo("MemTotal")
    assert total is not None
    sizes = {"SOFTCUDA_BYTES": str(total), "SOFTCUDA_PAGE_CACHE": str(total - 64 * MIB)}
    out, _ = program(
        """
        from umem.base import host
        before = host.meminfo("MemAvailable")
        enable("auto")
        kept = blocks(1)
        budget, after = umem.stats().budget_bytes, host.meminfo("MemAvailable")
        # Other programs run beside the test.
        print(min(before, after) / 2 < budget <= max(before, after))
        """,
        **INTEGRATED | sizes,
    )
    assert out == "True\n"


@pytest.mark.parametrize("backing", ["managed", "mapped"])
def test_a_training_that_fits_moves_nothing(program: Program, backing: str) -> None:
    out, err = program(
        TRAIN
        + f"""
with enable("auto", backing={backing!r}):
    assert all(torch.equal(a, b) for a, b in zip(train("cuda"), train("cpu")))
    found = umem.stats()
    print(found.allocs > 0, found.peak_live_bytes > 64 * MIB, soft.calls("cuMemPrefetchAsync"))
    print(found.bytes_in, found.bytes_out, found.evictions, found.hook_errors)
""",
        **INTEGRATED,
    )
    assert out.split() == ["True", "True", "0", "0", "0", "0", "0"]
    assert err.count(WARNING) == err.count("\n") == 1, err


@pytest.mark.parametrize("backing", ["managed", "mapped"])
def test_the_same_options_serve_again_beside_living_tensors(program: Program, backing: str) -> None:
    out, _ = program(
        f"""
        enable("auto", backing={backing!r})
        kept = blocks(2)
        umem.disable()
        enable("auto", backing={backing!r})
        print(intact(kept))
        """,
        **INTEGRATED,
    )
    assert out == "True\n"


def test_a_smaller_device_is_refused(program: Program) -> None:
    """It would hold the rest of the host's memory."""
    out, _ = program(
        """
        umem.enable(budget="auto", device="cuda:128MiB")
        try:
            blocks(1)
        except Exception as error:
            print("this one's memory is the host's: give a budget instead" in str(error))
        """,
        **INTEGRATED,
    )
    assert out == "True\n"


def test_out_of_memory_says_why_nothing_was_evicted(program: Program) -> None:
    out, err = program(
        """
        enable("16MiB")
        kept = blocks(6)
        try:
            torch.empty(3 * MIB, device="cuda")
        except torch.OutOfMemoryError as error:
            print("memory is not managed here, so nothing can be evicted" in str(error))
        print(intact(kept))
        """,
        **INTEGRATED,
    )
    assert out.split() == ["True", "True"]
    assert err.count(WARNING) == 1
