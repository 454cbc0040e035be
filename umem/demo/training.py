"""A training that its owner steps, and the fingerprint of its results."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from . import data

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
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.losses.append(loss.item())
        return self.losses[-1]

    def fingerprint(self) -> dict[str, str]:
        """Return the last loss as a hex float, and SHA-256 of losses, weights and the optimizer."""
        return {
            "loss": self.losses[-1].hex(),
            "losses_sha256": hashlib.sha256(
                " ".join(loss.hex() for loss in self.losses).encode()
            ).hexdigest(),
            "state_sha256": state_sha256(self.net, self.optimizer),
        }


def state_sha256(net: nn.Module, optimizer: Optimizer) -> str:
    """Return SHA-256 over names, types, shapes and bytes of the weights and the optimizer state."""
    digest = hashlib.sha256()
    for name, tensor in net.state_dict().items():
        _digest_tensor(digest, name, tensor)
    for index, state in sorted(optimizer.state_dict()["state"].items()):
        for key, value in sorted(state.items()):
            if hasattr(value, "dtype"):
                _digest_tensor(digest, f"{index}.{key}", value)
            else:
                digest.update(f"{index}.{key}={value!r};".encode())
    return digest.hexdigest()


def _digest_tensor(digest: hashlib._Hash, name: str, tensor: Tensor) -> None:
    torch = data.need("torch")
    digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    digest.update(raw.numpy().data)
