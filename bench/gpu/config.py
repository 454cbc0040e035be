"""Benchmark parameters and repetitions."""

from __future__ import annotations

from dataclasses import dataclass

from umem.base.units import GIB, MIB


@dataclass(frozen=True)
class BatchSearch:
    """The largest batch of a workload at a budget in bytes; `batches` are the ones to try."""

    workload: str
    budget: int
    batches: tuple[int, ...]


@dataclass(frozen=True)
class Config:
    """Sizes in bytes."""

    smoke: bool = False
    block: int = 256 * MIB  # what one measurement moves
    copy_sizes: tuple[int, ...] = tuple(n * MIB for n in (2, 16, 64, 256, 1024, 4096))
    pieces: tuple[int, ...] = (16 * MIB, 64 * MIB, 256 * MIB)
    alloc_sizes: tuple[int, ...] = (2 * MIB, 64 * MIB, 1024 * MIB)
    rounds: int = 7
    loops: int = 20_000  # of the native allocation loops
    kernel_ms: float = 30.0  # length of the work that copies are to overlap
    workloads: tuple[str, ...] = ("resnet50", "gpt2", "unet")
    fractions: tuple[float, ...] = (1.0, 0.75, 0.5, 0.25)
    policies: tuple[str, ...] = ("none", "lru", "conv_lru", "auto")
    warm_steps: int = 2
    planning_steps: int = 10  # of `auto` instead: it records one, plans, and judges its plan by two
    steps: int = 5
    fits_rounds: int = 15
    searches: tuple[BatchSearch, ...] = (
        BatchSearch("resnet50", 16 * GIB, tuple(range(64, 1025, 32))),
        BatchSearch("vgg16", 12 * GIB, (256,)),
    )


_SMOKE_SIZE = {
    "resnet50": "resnet50:width=16,blocks=2x2x2x2,image=64,batch=32,classes=10",
    "gpt2": "gpt2:layers=4,dim=128,heads=4,context=128,vocabulary=1000,batch=16",
    "unet": "unet:width=8,levels=2,image=64,batch=16",
    "vgg16": "vgg16:width=8,image=64,batch=64,classes=10",
}
SMOKE = Config(
    smoke=True,
    block=8 * MIB,
    copy_sizes=(2 * MIB, 8 * MIB),
    pieces=(2 * MIB, 4 * MIB),
    alloc_sizes=(2 * MIB, 8 * MIB),
    rounds=2,
    loops=200,
    kernel_ms=1.0,
    workloads=(_SMOKE_SIZE["resnet50"], _SMOKE_SIZE["gpt2"], _SMOKE_SIZE["unet"]),
    fractions=(1.0, 0.5),
    policies=("none", "lru", "auto"),
    warm_steps=1,
    planning_steps=4,
    steps=1,
    fits_rounds=2,
    searches=(
        BatchSearch(_SMOKE_SIZE["resnet50"], 32 * MIB, (8, 16, 32, 64)),
        BatchSearch(_SMOKE_SIZE["vgg16"], 32 * MIB, (64,)),
    ),
)
