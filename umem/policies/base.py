"""Policies and their decisions: plans by op index, which the native engine executes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import index
from typing import (
    Any,
    Generic,
    Literal,
    NamedTuple,
    Protocol,
    TypeAlias,
    TypeVar,
    get_args,
    runtime_checkable,
)

import numpy as np

from ..base.device_profiles import DeviceProfile
from ..errors import PlanError, shown
from ..trace.step_trace import Ints, Kind, StepTrace  # noqa: F401 - Kind for `umem.policies`

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


ENTRIES: dict[str, type[Move] | type[Fetch] | type[WriteBack]] = {  # by the plan's field
    "evict": Move,
    "evict_first": Move,
    "fetch": Fetch,
    "write_back": WriteBack,
}


def _whole(given: Any) -> Ints:
    column = isinstance(given, Sequence) or hasattr(given, "__array__")
    array = np.asarray(given if column else tuple(given))
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"it has values of type {array.dtype}")
    return array.astype(np.int64, copy=False)


def _entries(kind: Any, given: Any) -> Sequence[Any]:
    if isinstance(given, Entries):
        return given
    rows = _whole(given)
    if rows.size == 0:
        return ()
    if rows.shape[1:] != (len(kind._fields),):
        raise ValueError(f"its shape is {rows.shape}")
    return Entries(kind, *rows.T)


def _order(given: object) -> object:
    if given not in get_args(Order):
        raise ValueError("there is no such order")
    return given


# For each field what is allowed, and the function that reads it.
_FORMS: dict[str, tuple[str, Callable[[Any], object]]] = {
    **{
        field: (
            f"{kind.__name__}({', '.join(kind._fields)}) with whole numbers, or rows of them",
            partial(_entries, kind),
        )
        for field, kind in ENTRIES.items()
    },
    **dict.fromkeys(
        ("retain", "read_mostly", "barriers"),
        ("whole numbers", lambda given: tuple(map(index, given))),
    ),
    **dict.fromkeys(("capacity", "window", "headroom"), ("a whole number", index)),
    "gated": ("True or False", bool),
    "occupancy": (
        "one whole number for each op, or None",
        lambda given: None if given is None else _whole(given),
    ),
    "order": (" or ".join(map(repr, get_args(Order))), _order),
}


@dataclass(frozen=True, eq=False)
class Plan:
    """Moves for each step like `trace`, as indices of its ops and tensors.

    Only large tensors move one by one; entries for small ones have no effect. Moves that a
    plan leaves out happen on demand: an op's absent inputs are fetched before it, and under
    pressure the engine evicts in `order`. A wrong plan costs time, never a result. `check` finds
    entries without effect.

    Entries may be tuples or rows of an array, and come from any iterable.

    Raises:
        PlanError: a field has a value of another kind; the message names the field.
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

    def __post_init__(self) -> None:
        for field, (allowed, read) in _FORMS.items():
            given = getattr(self, field)
            try:
                object.__setattr__(self, field, read(given))
            except (TypeError, ValueError) as error:
                raise PlanError(
                    f"the plan's {field}={shown(given)}: {error}; allowed: {allowed}"
                ) from error


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
    `second(trace, device, budget)`, that returns another plan for the trace, which is tried first,
    or None. Programs ask `victims` and `second`; simulations and replays do not.
    """

    name: str

    def plan(self, trace: StepTrace, device: DeviceProfile, budget: int) -> Plan | None:
        """Return the plan for steps like `trace`.

        None ends planning: from then on lru decides, after `victims` if the policy has it.
        """
