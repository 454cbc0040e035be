"""The parts in the order of a first hour on a card, how long each may take, and their sizes."""

from __future__ import annotations

from dataclasses import dataclass

from gpu.record import Deadline, Guard, Record
from umem.base.units import MIB

LONGEST = 480.0  # declared seconds of a letter: a command on a lent machine may take ten minutes
PATIENCE = 1.25  # times its declared seconds, after which a part is killed
START = 8.0  # estimated seconds until a process has imported torch and opened the device


@dataclass(frozen=True)
class Config:
    """Sizes in bytes; networks are those of policies/workloads.py."""

    block: int = 512 * MIB  # what one measurement moves
    calls: tuple[int, ...] = (4 * MIB, 16 * MIB, 64 * MIB)  # bytes of one driver call
    threads: tuple[int, ...] = (1, 2, 4)
    rounds: int = 7
    kernel_ms: float = 30.0  # length of the kernel that calls wait behind
    bits: tuple[str, ...] = ("gpt_smoke", "resnet50_b128")
    bits_fractions: tuple[float, ...] = (1.2, 1 / 2, 1 / 4)  # in turn: with a layout, and without
    fits: tuple[str, ...] = ("resnet50_b128", "gpt2_small_b8", "vit_l_b64")
    outofcore: str = ""  # the network of all parts that have one, if not their own
    fractions: tuple[float, ...] = (1 / 2, 1 / 3, 1 / 4)  # of the peak, as budgets
    # A policy, and after a slash the backing. The slowest last: the time may end in it.
    ways: tuple[str, ...] = ("auto/mapped", "lru/mapped", "auto/managed", "lru/managed")
    warm_steps: int = 12  # `auto` records a step, plans, and judges its plan
    steps: int = 6
    fits_rounds: int = 8  # of two steps each


SMOKE = Config(
    block=8 * MIB,
    calls=(2 * MIB, 4 * MIB),
    threads=(1, 2),
    rounds=2,
    kernel_ms=1.0,
    bits=("resnet_smoke",),
    bits_fractions=(1.2, 1 / 2),
    fits=("resnet_smoke",),
    outofcore="resnet_smoke",
    fractions=(1 / 2,),
    warm_steps=4,
    steps=1,
    fits_rounds=1,
)


@dataclass(frozen=True)
class Part:
    """`run` is the function that takes its measurements, as module.name.

    `seconds` are declared, with the starts of processes.
    """

    name: str
    letter: str
    run: str
    seconds: float
    net: str = ""  # its network, where it has one


@dataclass(frozen=True)
class Bench:
    """The objects of a part's process; umem's extension for torch is kept in `cache`."""

    part: Part
    record: Record
    config: Config
    deadline: Deadline
    guard: Guard
    cache: str


def _outofcore(letter: str, *nets: str) -> list[Part]:
    return [Part(f"outofcore_{net}", letter, "trainings.outofcore", 150, net) for net in nets]


PARTS = (
    # Equal bits, as figures of wrong results are worth nothing; then what the driver's calls cost.
    Part("bits", "a", "trainings.bits", 180),
    Part("ways", "a", "ways.run", 100),
    Part("calls", "a", "calls.run", 100),
    Part("contents", "a", "contents.run", 80),
    # Trainings: everything fits; not everything does.
    Part("fits", "b", "trainings.fits", 200),
    *_outofcore("c", "resnet50_b128", "gpt2_small_b8", "vit_l_b64"),
    *_outofcore("d", "unet_b8_512", "vgg16_b128", "densenet121_b96"),
)
LETTERS = sorted({part.letter for part in PARTS})
