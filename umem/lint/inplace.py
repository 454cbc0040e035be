"""The ops of a recorded program that may write their result over their input.

An op may if the input is not needed any more: autograd has not saved it, no later op or function
gets it, it is alive in this step alone, and the op's in-place form gives the same bits (see
`equivalence`). A site, a module or a line of the program, may be changed only if all its calls may.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from ..capture.recording import Recording
from ..trace.ids import BlockId
from ..trace.schema import Alloc, Free, Op
from .calls import NO_CALL, Call
from .equivalence import Prober
from .watcher import Watched


@dataclass(frozen=True)
class Site:
    """A place of the program at which all calls of one op may be in place."""

    op: str  # relu
    module: str  # the path of torch's module; empty for a call in the program
    module_type: str
    built: str  # the line that made the module; empty where unknown
    switch: bool  # the module has `inplace`
    line: str  # of the call
    write: str  # how the call is written in place
    position: int  # of the operand that is written over
    pairs: tuple[tuple[BlockId, BlockId], ...]  # of blocks, input and result, in the last step


@dataclass(frozen=True)
class Refused:
    """A module whose `inplace` must not be set."""

    module: str
    op: str
    built: str  # the line that made it
    line: str
    why: str


@dataclass(frozen=True)
class InPlace:
    """The sites found."""

    sites: list[Site]
    refused: list[Refused]


def find(watched: Watched) -> InPlace:
    """Return the sites that may be in place together."""
    return _Search(watched).run()


def peak(recording: Recording, pairs: Iterable[tuple[BlockId, BlockId]] = ()) -> int:
    """Return the requested bytes at the last step's peak, each pair of blocks being one."""
    begin, _ = recording.span()
    return max([0, *live_bytes(recording, pairs)[begin:]])


def live_bytes(recording: Recording, pairs: Iterable[tuple[BlockId, BlockId]] = ()) -> list[int]:
    """Return the bytes after each event of the steps, each pair of blocks being one."""
    one = _Union(pairs)
    live, over_time = 0, []
    holders: dict[BlockId, int] = defaultdict(int)
    for event in recording.events[: recording.span()[1]]:
        if isinstance(event, (Alloc, Free)):
            block, change = one.of(event.id), 1 if isinstance(event, Alloc) else -1
            holders[block] += change
            if holders[block] == max(change, 0):  # gained its first holder, or lost its last
                live += change * _size(recording, block)
        over_time.append(live)
    return over_time


class _Union:
    """Blocks that are one."""

    def __init__(self, pairs: Iterable[tuple[BlockId, BlockId]]) -> None:
        self._root: dict[BlockId, BlockId] = {}
        for source, result in pairs:
            if self.of(source) != self.of(result):
                self._root[self.of(result)] = self.of(source)

    def of(self, block: BlockId) -> BlockId:
        while block in self._root:
            block = self._root[block]
        return block


def _size(recording: Recording, block: BlockId) -> int:
    known = recording.blocks[block]
    return 0 if known.on_host else known.bytes


