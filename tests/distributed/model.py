"""A small GPT, whose weights and activations are blocks of their own, and its batches."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (torch's own convention)
from torch.utils.checkpoint import checkpoint

WORDS, WIDTH, HEADS, BLOCKS = 1024, 512, 8, 2
BATCH, LENGTH = 4, 96


class Block(nn.Module):
    """Attention and an MLP; its linear layers have names that tensor parallelism refers to."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        # With tensor parallelism a rank has some of the heads only, so their number is not fixed.
        q, k, v = (
            layer(y).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A decoder of `blocks` blocks; `checkpointed` ones run again in the backward pass."""

    def __init__(self, blocks: int, *, checkpointed: bool = False, reentrant: bool = False) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, HEADS) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.checkpointed, self.reentrant = checkpointed, reentrant

    def embed(self, tokens: Tensor) -> Tensor:
        return self.words(tokens) + self.places.weight[: tokens.shape[1]]

    def logits(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            again = self.checkpointed
            x = checkpoint(block, x, use_reentrant=self.reentrant) if again else block(x)
        return self.logits(x)


def seeded(blocks: int | None = None, **options: bool) -> GPT:
    """Return the same network each time, on every rank, with `BLOCKS` blocks if not told."""
    torch.manual_seed(1)
    return GPT(BLOCKS if blocks is None else blocks, **options)


def batch(step: int, rank: int, size: int | None = None) -> tuple[Tensor, Tensor]:
    """Return the tokens of a step, `BATCH` rows by default, and those that follow each."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    rows = torch.randint(WORDS, (size or BATCH, LENGTH + 1), generator=generator)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def loss_of(logits: Tensor, wanted: Tensor) -> Tensor:
    """Return the mean cross entropy, in float32 whatever the network computes in."""
    return F.cross_entropy(logits.float().flatten(0, 1), wanted.flatten())
