"""Workers that live through several epochs while the parent trains below a third of its need."""

from __future__ import annotations

import warnings

import pytest

torch = pytest.importorskip("torch")

from support.training import train  # noqa: E402

import umem  # noqa: E402

MIB = 1 << 20


class Rows(torch.utils.data.Dataset):
    def __init__(self) -> None:
        self.rows = torch.randn(64, 65536, generator=torch.Generator().manual_seed(3))  # 16 MiB

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        row = self.rows[index].clone()
        if torch.utils.data.get_worker_info() is not None:
            self.rows[index].neg_().neg_()  # a write whose failure a later epoch would notice
            self.rows[(index + 1) % 64].add_(0.0)
        return row, index


def run(workers: int, context: str | None) -> str:
    return train(
        Rows(),
        24,
        epochs=3,
        batch_size=8,
        num_workers=workers,
        multiprocessing_context=context,
        persistent_workers=workers > 0,
    )


@pytest.mark.parametrize(
    "context", ["fork", "spawn", pytest.param("forkserver", marks=pytest.mark.nightly)]
)
def test_persistent_workers(context: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        plain = run(0, None)
        with umem.enable(budget="12MiB", device="soft"):  # data 16, weights, momentum, grads 18 MiB
            umem.reset_peak_stats()
            assert run(2, context) == plain
            stats = umem.stats()
            assert (
                stats.peak_live_bytes > 1.8 * stats.budget_bytes
            )  # spawn moves the data to /dev/shm
            assert stats.peak_resident_bytes <= 12 * MIB
