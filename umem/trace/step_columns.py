"""The columns of a step from the columns of its events."""

from __future__ import annotations

from collections import defaultdict, deque

import numpy as np

from ..base.units import PAGE_BYTES, PIECE_BYTES
from ..errors import TraceError
from .event_columns import OP
from .step_part import Part, on_device
from .step_trace import Bools, Floats, Ints, Kind, Parts, StepTrace

ALWAYS_THERE = ("param", "optimizer")  # tags that mean it, where one step does not show it


class StepColumns:
    """A StepTrace under construction: ops that access memory, and blocks that have some.

    Raises:
        TraceError: no op accesses memory, or one uses a block that is not live.
    """

    def __init__(self, part: Part, cut: set[int]) -> None:
        self._part, self._events = part, part.events
        self._cut = cut  # sizes of ranges
        blocks = part.blocks
        self._has_bytes = self._events.bytes[blocks.allocated] > 0
        self._born = blocks.allocated[self._has_bytes]  # the row of each tensor
        self._freed = blocks.freed[self._has_bytes]
        self._ordinal = part.ordinals[self._has_bytes]
        self._of_part = part.with_new(part.step, part.number)[self._has_bytes]
        self._carried = int(np.searchsorted(self._born, part.live))  # so many were there before
        self._asked = self._events.bytes[self._born]
        self._access()
        if not len(self._ops):
            raise TraceError("the step has no op that accesses memory; nothing to plan")

    def _access(self) -> None:
        """Find the ops and the accesses: each tensor at most once per op, in the order of use."""
        events, blocks = self._events, self._part.blocks
        rows = np.flatnonzero(events.kind == OP)
        count = (events.reads + events.writes)[rows]
        op = np.repeat(np.arange(len(rows)), count)
        block = blocks.find(events.accesses, rows[op])
        dead = np.flatnonzero(np.append(blocks.freed, -1)[block] < rows[op])
        if len(dead):
            raise TraceError(
                f"op {events.name[rows[op[dead[0]]]]!r} uses id {events.accesses[dead[0]]}, which "
                "is not live"
            )
        number = np.where(self._has_bytes, np.cumsum(self._has_bytes) - 1, np.int64(-1))
        tensor = number[block]
        kept = np.flatnonzero(tensor >= 0)
        # One access for each op and tensor, in the order in which the op first names the tensor.
        key = op[kept] * (len(self._born) + 1) + tensor[kept]
        _, first, access = np.unique(key, return_index=True, return_inverse=True)
        order = np.argsort(first)
        self._access_of = np.full(len(op), -1)
        self._access_of[kept] = np.argsort(order)[access]  # the access that each of the log is in
        place = kept[first[order]]
        self._tensor = tensor[place]
        within = np.arange(len(op)) - np.repeat(np.cumsum(count) - count, count)
        writes = within >= events.reads[rows[op]]
        self._reads, self._writes = (np.zeros(len(place), bool) for _ in range(2))
        self._writes[self._access_of[kept[writes[kept]]]] = True
        self._reads[self._access_of[kept[~writes[kept]]]] = True
        counts = np.zeros(len(rows), bool)
        counts[op[kept]] = True
        self._ops = rows[counts]
        self._op = (np.cumsum(counts) - 1)[op[place]]
        self._us = self._times(rows, counts)

    def _times(self, rows: Ints, counts: Bools) -> Floats:
        """Return the time of each op, and of the ops without accesses before it."""
        n = len(self._ops)
        us = self._events.with_times().us[rows]
        idle = np.bincount((np.cumsum(counts) - counts)[~counts], us[~counts], n + 1)
        total = us[counts] + idle[:n]
        total[-1:] += idle[n]
        return total

    def build(self) -> StepTrace:
        """Return the columns of the part."""
        kind, first, last = self._lifetimes()
        families = self._families()
        # Tensors freed before the first op are live in no op.
        kept = np.flatnonzero(last >= 0)
        new = np.full(len(last), -1, np.int64)
        new[kept] = np.arange(len(kept))
        asked = self._asked[kept]
        taken, large = on_device(asked)
        tensors = new[self._tensor]
        ranges = self._ranges()
        part, parts = self._parts(ranges)
        next_alias = np.full(len(last), -1, np.int64)
        for tensor, alias in self._next_aliases(kind).items():
            next_alias[tensor] = new[alias]
        rows = self._born[kept]
        tags = tuple([self._events.name[row] for row in rows.tolist()])
        # One that is live where the plan begins is not cut: products use it unseen.
        workspace = np.array([tag == "workspace" for tag in tags], bool)
        cut = self._pieces(asked, large, tensors, ranges, (kept < self._carried) & workspace)
        next_alias = next_alias[kept]
        if cut is not None:  # another tensor takes its place only in equal pieces
            next_alias[(next_alias >= 0) & (cut != cut[next_alias])] = -1
        return StepTrace(
            op_us=self._us,
            op_names=tuple([self._events.name[row] for row in self._ops.tolist()]),
            bytes=taken,
            large=large,
            tags=tags,
            families=tuple([families[t] for t in kept.tolist()]),
            kind=kind[kept],
            first=first[kept],
            last=last[kept],
            next_alias=next_alias,
            source=self._events.id[rows],
            access_start=np.searchsorted(self._op, np.arange(len(self._ops) + 1)),
            access_tensor=tensors,
            access_write=self._writes,
            access_read=self._reads,
            access_part=part,
            parts=parts,
            cut=cut,
        )

    def _lifetimes(self) -> tuple[Ints, Ints, Ints]:
        """Return kind, first and last op of each tensor, now that the remaining ones are known."""
        last_op = len(self._ops) - 1
        there = np.arange(len(self._born)) < self._carried
        born = np.searchsorted(self._ops, self._born)  # the next op
        stays = self._freed == len(self._events)
        freed = np.searchsorted(self._ops, self._freed)
        # A block that an op allocates and frees has its events before the op, and is live in it.
        inside = ~there & (born == freed)
        ended = np.where(stays, last_op, np.where(inside, freed, freed - 1))
        first = np.minimum(born, last_op)
        persists = there.copy()
        if self._part.number == 0:
            persists |= [self._events.name[row] in ALWAYS_THERE for row in self._born.tolist()]
            made = self._tensor[(self._op == 0) & self._writes & ~self._reads]
            before = born == 0
            before[made] = False
            persists |= before
        kind = np.where(
            stays,
            np.where(persists, Kind.PERSISTENT, Kind.MADE),
            np.where(there, Kind.CARRIED, Kind.TRANSIENT),
        )
        return kind, np.where(kind == Kind.PERSISTENT, 0, first), np.minimum(ended, last_op)

    def _families(self) -> list[str]:
        """Return the family of each tensor, or that of the op that made it."""
        families = [self._events.family[row] for row in self._born.tolist()]
        born = np.searchsorted(self._ops, self._born)
        new = self._writes & (self._tensor >= self._carried) & (born[self._tensor] == self._op)
        made = zip(self._tensor[new].tolist(), self._ops[self._op[new]].tolist(), strict=True)
        for tensor, row in made:
            families[tensor] = families[tensor] or self._events.family[row]
        return families

    def _ranges(self) -> dict[int, tuple[tuple[int, int], ...]]:
        """Return the byte ranges of the accesses that are of parts, by the access."""
        access = self._access_of[self._events.part_access]
        parted = np.zeros(len(self._access_of), bool)
        parted[self._events.part_access] = True
        whole = self._access_of[~parted]
        used = np.flatnonzero((access >= 0) & ~np.isin(access, whole))
        found: defaultdict[int, set[tuple[int, int]]] = defaultdict(set)
        columns = (access, self._events.begin, self._events.end)
        for number, begin, end in zip(*(column[used].tolist() for column in columns), strict=True):
            found[number].add((begin, end))
        return {number: tuple(sorted(found[number])) for number in sorted(found)}

    def _parts(
        self, ranges: dict[int, tuple[tuple[int, int], ...]]
    ) -> tuple[Ints | None, Parts | None]:
        """Return what each access is of, and the sets that this names."""
        if not ranges:
            return None, None
        number = {of: i for i, of in enumerate(dict.fromkeys(ranges.values()))}
        begin, end = np.array([row for of in number for row in of], np.int64).T
        start = np.concatenate(([0], np.cumsum([len(of) for of in number])))
        part = np.full(len(self._tensor), -1, np.int64)
        part[list(ranges)] = [number[of] for of in ranges.values()]
        return part, Parts(start.astype(np.int64), begin, end)

    def _pieces(
        self,
        asked: Ints,
        large: Bools,
        tensors: Ints,
        ranges: dict[int, tuple[tuple[int, int], ...]],
        whole: Bools,
    ) -> Ints | None:
        """Return the bytes of the pieces that each tensor is cut into; None: 64 MiB each."""
        used: dict[int, int] = {}  # the least that an access is of
        for access, of in ranges.items():
            tensor, size = int(tensors[access]), sum(end - begin for begin, end in of)
            used[tensor] = min(used.get(tensor, size), size)
        few = [t for t, size in used.items() if large[t] and 2 * size <= asked[t]]
        if not few and not self._cut:
            return None
        from ..base.native import core

        cut = self._cut | {core.range_bytes(int(asked[t])) for t in few}
        sizes, place = np.unique(asked, return_inverse=True)
        pieces = [
            core.finer_piece(size) if size >= PAGE_BYTES and core.range_bytes(size) in cut
            else PIECE_BYTES
            for size in sizes.tolist()
        ]  # fmt: skip
        return np.where(whole, PIECE_BYTES, np.array(pieces, np.int64)[place])

    def _next_aliases(self, kind: Ints) -> dict[int, int]:
        """Match each CARRIED tensor with its MADE tensor, where there is one.

        In steady state it is the one with the same ordinal among its step's allocations. The
        others are matched by order among those of equal bytes and tag: the steps differ a little,
        or the one before was not recorded.
        """
        made = np.flatnonzero(kind == Kind.MADE).tolist()
        carried = np.flatnonzero(kind == Kind.CARRIED).tolist()
        place = {(int(self._ordinal[t]), int(self._asked[t])): t for t in made}
        next_aliases: dict[int, int] = {}
        for tensor in carried:
            if self._part.after_ops and self._of_part[tensor] == self._part.number - 1:
                next_alias = place.get((int(self._ordinal[tensor]), int(self._asked[tensor])))
                if next_alias is not None:
                    next_aliases[tensor] = next_alias
        left: defaultdict[tuple[int, str], deque[int]] = defaultdict(deque)
        for tensor in sorted(set(made) - set(next_aliases.values())):
            left[self._like(tensor)].append(tensor)
        for tensor in carried:
            if tensor not in next_aliases and left[self._like(tensor)]:
                next_aliases[tensor] = left[self._like(tensor)].popleft()
        return next_aliases

    def _like(self, tensor: int) -> tuple[int, str]:
        return int(self._asked[tensor]), self._events.name[self._born[tensor]]
