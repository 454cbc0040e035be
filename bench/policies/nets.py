"""Networks for this bench only: DenseNet, Inception, SE-ResNet, encoders, LSTM, Llama.

Others come from bench/nets.py and umem/demo/nets.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from nets import Bottleneck, EncoderBlock, conv_norm
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (torch's own convention)


class DenseLayer(nn.Module):
    """DenseNet's layer: two convolutions, whose output joins all features before it."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm2d(inputs),
            nn.ReLU(inplace=True),
            *conv_norm(inputs, 4 * growth, 1),
            nn.ReLU(inplace=True),
            nn.Conv2d(4 * growth, growth, 3, 1, 1, bias=False),
        )

    def forward(self, features: list[Tensor]) -> Tensor:
        made: Tensor = self.body(torch.cat(features, 1))
        return made


class DenseNet(nn.Module):
    """DenseNet-BC (Huang et al. 2017), with halving transitions between the blocks."""

    def __init__(self, growth: int, blocks: Sequence[int], classes: int) -> None:
        super().__init__()
        channels = 2 * growth
        self.stem = nn.Sequential(
            *conv_norm(3, channels, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        )
        self.blocks = nn.ModuleList()
        self.transitions = nn.ModuleList()
        for count in blocks:
            self.blocks.append(
                nn.ModuleList(DenseLayer(channels + i * growth, growth) for i in range(count))
            )
            channels += count * growth
            if len(self.blocks) < len(blocks):
                self.transitions.append(_transition(channels))
                channels //= 2
        self.norm = nn.BatchNorm2d(channels)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for i, block in enumerate(self.blocks):
            features = [x]
            assert isinstance(block, nn.ModuleList)
            for layer in block:
                features.append(layer(features))
            x = torch.cat(features, 1)
            if i < len(self.transitions):
                x = self.transitions[i](x)
        logits: Tensor = self.head(F.relu(self.norm(x), inplace=True).mean(dim=(2, 3)))
        return logits


def _transition(channels: int) -> nn.Module:
    return nn.Sequential(
        nn.BatchNorm2d(channels),
        nn.ReLU(inplace=True),
        nn.Conv2d(channels, channels // 2, 1, bias=False),
        nn.AvgPool2d(2),
    )


class SEBottleneck(Bottleneck):
    """A bottleneck whose channels are weighted by their content: squeeze and excitation."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__(inputs, width, stride)
        outputs = 4 * width
        self.squeeze = nn.Linear(outputs, outputs // 16)
        self.excite = nn.Linear(outputs // 16, outputs)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        scale = torch.sigmoid(self.excite(F.relu(self.squeeze(y.mean(dim=(2, 3))))))
        return F.relu(y * scale[:, :, None, None] + self.shortcut(x), inplace=True)


class Unit(nn.Sequential):
    """Inception's convolution, normalisation and ReLU, with kernels that need not be square."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        size: int | tuple[int, int],
        stride: int = 1,
        padding: int | tuple[int, int] = 0,
    ) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, size, stride, padding, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        )


class Branches(nn.Module):
    """Parallel paths whose outputs are joined."""

    def __init__(self, *paths: nn.Module) -> None:
        super().__init__()
        self.paths = nn.ModuleList(paths)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([path(x) for path in self.paths], 1)


