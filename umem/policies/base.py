"""What a policy is, and what it decides: a plan by op index that the native engine executes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from ..devices import DeviceProfile
from ..trace.step import Ints, StepTrace

Order = Literal["lru", "fifo", "furthest"]


class Move(NamedTuple):
    """A tensor to move once op `after` has ended; -1 is the step's begin."""

    after: int
    tensor: int


class Fetch(NamedTuple):
    """A tensor to bring in: from the end of op `after` on (-1: the step's begin), for op `by`.

    `by` may be at or beyond the number of ops: an op of the next step.
    """

    after: int
    by: int
    tensor: int


class Copy(NamedTuple):
    """A tensor to copy to the host once op `after` has ended; op `until` is the next to write it.

    It stays, and leaves without a transfer. `until` may be an op of the next step, up to twice the
    number of ops: never. A tensor that is away after `after` gets its copy when it returns.
    """

    after: int
    until: int
    tensor: int


@dataclass(frozen=True, eq=False)
class Plan:
    """What to do in each step that is like `trace`, by its indices of ops and tensors.

    Only large tensors are moved; what a plan says of small ones is ignored. Whatever a plan forgets
    is done on demand: an op's absent inputs are fetched before it, and when room is short the
    engine evicts in `order`. A plan that is wrong costs time and never more.
    """

    trace: StepTrace
    evict: tuple[Move, ...] = ()  # leave after the op, with a copy out where one is needed
    cold: tuple[Move, ...] = ()  # the first to leave under pressure from here to their next use
    fetch: tuple[Fetch, ...] = ()  # in the order given (`gated`: by `by`), as far as they fit
    copy: tuple[Copy, ...] = ()  # early write-back: what then leaves does so at once
    keep: tuple[int, ...] = ()  # tensors that are not evicted while anything else can be
    read_mostly: tuple[int, ...] = ()  # tensors whose copy on the host stays valid while here
    # With `gated` a fetch starts only where `occupancy` leaves room for it until op `by`; bytes of
    # large tensors, [n_ops], at most `capacity`. Starting adds the tensor to the occupancy.
    gated: bool = False
    occupancy: Ints | None = None
    capacity: int = 0
    order: Order = "lru"  # who leaves under pressure: by last use, by first use, by next use
    window: int = 0  # tensors that the next ops use, that many, are not evicted under pressure
    headroom: int = 0  # bytes that are kept free by evicting before room is short
    waits: tuple[int, ...] = ()  # after these ops compute waits until all moves are done


class Block(NamedTuple):
    """A unit of memory as `victims` sees it."""

    id: int
    bytes: int
    tag: str
    family: str
    last_use: int  # by a clock that ticks at every use
    segment: bool  # a page of small tensors


@dataclass(frozen=True)
class View:
    """What may leave now, the least recently used first."""

    blocks: tuple[Block, ...]
    resident_bytes: int
    budget_bytes: int


@runtime_checkable
class Policy(Protocol):
    """Decides what to move and when. The same object serves programs and replay.

    Third parties register theirs under the entry-point group `umem.policies`: a callable without
    arguments that returns one. A policy may also have `victims(view, need)`, which is asked under
    pressure for the ids of the blocks to evict, first to go first; and `on_trial = True`: in a
    program, plans whose first steps are worse than lru's are given up.
    """

    name: str

    def plan(self, trace: StepTrace, device: DeviceProfile, budget: int) -> Plan | None:
        """The plan for steps like `trace`; None: the native policy of this name works alone."""
