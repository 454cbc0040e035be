"""What to drop so that a step is fastest at a budget, where the rest swaps."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...devices import DeviceProfile
from ...errors import NotSupportedError, PlanError
from ...policies.occupancy import capacity
from ...trace.step import Bools, Floats, Ints, Kind, StepTrace
from . import score
from .bound import Relaxation
from .candidates import Checkpoints, Selection
from .graph import Graph
from .plan import Keep
from .reduced import reduced
from .rewrite import dropped_by, rewrite

LINK = 0.8  # of the link is planned with: a slower one costs more than this insurance
_WHOLE = 1 / LINK
COUNTS = (0, 3, 4, 6, 8, 12, 16, 24, 32, 48)  # of checkpoints
_FEW = (3, 6, 12)  # where copies go after each use: each chain is run once for each of its tensors
_SHARES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)  # of the droppable bytes, refined around the best
_FINER = (0.1, 0.05, 0.025)
# The bound takes all of the link for used, which no schedule does: choices are made behind slower
# ones too, and of those made so the estimate decides.
_FACTORS = (1.0, 0.75, 0.5, 0.3, 0.1)
_BOUNDED = (*_FACTORS, _WHOLE)
# Of compute, on top of the bound: of two choices that the link hides the shorter is better.
_COMPUTE_SHARE = 0.02
# The accesses of a step times the choices that local search looks at, or estimates: its time.
_LOOKED = 200_000
_TRIED = 130_000
_FLIPPED = (1, 1, 2, 3)  # neighbours at a time
_RELAXED = (0.7, 0.5, 0.3)  # of the link, behind which the linear program is solved
_UPDATES = 0.1  # of the room: less that persists and is written makes no bound of its own
_KEPT = 0.15  # of the trials keep, or drop, a temporary instead
_BETTER = 1 - 1e-4
_EXCHANGED = 900_000  # as _LOOKED, for what needs no estimate
_EXCHANGES = 600  # at most
_EXCHANGE = 0.6  # of the trials drop one tensor for others
_FAST = 5  # of each kind that are estimated behind all of the link
_FINAL = 5  # starts that are estimated once more, behind half of the link
_HOPELESS = 0.15  # of the room: with so much over it no few changes lower the peak enough


@dataclass(frozen=True, eq=False)
class Choice:
    """A selection and what is known of it. Times in µs, of steps behind `LINK` of the link."""

    selection: Selection
    floors: Floats  # behind each of _BOUNDED
    compute_us: float
    over: int  # bytes, without swapping
    mode: Keep = "speed"

    def least_us(self, factor: float) -> float:
        """No more than the step's time behind so much of the link."""
        return float(self.floors[_BOUNDED.index(factor)])

    def rank(self, factor: float) -> float:
        """What is less is better behind so much of the link, as far as the bound tells."""
        return self.least_us(factor) + _COMPUTE_SHARE * self.compute_us

    @property
    def fits(self) -> bool:
        """Without swapping."""
        return self.over <= 0


