"""DataLoader workers, forked and spawned, under a budget that is a fraction of the data."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from support.rows import Rows  # noqa: E402
from support.training import train  # noqa: E402

import umem  # noqa: E402


def run(workers: int, context: str | None) -> str:
    return train(
        Rows(), 16, epochs=2, batch_size=16, num_workers=workers, multiprocessing_context=context
    )


@pytest.fixture(scope="module")
def plain() -> str:
    return run(0, None)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("workers", "context"),
    [
        (0, None),
        (2, "fork"),
        pytest.param(2, "spawn", marks=pytest.mark.nightly),  # as test_persistent_workers.py has
    ],
)
@pytest.mark.parametrize("policy", [pytest.param("none", marks=pytest.mark.nightly), "lru"])
def test_workers_never_see_or_cause_wrong_data(
    plain: str, workers: int, context: str | None, policy: str
) -> None:
    with umem.enable(budget="16MiB", device="soft", policy=policy):
        assert run(workers, context) == plain
        assert umem.stats().peak_resident_bytes <= 16 << 20
