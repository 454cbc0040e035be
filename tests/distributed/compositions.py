"""Other features that programs use together with umem, each with a program that uses it.

The tests (`integration/test_compose.py`) and `bench/compose.py` run the same programs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from . import model, programs
from .programs import Program, Trial, adamw, learn, simple


class Composition(NamedTuple):
    """A feature or a library, and the program that uses it on one rank."""

    title: str
    trial: Trial
    says_steps: bool = False  # nothing in its steps tells umem where one ends
    steady: bool = True  # each step does the same


def layers(widths: Sequence[int]) -> nn.Sequential:
    """Return linear layers between `widths`, with GELU between."""
    torch.manual_seed(1)
    made: list[nn.Module] = []
    for one, other in pairwise(widths):
        made += (nn.Linear(one, other), nn.GELU())
    return nn.Sequential(*made[:-1])


def rows_of(step: int, rank: int, count: int, width: int) -> Tensor:
    """Return the input of a step of `layers`."""
    return torch.randn(count, width, generator=torch.Generator().manual_seed(1000 * step + rank))


def clipped(rank: int, _world: int, *, foreach: bool) -> Program:
    """Clip gradients, all at once or one after the other."""
    net = model.seeded()
    optimizer = adamw(net.parameters(), foreach=foreach)

    def step(i: int) -> list[Tensor]:
        tokens, wanted = model.batch(i, rank)
        loss = model.loss_of(net(tokens), wanted)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 0.5, foreach=foreach)
        optimizer.step()
        optimizer.zero_grad()
        return [loss.detach(), norm]

    return Program(step, net.parameters)


def together(rank: int, _world: int, *, overflow: bool = False) -> Program:
    """Do as large trainings do: autocast, a scaler, checkpoints, micro-batches, clipping, an EMA.

    `overflow`: every third update is skipped by the scaler, because gradients are not finite.
    """
    net = model.seeded(checkpointed=True)
    optimizer = adamw(net.parameters(), foreach=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    average = torch.optim.swa_utils.AveragedModel(
        net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )

    def step(i: int) -> list[Tensor]:
        losses = []
        for part in range(2):
            tokens, wanted = model.batch(2 * i + part, rank)
            with torch.autocast("cpu", torch.bfloat16):
                loss = model.loss_of(net(tokens), wanted) / 2
            factor = torch.inf if overflow and i % 3 == 1 else 1.0
            scaler.scale(loss * factor).backward()
            losses.append(loss.detach())
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        average.update_parameters(net)
        return losses

    return Program(step, lambda: [*net.parameters(), *average.parameters()])


def saved_on_cpu(rank: int, _world: int) -> Program:
    """Keep what the backward pass needs in copies, as `save_on_cpu` does on every device."""
    net = model.seeded()
    optimizer = adamw(net.parameters())

    def step(i: int) -> list[Tensor]:
        tokens, wanted = model.batch(i, rank)
        with torch.autograd.graph.save_on_cpu(pin_memory=False):
            loss = model.loss_of(net(tokens), wanted)
        return learn(loss, optimizer)

    return Program(step, net.parameters)


def per_sample(rank: int, _world: int) -> Program:
    """Clip the gradient of each sample, as private training does, by vmap over grad."""
    net = layers([512] * 7)
    values = {name: value.detach() for name, value in net.named_parameters()}

    def loss_of(values: dict[str, Tensor], x: Tensor) -> Tensor:
        made: Tensor = torch.func.functional_call(net, values, (x,))
        return (made - x).square().mean()

    gradients_of = torch.func.vmap(torch.func.grad_and_value(loss_of), in_dims=(None, 0))

    def step(i: int) -> list[Tensor]:
        x = rows_of(i, rank, 8, 512)
        gradients, losses = gradients_of(values, x)
        norms = sum(g.flatten(1).square().sum(1) for g in gradients.values()).sqrt()
        factors = (0.05 / norms).clamp(max=1)
        for name, gradient in gradients.items():
            values[name] -= 0.1 * torch.tensordot(factors, gradient, 1)
        return [losses.sum()]

    return Program(step, values.values)


class Stored(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Rows that the parent holds in umem's memory, and that its workers read there."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(2)
        self.parts = [torch.randn(32, 1 << 15, generator=generator) for _ in range(8)]  # 32 MiB

    def __len__(self) -> int:
        return 1000 * model.BATCH

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = self.parts[index // 32 % 8][index % 32]
        return row[: 1 << 14].clone(), row[1 << 14 :].clone()


def loaded(_rank: int, _world: int, *, context: str, workers: int) -> Program:
    """Train on rows from worker processes that live long, through a thread that pins if it can."""
    net = layers([1 << 14, 128, 1 << 14])  # 16 MiB
    optimizer = adamw(net.parameters())
    loader = torch.utils.data.DataLoader(
        Stored(),
        model.BATCH,
        num_workers=workers,
        persistent_workers=True,
        pin_memory=torch.cuda.is_available(),
        multiprocessing_context=context,
    )
    batches = iter(loader)

    def step(_i: int) -> list[Tensor]:
        x, wanted = next(batches)
        return learn(F.mse_loss(net(x), wanted), optimizer)

    return Program(step, net.parameters)


def peft_lora(rank: int, _world: int) -> Program:
    """Fine-tune with the adapters of peft."""
    import peft

    config = peft.LoraConfig(r=8, target_modules=["q", "v", "up", "down"])
    net = peft.get_peft_model(model.seeded(), config)
    learning = [parameter for parameter in net.parameters() if parameter.requires_grad]
    return Program(simple(net, adamw(learning), rank).step, lambda: learning)


def bitsandbytes_adamw(rank: int, _world: int) -> Program:
    """Train with states of 8 bits, by kernels that are reached by address."""
    import bitsandbytes

    net = model.seeded()
    return simple(net, bitsandbytes.optim.AdamW8bit(net.parameters(), lr=1e-3), rank)


def torchao_adamw(rank: int, _world: int, *, bits: int) -> Program:
    """Train with states of a few bits, which are tensor subclasses.

    Its update is compiled for each shape, which takes minutes here: it runs eagerly instead.
    """
    import torchao.optim

    torch.compiler.set_stance("force_eager")
    net = model.seeded()
    optimizer = getattr(torchao.optim, f"AdamW{bits}bit")(net.parameters(), lr=1e-3)
    return simple(net, optimizer, rank)


WIDTHS = [1024, 2048] * 12 + [1024]  # 24 layers, each of 2 MiB in 8 bits


def running(net: nn.Module, state: Iterable[Tensor], rank: int) -> Program:
    """Run `layers` forward; a step's result is the mean of its outputs' squares."""
    kept = list(state)

    def step(i: int) -> list[Tensor]:
        with torch.no_grad():
            return [net(rows_of(i, rank, 16 * model.BATCH, WIDTHS[0])).square().mean()]

    return Program(step, lambda: kept)


def as_int8(weight: Tensor, *, rows: bool) -> tuple[Tensor, Tensor]:
    """Return a matrix in 8 bits and its scale: one for each row, or one for all."""
    largest = weight.abs().amax(1, keepdim=True) if rows else weight.abs().amax()
    scale = largest / 127
    return (weight / scale).round_().to(torch.int8), scale


class Int8Linear(nn.Module):
    """A linear layer with weights of 8 bits and a scale for each row, as CPM-2 has them."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        weight, scale = as_int8(base.weight.detach(), rows=True)
        self.bias = base.bias
        self.weight: Tensor
        self.scale: Tensor
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.scale, self.bias)


