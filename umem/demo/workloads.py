"""The trainings of the demo, for any torch device: small enough for a CPU, on real data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import data
from .training import SEED, Training

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ResNetConfig:
    """A ResNet on the handwritten digits; lengths in pixels.

    The defaults are ResNet-34's layout, but narrow: about 185 MiB at its peak, half a second of one
    core, with no tensor above 6 MiB, so that an eighth of the peak still holds one operator.
    """

    width: int = 8
    blocks: tuple[int, ...] = (3, 4, 6, 3)
    image: int = 32
    batch: int = 192


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


Config = ResNetConfig | GPTConfig
WORKLOADS: dict[str, Config] = {"resnet": ResNetConfig(), "gpt": GPTConfig()}


def _order(count: int, batch: int) -> Callable[[int], Tensor]:
    """Return a function from i to the indices of batch i: one fixed shuffle, repeated."""
    torch = data.need("torch")
    shuffle = torch.randperm(count, generator=torch.Generator().manual_seed(SEED))

    def indices(i: int) -> Tensor:
        chosen: Tensor = shuffle[torch.arange(i * batch, (i + 1) * batch) % count]
        return chosen

    return indices


def _build_resnet(config: ResNetConfig, device: str, fused: bool | None) -> Training:
    torch = data.need("torch")
    from . import nets

    images, labels = (part.to(device) for part in data.digits(config.image))
    net = nets.ResNet(config.width, config.blocks).to(device)
    optimizer = torch.optim.SGD(
        net.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4, fused=fused
    )
    order = _order(len(labels), config.batch)

    def batch_loss(i: int) -> Tensor:
        chosen = order(i).to(device)
        loss: Tensor = torch.nn.functional.cross_entropy(net(images[chosen]), labels[chosen])
        return loss

    return Training(net, optimizer, batch_loss)


def _build_gpt(config: GPTConfig, device: str, fused: bool | None) -> Training:
    torch = data.need("torch")
    from . import nets

    text = data.stdlib_text(config.text)
    letters = sorted(set(text))
    code = {letter: i for i, letter in enumerate(letters)}
    tokens = torch.tensor([code[letter] for letter in text], dtype=torch.int64).to(device)
    net = nets.GPT(len(letters), config.context, config.layers, config.dim, config.heads)
    net = net.to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=0.1, fused=fused)
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


def set_threads(threads: int) -> None:
    """Fix torch's CPU threads.

    The order of sums depends on their number, and so does the minimum budget of the software device
    (4 frames of 2 MiB per thread).
    """
    data.need("torch").set_num_threads(threads)


def seed(device: str, deterministic: bool) -> None:
    """Seed torch.

    On a GPU, `deterministic` selects the algorithms that repeat bit by bit instead of the fastest
    ones.

    Raises:
        NotSupportedError: torch is missing.
    """
    torch: Any = data.need("torch")
    torch.manual_seed(SEED)
    if device.startswith("cuda"):
        torch.backends.cudnn.deterministic = deterministic
        torch.backends.cudnn.benchmark = not deterministic
        torch.use_deterministic_algorithms(deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = False  # filling would only cost time


def build(
    config: Config, device: str = "cpu", deterministic: bool = True, *, fused: bool = False
) -> Training:
    """Make the training on a torch device ("cpu", "cuda", ...), the same on every call.

    The caller calls `set_threads`; `deterministic` is that of `seed`. With `fused` the optimizer
    updates by torch's fused kernels, whose bits differ from those of the default.

    Raises:
        NotSupportedError: torch or scikit-learn is missing.
    """
    seed(device, deterministic)
    if isinstance(config, ResNetConfig):
        return _build_resnet(config, device, fused or None)
    return _build_gpt(config, device, fused or None)