class InceptionV3(nn.Module):
    """Inception-v3 (Szegedy et al. 2016) for images of 299 x 299, without the auxiliary head."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            Unit(3, 32, 3, 2),
            Unit(32, 32, 3),
            Unit(32, 64, 3, 1, 1),
            nn.MaxPool2d(3, 2),
            Unit(64, 80, 1),
            Unit(80, 192, 3),
            nn.MaxPool2d(3, 2),
            *(_mixed_a(inputs, pool) for inputs, pool in ((192, 32), (256, 64), (288, 64))),
            Branches(
                Unit(288, 384, 3, 2),
                nn.Sequential(Unit(288, 64, 1), Unit(64, 96, 3, 1, 1), Unit(96, 96, 3, 2)),
                nn.MaxPool2d(3, 2),
            ),
            *(_mixed_b(width) for width in (128, 160, 160, 192)),
            Branches(
                nn.Sequential(Unit(768, 192, 1), Unit(192, 320, 3, 2)),
                nn.Sequential(Unit(768, 192, 1), *_asymmetric(192, 192, 192), Unit(192, 192, 3, 2)),
                nn.MaxPool2d(3, 2),
            ),
            *(_mixed_c(inputs) for inputs in (1280, 2048)),
        )
        self.head = nn.Linear(2048, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(x).mean(dim=(2, 3)))
        return logits


def _pooled(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.AvgPool2d(3, 1, 1), Unit(inputs, outputs, 1))


def _asymmetric(inputs: int, middle: int, outputs: int) -> tuple[nn.Module, nn.Module]:
    return Unit(inputs, middle, (1, 7), 1, (0, 3)), Unit(middle, outputs, (7, 1), 1, (3, 0))


def _mixed_a(inputs: int, pool: int) -> nn.Module:
    return Branches(
        Unit(inputs, 64, 1),
        nn.Sequential(Unit(inputs, 48, 1), Unit(48, 64, 5, 1, 2)),
        nn.Sequential(Unit(inputs, 64, 1), Unit(64, 96, 3, 1, 1), Unit(96, 96, 3, 1, 1)),
        _pooled(inputs, pool),
    )


def _mixed_b(width: int) -> nn.Module:
    long = (*_asymmetric(width, width, width), *_asymmetric(width, width, 192))
    return Branches(
        Unit(768, 192, 1),
        nn.Sequential(Unit(768, width, 1), *_asymmetric(width, width, 192)),
        nn.Sequential(Unit(768, width, 1), *long),
        _pooled(768, 192),
    )


def _mixed_c(inputs: int) -> nn.Module:
    def split() -> nn.Module:
        return Branches(Unit(384, 384, (1, 3), 1, (0, 1)), Unit(384, 384, (3, 1), 1, (1, 0)))

    return Branches(
        Unit(inputs, 320, 1),
        nn.Sequential(Unit(inputs, 384, 1), split()),
        nn.Sequential(Unit(inputs, 448, 1), Unit(448, 384, 3, 1, 1), split()),
        _pooled(inputs, 192),
    )


class Bert(nn.Module):
    """An encoder that predicts every token of a text (Devlin et al. 2019), with pre-norms."""

    def __init__(self, vocabulary: int, context: int, layers: int, dim: int, heads: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, dim)
        self.position = nn.Embedding(context, dim)
        self.blocks = nn.Sequential(*(EncoderBlock(dim, heads) for _ in range(layers)))
        self.transform = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.LayerNorm(dim))
        self.head = nn.Linear(dim, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(places)
        logits: Tensor = self.head(self.transform(self.blocks(x)))
        return logits


class ViT(nn.Module):
    """The vision transformer (Dosovitskiy et al. 2021) with patches of 16 x 16."""

    def __init__(self, image: int, layers: int, dim: int, heads: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, dim, 16, 16)
        self.first = nn.Parameter(torch.zeros(1, 1, dim))
        self.position = nn.Parameter(torch.zeros(1, (image // 16) ** 2 + 1, dim))
        self.blocks = nn.Sequential(*(EncoderBlock(dim, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.position
        logits: Tensor = self.head(self.norm(self.blocks(x))[:, 0])
        return logits


class LSTM(nn.Module):
    """Layers of LSTM cells over a text, unrolled; returns the prediction after the last token."""

    def __init__(self, vocabulary: int, dim: int, layers: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, dim)
        self.inputs = nn.ModuleList(nn.Linear(dim, 4 * dim) for _ in range(layers))
        self.hidden = nn.ModuleList(nn.Linear(dim, 4 * dim, bias=False) for _ in range(layers))
        self.head = nn.Linear(dim, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        zero = torch.zeros(len(tokens), self.head.in_features)
        states = [(zero, zero) for _ in self.inputs]
        for x in self.token(tokens).unbind(1):
            for i, (of_input, of_hidden) in enumerate(zip(self.inputs, self.hidden, strict=True)):
                h, c, _ = _lstm_cell(of_input(x) + of_hidden(states[i][0]), states[i][1])
                states[i] = h, c
                x = h
        logits: Tensor = self.head(x)
        return logits


# One op forward and one backward, as the fused kernel of CUDA: torch's cell for CPUs is twenty.
@torch.library.custom_op("umem_bench::lstm_cell", mutates_args=())
def _lstm_cell(gates: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    i, f, g, o = gates.chunk(4, 1)
    active = torch.cat([i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()], 1)
    i, f, g, o = active.chunk(4, 1)
    after = f * c + i * g
    return o * after.tanh(), after, active


@_lstm_cell.register_fake
def _(gates: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(c), torch.empty_like(c), torch.empty_like(gates)


@torch.library.custom_op("umem_bench::lstm_cell_backward", mutates_args=())
def _lstm_cell_backward(
    grad_h: Tensor, grad_c: Tensor, c: Tensor, after: Tensor, active: Tensor
) -> tuple[Tensor, Tensor]:
    i, f, g, o = active.chunk(4, 1)
    inner = after.tanh()
    total = grad_c + grad_h * o * (1 - inner * inner)
    of_gates = (
        total * g * i * (1 - i),
        total * c * f * (1 - f),
        total * i * (1 - g * g),
        grad_h * inner * o * (1 - o),
    )
    return torch.cat(of_gates, 1), total * f


@_lstm_cell_backward.register_fake
def _(*tensors: Tensor) -> tuple[Tensor, Tensor]:
    *_, c, _, active = tensors
    return torch.empty_like(active), torch.empty_like(c)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[1], output[1], output[2])


def _backward(ctx: Any, grad_h: Tensor, grad_c: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    grads: tuple[Tensor, Tensor] = _lstm_cell_backward(grad_h, grad_c, *ctx.saved_tensors)
    return grads


_lstm_cell.register_autograd(_backward, setup_context=_save)


class LlamaBlock(nn.Module):
    """Llama's block (Touvron et al. 2023) with a cache of keys and values of constant shape."""

    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.RMSNorm(dim)
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.norm2 = nn.RMSNorm(dim)
        self.gate, self.up = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor, cache: Tensor | None, place: Tensor | None) -> Tensor:
        """`cache` is [2, batch, heads, length, dim / heads]; without one, attend to x alone."""
        batch, length, dim = x.shape
        shape = (batch, length, self.heads, dim // self.heads)
        y = self.norm1(x)
        q, k, v = (part(y).view(shape).transpose(1, 2) for part in (self.q, self.k, self.v))
        if cache is not None and place is not None:
            k, v = cache[0].index_copy_(2, place, k), cache[1].index_copy_(2, place, v)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=cache is None)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, dim))
        y = self.norm2(x)
        joined: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return joined


class Llama(nn.Module):
    """Llama's layout, for inference."""

    def __init__(self, vocabulary: int, layers: int, dim: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(LlamaBlock(dim, heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)

    def forward(
        self, tokens: Tensor, caches: Sequence[Tensor] = (), place: Tensor | None = None
    ) -> Tensor:
        """Return the logits of the last token; `caches` has one per block, or is empty."""
        x = self.token(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x, caches[i] if caches else None, place)
        logits: Tensor = self.head(self.norm(x[:, -1:]))
        return logits
