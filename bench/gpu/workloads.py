"""Trainings of a realistic size for a GPU: ResNet-50, VGG-16, a U-Net, a medium GPT-2.

They learn from one batch of random numbers, made on the device with a fixed seed, because only
their time and memory matter; so they need nothing but torch. A workload is described by text,
`name` or `name:setting=value,...`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from umem.demo import data
from umem.demo.training import Training
from umem.demo.workloads import seed
from umem.errors import ConfigError

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
    """A U-Net that classifies each pixel; lengths in pixels."""

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
    """The layout of GPT-2 medium, without dropout and with an untied head."""

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


# By name, with their default settings.
WORKLOADS: dict[str, LargeConfig] = {
    "resnet50": ResNet50Config(),
    "gpt2": GPT2Config(),
    "unet": UNetConfig(),
    "vgg16": VGG16Config(),
}


def lookup(text: str) -> LargeConfig:
    """Return the workload of that name and its settings: ``resnet50:batch=64,image=128``.

    Lists are written like ``3x4x6x3``, switches as 0 or 1.

    Raises:
        ConfigError: no such workload or setting, or a bad value.
    """
    name, _, settings = text.partition(":")
    if name not in WORKLOADS:
        raise ConfigError(f"workload {name!r} is unknown; allowed: {', '.join(WORKLOADS)}")
    config = WORKLOADS[name]
    return replace(
        config, **dict(_setting(config, name, part) for part in settings.split(",") if part)
    )


def _setting(config: LargeConfig, name: str, text: str) -> tuple[str, Any]:
    key, _, value = text.partition("=")
    known = [field.name for field in fields(config)]
    if key not in known:
        raise ConfigError(f"workload {name} has no setting {key!r}; allowed: {', '.join(known)}")
    default = getattr(config, key)
    try:
        if isinstance(default, tuple):
            return key, tuple(int(part) for part in value.split("x"))
        return key, bool(int(value)) if isinstance(default, bool) else type(default)(value)
    except ValueError:
        raise ConfigError(
            f"workload {name}: {key}={value!r} is not of type {type(default).__name__}; "
            f"allowed: as in {key}={_written(default)}"
        ) from None


def _written(value: Any) -> str:
    if isinstance(value, tuple):
        return "x".join(str(part) for part in value)
    return str(int(value)) if isinstance(value, bool) else str(value)


def build(config: LargeConfig, device: str = "cpu", deterministic: bool = True) -> Training:
    """Make the training on a torch device, the same on every call, as those of `umem demo`."""
    torch = data.need("torch")
    seed(device, deterministic)
    with torch.device(device):
        if isinstance(config, GPT2Config):
            return _build_tokens(config, device)
        return _build_images(config, device)


def _build_images(config: ImageConfig, device: str) -> Training:
    torch = data.need("torch")
    shape = torch.channels_last if config.channels_last else torch.contiguous_format
    net: Any = _image_net(config)  # torch's stubs need more arguments than `memory_format`
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
    import nets

    if isinstance(config, ResNet50Config):
        return nets.ResNet50(config.width, config.blocks, config.classes)
    if isinstance(config, VGG16Config):
        return nets.VGG16(config.width, config.image, config.classes)
    return nets.UNet(config.width, config.levels, config.classes)


def _build_tokens(config: GPT2Config, device: str) -> Training:
    from umem.demo.nets import GPT

    torch = data.need("torch")
    net = GPT(config.vocabulary, config.context, config.layers, config.dim, config.heads)
    tokens = torch.randint(config.vocabulary, (config.batch, config.context + 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=config.learning_rate, weight_decay=0.1)
    loss = _loss_of(net, tokens[:, :-1], tokens[:, 1:], config.amp, device)
    return Training(net, optimizer, loss)


def _loss_of(
    net: nn.Module, inputs: Tensor, targets: Tensor, amp: bool, device: str
) -> Callable[[int], Tensor]:
    """Return the loss of a batch: cross entropy over dimension 1, or over the last one for text.

    Predictions are flattened to rows, because the loss over images has no deterministic kernel.
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
