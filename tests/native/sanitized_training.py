"""A training on the software device whose native core is built with a sanitizer.

python sanitized_training.py FOLDER [PLANT]

FOLDER contains the package umem with that core, and is on PYTHONPATH; the sanitizer's library is
preloaded. Tensors leave the device and return in ops, page faults, system calls, sleep, on other
threads and in a forked child. PLANT makes a fault that the sanitizer must report.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import tempfile
import threading
from pathlib import Path

import torch
from torch import nn

import umem
from umem.base.native import core

MIB = 1 << 20


def train() -> None:
    """Take steps at a fraction of their memory."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for width in (3, 16, 16):
        layers += [nn.Conv2d(width, 16, 3, padding=1), nn.ReLU()]
    module = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(module.parameters())
    for step in range(6):
        if step == 4:
            umem.set_budget("24MiB")
        x, y = torch.randn(8, 3, 96, 96), torch.randint(0, 10, (8,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()
    with umem.sleep():
        pass


def blocks() -> list[torch.Tensor]:
    return [torch.full((MIB,), float(i)) for i in range(12)]  # 48 MiB


def intact(tensors: list[torch.Tensor]) -> bool:
    return all(bool(tensor.eq(float(i)).all()) for i, tensor in enumerate(tensors))


def share(tensors: list[torch.Tensor]) -> None:
    """Touch the tensors on two threads, then by NumPy, which umem sees as page faults."""

    def compute() -> None:
        for tensor in tensors:
            tensor.add_(1).sub_(1)

    def hint() -> None:
        for tensor in tensors:
            with contextlib.suppress(umem.StateError):  # the other thread's op uses it
                umem.evict(tensor)
                umem.prefetch(tensor)

    threads = [threading.Thread(target=one) for one in (compute, hint)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, tensor in enumerate(tensors):
        assert float(tensor.numpy()[::4096].sum()) == i * MIB / 4096


def fork(tensors: list[torch.Tensor]) -> None:
    child = os.fork()
    if child == 0:
        tensors[3].add_(1).sub_(1)
        os._exit(0 if intact(tensors) else 1)
    assert os.waitpid(child, 0)[1] == 0


def call_the_system(tensors: list[torch.Tensor]) -> None:
    with tempfile.TemporaryFile(buffering=0) as file:
        for tensor in tensors:
            umem.evict(tensor)
            file.write(tensor.numpy().data)
        file.seek(0)
        for tensor in tensors:
            umem.evict(tensor)
            file.readinto(tensor.numpy().data)


def overrun() -> None:
    """Write beyond what malloc gave."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.memset(ctypes.c_void_p(libc.malloc(64)), 0, 128)


def race() -> None:
    """Write the same bytes on two threads without synchronisation."""
    libc = ctypes.CDLL(None)
    shared = ctypes.create_string_buffer(4 * MIB)
    start = threading.Barrier(2)

    def write() -> None:
        start.wait()
        for _ in range(50):
            libc.memset(shared, 0, len(shared))

    threads = [threading.Thread(target=write) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


PLANTS = {"overrun": overrun, "race": race}


def main() -> None:
    assert Path(core.__file__).parents[1] == Path(sys.argv[1]), core.__file__
    torch.set_num_threads(1)
    with umem.enable(budget="16MiB", device="soft"):
        train()
        tensors = blocks()
        share(tensors)
        call_the_system(tensors)
        fork(tensors)
        assert intact(tensors)
        stats = umem.stats()
        assert stats.faults > 0 < stats.evictions, stats
        for plant in sys.argv[2:]:
            PLANTS[plant]()
        del tensors
    print("fine")


if __name__ == "__main__":
    main()
