"""A training that its owner steps, and the fingerprint of its results."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

SEED = 2024


@dataclass
class Training:
    """A network, its optimizer and the loss of batch i."""

    net: nn.Module
    optimizer: Optimizer
    batch_loss: Callable[[int], Tensor]
    losses: list[float] = field(default_factory=list)

    def step(self) -> float:
        """Train on the next batch; return its loss."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.batch_loss(len(self.losses))
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())
        return self.losses[-1]

    def fingerprint(self) -> dict[str, str]:
        """Return the last loss as a hex float, and SHA-256 of losses, weights and optimizer."""
        digest = hashlib.sha256(" ".join(loss.hex() for loss in self.losses).encode())
        state = {f"net.{name}": tensor for name, tensor in self.net.state_dict().items()}
        for index, values in self.optimizer.state_dict()["state"].items():
            state |= {f"optimizer.{index}.{name}": value for name, value in values.items()}
        for name, value in sorted(state.items()):
            _add(digest, name, value)
        return {"loss": self.losses[-1].hex(), "state_sha256": digest.hexdigest()}


def _add(digest: hashlib._Hash, name: str, value: object) -> None:
    """Add a tensor's name, type, shape and bytes, or another value, to the digest."""
    import torch

    if not isinstance(value, torch.Tensor):
        digest.update(f"{name}={value!r};".encode())
        return
    digest.update(f"{name}:{value.dtype}:{tuple(value.shape)};".encode())
    digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
