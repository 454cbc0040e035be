"""The programs that are tried: each trains the GPT of `model` in one way, with plain PyTorch.

A program is made after umem is on, and knows nothing of it. `step(i)` is one iteration and returns
its losses; `state()` yields the tensors of which the final values are compared.
"""

from __future__ import annotations

import importlib.util
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW

from . import model


class Program(NamedTuple):
    """A program that is ready to run."""

    step: Callable[[int], list[Tensor]]
    state: Callable[[], Iterable[Tensor]]


class Trial(NamedTuple):
    """The ranks that a program needs, what makes it on one of them, and modules that it imports."""

    ranks: int
    make: Callable[[int, int], Program]
    needs: tuple[str, ...] = ()

    @property
    def missing(self) -> list[str]:
        """The modules that are not installed."""
        return [name for name in self.needs if importlib.util.find_spec(name) is None]


def adamw(parameters: Iterable[Tensor] | Iterable[dict[str, Any]], **options: Any) -> AdamW:
    """Return torch's loop over parameters, which is what fits into a small budget."""
    return AdamW(parameters, lr=1e-3, **({"foreach": False, "fused": False} | options))


def local(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield this rank's part of each."""
    for tensor in tensors:
        yield tensor.to_local() if hasattr(tensor, "to_local") else tensor


def learn(loss: Tensor, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Backward and step; return the loss as a program's step does."""
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return [loss.detach()]


def simple(net: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> Program:
    """Forward, backward, step."""

    def step(i: int) -> list[Tensor]:
        tokens, wanted = model.batch(i, rank)
        loss = model.loss_of(net(tokens), wanted)
        return learn(loss, optimizer)

    return Program(step, lambda: local(net.parameters()))


# One process.


def plain(
    rank: int, _world: int, *, checkpointed: bool = False, reentrant: bool = False, **options: Any
) -> Program:
    net = model.seeded(checkpointed=checkpointed, reentrant=reentrant)
    return simple(net, adamw(net.parameters(), **options), rank)


def side_thread(rank: int, _world: int) -> Program:
    """Another thread makes the next batch, with operators and large blocks, as a prefetcher does.

    How far it is ahead differs from step to step.
    """
    net = model.seeded()
    optimizer = adamw(net.parameters())
    asked: queue.Queue[int] = queue.Queue()
    made: queue.Queue[tuple[Tensor, Tensor, Tensor]] = queue.Queue()

    def make() -> None:
        while True:
            i = asked.get()
            tokens, wanted = model.batch(i, rank)
            generator = torch.Generator().manual_seed(i)
            image = torch.randn(1 << 20, generator=generator)  # 4 MiB
            for _ in range(6):
                image = (image * 0.5).add_(0.25).clamp_(-1, 1)
            made.put((tokens, wanted, image))

    threading.Thread(target=make, daemon=True).start()
    asked.put(0)

    def step(i: int) -> list[Tensor]:
        tokens, wanted, image = made.get()
        asked.put(i + 1)
        loss = model.loss_of(net(tokens), wanted) + 1e-3 * image.square().mean()
        return learn(loss, optimizer)

    return Program(step, net.parameters)


def inline_batch(rank: int, _world: int) -> Program:
    """Do what `side_thread` does in the only thread: its measure."""
    net = model.seeded()
    optimizer = adamw(net.parameters())

    def step(i: int) -> list[Tensor]:
        tokens, wanted = model.batch(i, rank)
        image = torch.randn(1 << 20, generator=torch.Generator().manual_seed(i))
        for _ in range(6):
            image = (image * 0.5).add_(0.25).clamp_(-1, 1)
        loss = model.loss_of(net(tokens), wanted) + 1e-3 * image.square().mean()
        return learn(loss, optimizer)

    return Program(step, net.parameters)


def in_backward(rank: int, _world: int) -> Program:
    """One optimizer a parameter, which steps as soon as the gradient is complete."""
    net = model.seeded()
    optimizers = {parameter: adamw([parameter]) for parameter in net.parameters()}

    def update(parameter: Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(update)

    def step(i: int) -> list[Tensor]:
        tokens, wanted = model.batch(i, rank)
        loss = model.loss_of(net(tokens), wanted)
        loss.backward()
        return [loss.detach()]

    return Program(step, net.parameters)


def optimizers(rank: int, _world: int, *, count: int) -> Program:
    """A list of optimizers, stepped one after the other after the backward pass."""
    net = model.seeded()
    parameters = list(net.parameters())
    every = [adamw(parameters[i::count]) for i in range(count)]

    def step(i: int) -> list[Tensor]:
        tokens, wanted = model.batch(i, rank)
        loss = model.loss_of(net(tokens), wanted)
        loss.backward()
        for optimizer in every:
            optimizer.step()
        for optimizer in every:
            optimizer.zero_grad()
        return [loss.detach()]

    return Program(step, net.parameters)


def adversaries(rank: int, _world: int) -> Program:
    """Two networks, each of which learns with its own loss and optimizer in turn, as in a GAN."""
    nets = [model.seeded(1), model.seeded(1)]
    every = [adamw(net.parameters()) for net in nets]

    def step(i: int) -> list[Tensor]:
        losses = []
        for which, (net, optimizer) in enumerate(zip(nets, every, strict=True)):
            tokens, wanted = model.batch(2 * i + which, rank)
            with torch.no_grad():
                other = nets[1 - which](tokens).softmax(-1).amax()
            loss = model.loss_of(net(tokens), wanted) + 0.01 * other
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    return Program(step, lambda: [p for net in nets for p in net.parameters()])


def accumulating(rank: int, _world: int) -> Program:
    """Four backward passes to an update."""
    net = model.seeded()
    optimizer = adamw(net.parameters())

    def step(i: int) -> list[Tensor]:
        losses = []
        for part in range(4):
            tokens, wanted = model.batch(4 * i + part, rank, 2)
            loss = model.loss_of(net(tokens), wanted) / 4
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        return losses

    return Program(step, net.parameters)


def by_hand(rank: int, _world: int) -> Program:
    """Gradient descent without an optimizer."""
    net = model.seeded()

    def step(i: int) -> list[Tensor]:
        tokens, wanted = model.batch(i, rank)
        loss = model.loss_of(net(tokens), wanted)
        loss.backward()
        with torch.no_grad():
            for parameter in net.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=0.1)
                parameter.grad = None
        return [loss.detach()]

    return Program(step, net.parameters)


def mixed_precision(rank: int, _world: int, *, scaled: bool = False) -> Program:
    """Autocast to bfloat16; `scaled`: with a GradScaler, and gradients that are clipped."""
    net = model.seeded()
    optimizer = adamw(net.parameters(), foreach=scaled)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=scaled)

    def step(i: int) -> list[Tensor]:
        tokens, wanted = model.batch(i, rank)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model.loss_of(net(tokens), wanted)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return [loss.detach()]

    return Program(step, net.parameters)


class LowRank(nn.Module):
    """A linear layer that stays as it is, and a product of two small ones that learns."""

    def __init__(self, base: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.base = base.requires_grad_(requires_grad=False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def low_rank(rank: int, _world: int) -> Program:
    """Fine-tune with low-rank adapters, as LoRA does."""
    net = model.seeded().requires_grad_(requires_grad=False)
    for block in net.blocks:
        for name in ("q", "v", "up", "down"):
            setattr(block, name, LowRank(getattr(block, name)))
    learning = [parameter for parameter in net.parameters() if parameter.requires_grad]
    return Program(simple(net, adamw(learning), rank).step, lambda: learning)


def averaged(rank: int, _world: int) -> Program:
    """Keep a moving average of the weights."""
    net = model.seeded()
    optimizer = adamw(net.parameters())
    average = torch.optim.swa_utils.AveragedModel(
        net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )

    def step(i: int) -> list[Tensor]:
        tokens, wanted = model.batch(i, rank)
        losses = learn(model.loss_of(net(tokens), wanted), optimizer)
        average.update_parameters(net)
        return losses

    return Program(step, lambda: [*net.parameters(), *average.parameters()])


def functional(rank: int, _world: int) -> Program:
    """Take gradients by torch.func, of parameters that are no attributes of a module."""
    net = model.seeded()
    values = {name: value.detach() for name, value in net.named_parameters()}

    def loss_of(values: dict[str, Tensor], tokens: Tensor, wanted: Tensor) -> Tensor:
        return model.loss_of(torch.func.functional_call(net, values, (tokens,)), wanted)

    def step(i: int) -> list[Tensor]:
        gradients, loss = torch.func.grad_and_value(loss_of)(values, *model.batch(i, rank))
        for name, gradient in gradients.items():
            values[name] -= 0.1 * gradient
        return [loss]

    return Program(step, values.values)


class Batches(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """The rows of `model.batch`."""

    def __len__(self) -> int:
        return 1000 * model.BATCH

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        tokens, wanted = model.batch(index, 0, 1)
        return tokens[0], wanted[0]


def loaded(_rank: int, _world: int) -> Program:
    """Batches come from worker processes that are forked."""
    net = model.seeded()
    optimizer = adamw(net.parameters())
    loader = torch.utils.data.DataLoader(
        Batches(),
        model.BATCH,
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context="fork",
    )
    batches = iter(loader)

    def step(_i: int) -> list[Tensor]:
        tokens, wanted = next(batches)
        return learn(model.loss_of(net(tokens), wanted), optimizer)

    return Program(step, net.parameters)


# Several ranks.


def ddp(rank: int, _world: int, *, micro_batches: int = 1, **options: Any) -> Program:
    """Train with DistributedDataParallel; of several micro-batches the last one is reduced."""
    net = nn.parallel.DistributedDataParallel(model.seeded(), **options)
    optimizer = adamw(net.parameters())

    def step(i: int) -> list[Tensor]:
        losses = []
        for part in range(micro_batches):
            last = part == micro_batches - 1
            with nullcontext() if last else net.no_sync():
                tokens, wanted = model.batch(micro_batches * i + part, rank)
                loss = model.loss_of(net(tokens), wanted)
                loss.backward()
                losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        return losses

    return Program(step, net.parameters)


def collective(rank: int, world: int, *, what: str) -> Program:
    """One collective in each step, and nothing else that is distributed."""
    net = model.seeded()
    optimizer = adamw(net.parameters())
    part = torch.full((1 << 19,), float(rank))  # 2 MiB
    whole = torch.empty(world << 19)

    def step(i: int) -> list[Tensor]:
        if what == "all_gather":
            dist.all_gather_into_tensor(whole, part)
        elif what == "all_reduce":
            dist.all_reduce(part, op=dist.ReduceOp.MAX)
        tokens, wanted = model.batch(i, rank)
        used = whole if what == "all_gather" else part
        loss = model.loss_of(net(tokens), wanted) + 1e-3 * used.mean()
        return learn(loss, optimizer)

    return Program(step, net.parameters)


def fsdp1(rank: int, _world: int, *, orig: bool = False) -> Program:
    """FullyShardedDataParallel, one flat parameter a block."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    net = FSDP(
        model.seeded(),
        auto_wrap_policy=ModuleWrapPolicy({model.Block}),
        device_id=torch.device("cpu"),
        use_orig_params=orig,
    )
    return simple(net, adamw(net.parameters()), rank)


def fsdp2(
    rank: int, world: int, *, offload: bool = False, bf16: bool = False, checkpointed: bool = False
) -> Program:
    """Train with fully_shard; each block is a unit."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    options: dict[str, Any] = {"mesh": init_device_mesh("cpu", (world,))}
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if bf16:
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    net = model.seeded(checkpointed=checkpointed)
    for block in net.blocks:
        fully_shard(block, **options)
    fully_shard(net, **options)
    return simple(net, adamw(net.parameters()), rank)


def zero(rank: int, _world: int, *, stage: int, groups: bool = False) -> Program:
    """Train with DeepSpeed's ZeRO: gradients and states in flat partitions, at stage 3 weights too.

    With `groups` each block is a parameter group, and so a partition, of its own.
    """
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(rank)}
    import deepspeed

    net = model.seeded()
    parts = [*net.blocks, net.words, net.places, net.norm, net.head] if groups else [net]
    params = [{"params": list(part.parameters())} for part in parts]
    config = {
        "train_micro_batch_size_per_gpu": model.BATCH,
        # By default up to 2 GB each, which the network does not have.
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 2 << 20,
            "allgather_bucket_size": 2 << 20,
            "sub_group_size": 2 << 20,
            "stage3_max_live_parameters": 4 << 20,
            "stage3_prefetch_bucket_size": 1 << 20,
            "stage3_param_persistence_threshold": 2048,
        },
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(
        model=net, optimizer=adamw(params), config=config, dist_init_required=False
    )

    def step(i: int) -> list[Tensor]:
        tokens, wanted = model.batch(i, rank)
        loss = model.loss_of(engine(tokens), wanted)
        engine.backward(loss)
        engine.step()
        return [loss.detach()]

    def state() -> list[Tensor]:
        if stage < 3:
            return list(net.parameters())
        with deepspeed.zero.GatheredParameters(list(net.parameters())):
            return [weight.detach().clone() for weight in net.parameters()]

    return Program(step, state)


class _Stage(nn.Module):
    """One half of the network, for pipelining."""

    def __init__(self, net: model.GPT, rank: int, world: int) -> None:
        super().__init__()
        first, last = rank == 0, rank == world - 1
        per_rank = len(net.blocks) // world
        self.first, self.last = first, last
        self.blocks = net.blocks[rank * per_rank : (rank + 1) * per_rank]
        self.words = net.words if first else None
        self.places = net.places if first else None
        self.norm = net.norm if last else None
        self.head = net.head if last else None

    def forward(self, x: Tensor) -> Tensor:
        if self.words is not None and self.places is not None:
            x = self.words(x) + self.places.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


def pipeline(rank: int, world: int) -> Program:
    """Train with the schedule 1F1B, four micro-batches."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    net = _Stage(model.seeded(), rank, world)
    optimizer = adamw(net.parameters())
    stage = PipelineStage(net, rank, world, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=model.loss_of)

    def step(i: int) -> list[Tensor]:
        tokens, wanted = model.batch(i, 0, 8)
        losses: list[Tensor] = []
        if net.first:
            schedule.step(tokens)
        else:
            schedule.step(target=wanted, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        return [loss.detach() for loss in losses]

    return Program(step, net.parameters)


def tensor_parallel(_rank: int, world: int) -> Program:
    """Shard the linear layers of each block, by parallelize_module."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    net = model.seeded()
    mesh = init_device_mesh("cpu", (world,))
    plan = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
    for block in net.blocks:
        parallelize_module(block, mesh, plan | {"o": RowwiseParallel(), "down": RowwiseParallel()})
    return simple(net, adamw(net.parameters()), 0)


TRIALS: dict[str, Trial] = {
    "plain": Trial(1, plain),
    "checkpoint": Trial(1, partial(plain, checkpointed=True)),
    "foreach": Trial(1, partial(plain, foreach=True)),
    "fused": Trial(1, partial(plain, fused=True)),
    "inline_batch": Trial(1, inline_batch),
    "side_thread": Trial(1, side_thread),
    "in_backward": Trial(1, in_backward),
    "optimizers12": Trial(1, partial(optimizers, count=12)),
    "optimizers2": Trial(1, partial(optimizers, count=2)),
    "adversaries": Trial(1, adversaries),
    "accumulate4": Trial(1, accumulating),
    "by_hand": Trial(1, by_hand),
    "bf16": Trial(1, mixed_precision),
    "bf16_scaler_clip": Trial(1, partial(mixed_precision, scaled=True)),
    "reentrant_checkpoint": Trial(1, partial(plain, checkpointed=True, reentrant=True)),
    "low_rank": Trial(1, low_rank),
    "averaged": Trial(1, averaged),
    "functional": Trial(1, functional),
    "data_loader": Trial(1, loaded),
    "all_reduce": Trial(2, partial(collective, what="all_reduce")),
    "all_gather": Trial(2, partial(collective, what="all_gather")),
    "ddp": Trial(2, ddp),
    "ddp_view": Trial(2, partial(ddp, gradient_as_bucket_view=True)),
    "ddp_view4": Trial(2, partial(ddp, gradient_as_bucket_view=True, bucket_cap_mb=4)),
    "ddp_no_sync": Trial(2, partial(ddp, micro_batches=2)),
    "ddp_static": Trial(2, partial(ddp, static_graph=True)),
    "fsdp1": Trial(2, fsdp1),
    "fsdp1_orig": Trial(2, partial(fsdp1, orig=True)),
    "fsdp2": Trial(2, fsdp2),
    "fsdp2_offload": Trial(2, partial(fsdp2, offload=True)),
    "fsdp2_bf16": Trial(2, partial(fsdp2, bf16=True)),
    "fsdp2_checkpoint": Trial(2, partial(fsdp2, checkpointed=True)),
    "zero1": Trial(2, partial(zero, stage=1), ("deepspeed",)),
    "zero2": Trial(2, partial(zero, stage=2), ("deepspeed",)),
    "zero1_groups": Trial(2, partial(zero, stage=1, groups=True), ("deepspeed",)),
    "zero2_groups": Trial(2, partial(zero, stage=2, groups=True), ("deepspeed",)),
    "zero3": Trial(2, partial(zero, stage=3), ("deepspeed",)),
    "pipeline": Trial(2, pipeline),
    "tensor_parallel": Trial(2, tensor_parallel),
}
