"""The networks of several benches, in plain PyTorch: ResNet-50, VGG-16, a U-Net, encoder blocks.

GPT is that of `umem demo`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (torch's own convention)
from torch.utils.checkpoint import checkpoint

from umem.demo.nets import Attention


def conv_norm(inputs: int, outputs: int, size: int, stride: int = 1) -> list[nn.Module]:
    """Return a convolution that keeps the image's size (except for the stride), and its norm."""
    conv = nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)
    return [conv, nn.BatchNorm2d(outputs)]


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions, four times as wide at the end, and a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            *conv_norm(inputs, width, 1),
            nn.ReLU(inplace=True),
            *conv_norm(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *conv_norm(width, outputs, 1),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(*conv_norm(inputs, outputs, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x), inplace=True)


class ResNet50(nn.Module):
    """ResNet-50 at width 64 and blocks (3, 4, 6, 3); deeper ones have more blocks."""

    def __init__(
        self,
        width: int,
        blocks: Sequence[int],
        classes: int,
        block: type[Bottleneck] = Bottleneck,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            *conv_norm(3, width, 7, 2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        ]
        channels = width
        for stage, count in enumerate(blocks):
            for i in range(count):
                layers.append(block(channels, width << stage, 2 if stage and not i else 1))
                channels = 4 * (width << stage)
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(x).mean(dim=(2, 3)))
        return logits


class ConvStage(nn.Sequential):
    """A stage of `count` 3 x 3 convolutions of one width, with or without normalisation."""

    def __init__(self, inputs: int, outputs: int, count: int, norm: bool = True) -> None:
        layers: list[nn.Module] = []
        for i in range(count):
            before = outputs if i else inputs
            if norm:
                layers += conv_norm(before, outputs, 3)
            else:
                layers.append(nn.Conv2d(before, outputs, 3, padding=1))
            layers.append(nn.ReLU(inplace=True))
        super().__init__(*layers)


class VGG16(nn.Module):
    """VGG-16 at width 64, as first published but without dropout."""

    def __init__(self, width: int, image: int, classes: int) -> None:
        super().__init__()
        stages: list[nn.Module] = []
        channels = 3
        for outputs, count in zip((1, 2, 4, 8, 8), (2, 2, 3, 3, 3), strict=True):
            stages += [ConvStage(channels, outputs * width, count, False), nn.MaxPool2d(2)]
            channels = outputs * width
        self.features = nn.Sequential(*stages)
        hidden = 64 * width
        self.head = nn.Sequential(
            nn.Linear(channels * (image // 32) ** 2, hidden),
            nn.ReLU(inplace=True),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Linear(hidden, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(x).flatten(1))
        return logits


class UNet(nn.Module):
    """The U-Net: `levels` halvings and back up, each level joined with its counterpart."""

    def __init__(self, width: int, levels: int, classes: int) -> None:
        super().__init__()
        widths = [width << level for level in range(levels + 1)]
        self.down = nn.ModuleList(
            ConvStage(inputs, outputs, 2)
            for inputs, outputs in zip([3, *widths], widths, strict=False)
        )
        self.grow = nn.ModuleList(
            nn.ConvTranspose2d(2 * outputs, outputs, 2, 2) for outputs in reversed(widths[:-1])
        )
        self.up = nn.ModuleList(
            ConvStage(2 * outputs, outputs, 2) for outputs in reversed(widths[:-1])
        )
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        twins: list[Tensor] = []
        for stage in self.down:
            x = stage(x if not twins else F.max_pool2d(x, 2))
            twins.append(x)
        twins.pop()
        for grow, stage in zip(self.grow, self.up, strict=True):
            x = stage(torch.cat([twins.pop(), grow(x)], dim=1))
        logits: Tensor = self.head(x)
        return logits


class FullAttention(Attention):
    """Self-attention to all positions."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        parts = self.qkv(x).view(batch, length, 3, self.heads, dim // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        joined: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, dim))
        return joined


class EncoderBlock(nn.Module):
    """`GPTBlock` with attention to all positions."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = FullAttention(dim, heads)
        self.norm2 = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return y


class CheckpointedEncoder(nn.Module):
    """Encoder blocks on tokens; each block's activations are recomputed in the backward pass."""

    def __init__(self, vocabulary: int, dim: int, heads: int, blocks: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(EncoderBlock(dim, heads) for _ in range(blocks))
        self.head = nn.Linear(dim, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        logits: Tensor = self.head(x)
        return logits
