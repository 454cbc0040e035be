"""A convolutional net and a transformer, small, with what recomputation stumbles over."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class Residual(nn.Module):
    """Convolutions, batch norm, and ReLU and addition in place."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.first_norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.second_norm = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = functional.relu(self.first_norm(self.first(x)), inplace=True)
        hidden = self.second_norm(self.second(hidden))
        hidden += x
        return functional.relu_(hidden)


class Convolutional(nn.Module):
    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.Sequential(
            Residual(channels), nn.MaxPool2d(2), nn.Dropout(0.3), Residual(channels)
        )
        self.head = nn.Linear(channels, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.blocks(functional.silu(self.stem(x))).mean((2, 3)))
        return out


class Layer(nn.Module):
    """Attention and a perceptron, both behind a layer norm."""

    def __init__(self, width: int, heads: int, attention_dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.attention_dropout = heads, attention_dropout
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(),
            nn.Linear(4 * width, width), nn.Dropout(0.1),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm(x)).split(width, -1)
        )
        attended = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.attention_dropout
        )
        x = x + functional.dropout(
            self.out(attended.transpose(1, 2).reshape(batch, length, width)), 0.1
        )
        out: torch.Tensor = x + self.mlp(x)
        return out


def transformer(width: int = 32, layers: int = 2) -> nn.Module:
    """The last layer's attention has dropout, for which the CPU has no fused kernel."""
    return nn.Sequential(*(Layer(width, 4, 0.1 if i == layers - 1 else 0.0) for i in range(layers)))
