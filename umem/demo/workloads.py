"""The trainings of the demo and of the benches, defined once, for any torch device.

A workload is a description that travels as text (name and numbers); `build` makes the training.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from umem.errors import ConfigError

from . import data

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

SEED = 2024


@dataclass(frozen=True)
class ResNetConfig:
    """A ResNet on the handwritten digits; lengths in pixels.

    The defaults are ResNet-34's layout, narrow: about 185 MiB at its peak for half a second of one
    core, with no tensor above 6 MiB, so that an eighth of the peak still holds one operator.
    """

    width: int = 8
    blocks: tuple[int, ...] = (3, 4, 6, 3)
    image: int = 32
    batch: int = 192
    learning_rate: float = 0.05


@dataclass(frozen=True)
class GPTConfig:
    """A character GPT on the standard library's sources; `text` in characters.

    The defaults need about 170 MiB at the peak; the residual stream is 2 MiB, one page.
    """

    layers: int = 5
    dim: int = 128
    heads: int = 4
    context: int = 128
    batch: int = 32
    text: int = 1_000_000
    learning_rate: float = 2e-3


Config = ResNetConfig | GPTConfig


@dataclass
class Training:
    """A network, its optimizer and the loss of batch i."""

    net: nn.Module
    optimizer: Optimizer
    batch_loss: Callable[[int], Tensor]
    losses: list[float] = field(default_factory=list)

    def step(self) -> float:
        """Train on the next batch; returns its loss."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.batch_loss(len(self.losses))
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.losses.append(loss.item())
        return self.losses[-1]

    def fingerprint(self) -> dict[str, str]:
        """The last loss as a hex float, and SHA-256 of all losses, weights and optimizer state."""
        return {
            "loss": self.losses[-1].hex(),
            "losses_sha256": hashlib.sha256(
                " ".join(loss.hex() for loss in self.losses).encode()
            ).hexdigest(),
            "state_sha256": state_sha256(self.net, self.optimizer),
        }


def state_sha256(net: nn.Module, optimizer: Optimizer) -> str:
    """SHA-256 over names, types, shapes and bytes of the weights and of the optimizer state."""
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


def _order(count: int, batch: int) -> Callable[[int], Tensor]:
    """Indices of batch i: one fixed shuffle, walked round and round."""
    torch = data.need("torch")
    shuffle = torch.randperm(count, generator=torch.Generator().manual_seed(SEED))

    def indices(i: int) -> Tensor:
        chosen: Tensor = shuffle[torch.arange(i * batch, (i + 1) * batch) % count]
        return chosen

    return indices


def _build_resnet(config: ResNetConfig, device: str) -> Training:
    torch = data.need("torch")
    from . import nets

    images, labels = (part.to(device) for part in data.digits(config.image))
    net = nets.ResNet(config.width, config.blocks).to(device)
    optimizer = torch.optim.SGD(
        net.parameters(), lr=config.learning_rate, momentum=0.9, weight_decay=5e-4
    )
    order = _order(len(labels), config.batch)

    def batch_loss(i: int) -> Tensor:
        chosen = order(i).to(device)
        loss: Tensor = torch.nn.functional.cross_entropy(net(images[chosen]), labels[chosen])
        return loss

    return Training(net, optimizer, batch_loss)


def _build_gpt(config: GPTConfig, device: str) -> Training:
    torch = data.need("torch")
    from . import nets

    text = data.stdlib_text(config.text)
    letters = sorted(set(text))
    code = {letter: i for i, letter in enumerate(letters)}
    tokens = torch.tensor([code[letter] for letter in text], dtype=torch.int64).to(device)
    net = nets.GPT(len(letters), config.context, config.layers, config.dim, config.heads)
    net = net.to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=config.learning_rate, weight_decay=0.1)
    order = _order(len(tokens) - config.context - 1, config.batch)
    window = torch.arange(config.context)

    def batch_loss(i: int) -> Tensor:
        places = (order(i).unsqueeze(1) + window).to(device)
        logits = net(tokens[places])
        loss: Tensor = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), tokens[places + 1].flatten()
        )
        return loss

    return Training(net, optimizer, batch_loss)


@dataclass(frozen=True)
class Workload:
    """A named training."""

    name: str
    title: str
    config: Config


WORKLOADS: dict[str, Workload] = {
    w.name: w
    for w in (
        Workload("resnet", "ResNet on scikit-learn's handwritten digits", ResNetConfig()),
        Workload("gpt", "GPT (characters) on Python's standard library", GPTConfig()),
    )
}


def lookup(name: str) -> Workload:
    """The workload of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in WORKLOADS:
        raise ConfigError(f"workload {name!r} is unknown; allowed: {', '.join(WORKLOADS)}")
    return WORKLOADS[name]


def set_threads(threads: int) -> None:
    """Fix torch's CPU threads.

    The order of sums depends on their number, and so does the least budget of the software device
    (4 frames of 2 MiB a thread).
    """
    data.need("torch").set_num_threads(threads)


def build(config: Config, device: str = "cpu") -> Training:
    """Make the training on a torch device ("cpu", "cuda", ...), the same on every call.

    Seeds torch; `set_threads` is the caller's.

    Raises:
        NotSupportedError: torch or scikit-learn is missing.
    """
    torch: Any = data.need("torch")
    torch.manual_seed(SEED)
    if device.startswith("cuda"):
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
    if isinstance(config, ResNetConfig):
        return _build_resnet(config, device)
    return _build_gpt(config, device)
