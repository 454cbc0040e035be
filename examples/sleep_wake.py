"""Release device memory to another program temporarily, and take it back.

    python examples/sleep_wake.py

Trains a small network under umem, sleeps between two steps as a notebook or a co-located engine
would, and shows how much device memory is free before, asleep and awake, with a checksum of all
weights each time. Without a GPU it is the memory of umem's software device of 96 MiB.
"""

from __future__ import annotations

import hashlib

import torch
from torch import nn

import umem
from umem.base.units import MIB, format_bytes

WIDTH, LAYERS, BATCH = 1024, 4, 64


def free_bytes(device: str) -> int:
    """Return the device memory that is free now, as the driver reports it."""
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    from umem.base.native import core

    return sum(memory["free_bytes"] for memory in core.device_memory())


def checksum(net: nn.Module) -> str:
    """Return the digest of all weights; reading them fetches them to the device."""
    digest = hashlib.sha256()
    for weight in net.parameters():
        digest.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


def report(when: str, device: str, words: str) -> None:
    print(f"{when:<8} {format_bytes(free_bytes(device)):>12} free  {words}", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        umem.enable(device="cuda")
    else:
        umem.enable(device="soft:96MiB", budget=96 * MIB)

    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
    data = torch.randn(BATCH, WIDTH, device=device)

    def step() -> float:
        optimizer.zero_grad()
        loss = net(data).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    for _ in range(3):
        step()
    before = checksum(net)
    report("before", device, f"weights {before}")

    with umem.sleep(["grad"], keep="discard"), umem.sleep() as everything:
        words = f"{format_bytes(everything.bytes)} wait on the host, gradients are dropped"
        report("asleep", device, words)
    after = checksum(net)
    report("awake", device, f"weights {after}")
    print("equal checksums" if after == before else "THE WEIGHTS CHANGED")
    print(f"the next step's loss: {step():.6f}")
    if after != before:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
