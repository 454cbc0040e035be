"""Train the network of train_digits.py on two workers of Ray Train.

    python examples/ray_digits.py
    UMEM=1 UMEM_BUDGET=32MiB python examples/ray_digits.py

Plain Ray and PyTorch, without umem. Both print the same last line. Needs ray[train].
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import ddp_digits
from ray import train
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

WORKERS = 2


def worker(config: dict[str, Any]) -> None:
    """Train like ddp_digits.py; Ray has created the process group."""
    final = ddp_digits.train()
    if train.get_context().get_world_rank() == 0:
        Path(config["result"]).write_text(final)


def main() -> None:
    """Train, and print what rank 0 found."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result"
        TorchTrainer(
            worker,
            train_loop_config={"result": str(result)},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=WORKERS),
            run_config=RunConfig(storage_path=folder),
        ).fit()
        print(result.read_text())


if __name__ == "__main__":
    main()
