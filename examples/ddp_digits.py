"""Train the network of train_digits.py on several processes, with DistributedDataParallel.

    torchrun --nproc-per-node 2 examples/ddp_digits.py
    UMEM=1 UMEM_BUDGET=32MiB torchrun --nproc-per-node 2 examples/ddp_digits.py
    umem run --budget 32MiB torchrun --nproc-per-node 2 examples/ddp_digits.py

Plain PyTorch, without umem. All three print the same last line.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel
from train_digits import SEED, load_data, make_net, weights_sha256

STEPS, BATCH = 12, 64  # per process


def train() -> str:
    """Train in a process group that there is; return what all ranks found in the end."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    images, labels = load_data()
    net = make_net()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    loss = torch.tensor(float("nan"))
    for step in range(STEPS):
        first = (step * world + rank) * BATCH
        mine = torch.arange(first, first + BATCH) % len(images)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[mine]), labels[mine])
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step:2}: loss {loss.item():.4f}", flush=True)
    total = loss.detach().clone()
    dist.all_reduce(total)
    return f"final loss={float(total).hex()} sha256={weights_sha256(net)}"


def main() -> None:
    dist.init_process_group("gloo")
    final = train()
    if dist.get_rank() == 0:
        print(final)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
