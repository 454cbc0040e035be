"""Fine-tune a Llama-like model with bfloat16 weights, and float32 masters and Adam states.

    python examples/llama.py
    umem run --budget 40MiB examples/llama.py
    umem plan examples.llama:make_step --budget 33% --optimizer auto

Plain PyTorch, without umem. The first two train a small model, and print the same last line: the
last loss as a hex float and the SHA-256 of the weights. The third plans a step of a model with 1.2
billion parameters, batch 8 of 2,048 tokens, without a GPU and without its memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

THREADS = 2  # the order of sums depends on it
SEED, STEPS = 7, 6


@dataclass(frozen=True)
class Config:
    """A model's size, and that of a batch."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    batch: int
    length: int


SMALL = Config(512, 256, 4, 8, 2, 704, batch=4, length=64)
LARGE = Config(128256, 2048, 16, 32, 8, 8192, batch=8, length=2048)  # the sizes of Llama 3.2 1B


class MixedAdamW(torch.optim.Optimizer):
    """AdamW on float32 masters of low-precision parameters."""

    def __init__(self, parameters: Iterable[Tensor], lr: float = 1e-4, decay: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr, "decay": decay, "betas": (0.9, 0.95), "eps": 1e-8})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the masters, and round them to the parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad.float(), group)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state["master"] = parameter.float()
            state["mean"] = torch.zeros_like(state["master"])
            state["square"] = torch.zeros_like(state["master"])
        state["step"] += 1
        (first, second), count = group["betas"], state["step"]
        state["mean"].lerp_(gradient, 1 - first)
        state["square"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        scale = state["square"].sqrt().div_((1 - second**count) ** 0.5).add_(group["eps"])
        state["master"].mul_(1 - group["lr"] * group["decay"])
        state["master"].addcdiv_(state["mean"], scale, value=-group["lr"] / (1 - first**count))
        parameter.copy_(state["master"])


class Block(nn.Module):
    """Grouped-query attention with rotary positions, and a gated perceptron."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.kv_heads
        inner = config.width // config.heads * config.kv_heads
        self.before_attention, self.before_mlp = (nn.RMSNorm(config.width) for _ in range(2))
        self.q = nn.Linear(config.width, config.width, bias=False)
        self.k = nn.Linear(config.width, inner, bias=False)
        self.v = nn.Linear(config.width, inner, bias=False)
        self.o = nn.Linear(config.width, config.width, bias=False)
        self.gate = nn.Linear(config.width, config.hidden, bias=False)
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        at = self.before_attention(x)
        q, k, v = self._split(self.q(at)), self._split(self.k(at)), self._split(self.v(at))
        seen = F.scaled_dot_product_attention(
            _turned(q, turn), _turned(k, turn), v, is_causal=True, enable_gqa=True
        )
        x = x + self.o(seen.transpose(1, 2).flatten(2))
        at = self.before_mlp(x)
        return x + self.down(F.silu(self.gate(at)) * self.up(at))

    def _split(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        size = self.q.weight.shape[0] // self.heads
        return x.view(batch, length, width // size, size).transpose(1, 2)


class Llama(nn.Module):
    """Predicts the next token at every place; the table of tokens is also the last layer."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        size = config.width // config.heads
        speed = 500000.0 ** (-torch.arange(0, size, 2) / size)
        angle = torch.outer(torch.arange(config.length), speed)
        self.register_buffer("turn", torch.cat((angle.cos(), angle.sin()), -1), persistent=False)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, self.turn)
        scores: Tensor = F.linear(self.norm(x), self.tokens.weight)
        return scores


def _turned(x: Tensor, turn: Tensor) -> Tensor:
    """Turn pairs of channels by the angle of their position."""
    cos, sin = turn.to(x.dtype).chunk(2, -1)
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def loss_of(net: nn.Module, tokens: Tensor) -> Tensor:
    """Return the cross entropy of each token given those before it."""
    scores = net(tokens[:, :-1])
    return F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


def make_step(
    config: Config = LARGE,
) -> tuple[nn.Module, torch.optim.Optimizer, Tensor, Callable[[nn.Module, Tensor], Tensor]]:
    """Return what `umem plan` needs: network, optimizer, batch and loss function."""
    net = Llama(config).bfloat16()
    optimizer = MixedAdamW(net.parameters())
    tokens = torch.randint(config.vocabulary, (config.batch, config.length + 1))
    return net, optimizer, tokens, loss_of


def main() -> None:
    torch.set_num_threads(THREADS)
    torch.manual_seed(SEED)
    net, optimizer, _, _ = make_step(SMALL)
    loss = torch.tensor(float("nan"))
    for step in range(STEPS):
        tokens = torch.randint(SMALL.vocabulary, (SMALL.batch, SMALL.length + 1))
        optimizer.zero_grad()
        loss = loss_of(net, tokens)
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}", flush=True)
    digest = hashlib.sha256()
    for tensor in net.state_dict().values():
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy())
    print(f"final loss={float(loss.item()).hex()} sha256={digest.hexdigest()}")


if __name__ == "__main__":
    main()