@dataclass
class Search:
    """Looks for the selection with the least estimated step time."""

    graph: Graph
    device: DeviceProfile
    budget: int
    _known: dict[bytes, Choice] = field(default_factory=dict)
    _estimates: dict[tuple[Choice, float], float] = field(default_factory=dict)
    _seeds: list[Choice] = field(default_factory=list)
    _latest: tuple[Choice, StepTrace] | None = None  # that was looked at, and its step

    def __post_init__(self) -> None:
        whole, graph = self.graph.step, self.graph
        step, forward = reduced(whole, graph.forward, graph.last_wanted)
        self.small = Graph(step, forward)
        self.room = capacity(whole.pieces, self.budget)
        self.link = score.derated(self.device, LINK)
        written = whole.bytes[(whole.kind == Kind.PERSISTENT) & ~whole.clean].sum()
        self.updates = int(written) > _UPDATES * self.room
        nothing: Bools = np.zeros(whole.n_tensors, bool)
        self.swap_only = self.look(Selection(nothing, nothing))

    def look(self, selection: Selection, mode: Keep = "speed") -> Choice:
        """The choice of a selection."""
        key = np.packbits(dropped_by(self.small, *selection)).tobytes() + mode.encode()
        found = self._known.get(key)
        if found is None:
            made = rewrite(self.small, *selection, mode, labels=False)
            step, begins = made.step, [0, made.behind_backward] if self.updates else [0]
            floors = score.floors_us(step, self.link, self.room, _BOUNDED, begins)
            over = step.peak_bytes - self.room
            found = self._known[key] = Choice(selection, floors, step.compute_us, over, mode)
            self._latest = found, step
        return found

    def estimate_us(self, choice: Choice, factor: float = 1.0) -> float:
        """With the default policy's swapping, behind so much of the link that is planned with."""
        if choice.fits:
            return choice.compute_us
        found = self._estimates.get((choice, factor))
        if found is None:
            if self._latest and self._latest[0] is choice:
                step = self._latest[1]
            else:  # steps are many, and too large to keep them all
                step = rewrite(self.small, *choice.selection, choice.mode, labels=False).step
            link = score.derated(self.link, factor)
            found = score.estimate_us(step, link, self.room, compare=False)
            self._estimates[choice, factor] = found
        return found

    def best(self) -> Choice:
        """The least estimate of: a grid, local searches in it, recompute alone, swapping alone."""
        if self.swap_only.fits:
            return self.swap_only
        grid = list(self._grid())
        seeds = _unique(_top(grid, factor, 2) for factor in _FACTORS)
        self._seeds = [*seeds, *self._relaxed()]
        best = self._fastest([self.swap_only, *self._seeds])
        best = self._fastest([best, self._improved(best, 0.5)])
        return self._settled(self._fastest([best, *self._alone()]))

    def others(self) -> list[Choice]:
        """Of a few the fastest behind half of the link, and of a few that behind all of it.

        The former of what `best` started from; the latter of all that it looked at, and changed as
        the best one is.
        """
        slow = sorted(self._seeds, key=self.estimate_us)[:_FINAL]
        known = list(self._known.values())
        # What moves much has the least bound there, what hides well the least behind half of it.
        fast = _unique(_top(known, factor, _FAST) for factor in (1.0, 0.5))
        found = [self._fastest(slow, 0.5)] if slow else []
        return [*found, self._settled(self._fastest(fast, _WHOLE), _WHOLE)]

    def recompute_only(self, *, at_any_time: bool = False) -> Choice | None:
        """The shortest one found that needs no swapping.

        With `at_any_time` also by exchanging what is dropped, and by copies that go after each use,
        which takes several times as long.
        """
        if self.swap_only.fits:
            return self.swap_only
        list(self._grid())
        if not self._alone():
            self._shrink()
        for choice in self._alone() if at_any_time else ():
            self._exchange(choice)
        if at_any_time and not self._alone():
            for count in _FEW:
                points = Checkpoints(self.small, count)
                for share in (0.8, 0.9, 1.0):
                    self.look(points.cheapest(share), "memory")
        return next(iter(self._alone()), None)

    def _shrink(self) -> None:
        """From the lowest peaks known change one group after the other where the peak falls."""
        lowest = sorted(self._known.values(), key=lambda choice: choice.over)[:2]
        left = _LOOKED // max(len(self.small.step.access_tensor), 1)
        for choice in lowest:
            if choice.over > _HOPELESS * self.room:
                continue
            for group in self._groups(choice):
                other = self.look(_flipped(choice.selection, group))
                left -= 1
                if other.over < choice.over:
                    choice = other
                if left <= 0 or choice.fits:
                    return

    def _exchange(self, choice: Choice) -> None:
        """Change a few tensors at random. What fits and is shorter is gone on from; seeded."""
        graph, generator = self.small, random.Random(0)  # noqa: S311 - no secret
        saved = np.flatnonzero(graph.droppable)
        looks = min(_EXCHANGED // max(len(graph.step.access_tensor), 1), _EXCHANGES)
        for _ in range(looks if len(saved) else 0):
            other = self._exchanged(choice, saved, generator)
            if other.fits and other.compute_us < choice.compute_us:
                choice = other

    def _alone(self) -> list[Choice]:
        """The shortest one known that needs no swapping, if any."""
        fitting = [choice for choice in self._known.values() if choice.fits]
        return sorted(fitting, key=lambda choice: choice.compute_us)[:1]

    def _relaxed(self) -> Iterator[Choice]:
        """Rounded solutions of the linear program behind slower links; none without highspy."""
        for factor in _RELAXED:
            try:
                program = Relaxation(self.small, score.derated(self.link, factor), self.room)
                program.least_us()
            except (NotSupportedError, PlanError):
                return
            yield self.look(program.selection(0.5))

    def _fastest(self, choices: Iterable[Choice], factor: float = 1.0) -> Choice:
        return min(choices, key=lambda choice: self.estimate_us(choice, factor))

    def _grid(self) -> Iterator[Choice]:
        """By number of checkpoints and by share, finer where it is good."""
        lines = [Checkpoints(self.small, count) for count in COUNTS]
        found: dict[tuple[int, float], Choice] = {}
        for share in _SHARES:
            for line, points in enumerate(lines):
                found[line, share] = self.look(points.cheapest(share))
        for width in _FINER:
            for line, share in self._promising(found):
                for near in (share - width, share + width):
                    if 0 <= near <= 1 and (line, near) not in found:
                        found[line, near] = self.look(lines[line].cheapest(near))
        yield from found.values()

    @staticmethod
    def _promising(found: dict[tuple[int, float], Choice]) -> list[tuple[int, float]]:
        """The places of the best two lines behind each link, and of the shortest that fits."""
        places: dict[tuple[int, float], None] = {}
        for factor in _FACTORS:
            order = sorted(found, key=lambda place: found[place].rank(factor))
            lines: list[int] = []
            for place in order:
                if place[0] not in lines and len(lines) < 2:
                    lines.append(place[0])
                    places[place] = None
        fitting = [place for place in found if found[place].fits]
        fitting.sort(key=lambda place: found[place].compute_us)
        places.update(dict.fromkeys(fitting[:2]))
        return list(places)

    def _improved(self, choice: Choice, factor: float) -> Choice:
        """Change one group of tensors after the other, where the bound behind a link falls."""
        left = _LOOKED // max(len(self.small.step.access_tensor), 1)
        changed = True
        while changed and left > 0:
            changed = False
            for group in self._groups(choice):
                other = self.look(_flipped(choice.selection, group))
                left -= 1
                if other.rank(factor) < choice.rank(factor) * _BETTER:
                    choice, changed = other, True
                if left <= 0:
                    break
        return choice

    def _settled(self, choice: Choice, factor: float = 1.0) -> Choice:
        """Change a few tensors at random, where the estimate behind a link falls; seeded."""
        graph, generator = self.small, random.Random(0)  # noqa: S311 - a walk that is the same each time
        saved = np.flatnonzero(graph.droppable)
        temporary = np.flatnonzero(np.array(graph.may_drop, bool) & ~graph.saved)
        now = self.estimate_us(choice, factor)
        left = _TRIED // max(len(graph.step.access_tensor), 1) if len(saved) else 0
        seen = {choice}
        tries = 4 * left  # what drops the same as a trial before costs no look, and few are left
        while left > 0 and tries > 0:
            tries -= 1
            if len(temporary) and generator.random() < _KEPT:
                drop, keep = choice.selection.drop, choice.selection.keep.copy()
                keep[generator.choice(temporary.tolist())] ^= True
                other = self.look(Selection(drop, keep), choice.mode)
            else:
                other = self._exchanged(choice, saved, generator)
            if other in seen:
                continue
            seen.add(other)
            left -= 1
            if other.least_us(factor) < now:
                left -= 0 if other.fits else 1  # an estimate takes about as long as a look
                if self.estimate_us(other, factor) < now:
                    choice, now = other, self.estimate_us(other, factor)
        return choice

    def _exchanged(self, choice: Choice, saved: Ints, generator: random.Random) -> Choice:
        """Drop one tensor for one or two others at random, or change one or a few neighbours."""
        dropped = choice.selection.drop[saved]
        gone, kept = saved[dropped].tolist(), saved[~dropped].tolist()
        if gone and kept and generator.random() < _EXCHANGE:
            more = generator.choices(kept, k=generator.choice((1, 1, 2)))
            tensors = np.unique([generator.choice(gone), *more])
        else:
            begin = generator.randrange(len(saved))
            tensors = saved[begin : begin + generator.choice(_FLIPPED)]
        return self.look(_flipped(choice.selection, tensors), choice.mode)

    def _groups(self, choice: Choice) -> Iterator[Ints]:
        """Droppable tensors that are alike, as the same layer of all blocks: all, then parts.

        What is dropped comes first, the dearest a byte at first; then what is kept.
        """
        graph, step = self.small, self.small.step
        kinds: dict[tuple[object, ...], list[int]] = {}
        for tensor in np.flatnonzero(graph.droppable).tolist():
            ops = tuple(step.op_names[op] for op in graph.writers[tensor])
            kind = bool(choice.selection.drop[tensor]), ops, int(step.bytes[tensor])
            kinds.setdefault(kind, []).append(tensor)
        heads = np.array([alike[0] for alike in kinds.values()], np.int64)
        cost = graph.cost_per_byte(heads, choice.selection.keep)
        order = sorted(
            zip(kinds.items(), cost.tolist(), strict=True),
            key=lambda item: (not item[0][0][0], -item[1] if item[0][0][0] else item[1]),
        )
        for parts in (1, 2, 4, 8, 1 << 30):
            for (_, alike), _ in order:
                if parts > 1 and len(alike) * 2 <= parts < 1 << 30:
                    continue
                if parts == 1 or len(alike) > 1:
                    yield from np.array_split(np.array(alike, np.int64), min(parts, len(alike)))


def _flipped(selection: Selection, tensors: Ints) -> Selection:
    """What was dropped is kept, and what was kept is dropped."""
    drop, keep = selection.drop.copy(), selection.keep.copy()
    drop[tensors] = ~drop[tensors]
    keep[tensors] &= ~drop[tensors]
    return Selection(drop, keep)


def _top(choices: Sequence[Choice], factor: float, count: int) -> list[Choice]:
    return sorted(choices, key=lambda choice: choice.rank(factor))[:count]


def _unique(lists: Iterable[Iterable[Choice]]) -> list[Choice]:
    return list({id(choice): choice for some in lists for choice in some}.values())
