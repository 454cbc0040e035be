"""Tensors that a program still holds at the peak of its step, though no op needs them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..capture.recording import Recording
from ..trace.ids import BlockId
from ..trace.schema import Event, Free, Op
from . import inplace
from .watcher import Watched

# Ops after a tensor's last use within which an expression may still hold it.
_SOON = 2
_EXEMPT = ("param", "optimizer", "grad", "input")  # they outlive a step on purpose


@dataclass(frozen=True)
class Late:
    """The late tensors of one source line."""

    line: str
    blocks: list[BlockId]
    peak_bytes: int  # reduction of the step's peak without them


def find(watched: Watched) -> Iterator[Late]:
    """Yield, by line, the late tensors of the last but one step.

    Only the recorded steps are known, so only tensors that are alike in each are late: made again
    in each, and used as often. The first step may make tensors for all others, and the reads after
    the last one are unknown.
    """
    recording = watched.recording
    steps = _Steps(watched)
    count = len(steps.ends)
    by_line: dict[str, list[set[BlockId]]] = defaultdict(lambda: [set() for _ in range(count)])
    for block in steps.lifetimes:
        if (made_in := steps.of(steps.lifetimes[block][0])) < count:
            by_line[watched.lines[block]][made_in].add(block)
    late = [set[BlockId](), *(steps.late(step) for step in range(1, count))]
    up_to = replace(recording, events=recording.events[: steps.ends[-2] + 1])
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
    """The lifetimes of blocks, and what needs them, by the indices of events."""

    def __init__(self, watched: Watched) -> None:
        self.watched, self.events = watched, watched.recording.events
        self.ends = watched.recording.step_ends()
        self.live = inplace.live_bytes(watched.recording)
        self.lifetimes = watched.recording.lifetimes()
        # By block, the events that get it, ascending.
        self.needs: dict[BlockId, list[int]] = defaultdict(list)
        self.made_in: dict[BlockId, str] = {}  # the phase of the first op that gets a block
        for index, event in enumerate(self.events):
            if isinstance(event, Op):
                for block in {*event.reads, *event.writes}:
                    self.needs[block].append(index)
                    self.made_in.setdefault(block, self._phase(index))
        for block, times in watched.touched.items():
            self.needs[block] = sorted([*self.needs[block], *times])
        # Autograd releases unpacked tensors, though not immediately.
        self.exempt = {held.block for held in watched.held.values()}.union(
            watched.of_backward, watched.asked, watched.unpacked
        )

    def of(self, index: int) -> int:
        """Return the step of an event."""
        return sum(end < index for end in self.ends)

    def _phase(self, index: int) -> str:
        return self.watched.recording.costs[index].phase

    def late(self, step: int) -> set[BlockId]:
        """Return the blocks, made after step 0, that no op needs at the peak or later.

        At a peak in the forward pass only those of previous steps: the running code has variables
        that a program cannot release, such as those of an enclosing module.
        """
        begin, end = self.watched.recording.span(step)
        live = self.live[begin:end]
        if not live:
            return set()
        at = begin + live.index(max(live))
        ops = [i for i in range(at) if isinstance(self.events[i], Op)]
        soon = ops[-_SOON] if len(ops) >= _SOON else 0
        then = next((i for i in range(at, end) if isinstance(self.events[i], Op)), None)
        until = begin if then is not None and self._phase(then) == "forward" else at
        found = set()
        for block, (born, died) in self.lifetimes.items():
            known, needs = self.watched.recording.blocks[block], self.needs.get(block)
            if not self.ends[0] < born <= at < died or born > until or not needs:
                continue
            if needs[-1] >= soon or known.on_host or known.tag in _EXEMPT or block in self.exempt:
                continue
            if self.made_in[block] != "optimizer":  # else a variable of torch's holds it
                found.add(block)
        return found


def _freed_early(recording: Recording, needed: dict[BlockId, int]) -> Recording:
    """Return the same steps, without costs, in which these blocks die after their last use."""
    gone: dict[int, list[Free]] = defaultdict(list)
    for block, index in needed.items():
        gone[index].append(Free(block))
    events: list[Event] = []
    for index, event in enumerate(recording.events):
        if not (isinstance(event, Free) and event.id in needed):
            events.append(event)
        events += gone.get(index, ())
    return replace(recording, events=events, costs={})
