"""Segments of small tensors as units of a step: tensors that share a page move together."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..base.units import PAGE_BYTES, PIECE_BYTES
from .step_trace import Bools, Ints, Kind, StepTrace

_NONE = np.int64(-1)


def with_segments(trace: StepTrace, address: Ints) -> StepTrace:
    """Return the step with segments of 2 MiB in place of the small tensors in them.

    A segment is accessed where a tensor in it is, and where one is allocated in it. Its life in the
    step is from the first life of a tensor in it to the last one, with any times in between at
    which it is empty; but where tensors of the step before are in it at the start, and it is empty
    later on, that is a life of its own. Large tensors keep their indices' order and come first.

    Args:
        trace: a step in which the same blocks lie at the same addresses each time.
        address: [m] of each tensor; 0: unknown, it stays a small tensor.
    """
    n, m = trace.n_ops, trace.n_tensors
    page = address // PAGE_BYTES
    inside = ~trace.large & (page > 0)
    kept = np.flatnonzero(~inside)
    if not inside.any():
        return trace
    pages, segment = np.unique(page[inside], return_inverse=True)
    held = np.flatnonzero(inside)
    kind, split = _kinds(trace, held, segment, len(pages))
    # Rows: the kept tensors, the segments, and the earlier lives of those that are split.
    count = len(kept) + len(pages)
    row = np.full(m, _NONE)
    row[kept] = np.arange(len(kept))
    row[held] = len(kept) + segment
    early = count + np.cumsum(split >= 0) - 1  # of each segment
    before = trace.first[held] <= split[segment]
    row[held[before]] = early[segment[before]]
    lives = np.flatnonzero(split >= 0)
    total = count + len(lives)

    kinds = np.concatenate((trace.kind[kept], kind, np.full(len(lives), int(Kind.CARRIED))))
    first, last = np.full(total, n), np.zeros(total, np.int64)
    np.minimum.at(first, row, trace.first)
    np.maximum.at(last, row, trace.last)
    persistent = kinds == Kind.PERSISTENT
    first[persistent | (kinds == Kind.CARRIED)] = 0
    last[persistent | (kinds == Kind.MADE)] = n - 1
    next_alias = np.full(total, _NONE)
    alias = trace.next_alias[kept]
    next_alias[: len(kept)] = np.where((alias >= 0) & (row[alias] < len(kept)), row[alias], -1)
    next_alias[count:] = np.where(kind[lives] == Kind.MADE, len(kept) + lives, -1)

    largest = _largest_of(trace, row, total)
    born = held[np.isin(trace.kind[held], (Kind.TRANSIENT, Kind.MADE))]
    op = np.concatenate((trace.access_op, trace.first[born]))
    unit = np.concatenate((row[trace.access_tensor], row[born]))
    write = np.concatenate((trace.access_write, np.ones(len(born), bool)))
    read = np.ones(len(op), bool)
    if trace.access_read is not None:
        read[: len(trace.access_read)] = trace.access_read
    read |= unit >= len(kept)  # a write overwrites only a part of a segment
    key, at, which = np.unique(op * total + unit, return_index=True, return_inverse=True)
    written = np.zeros(len(key), bool)
    np.logical_or.at(written, which, write)
    return replace(
        trace,
        bytes=np.concatenate((trace.bytes[kept], np.full(total - len(kept), PAGE_BYTES))),
        large=np.concatenate((trace.large[kept], np.ones(total - len(kept), bool))),
        tags=tuple(trace.tags[t] for t in largest.tolist()),
        families=tuple(trace.families[t] for t in largest.tolist()),
        kind=kinds,
        first=first,
        last=np.maximum(first, last),
        next_alias=next_alias,
        source=trace.source[largest],
        access_start=np.concatenate(([0], np.cumsum(np.bincount(key // total, minlength=n)))),
        access_tensor=key % total,
        access_write=written,
        access_read=None if trace.access_read is None else read[at],
        access_part=None if trace.access_part is None else _parts(trace.access_part, at),
        cut=None if trace.cut is None else np.concatenate(
            (trace.cut[kept], np.full(total - len(kept), PIECE_BYTES))
        ),
        place=np.concatenate((np.zeros(len(kept), np.int64), pages * PAGE_BYTES,
                              pages[lives] * PAGE_BYTES)),
    )  # fmt: skip


def _parts(of: Ints, at: Ints) -> Ints:
    """Return what accesses are of, where those from the end of `of` on are of whole tensors."""
    return np.concatenate((of, np.full(int(at.max(initial=0)) + 1, _NONE)))[at]


def _kinds(trace: StepTrace, held: Ints, segment: Ints, count: int) -> tuple[Ints, Ints]:
    """Return the kind of each segment, and the op after which its life from the step before ends.

    That op is -1 where there is no such life, or no end to it.
    """
    kinds = trace.kind[held]
    stays, at_end, at_start = (np.zeros(count, bool) for _ in range(3))
    stays[segment[kinds == Kind.PERSISTENT]] = True
    at_end[segment[kinds == Kind.MADE]] = True
    at_start[segment[kinds == Kind.CARRIED]] = True
    kind = np.where(at_end, int(Kind.MADE), int(Kind.TRANSIENT))
    split = np.full(count, _NONE)
    order = np.lexsort((trace.first[held], segment))
    bounds = np.searchsorted(segment[order], np.arange(count + 1))
    for s in np.flatnonzero(at_start & ~stays).tolist():
        members = held[order[bounds[s] : bounds[s + 1]]]
        end = _first_end(trace, members)
        if end < int(trace.last[members].max()):
            split[s] = end
        elif at_end[s]:
            stays[s] = True  # it is never empty
        else:
            kind[s] = Kind.CARRIED
    return np.where(stays, int(Kind.PERSISTENT), kind), split


def _first_end(trace: StepTrace, members: Ints) -> int:
    """Return the last op before the tensors, by ascending first op, are all dead for a time."""
    end = 0
    for tensor in members.tolist():
        if trace.kind[tensor] != Kind.CARRIED and int(trace.first[tensor]) > end:
            break
        end = max(end, int(trace.last[tensor]))
    return end


def _largest_of(trace: StepTrace, row: Ints, total: int) -> Ints:
    """Return the index of the largest tensor of each row, which names it."""
    order = np.lexsort((trace.bytes, row))
    last: Bools = np.append(np.diff(row[order]) > 0, True)
    largest = np.zeros(total, np.int64)
    largest[row[order[last]]] = order[last]
    return largest
