"""A data set that spawned workers can import."""

from __future__ import annotations

import torch

SAMPLES, FEATURES = 96, 65536  # 24 MiB


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Rows of one tensor; a worker scribbles over its copy after reading."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.rows = torch.randn(SAMPLES, FEATURES, generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        row = self.rows[index].clone()
        # A spawned worker has the tensor in shared memory, as it has with plain torch.
        if torch.utils.data.get_worker_info() is not None and not self.rows.is_shared():
            self.rows[index] = -1.0  # the parent must never see this
        return row
