"""The model of torch's caching allocator against the allocator itself, on the software driver."""

from __future__ import annotations

from pathlib import Path

import pytest
from softcuda.programs import reason_without_torch, torch_program

pytestmark = pytest.mark.skipif(
    reason_without_torch() is not None, reason=str(reason_without_torch())
)
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("mib", [256, 4096], ids=["short", "plenty"])
def test_the_model_reserves_what_torch_does(seed: int, mib: int) -> None:
    torch_program(
        f"""
        import random
        sys.path.insert(0, {str(ROOT)!r})
        from umem.analysis.caching_allocator import CachingAllocator
        from umem.errors import OutOfMemoryError
        rng, model = random.Random({seed}), CachingAllocator(limit={mib} * MIB)
        live, refused = [], 0
        for _ in range(600):
            if live and rng.random() < 0.45:
                theirs, ours = live.pop(rng.randrange(len(live)))
                torch.cuda.caching_allocator_delete(theirs)
                model.free(ours)
            else:
                size = rng.randint(1, rng.choice((4096, MIB, 3 * MIB, 15 * MIB, 50 * MIB)))
                try:
                    theirs = torch.cuda.caching_allocator_alloc(size)
                except torch.OutOfMemoryError:
                    theirs = None
                    refused += 1
                try:
                    ours = model.malloc(size)
                except OutOfMemoryError:
                    ours = None
                assert (theirs is None) == (ours is None)
                if ours is not None:
                    live.append((theirs, ours))
            assert torch.cuda.memory_reserved() == model.reserved
            assert torch.cuda.memory_allocated() == model.allocated
        assert (refused > 0) == ({mib} == 256)
        """,
        SOFTCUDA_BYTES=str(mib << 20),
    )