class _Search:
    def __init__(self, watched: Watched) -> None:
        self.watched = watched
        self.prober = Prober()
        self.accessed: dict[BlockId, list[int]] = defaultdict(list)  # events, by block
        self.written: dict[BlockId, list[int]] = defaultdict(list)
        self.in_backward: set[int] = set()  # events
        self.life: dict[BlockId, tuple[int, int]] = {}
        self.ends: list[int] = []
        for index, event in enumerate(watched.recording.events):
            if isinstance(event, Op):
                for block in {*event.reads, *event.writes}:
                    self.accessed[block].append(index)
                for block in event.writes:
                    self.written[block].append(index)
                if watched.recording.costs[index].phase == "backward":
                    self.in_backward.add(index)
            elif isinstance(event, Alloc):
                self.life[event.id] = (index, 1 << 62)
            elif isinstance(event, Free):
                self.life[event.id] = (self.life.get(event.id, (0, 0))[0], index)
            else:
                self.ends.append(index)

    def run(self) -> InPlace:
        """Drop sites until the calls of the remaining ones may all be in place together."""
        chosen: dict[tuple[str, ...], int] = {}
        groups: dict[tuple[str, ...], list[Call]] = defaultdict(list)
        for call in self.watched.calls:
            groups[_key(call)].append(call)
        why: dict[tuple[str, ...], str] = {}
        for key, calls in groups.items():
            options = {i: self._whole(calls, i) for i in (0, 1)}
            if any(reason == "" for reason in options.values()):
                chosen[key] = next(i for i, reason in options.items() if reason == "")
            else:
                why[key] = options[0]
        while (dropped := self._clash(groups, chosen)) is not None:
            why[dropped] = "another op in place keeps its result, which this one would overwrite"
            del chosen[dropped]
        found = [self._site(groups[key], position) for key, position in chosen.items()]
        sites = [site for site in found if site is not None]
        return InPlace(sites, self._refused(groups, why))

    def _whole(self, calls: list[Call], position: int) -> str:
        """Return why a site may not write over the operand; empty if all of its calls may."""
        return next((why for call in calls if (why := self._why_not(call, position))), "")

    def _why_not(self, call: Call, position: int) -> str:
        if position not in call.over:
            return "it has no such operand"
        if call.over[position]:
            return call.over[position]
        if call.module in self.watched.unfit:
            return self.watched.unfit[call.module]
        if call.number != NO_CALL and self.watched.ops_of[call.number] != 1:
            return "its call is more than one op"
        block = call.blocks[position]
        return (
            self._outlives(call, block) or self._missed(call, block) or self._spoilt(call, position)
        )

    def _outlives(self, call: Call, block: BlockId) -> str:
        """Return how a block's lifetime exceeds the step of a call; empty if it does not."""
        born, died = self.life[block]
        step = bisect_right(self.ends, call.event)
        if step >= len(self.ends) or born < (self.ends[step - 1] if step else 0):
            return "its input is older than the step"
        if not any(index < call.event for index in self.written[block]):
            return "its input comes from outside the step"
        return "its input is held beyond the step" if died > self.ends[step] else ""

    def _missed(self, call: Call, block: BlockId) -> str:
        """Return the reason why a block is needed after a call; empty if it is not."""
        own = {call.number} - {NO_CALL}
        if self.watched.saved_by[block] - own:
            return "its input is saved for the backward pass by another op"
        touched = any(time > call.event for time in self.watched.touched[block])
        return "its input is used afterwards" if touched or self._used_later(call, block) else ""

    def _spoilt(self, call: Call, position: int) -> str:
        """Return why the form in place differs, or fails, in the step; empty if it does not."""
        verdict = self.prober.verdict(call, position)
        if verdict.keeps_result and any(i > call.event for i in self.written[call.result]):
            return "its result, which the in-place form keeps, is written over later"
        return verdict.why_not

    def _used_later(self, call: Call, block: BlockId) -> bool:
        """Return whether a later op gets the block, except in the call's own backward pass."""
        later = [index for index in self.accessed[block] if index > call.event]
        for time, number in self.watched.unpacked.get(block, ()):
            if number == call.number != NO_CALL:
                own = next((i for i in later if i >= time and i in self.in_backward), None)
                if own is not None:
                    later.remove(own)
        return bool(later)

    def _clash(
        self, groups: dict[tuple[str, ...], list[Call]], chosen: dict[tuple[str, ...], int]
    ) -> tuple[str, ...] | None:
        """Return a chosen site that overwrites what another one keeps in its in-place form."""
        kept = set()
        for key, position in chosen.items():
            for call in groups[key]:
                if self.prober.verdict(call, position).keeps_result:
                    kept.add(call.result)
        for key, position in chosen.items():
            if any(call.blocks[position] in kept for call in groups[key]):
                return key
        return None

    def _site(self, calls: list[Call], position: int) -> Site | None:
        """Return the site; None if no user can write it in place, or the last step lacks it."""
        shown = next((call for call in calls if call.write or call.module), None)
        begin, end = self.watched.recording.span()
        pairs = tuple(
            (call.blocks[position], call.result) for call in calls if begin <= call.event < end
        )
        if shown is None or not pairs or (shown.switch and position):
            return None
        return Site(
            op=shown.bare,
            module=shown.module,
            module_type=shown.module_type,
            built=shown.built,
            switch=shown.switch,
            line=shown.line,
            write=shown.write,
            position=position,
            pairs=pairs,
        )

    def _refused(
        self, groups: dict[tuple[str, ...], list[Call]], why: dict[tuple[str, ...], str]
    ) -> list[Refused]:
        told = []
        for key, reason in why.items():
            call = next((call for call in groups[key] if call.switch), None)
            if call is not None:
                told.append(Refused(call.module, call.bare, call.built, call.line, reason))
        return told


def _key(call: Call) -> tuple[str, ...]:
    return ("module", call.module) if call.module else ("line", call.line, call.bare)