def int8_rows(rank: int, _world: int) -> Program:
    """Run a network of `Int8Linear`."""
    net = layers(WIDTHS)
    for name, layer in list(net.named_children()):
        if isinstance(layer, nn.Linear):
            setattr(net, name, Int8Linear(layer))
    return running(net, net.buffers(), rank)


def torchao_rows(rank: int, _world: int) -> Program:
    """Run a network that torchao has quantized to 8 bits, with a scale for each row."""
    from torchao.quantization import Int8WeightOnlyConfig, PerRow, quantize_

    net = layers(WIDTHS)
    quantize_(net, Int8WeightOnlyConfig(granularity=PerRow()))
    weights: list[Any] = [layer.weight for layer in net if isinstance(layer, nn.Linear)]
    return running(net, (part for w in weights for part in (w.qdata, w.scale)), rank)


_KNOWN = programs.TRIALS


def _one(make: Any, *needs: str, **options: Any) -> Trial:
    return Trial(1, partial(make, **options), needs)


COMPOSITIONS = {
    "plain": Composition("AdamW alone", _KNOWN["plain"]),
    "accumulate4": Composition("gradient accumulation", _KNOWN["accumulate4"]),
    "bf16": Composition("torch.autocast", _KNOWN["bf16"]),
    "bf16_scaler_clip": Composition("autocast, GradScaler, clipping", _KNOWN["bf16_scaler_clip"]),
    "clip": Composition("clip_grad_norm_", _one(clipped, foreach=False)),
    "clip_foreach": Composition("clip_grad_norm_, foreach", _one(clipped, foreach=True)),
    "together": Composition(
        "all of accumulation, autocast, GradScaler, clipping, checkpoint, EMA", _one(together)
    ),
    "scaler_skips": Composition(
        "the same, with updates that GradScaler skips", _one(together, overflow=True), steady=False
    ),
    "checkpoint": Composition("checkpoint, not reentrant", _KNOWN["checkpoint"]),
    "reentrant_checkpoint": Composition("checkpoint, reentrant", _KNOWN["reentrant_checkpoint"]),
    "save_on_cpu": Composition("save_on_cpu", _one(saved_on_cpu)),
    "in_backward": Composition("optimizer in backward", _KNOWN["in_backward"]),
    "averaged": Composition("EMA, AveragedModel", _KNOWN["averaged"]),
    "functional": Composition(
        "torch.func: grad, functional_call", _KNOWN["functional"], says_steps=True
    ),
    "per_sample": Composition("torch.func: vmap over grad", _one(per_sample), says_steps=True),
    "loader_fork": Composition("DataLoader, fork", _one(loaded, context="fork", workers=2)),
    "loader_spawn": Composition("DataLoader, spawn", _one(loaded, context="spawn", workers=1)),
    "lora": Composition("LoRA, by hand", _KNOWN["low_rank"]),
    "peft": Composition("LoRA, peft", _one(peft_lora, "peft")),
    "bitsandbytes": Composition("bitsandbytes AdamW8bit", _one(bitsandbytes_adamw, "bitsandbytes")),
    "torchao8": Composition("torchao AdamW8bit", _one(torchao_adamw, "torchao", bits=8)),
    "torchao4": Composition("torchao AdamW4bit", _one(torchao_adamw, "torchao", bits=4)),
    "int8_rows": Composition("int8 weights, by row", _one(int8_rows)),
    "torchao_rows": Composition("torchao int8 weights, by row", _one(torchao_rows, "torchao")),
}
TRIALS = _KNOWN | {name: composition.trial for name, composition in COMPOSITIONS.items()}
