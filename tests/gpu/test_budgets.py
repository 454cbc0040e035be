"""Budgets that sessions, fractions and other devices give a GPU, and what they count."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("torch")

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("softcuda")]
Program = Callable[..., tuple[str, str]]

BUDGET = """
def budget(device=0):
    return umem.stats(device).budget_bytes // MIB
"""


@pytest.mark.parametrize(
    ("first", "then", "mib"), [("64MiB", "25%", 128), ("auto", "10%", 50), ("10%", "64MiB", 64)]
)
def test_a_session_with_live_tensors_has_its_own_budget(
    program: Program, first: str, then: str, mib: int
) -> None:
    program(
        BUDGET
        + f"""
kept = []
for given in ({first!r}, {then!r}):
    enable(given)
    kept += blocks(1)
    before = budget()
    umem.disable()
assert before == {mib}, before
assert intact(kept[:1])
""",
        SOFTCUDA_BYTES=str(512 << 20),
    )


def test_a_session_with_live_tensors_finds_its_own_budget(program: Program) -> None:
    """The memory of those tensors counts as the budget's."""
    program(
        BUDGET
        + """
enable("64MiB")
kept = blocks(48)  # half of it is evicted, and the driver keeps the frames
umem.disable()
enable("auto")
free, _ = torch.cuda.mem_get_info()
found = budget()
most = free // MIB + 96
assert most * 7 // 8 - 4 <= found <= most, (found, free // MIB)
umem.disable()
""",
        SOFTCUDA_BYTES=str(512 << 20),
    )


def test_a_refused_budget_leaves_all_devices_as_they_were(program: Program) -> None:
    program(
        BUDGET
        + """
enable("25%")
first, second = (torch.ones(4 * MIB, device=f"cuda:{i}") for i in range(2))
before = budget(0), budget(1)
umem.pin(second)
try:
    umem.set_budget("10MiB")
except umem.UmemError as error:
    print(error)
else:
    raise AssertionError("a pinned tensor of 16 MiB fits")
assert (budget(0), budget(1)) == before, (budget(0), budget(1), before)
""",
        SOFTCUDA_DEVICES="2",
    )


def test_a_fraction_is_one_of_what_the_option_leaves(program: Program) -> None:
    program(
        BUDGET
        + """
umem.enable(budget="auto", device="cuda:128MiB")
x = torch.ones(4, device="cuda")
torch.cuda.set_per_process_memory_fraction(0.5)
assert budget() == 64, budget()
assert torch.cuda.get_per_process_memory_fraction() == 0.5
""",
        SOFTCUDA_BYTES=str(512 << 20),
    )


def test_auto_stays_within_what_the_option_leaves(program: Program) -> None:
    """Also once the free memory was looked at: the headroom is one of that size."""
    program(
        BUDGET
        + """
from umem.session import auto_budget
auto_budget.EVERY_S = 0
umem.enable(budget="auto", device="cuda:1GiB")
torch.ones(4, device="cuda")
first = budget()
for _ in range(2 * auto_budget.PATIENCE):
    torch.ones(4, device="cuda")
    umem.step()
assert budget() == first > 768, (first, budget())
""",
        SOFTCUDA_BYTES=str(4 << 30),
    )


@pytest.mark.parametrize("early", [True, False])
def test_auto_leaves_a_fraction_that_the_program_set(program: Program, early: bool) -> None:
    """Also one that was set before the first look at the free memory."""
    program(
        BUDGET
        + f"""
from umem.session import auto_budget
auto_budget.EVERY_S = 0
enable("auto")
def steps():
    for _ in range(2 * auto_budget.PATIENCE):
        torch.ones(4, device="cuda")
        umem.step()
if not {early}:
    steps()
torch.cuda.set_per_process_memory_fraction(0.25)
steps()
assert budget() == 128, budget()
""",
        SOFTCUDA_BYTES=str(512 << 20),
    )


def test_plain_memory_takes_what_is_counted(program: Program) -> None:
    """Unlike managed memory, plain memory beyond a block is taken too."""
    program(
        """
        enable("400MiB")
        first = torch.ones(4, device="cuda")
        free, _ = torch.cuda.mem_get_info()
        before = umem.stats().live_bytes
        more = [torch.empty(66 * MIB, dtype=torch.uint8, device="cuda") for _ in range(3)]
        taken = free - torch.cuda.mem_get_info()[0]
        assert taken == umem.stats().live_bytes - before == 3 * 66 * MIB, taken // MIB
        """,
        SOFTCUDA_BYTES=str(512 << 20),
        SOFTCUDA_NO_CMA="0",
    )


def test_the_other_backing_is_tried_in_the_same_process(program: Program) -> None:
    """The driver is asked again, since the other backing needs other calls."""
    _, said = program(
        """
        enable(backing="mapped")
        try:
            torch.ones(4, device="cuda")
        except (RuntimeError, umem.UmemError) as error:
            assert "backing=managed" in str(error), error
        else:
            raise AssertionError("it is not supported")
        umem.disable()
        enable(backing="managed")
        assert bool(torch.ones(4, device="cuda").cpu().eq(1).all())
        """,
        SOFTCUDA_NO_CMA="0",
        SOFTCUDA_MISSING="cuMemCreate",
    )
    assert "plain device memory is used" in said
