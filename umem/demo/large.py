"""Trainings of the size that a GPU is bought for: ResNet-50, VGG-16, a U-Net, a medium GPT-2.

What they learn from is one batch of random numbers, made on the device by a fixed seed: their time
and memory are the point, and they need nothing but torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import data
from .training import Training

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class ResNet50Config:
    """ResNet-50 as published; lengths in pixels, `amp` is autocast to bfloat16."""

    width: int = 64
    blocks: tuple[int, ...] = (3, 4, 6, 3)
    image: int = 224
    batch: int = 128
    classes: int = 1000
    amp: bool = True
    channels_last: bool = True
    learning_rate: float = 0.05


@dataclass(frozen=True)
class VGG16Config:
    """VGG-16 with batch normalisation and without dropout; lengths in pixels."""

    width: int = 64
    image: int = 224
    batch: int = 256
    classes: int = 1000
    amp: bool = False
    channels_last: bool = False
    learning_rate: float = 0.01


@dataclass(frozen=True)
class UNetConfig:
    """A U-Net that says the class of each pixel; lengths in pixels."""

    width: int = 64
    levels: int = 4
    image: int = 512
    batch: int = 8
    classes: int = 2
    amp: bool = True
    channels_last: bool = False
    learning_rate: float = 0.01


@dataclass(frozen=True)
class GPT2Config:
    """GPT-2's medium layout, without dropout and with a head of its own."""

    layers: int = 24
    dim: int = 1024
    heads: int = 16
    context: int = 1024
    vocabulary: int = 50257
    batch: int = 4
    amp: bool = True
    learning_rate: float = 3e-4


ImageConfig = ResNet50Config | VGG16Config | UNetConfig
LargeConfig = ImageConfig | GPT2Config


def build(config: LargeConfig, device: str) -> Training:
    """Make the training on `device`; the caller seeds torch first."""
    torch = data.need("torch")
    with torch.device(device):
        if isinstance(config, GPT2Config):
            return _build_tokens(config, device)
        return _build_images(config, device)


def _build_images(config: ImageConfig, device: str) -> Training:
    torch = data.need("torch")
    shape = torch.channels_last if config.channels_last else torch.contiguous_format
    net: Any = _image_net(config)  # torch's stubs do not know `memory_format` alone
    net.to(memory_format=shape)
    images = torch.randn(config.batch, 3, config.image, config.image)
    images = images.contiguous(memory_format=shape)
    targets = (config.batch, config.image, config.image)
    labels = torch.randint(config.classes, targets[: 3 if isinstance(config, UNetConfig) else 1])
    optimizer = torch.optim.SGD(
        net.parameters(), lr=config.learning_rate, momentum=0.9, weight_decay=5e-4
    )
    return Training(net, optimizer, _loss_of(net, images, labels, config.amp, device))


def _image_net(config: ImageConfig) -> nn.Module:
    from . import nets

    if isinstance(config, ResNet50Config):
        return nets.ResNet50(config.width, config.blocks, config.classes)
    if isinstance(config, VGG16Config):
        return nets.VGG16(config.width, config.image, config.classes)
    return nets.UNet(config.width, config.levels, config.classes)


def _build_tokens(config: GPT2Config, device: str) -> Training:
    torch = data.need("torch")
    from . import nets

    net = nets.GPT(config.vocabulary, config.context, config.layers, config.dim, config.heads)
    tokens = torch.randint(config.vocabulary, (config.batch, config.context + 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=config.learning_rate, weight_decay=0.1)
    loss = _loss_of(net, tokens[:, :-1], tokens[:, 1:], config.amp, device)
    return Training(net, optimizer, loss)


def _loss_of(
    net: nn.Module, inputs: Tensor, targets: Tensor, amp: bool, device: str
) -> Callable[[int], Tensor]:
    """Cross entropy over the classes, which are the outputs' dimension 1, or the last one of text.

    One row a prediction: the loss over images has no deterministic kernel.
    """
    torch: Any = data.need("torch")
    kind = torch.device(device).type

    def batch_loss(_: int) -> Tensor:
        with torch.autocast(kind, torch.bfloat16, enabled=amp):
            scores = net(inputs)
            if scores.dim() == 4:
                scores = scores.permute(0, 2, 3, 1)
            loss: Tensor = torch.nn.functional.cross_entropy(
                scores.flatten(0, -2), targets.flatten()
            )
        return loss

    return batch_loss
