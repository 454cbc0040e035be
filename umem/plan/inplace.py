"""Which ops of a recorded program may write their result over their input.

An op may where nobody misses the input: autograd has not saved it, no later op or function gets it,
it lives in the step alone, and the op's in-place form gives the same bits (see `probe`). A site, a
module or a line of the program, may be changed only where each of its calls may.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from .calls import NOBODY, Call
from .probe import Prober
from .recording import Born, Died, Recording, Work
from .watch import Watched


@dataclass(frozen=True)
class Site:
    """A place of the program all of whose calls of one op may be in place."""

    op: str  # relu
    module: str  # the path of torch's module; empty for a call in the program
    module_type: str
    built: str  # the line that made the module; empty where unknown
    switch: bool  # the module has `inplace`
    line: str  # of the call
    write: str  # how the call is written in place
    position: int  # of the operand that is written over
    pairs: tuple[tuple[int, int], ...]  # of blocks, input and result, in the last step


@dataclass(frozen=True)
class Refused:
    """A module with `inplace` that has to stay as it is."""

    module: str
    op: str
    built: str  # the line that made it
    line: str
    why: str


@dataclass(frozen=True)
class InPlace:
    """What was found."""

    sites: list[Site]
    refused: list[Refused]


def find(watched: Watched) -> InPlace:
    """The sites that may be in place together."""
    return _Search(watched).run()


def peak(recording: Recording, pairs: Iterable[tuple[int, int]] = ()) -> int:
    """Bytes asked for at the peak of the last step, each pair of blocks being one."""
    begin, _ = recording.span()
    return max([0, *live_bytes(recording, pairs)[begin:]])


def live_bytes(recording: Recording, pairs: Iterable[tuple[int, int]] = ()) -> list[int]:
    """Bytes behind each note up to the end of the last step, each pair of blocks being one."""
    one = _Union(pairs)
    live, over_time = 0, []
    holders: dict[int, int] = defaultdict(int)
    for note in recording.notes[: recording.span()[1]]:
        if isinstance(note, (Born, Died)):
            block, change = one.of(note.block), 1 if isinstance(note, Born) else -1
            holders[block] += change
            if holders[block] == max(change, 0):  # the first one to live, or the last one to die
                live += change * _size(recording, block)
        over_time.append(live)
    return over_time


class _Union:
    """Blocks that are one."""

    def __init__(self, pairs: Iterable[tuple[int, int]]) -> None:
        self._root: dict[int, int] = {}
        for source, result in pairs:
            if self.of(source) != self.of(result):
                self._root[self.of(result)] = self.of(source)

    def of(self, block: int) -> int:
        while block in self._root:
            block = self._root[block]
        return block


def _size(recording: Recording, block: int) -> int:
    known = recording.blocks[block]
    return 0 if known.on_host else known.bytes


class _Search:
    def __init__(self, watched: Watched) -> None:
        self.watched = watched
        self.prober = Prober()
        self.accessed: dict[int, list[int]] = defaultdict(list)  # notes, by block
        self.written: dict[int, list[int]] = defaultdict(list)
        self.in_backward: set[int] = set()  # notes
        self.life: dict[int, tuple[int, int]] = {}
        self.ends: list[int] = []
        for index, note in enumerate(watched.recording.notes):
            if isinstance(note, Work):
                for block in {*note.reads, *note.writes}:
                    self.accessed[block].append(index)
                for block in note.writes:
                    self.written[block].append(index)
                if note.phase == "backward":
                    self.in_backward.add(index)
            elif isinstance(note, Born):
                self.life[note.block] = (index, 1 << 62)
            elif isinstance(note, Died):
                self.life[note.block] = (self.life.get(note.block, (0, 0))[0], index)
            else:
                self.ends.append(index)

    def run(self) -> InPlace:
        """Sites are dropped until the calls of those that stay may all be in place at once."""
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
        """Why a site may not write over the operand; empty where all of its calls may."""
        return next((why for call in calls if (why := self._why_not(call, position))), "")

    def _why_not(self, call: Call, position: int) -> str:
        if position not in call.over:
            return "it has no such operand"
        if call.over[position]:
            return call.over[position]
        if call.module in self.watched.unfit:
            return self.watched.unfit[call.module]
        if call.number != NOBODY and self.watched.works_of[call.number] != 1:
            return "its call is more than one op"
        block = call.blocks[position]
        return (
            self._outlives(call, block)
            or self._missed(call, block)
            or self.prober.verdict(call, position).why_not
        )

    def _outlives(self, call: Call, block: int) -> str:
        """How a block's life reaches beyond the step of a call; empty where it does not."""
        born, died = self.life[block]
        step = bisect_right(self.ends, call.note)
        if step >= len(self.ends) or born < (self.ends[step - 1] if step else 0):
            return "its input is older than the step"
        if not any(index < call.note for index in self.written[block]):
            return "its input comes from outside the step"
        return "its input is held beyond the step" if died > self.ends[step] else ""

    def _missed(self, call: Call, block: int) -> str:
        """Who needs a block after a call; empty where nobody does."""
        own = {call.number} - {NOBODY}
        if self.watched.saved_by[block] - own:
            return "its input is saved for the backward pass by another op"
        touched = any(time > call.note for time in self.watched.touched[block])
        return "its input is used afterwards" if touched or self._used_later(call, block) else ""

    def _used_later(self, call: Call, block: int) -> bool:
        """Whether an op gets the block later, but for the call's own backward pass."""
        later = [index for index in self.accessed[block] if index > call.note]
        for time, number in self.watched.unpacked.get(block, ()):
            if number == call.number != NOBODY:
                own = next((i for i in later if i >= time and i in self.in_backward), None)
                if own is not None:
                    later.remove(own)
        return bool(later)

    def _clash(
        self, groups: dict[tuple[str, ...], list[Call]], chosen: dict[tuple[str, ...], int]
    ) -> tuple[str, ...] | None:
        """A chosen site that overwrites what another chosen one keeps in its in-place form."""
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
        """None where the user cannot write it in place, or the last step has no such call."""
        shown = next((call for call in calls if call.write or call.module), None)
        begin, end = self.watched.recording.span()
        pairs = tuple(
            (call.blocks[position], call.result) for call in calls if begin <= call.note < end
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
