"""Train a small GPT on the sources of Python's standard library, character by character.

    python examples/gpt.py
    umem run --budget 48MiB examples/gpt.py
    umem plan examples.gpt:make_step --budget 50% --device a100-pcie4

Plain PyTorch, without umem. The first two print the same last line: the last loss as a hex float
and the SHA-256 of the weights. The third plans a training step of a network of GPT-2 medium's size
without a GPU and without its memory: it only needs `make_step`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

THREADS = 2  # the order of sums depends on it, and so does the min budget: 8 MiB per thread
SEED = 7
STEPS, BATCH, RATE = 12, 8, 1e-3


@dataclass(frozen=True)
class Config:
    """A network's size."""

    vocabulary: int
    context: int
    layers: int
    heads: int
    width: int
    dropout: float = 0.0


SMALL = Config(vocabulary=128, context=128, layers=4, heads=4, width=128)
MEDIUM = Config(vocabulary=50257, context=1024, layers=24, heads=16, width=1024, dropout=0.1)


class Block(nn.Module):
    """Attention and a perceptron, each on the normalised sum so far."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.before_attention = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.mix = nn.Linear(config.width, config.width)
        self.before_mlp = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.before_attention(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        p = self.dropout if self.training else 0.0
        seen = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        x = x + self._drop(self.mix(seen.transpose(1, 2).reshape(batch, length, width)))
        return x + self._drop(self.down(F.gelu(self.up(self.before_mlp(x)))))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


class GPT(nn.Module):
    """Predicts the next token at every place; the table of tokens is also the last layer."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.places = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.places(places)
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x))
        return scores


def loss_of(net: nn.Module, tokens: Tensor) -> Tensor:
    """Return the cross entropy of each token given those before it."""
    scores = net(tokens[:, :-1])
    return F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


def make_step(
    config: Config = MEDIUM, batch: int = 8
) -> tuple[nn.Module, torch.optim.Optimizer, Tensor, Callable[[nn.Module, Tensor], Tensor]]:
    """Return what `umem plan` needs: network, optimizer, batch and loss function."""
    net = GPT(config)
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE)
    tokens = torch.randint(config.vocabulary, (batch, config.context + 1))
    return net, optimizer, tokens, loss_of


def load_text(min_chars: int) -> Tensor:
    """Return at least `min_chars` characters of the standard library, as codes below 128."""
    text = ""
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        text += path.read_text(encoding="utf-8")
        if len(text) >= min_chars:
            break
    return torch.tensor([min(ord(character), 127) for character in text])


def weights_sha256(net: nn.Module) -> str:
    """SHA-256 of all weights, in order."""
    digest = hashlib.sha256()
    for tensor in net.state_dict().values():
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def batch_of(text: Tensor, context: int, rows: int) -> Tensor:
    """Return pieces of the text from random places, each of `context` tokens and the next one."""
    starts = torch.randint(len(text) - context - 1, (rows,)).tolist()
    return torch.stack([text[start : start + context + 1] for start in starts])


def train(threads: int, compiled: Callable[[nn.Module], nn.Module] = lambda net: net) -> None:
    """Train the small network, called through `compiled`, and print the losses and the end."""
    torch.set_num_threads(threads)
    torch.manual_seed(SEED)
    text = load_text(100_000)
    net, optimizer, _, _ = make_step(SMALL)
    called = compiled(net)
    loss = torch.tensor(float("nan"))
    for step in range(STEPS):
        tokens = batch_of(text, SMALL.context, BATCH)
        optimizer.zero_grad()
        loss = loss_of(called, tokens)
        loss.backward()
        optimizer.step()
        print(f"step {step:2}: loss {loss.item():.4f}", flush=True)
    print(f"final loss={float(loss.item()).hex()} sha256={weights_sha256(net)}")


if __name__ == "__main__":
    train(THREADS)
