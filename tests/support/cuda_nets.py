"""Small trainings whose tensors are large enough to be managed: each is a maker of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

Step = Callable[[], torch.Tensor]  # one training step; its loss


@dataclass(frozen=True)
class Training:
    """A model in training: its parts, and its next step."""

    model: nn.Module
    step: Step


def cnn(device: str) -> Training:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.1), nn.Linear(32 * 16 * 16, 256), nn.ReLU(), nn.Linear(256, 10),
    ).to(device)  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> torch.Tensor:
        images = torch.randn(24, 3, 64, 64).to(device)
        labels = torch.randint(0, 10, (24,)).to(device)
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return Training(model, step)


class _UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Conv2d(3, 16, 3, padding=1)
        self.down2 = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.middle = nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.SiLU())
        self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.last = nn.Conv2d(32, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = F.silu(self.down1(x))
        second = self.middle(F.silu(self.down2(first)))
        out: torch.Tensor = self.last(torch.cat([first, self.up(second)], 1))
        return out


def unet(device: str) -> Training:
    """With batches of changing sizes, and momentum."""
    model = _UNet().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    count = 0

    def step() -> torch.Tensor:
        nonlocal count
        count += 1
        batch = (16, 16, 12, 16, 8)[count % 5]
        images = torch.randn(batch, 3, 64, 64).to(device)
        loss = F.mse_loss(model(images), images)
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
        return loss

    return Training(model, step)


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, 4, width // 4)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        out: torch.Tensor = x + self.mlp(self.norm2(x))
        return out


def _gpt(device: str, autocast: bool) -> Training:
    width, words = 128, 512
    batch = 4 if autocast else 16  # the CPU is slow at bfloat16
    model = nn.Sequential(
        nn.Embedding(words, width), _Block(width), _Block(width), nn.LayerNorm(width),
        nn.Linear(width, words),
    ).to(device)  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)

    def step() -> torch.Tensor:
        tokens = torch.randint(0, words, (batch, 129)).to(device)
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.reshape(-1, words).float(), tokens[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Training(model, step)


def gpt(device: str) -> Training:
    return _gpt(device, autocast=False)


def gpt_bf16(device: str) -> Training:
    return _gpt(device, autocast=True)


class _Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(128, 192, num_layers=2, batch_first=True)
        self.head = nn.Linear(192, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.lstm(x)[0])
        return out


def lstm(device: str) -> Training:
    model = _Tagger().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step() -> torch.Tensor:
        x, labels = torch.randn(64, 24, 128).to(device), torch.randint(0, 32, (64, 24)).to(device)
        loss = F.cross_entropy(model(x).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Training(model, step)


def streams(device: str) -> Training:
    """A copy and a part of the loss on a side stream, with record_stream."""
    first = nn.Linear(1024, 1024)
    model = nn.Sequential(first, nn.Tanh(), nn.Linear(1024, 1024)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    side = torch.cuda.Stream() if device == "cuda" else None

    def step() -> torch.Tensor:
        x = torch.randn(1024, 1024)
        if side is None:
            x, weight = x.to(device), first.weight.detach().clone()
            extra = (weight * weight).sum()
        else:
            here = torch.cuda.current_stream()
            side.wait_stream(here)
            with torch.cuda.stream(side):
                x = x.to(device)
                weight = first.weight.detach().clone()
                extra = (weight * weight).sum()
            here.wait_stream(side)
            for tensor in (x, extra):
                tensor.record_stream(here)
        loss = F.mse_loss(model(x), x) + extra * 1e-4
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Training(model, step)


def graph(device: str) -> Training:
    """Forward and backward replayed from a CUDA graph; the optimizer's step is not in it."""
    layers = [nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 1024), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Linear(1024, 1024)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.zeros(128, 1024, device=device)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def backward() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = F.mse_loss(model(x), x)
        loss.backward()
        return loss

    side, captured = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # as torch requires: once before it is captured
        backward()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(captured):
        loss = backward()

    def step() -> torch.Tensor:
        x.copy_(torch.randn(128, 1024))
        captured.replay()
        optimizer.step()
        return loss

    return Training(model, step)


NETS: dict[str, Callable[[str], Training]] = {
    "cnn": cnn, "unet": unet, "gpt": gpt, "gpt_bf16": gpt_bf16, "lstm": lstm, "streams": streams,
    "graph": graph,
}  # fmt: skip
