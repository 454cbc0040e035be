"""Tensors that a program still has at the peak of its step, though no op needs them any more."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from . import inplace
from .recording import Died, Note, Recording, Work
from .watch import Watched

# Ops after its last use: until then what is used in an expression may be alive.
_SOON = 2
_EXEMPT = ("param", "optimizer", "grad", "input")  # they are there for more than one step


@dataclass(frozen=True)
class Late:
    """What one line makes."""

    line: str
    blocks: list[int]
    peak_bytes: int  # by which the step's peak sinks without them


def find(watched: Watched) -> Iterator[Late]:
    """By line, what is late in the step before the last one.

    Known are the steps that were recorded, so only what looks the same in each of them is late:
    made anew in each, and used as often in each. The first step may make what all others use, and
    of the last one it is not known what the next one would read.
    """
    recording = watched.recording
    steps = _Steps(watched)
    count = len(steps.ends)
    by_line: dict[str, list[set[int]]] = defaultdict(lambda: [set() for _ in range(count)])
    for block in steps.lives:
        if (made_in := steps.of(steps.lives[block][0])) < count:
            by_line[watched.lines[block]][made_in].add(block)
    late = [set[int](), *(steps.late(step) for step in range(1, count))]
    up_to = replace(recording, notes=recording.notes[: steps.ends[-2] + 1])
    begin, end = recording.span(-2)
    peak = max(steps.live[begin:end], default=0)
    for line in dict.fromkeys(watched.lines[block] for block in sorted(late[-2])):
        made = by_line[line]
        uses = [sum(len(steps.needs.get(block, ())) for block in blocks) for blocks in made]
        alike = len(set(uses[:-1])) == 1 and uses[-1] <= uses[0]
        always = all(made[s] & (late[s] | late[s + 1]) for s in range(1, count - 1))
        if alike and always:
            blocks = [block for block in sorted(late[-2]) if watched.lines[block] == line]
            freed = _freed_early(up_to, {block: steps.needs[block][-1] for block in blocks})
            yield Late(line, blocks, peak - inplace.peak(freed))


class _Steps:
    """The lives of blocks, and what needs them, by the indices of notes."""

    def __init__(self, watched: Watched) -> None:
        self.watched, self.notes = watched, watched.recording.notes
        self.ends = watched.recording.step_ends()
        self.live = inplace.live_bytes(watched.recording)
        self.lives = watched.recording.lives()
        self.needs: dict[int, list[int]] = defaultdict(list)  # notes that get a block, ascending
        self.made_by: dict[int, Work] = {}
        for index, note in enumerate(self.notes):
            if isinstance(note, Work):
                for block in {*note.reads, *note.writes}:
                    self.needs[block].append(index)
                    self.made_by.setdefault(block, note)
        for block, times in watched.touched.items():
            self.needs[block] = sorted([*self.needs[block], *times])
        # What autograd took out again it lets go of itself, though not at once.
        self.exempt = {held.block for held in watched.held.values()}.union(
            watched.of_backward, watched.asked, watched.unpacked
        )

    def of(self, index: int) -> int:
        """The step of a note."""
        return sum(end < index for end in self.ends)

    def late(self, step: int) -> set[int]:
        """The blocks that no op needs from shortly before the step's peak on, made after step 0.

        At a peak in the forward pass only those of the steps before: what runs there has variables
        that a program cannot let go of, of a module around it for one.
        """
        begin, end = self.watched.recording.span(step)
        live = self.live[begin:end]
        if not live:
            return set()
        at = begin + live.index(max(live))
        works = [i for i in range(at) if isinstance(self.notes[i], Work)]
        soon = works[-_SOON] if len(works) >= _SOON else 0
        then = next((n for n in self.notes[at:end] if isinstance(n, Work)), None)
        until = begin if then is not None and then.phase == "forward" else at
        found = set()
        for block, (born, died) in self.lives.items():
            known, needs = self.watched.recording.blocks[block], self.needs.get(block)
            if not self.ends[0] < born <= at < died or born > until or not needs:
                continue
            if needs[-1] >= soon or known.on_host or known.tag in _EXEMPT or block in self.exempt:
                continue
            if self.made_by[block].phase != "optimizer":  # else it is a variable of torch's
                found.add(block)
        return found


def _freed_early(recording: Recording, needed: dict[int, int]) -> Recording:
    """The same steps where these blocks die behind the note that needs them last."""
    gone: dict[int, list[Died]] = defaultdict(list)
    for block, index in needed.items():
        gone[index].append(Died(block))
    notes: list[Note] = []
    for index, note in enumerate(recording.notes):
        if not (isinstance(note, Died) and note.block in needed):
            notes.append(note)
        notes += gone.get(index, ())
    return replace(recording, notes=notes)
