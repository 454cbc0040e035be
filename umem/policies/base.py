"""Policies and their decisions: plans by op index, which the native engine executes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import (
    Any,
    Generic,
    Literal,
    NamedTuple,
    Protocol,
    TypeAlias,
    TypeVar,
    runtime_checkable,
)

import numpy as np

from ..base.device_profiles import DeviceProfile
from ..trace.step_trace import Ints, StepTrace

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


class WriteBack(NamedTuple):
    """A tensor to copy to the host once op `after` has ended; op `until` is the next to write it.

    It stays, and leaves without a transfer. `until` may be an op of the next step, up to twice the
    number of ops: never. A tensor that is away after `after` gets its copy when it returns.
    """

    after: int
    until: int
    tensor: int


Entry = TypeVar("Entry", Move, Fetch, WriteBack)


class Entries(Sequence[Entry], Generic[Entry]):
    """Entries of a plan that were computed in columns; an entry is made on access.

    Args:
        kind: the type of the entries.
        columns: one for each of its fields.
    """

    def __init__(self, kind: type[Entry], *columns: Ints) -> None:
        self._kind: type[Entry] = kind
        self._rows = np.stack(columns, axis=1)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Ints:
        return self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Entry]:
        return map(self._kind._make, self._rows.tolist())

    def __getitem__(self, index: Any) -> Any:
        rows = self._rows[index].tolist()
        return tuple(map(self._kind._make, rows)) if isinstance(index, slice) else self._kind(*rows)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, eq=False)
class Plan:
    """Moves for each step like `trace`, as indices of its ops and tensors.

    Only large tensors move one by one; entries for small ones have no effect. Moves that a
    plan leaves out happen on demand: an op's absent inputs are fetched before it, and under
    pressure the engine evicts in `order`. A wrong plan costs time, never a result. `check` finds
    entries without effect.
    """

    trace: StepTrace
    evict: Sequence[Move] = ()  # leave after the op, with a copy out if the host has none
    evict_first: Sequence[Move] = ()  # leave first under pressure, until their next use
    fetch: Sequence[Fetch] = ()  # in this order (`gated`: by `by`), as far as they fit
    write_back: Sequence[WriteBack] = ()  # copied early, to leave without a transfer
    retain: tuple[int, ...] = ()  # tensors that stay as long as others can leave
    read_mostly: tuple[int, ...] = ()  # tensors whose copy on the host stays valid
    # With `gated`, a fetch starts only if `occupancy` (bytes of large tensors, [n_ops]) leaves room
    # for it within `capacity` bytes until op `by`; starting adds the tensor to the occupancy.
    gated: bool = False
    occupancy: Ints | None = None
    capacity: int = 0
    order: Order = "lru"  # of eviction under pressure: by last use, by first use, by next use
    window: int = 0  # tensors used next, this many, are not evicted under pressure
    headroom: int = 0  # bytes kept free by evicting before memory is short
    barriers: tuple[int, ...] = ()  # ops after which compute waits for all moves


class Candidate(NamedTuple):
    """A unit of memory as `victims` sees it."""

    id: int
    bytes: int
    tag: str
    family: str
    last_use: int  # in ticks of a clock that counts uses
    segment: bool  # a page of small tensors


@dataclass(frozen=True)
class CandidateView:
    """Units that may leave now, the least recently used first."""

    blocks: tuple[Candidate, ...]
    resident_bytes: int
    budget_bytes: int


PlanFunction: TypeAlias = "Callable[[StepTrace, DeviceProfile, int], Plan | None]"


@runtime_checkable
class Policy(Protocol):
    """Decides which tensors move and when. The same object serves programs and replay.

    Pass one to `umem.enable(policy=...)` or `umem.simulate`, or register it under the entry-point
    group `umem.policies`. A policy may also have `victims(view, need)`, which returns under
    pressure the ids of the units to evict, in that order; and `rollback = True`: in a program, a
    plan whose first steps are worse than those of lru is rolled back. If the policy has
    `second(trace, device, budget)`, that returns another plan for the trace, which is tried first.
    """

    name: str

    def plan(self, trace: StepTrace, device: DeviceProfile, budget: int) -> Plan | None:
        """Return the plan for steps like `trace`; None if the native policy needs no plan."""
