"""Train the GPT of gpt.py on several processes, each of which keeps a part of it (FSDP2).

    torchrun --nproc-per-node 2 examples/fsdp2_gpt.py
    UMEM=1 UMEM_BUDGET=24MiB torchrun --nproc-per-node 2 examples/fsdp2_gpt.py
    umem run --budget 24MiB torchrun --nproc-per-node 2 examples/fsdp2_gpt.py
    (cd examples && umem plan fsdp2_gpt:make_sharded --node h100x8 --ranks 64 --budget 60%)

Plain PyTorch, without umem. The first three print the same last line. The fourth plans one of 64
ranks of a network of GPT-2 XL's size, without a GPU and without its memory.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable

import torch
import torch.distributed as dist
from gpt import RATE, SEED, Config, batch_of, load_text, loss_of, make_step
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

STEPS, BATCH = 12, 8  # per process
WIDE = Config(vocabulary=128, context=128, layers=4, heads=4, width=256)
XL = Config(vocabulary=50257, context=1024, layers=48, heads=25, width=1600, dropout=0.1)
WHOLE = MixedPrecisionPolicy()  # everything in the parameters' own type


def make_sharded(
    config: Config = XL, batch: int = BATCH, policy: MixedPrecisionPolicy = WHOLE
) -> tuple[nn.Module, torch.optim.Optimizer, Tensor, Callable[[nn.Module, Tensor], Tensor]]:
    """Return what `umem plan` needs, as `make_step` does, with the network in shards."""
    net, _, tokens, _ = make_step(config, batch)
    for block in net.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(net, mp_policy=policy)
    return net, torch.optim.AdamW(net.parameters(), lr=RATE), tokens, loss_of


def train(rank: int) -> str:
    """Return the sha256 of the losses and the final weights."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)  # the same network everywhere
    text = load_text(100_000)
    net, optimizer, _, _ = make_sharded(WIDE)
    torch.manual_seed(SEED + rank)  # other batches in each
    digest = hashlib.sha256()
    for step in range(STEPS):
        tokens = batch_of(text, WIDE.context, BATCH)
        optimizer.zero_grad()
        loss = loss_of(net, tokens)
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        digest.update(float(total).hex().encode())
        if rank == 0:
            print(f"step {step:2}: loss of all {total.item():.4f}", flush=True)
    for parameter in net.parameters():
        assert isinstance(parameter, DTensor)
        whole: Tensor = parameter.full_tensor()
        digest.update(bytes(whole.detach().contiguous().flatten().view(torch.uint8).numpy()))
    return digest.hexdigest()


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    final = train(rank)
    # Its network is in reference cycles. gloo's threads outlive main and must not hold its tensors:
    # freeing them after the interpreter has ended aborts the process.
    gc.collect()
    if rank == 0:
        print(f"final sha256={final}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
