"""Train the GPT of gpt.py on several processes, each of which keeps a part of it (FSDP2).

    torchrun --nproc-per-node 2 examples/fsdp2_gpt.py
    UMEM=1 UMEM_BUDGET=24MiB torchrun --nproc-per-node 2 examples/fsdp2_gpt.py
    umem run --budget 24MiB torchrun --nproc-per-node 2 examples/fsdp2_gpt.py

Plain PyTorch, nothing of umem in it. All three print the same last line.
"""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from gpt import SEED, Config, batch_of, load_text, loss_of, make_step
from torch.distributed.fsdp import fully_shard

STEPS, BATCH = 12, 8  # of each process
WIDE = Config(vocabulary=128, context=128, layers=4, heads=4, width=256)


def train(rank: int) -> str:
    """Return the sha256 of the losses and the final weights."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)  # the same network everywhere
    text = load_text(100_000)
    net, _, _, _ = make_step(WIDE)
    for block in net.blocks:
        fully_shard(block)
    fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
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
        whole = parameter.full_tensor()
        digest.update(whole.detach().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    final = train(rank)  # its network is gone here: threads of gloo that outlive main may hold none
    if rank == 0:
        print(f"final sha256={final}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
