"""The number of umem's driver calls, on the counters of the software driver.

torch's own calls go to the runtime library, and are not counted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from softcuda.load import Softcuda  # noqa: E402

pytestmark = pytest.mark.gpu
Program = Callable[..., tuple[str, str]]
MIB = 1 << 20
SYMBOLS = Path(__file__).resolve().parents[2] / "src/driver/symbols.def"
ENTRIES = re.findall(r"UMEM_SYMBOL\((\w+)", SYMBOLS.read_text(encoding="utf-8"))
HINTS = ("cuMemPrefetchAsync", "cuMemPrefetchBatchAsync", "cuMemDiscardBatchAsync",
         "cuMemDiscardAndPrefetchBatchAsync", "cuMemAdvise")  # fmt: skip

# Twelve activations of 12 MiB, each from an operator with an input, used again in reverse order.
STEPS = f"""
import json
enable(budget=BUDGET, policy="lru")
weights = [torch.full((3 * MIB,), 1.0, device="cuda") for _ in range(2)]
out = torch.empty(3 * MIB, device="cuda")
operators = 0
def step():
    global operators
    kept = []
    for i in range(12):
        kept.append(torch.full((3 * MIB,), float(operators + i), device="cuda"))
        out.copy_(weights[i % 2])
    while kept:
        x = kept.pop()
        out.copy_(x)
        if CHECK:
            assert bool(out.cpu().eq(float(operators + len(kept))).all())
        x = None
    operators += 36
    umem.step()
for _ in range(4):
    step()
soft.reset()
operators, before = 0, umem.stats()
for _ in range(4):
    step()
after = umem.stats()
assert after.hook_errors == 0
names = {ENTRIES!r}
calls = {{name: n for name in names if (n := soft.calls(name))}}
moved = after.evictions + after.prefetches - before.evictions - before.prefetches
discarded = (after.bytes_discarded - before.bytes_discarded) // (12 * MIB)
print(json.dumps([calls, operators, moved, discarded]))
"""


def counted(
    program: Program, budget: str, check: bool = False, **environ: str
) -> tuple[dict[str, int], int, int, int]:
    """Calls by name in four warm steps; operators, moved and discarded units."""
    code = STEPS.replace("BUDGET", repr(budget)).replace("CHECK", str(check))
    out, _ = program(code, SOFTCUDA_BYTES=str(512 * MIB), **environ)
    calls, operators, moved, discarded = json.loads(out)
    return calls, operators, moved, discarded


def test_a_program_that_fits_calls_nothing(program: Program, softcuda: Softcuda) -> None:
    calls, _, moved, _ = counted(program, "448MiB")
    assert moved == 0
    assert calls == {}


@pytest.mark.parametrize("version", ["12080", "13000"])
def test_out_of_core_calls_are_bounded_by_what_moves(
    program: Program, softcuda: Softcuda, version: str
) -> None:
    calls, operators, moved, _ = counted(program, "96MiB", SOFTCUDA_VERSION=version)
    hints = sum(calls.get(name, 0) for name in HINTS)
    assert moved > 40
    assert hints <= 3 * moved, calls
    # Events with which others wait for a hint, and one of the stream that it waits for itself; and
    # one per eight operators, with which an eviction waits for a last use.
    assert calls["cuEventRecord"] <= 2 * hints + operators // 8, calls
    assert calls["cuStreamWaitEvent"] <= 2 * hints, calls
    # No call that allocates or frees memory, and none that can wait for the device.
    waiting = ("cuMemAlloc", "cuMemAllocManaged", "cuMemFree", "cuMemGetInfo", "cuCtxSynchronize",
               "cuStreamSynchronize", "cuEventSynchronize", "cuEventDestroy")  # fmt: skip
    assert not any(calls.get(name) for name in waiting), calls


def test_numbers_stay_right_meanwhile(program: Program, softcuda: Softcuda) -> None:
    _, _, moved, _ = counted(program, "96MiB", check=True, SOFTCUDA_SEED="3")
    assert moved > 40
