"""Networks of kinds that nets.py lacks: recommendation, GAN, volumes, diffusion, experts, states.

They have the operators and tensors of the named papers, not every detail; other_workloads.py has
the sizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from nets import EncoderBlock
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (torch's own convention)

from policies.nets import LlamaBlock
from umem.demo.nets import Attention, GPTBlock


class DLRM(nn.Module):
    """Recommendation (Naumov et al. 2019): embedding tables, and products of all pairs of vectors.

    Gradients of the tables are dense, as torch's default has them.
    """

    def __init__(self, rows: Sequence[int], dim: int, dense: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(count, dim, mode="sum") for count in rows)
        self.bottom = nn.Sequential(
            nn.Linear(dense, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, dim)
        )
        pairs = (len(rows) + 1) * len(rows) // 2
        self.top = nn.Sequential(
            nn.Linear(pairs + dim, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(),
            nn.Linear(512, 2),
        )  # fmt: skip

    def forward(self, dense: Tensor, features: Tensor) -> Tensor:
        """Return scores; `features` are indices, [tables, batch, lookups]."""
        x = self.bottom(dense)
        vectors = [x, *(table(of) for table, of in zip(self.tables, features, strict=True))]
        every = torch.stack(vectors, 1)
        products = every @ every.transpose(1, 2)
        below = torch.tril_indices(len(vectors), len(vectors), -1, device=x.device)
        scores: Tensor = self.top(torch.cat((x, products[:, below[0], below[1]]), 1))
        return scores


class Generator(nn.Sequential):
    """DCGAN's generator (Radford et al. 2016): an image of 4 * 2 ** levels from a vector."""

    def __init__(self, noise: int, width: int, levels: int) -> None:
        channels = width << (levels - 1)
        layers: list[nn.Module] = [
            nn.ConvTranspose2d(noise, channels, 4, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
        ]
        for _ in range(levels - 1):
            layers += [
                nn.ConvTranspose2d(channels, channels // 2, 4, 2, 1, bias=False),
                nn.BatchNorm2d(channels // 2),
                nn.ReLU(inplace=True),
            ]
            channels //= 2
        super().__init__(*layers, nn.ConvTranspose2d(channels, 3, 4, 2, 1), nn.Tanh())


class Discriminator(nn.Sequential):
    """DCGAN's discriminator: the generator's mirror image."""

    def __init__(self, width: int, levels: int) -> None:
        layers: list[nn.Module] = [nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.2, inplace=True)]
        for _ in range(levels - 1):
            layers += [
                nn.Conv2d(width, 2 * width, 4, 2, 1, bias=False),
                nn.BatchNorm2d(2 * width),
                nn.LeakyReLU(0.2, inplace=True),
            ]
            width *= 2
        super().__init__(*layers, nn.Conv2d(width, 1, 4), nn.Flatten(0))


class VolumeStage(nn.Sequential):
    """Two 3 x 3 x 3 convolutions of one width, each normalised per volume."""

    def __init__(self, inputs: int, outputs: int) -> None:
        layers: list[nn.Module] = []
        for before in (inputs, outputs):
            layers += [
                nn.Conv3d(before, outputs, 3, padding=1, bias=False),
                nn.InstanceNorm3d(outputs, affine=True),
                nn.LeakyReLU(inplace=True),
            ]
        super().__init__(*layers)


class VolumeUNet(nn.Module):
    """The 3-D U-Net (Çiçek et al. 2016; norms as in nnU-Net, Isensee et al. 2021)."""

    def __init__(self, inputs: int, width: int, levels: int, classes: int) -> None:
        super().__init__()
        widths = [min(width << level, 320) for level in range(levels + 1)]
        pairs = list(zip([inputs, *widths], widths, strict=False))
        self.down = nn.ModuleList(VolumeStage(*pair) for pair in pairs)
        ups = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.grow = nn.ModuleList(nn.ConvTranspose3d(deep, flat, 2, 2) for deep, flat in ups)
        self.up = nn.ModuleList(VolumeStage(2 * flat, flat) for _, flat in ups)
        self.head = nn.Conv3d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        twins: list[Tensor] = []
        for stage in self.down:
            x = stage(x if not twins else F.max_pool3d(x, 2))
            twins.append(x)
        twins.pop()
        for grow, stage in zip(self.grow, self.up, strict=True):
            x = stage(torch.cat([twins.pop(), grow(x)], 1))
        logits: Tensor = self.head(x)
        return logits


class TimedBlock(nn.Module):
    """A residual block of two convolutions with the time step as input, and optional attention."""

    def __init__(self, inputs: int, outputs: int, time: int, heads: int) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.GroupNorm(32, inputs), nn.SiLU(), nn.Conv2d(inputs, outputs, 3, padding=1)
        )
        self.time = nn.Linear(time, outputs)
        self.second = nn.Sequential(
            nn.GroupNorm(32, outputs), nn.SiLU(), nn.Conv2d(outputs, outputs, 3, padding=1)
        )
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()
        self.heads = heads
        if heads:
            self.norm = nn.GroupNorm(32, outputs)
            self.qkv, self.out = nn.Linear(outputs, 3 * outputs), nn.Linear(outputs, outputs)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.first(x) + self.time(F.silu(time))[:, :, None, None]
        y = self.shortcut(x) + self.second(y)
        if not self.heads:
            return y
        batch, channels, height, width = y.shape
        places = self.norm(y).flatten(2).transpose(1, 2)
        parts = self.qkv(places).view(batch, -1, 3, self.heads, channels // self.heads)
        z = F.scaled_dot_product_attention(*parts.permute(2, 0, 3, 1, 4))
        z = self.out(z.transpose(1, 2).reshape(batch, -1, channels))
        joined: Tensor = y + z.transpose(1, 2).view(batch, channels, height, width)
        return joined


class DiffusionUNet(nn.Module):
    """The network that guesses the noise of an image (Ho et al. 2020; Dhariwal and Nichol 2021)."""

    def __init__(self, width: int, factors: Sequence[int], attends: Sequence[int]) -> None:
        super().__init__()
        self.width, time = width, 4 * width
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        self.shrink, self.grow = nn.ModuleList(), nn.ModuleList()
        inputs, kept = width, [width]
        for level, factor in enumerate(factors):
            heads = 4 if level in attends else 0
            for _ in range(2):
                self.down.append(TimedBlock(inputs, factor * width, time, heads))
                inputs = factor * width
                kept.append(inputs)
            if level + 1 < len(factors):
                self.shrink.append(nn.Conv2d(inputs, inputs, 3, 2, 1))
                kept.append(inputs)
        self.middle = TimedBlock(inputs, inputs, time, 4)
        for level, factor in reversed(list(enumerate(factors))):
            heads = 4 if level in attends else 0
            for _ in range(3):
                self.up.append(TimedBlock(inputs + kept.pop(), factor * width, time, heads))
                inputs = factor * width
            if level:
                self.grow.append(nn.Conv2d(inputs, inputs, 3, padding=1))
        self.head = nn.Sequential(
            nn.GroupNorm(32, inputs), nn.SiLU(), nn.Conv2d(inputs, 3, 3, padding=1)
        )

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        """Return the noise in `x` at `times`, [batch]."""
        rates = torch.exp(-math.log(10_000) / (self.width // 2) * torch.arange(self.width // 2))
        angles = times[:, None] * rates.to(x.dtype)
        time = self.time(torch.cat((angles.sin(), angles.cos()), 1))
        x = self.stem(x)
        kept = [x]
        for i, block in enumerate(self.down):
            x = block(x, time)
            kept.append(x)
            if i % 2 and i // 2 < len(self.shrink):
                x = self.shrink[i // 2](x)
                kept.append(x)
        x = self.middle(x, time)
        for i, block in enumerate(self.up):
            x = block(torch.cat((x, kept.pop()), 1), time)
            if i % 3 == 2 and i // 3 < len(self.grow):
                x = self.grow[i // 3](F.interpolate(x, scale_factor=2.0))
        noise: Tensor = self.head(x)
        return noise


class DecoderBlock(GPTBlock):
    """A causal block that also attends to the encoder's output."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.heads = heads
        self.norm3 = nn.LayerNorm(dim)
        self.q, self.kv, self.joined = (nn.Linear(dim, n * dim) for n in (1, 2, 1))

    def across(self, x: Tensor, memory: Tensor) -> Tensor:
        batch, length, dim = x.shape
        size = dim // self.heads
        q = self.q(self.norm3(x)).view(batch, length, self.heads, size).transpose(1, 2)
        kv = self.kv(memory).view(batch, -1, 2, self.heads, size).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, kv[0], kv[1])
        z: Tensor = x + self.joined(y.transpose(1, 2).reshape(batch, length, dim))
        return z


class EncoderDecoder(nn.Module):
    """The transformer (Vaswani et al. 2017) with norms in front and one embedding."""

    def __init__(self, vocabulary: int, layers: int, dim: int, heads: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, dim)
        self.encoder = nn.Sequential(*(EncoderBlock(dim, heads) for _ in range(layers)))
        self.decoder = nn.ModuleList(DecoderBlock(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.encoder(self.token(source))
        x = self.token(target)
        for block in self.decoder:
            assert isinstance(block, DecoderBlock)
            x = block.across(block(x), memory)
        logits: Tensor = self.norm(x) @ self.token.weight.T
        return logits


class ExpertBlock(nn.Module):
    """Attention and experts that choose their tokens (Zhou et al. 2022): equal shapes each step."""

    def __init__(self, dim: int, heads: int, experts: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, heads)
        self.gate = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
            for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        tokens = self.norm2(x).flatten(0, 1)
        scores = self.gate(tokens).softmax(-1)
        each = 2 * len(tokens) // len(self.experts)  # each token has two experts on average
        weights, chosen = scores.T.topk(each)
        done = torch.zeros_like(tokens)
        for i, expert in enumerate(self.experts):
            made = expert(tokens[chosen[i]]) * weights[i, :, None]
            done = done.index_add(0, chosen[i], made.to(done.dtype))
        joined: Tensor = x + done.view_as(x)
        return joined


class StateSpaceBlock(nn.Module):
    """Mamba-2's block (Dao and Gu 2024): a scan over the text, by chunks of matrix products."""

    CHUNK, STATE, HEAD = 64, 64, 64

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inner, self.heads = 2 * dim, 2 * dim // self.HEAD
        self.norm = nn.RMSNorm(dim)
        self.project = nn.Linear(dim, 2 * self.inner + 2 * self.STATE + self.heads, bias=False)
        mixed = self.inner + 2 * self.STATE
        self.mix = nn.Conv1d(mixed, mixed, 4, padding=3, groups=mixed)
        self.decay, self.skip = (nn.Parameter(torch.zeros(self.heads)) for _ in range(2))
        self.norm2 = nn.RMSNorm(self.inner)
        self.out = nn.Linear(self.inner, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        sizes = (self.inner, self.inner + 2 * self.STATE, self.heads)
        gate, mixed, rate = self.project(self.norm(x)).split(sizes, -1)
        mixed = F.silu(self.mix(mixed.transpose(1, 2))[..., :length].transpose(1, 2))
        u, write, read = mixed.split((self.inner, self.STATE, self.STATE), -1)
        u = u.reshape(batch, length, self.heads, self.HEAD)
        y = self._scan(u, F.softplus(rate), write, read) + self.skip[:, None] * u
        joined: Tensor = x + self.out(self.norm2(y.flatten(2) * F.silu(gate)))
        return joined

    def _scan(self, u: Tensor, rate: Tensor, write: Tensor, read: Tensor) -> Tensor:
        """`u` [batch, length, heads, HEAD], `rate` [.., heads], `write` and `read` [.., STATE]."""
        cut = (len(u), -1, self.CHUNK)
        fades = (-self.decay.exp() * rate).unflatten(1, cut[1:]).cumsum(2)
        values = (u * rate[..., None]).unflatten(1, cut[1:])
        write, read = write.unflatten(1, cut[1:]), read.unflatten(1, cut[1:])
        between = fades[:, :, :, None] - fades[:, :, None]
        later = torch.ones(self.CHUNK, self.CHUNK, dtype=torch.bool).triu(1)
        weights = between.masked_fill(later[..., None], -math.inf).exp()
        weights = weights * torch.einsum("bcqn,bckn->bcqk", read, write)[..., None]
        inside = torch.einsum("bcqkh,bckhp->bcqhp", weights, values)
        left = values * (fades[:, :, -1:] - fades).exp()[..., None]
        made = torch.einsum("bckn,bckhp->bchpn", write, left)
        state, states = torch.zeros_like(made[:, 0]), []
        for chunk, fade in zip(made.unbind(1), fades[:, :, -1].exp().unbind(1), strict=True):
            states.append(state)
            state = state * fade[..., None, None] + chunk
        before = torch.einsum("bcqn,bchpn->bcqhp", read, torch.stack(states, 1))
        return (inside + before * fades.exp()[..., None]).flatten(1, 2)


class Texts(nn.Module):
    """A language model of any blocks."""

    def __init__(self, vocabulary: int, dim: int, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, dim)
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.blocks(self.token(tokens))))
        return logits


class LowRank(nn.Linear):
    """A linear layer that is frozen, and a trained correction of low rank (Hu et al. 2022)."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.requires_grad_(False)
        self.down = nn.Linear(inputs, rank, bias=False)
        self.up = nn.Linear(rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.up(self.down(x))


class AdaptedBlock(LlamaBlock):
    """Llama's block, frozen, with low-rank corrections of queries and values."""

    def __init__(self, dim: int, heads: int, hidden: int, rank: int) -> None:
        super().__init__(dim, heads, hidden)
        self.requires_grad_(False)
        self.q, self.v = (LowRank(dim, dim, rank) for _ in range(2))

    def forward(
        self, x: Tensor, cache: Tensor | None = None, place: Tensor | None = None
    ) -> Tensor:
        return super().forward(x, cache, place)
