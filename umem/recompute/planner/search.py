"""The search for the selection that makes a step fastest at a budget, with swapping."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...base.device_profiles import DeviceProfile
from ...policies.default.occupancy import capacity
from ...policies.default.planner import Auto
from ...trace.step_trace import Bools, Floats, Ints, Kind, StepTrace
from . import score
from .candidates import Checkpoints, Selection
from .graph import RecomputeGraph
from .reduced import reduced
from .rewrite import dropped_by, freed_by, rewrite

LINK = 0.8  # share of the bandwidth to plan with: a link slower than planned costs more than this
_WHOLE = 1 / LINK
COUNTS = (0, 3, 4, 6, 8, 12, 16, 24, 32, 48)  # numbers of checkpoints
_FEW = (3, 6, 12)  # with all copies freed: each chain runs once for each of its tensors
_SHARES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)  # of the droppable bytes, refined around the best
_FINER = (0.1, 0.05, 0.025)
# The bound assumes a fully used link, which no schedule attains: choices are also made for slower
# links, and the estimate decides among them.
_FACTORS = (1.0, 0.75, 0.5, 0.3, 0.1)
_BOUNDED = (*_FACTORS, _WHOLE)
# Share of the compute time added to the bound: of two choices with hidden transfers, prefer the
# shorter.
_COMPUTE_SHARE = 0.02
# Limits on the local search's time: accesses of the step times choices scored, or estimated.
_LOOKED = 200_000
_TRIED = 170_000
_FLIPPED = (1, 1, 2, 3)  # neighbours changed at a time
_UPDATES = 0.1  # of the room: min written persistent bytes for a bound from after backward
_REPEATED = 64  # trials in a row that were made before end a walk: little around it is new
_KEPT = 0.15  # share of the trials that keep, or drop, a temporary instead
_FREED = 40_000  # _TRIED for choices that free copies
_TOGGLED = 0.5  # share of these trials that free copies after each use, or keep them
_TOGGLED_RUNS = (1, 1, 1, 2, 3, 5)  # of how many dropped tensors next to each other
_IDLE = 16  # the max number of copies that are tried first, those idle for the longest
_BETTER = 1 - 1e-4
_EXCHANGED = 900_000  # _LOOKED for choices that need no estimate
_EXCHANGES = 600  # the max number of exchanges
_EXCHANGE = 0.6  # share of the trials that exchange dropped and kept tensors
_SLID = 0.4  # share of the exchanges that slide a stretch of the selection
_STRETCHES = (2, 3, 5, 9, 17, 33)  # of how many droppable tensors
_FAST = 5  # candidates of each kind that are estimated at full link bandwidth
_FINAL = 5  # seeds that are estimated again, at half of the link bandwidth
_HOPELESS = 0.15  # of the capacity: with a larger excess, few changes cannot lower the peak enough


@dataclass(frozen=True, eq=False)
class Choice:
    """A selection and its scores. Times in µs, at `LINK` of the link bandwidth."""

    selection: Selection
    floors: Floats  # lower bounds, for each of _BOUNDED
    compute_us: float
    over: int  # bytes over the capacity without swapping

    def min_us(self, factor: float) -> float:
        """Return a lower bound of the step time at this link factor."""
        return float(self.floors[_BOUNDED.index(factor)])

    def rank(self, factor: float) -> float:
        """Return the key to compare choices by at this link factor; lower is better."""
        return self.min_us(factor) + _COMPUTE_SHARE * self.compute_us

    @property
    def fits(self) -> bool:
        """True if the step fits without swapping."""
        return self.over <= 0


@dataclass
class Search:
    """A search for the selection with the min estimated step time."""

    graph: RecomputeGraph
    device: DeviceProfile
    budget: int
    known_good: Sequence[Selection] = ()  # from a similar step with the same tensors
    _known: dict[bytes, Choice] = field(default_factory=dict)
    _estimates: dict[tuple[Choice, float], float] = field(default_factory=dict)
    _seeds: list[Choice] = field(default_factory=list)
    _every: Bools = field(init=False)  # all copies that can be freed
    _latest: tuple[Choice, StepTrace] | None = None  # the last choice and its step

    def __post_init__(self) -> None:
        whole, graph = self.graph.step, self.graph
        step, forward = reduced(whole, graph.forward, graph.last_wanted)
        self.small = RecomputeGraph(step, forward)
        self.room = capacity(whole.pieces, self.budget)
        self.link = score.derated(self.device, LINK)
        written = whole.bytes[(whole.kind == Kind.PERSISTENT) & ~whole.clean].sum()
        self.updates = int(written) > _UPDATES * self.room
        nothing: Bools = np.zeros(whole.n_tensors, bool)
        self._every: Bools = np.array(self.small.may_drop, bool)
        self.swap_only = self.look(Selection(nothing, nothing, nothing))

    def look(self, selection: Selection) -> Choice:
        """Return the choice for a selection; rewrite the step if it is new."""
        dropped = dropped_by(self.small, selection.drop, selection.keep)
        freed = freed_by(self.small, dropped, selection.free)
        key = np.packbits((dropped, freed)).tobytes()
        found = self._known.get(key)
        if found is None:
            made = rewrite(self.small, *selection, labels=False)
            step, begins = made.step, [0, made.behind_backward] if self.updates else [0]
            floors = score.floors_us(step, self.link, self.room, _BOUNDED, begins)
            over = step.peak_bytes - self.room
            found = self._known[key] = Choice(selection, floors, step.compute_us, over)
            self._latest = found, step
        return found

    def estimate_us(self, choice: Choice, factor: float = 1.0) -> float:
        """Return the estimated time with the default policy's swapping, at this link factor."""
        if choice.fits:
            return choice.compute_us
        found = self._estimates.get((choice, factor))
        if found is None:
            if self._latest and self._latest[0] is choice:
                step = self._latest[1]
            else:  # there are too many steps to keep them all
                step = rewrite(self.small, *choice.selection, labels=False).step
            link = score.derated(self.link, factor)
            found = Auto().estimate_us(step, link, self.room, compare=False)
            self._estimates[choice, factor] = found
        return found

    def best(self) -> Choice:
        """Return the best of a grid, local searches from it, recomputation and swapping alone."""
        if self.swap_only.fits:
            return self.swap_only
        grid = list(self._grid())
        seeds = _unique(_top(grid, factor, 2) for factor in _FACTORS)
        self._seeds = [*seeds, *map(self.look, self.known_good)]
        best = self._fastest([self.swap_only, *self._seeds])
        best = self._fastest([best, self._improved(best, 0.5)])
        return self._settled(self._fastest([best, *self._alone()]))

    def others(self) -> list[Choice]:
        """Return the fastest candidates at half and at full link bandwidth.

        The former is one of the seeds of `best`; the latter is one of all choices that `best`
        tried, improved in the same way.
        """
        slow = sorted(self._seeds, key=self.estimate_us)[:_FINAL]
        known = list(self._known.values())
        # Choices that move much rank best at full bandwidth, those that overlap well at half of it.
        tops = [_top(known, factor, _FAST) for factor in (1.0, 0.5)]
        fast = _unique([*tops, map(self.look, self.known_good)])
        found = [self._fastest(slow, 0.5)] if slow else []
        return [*found, self._settled(self._fastest(fast, _WHOLE), _WHOLE)]

    def recompute_only(self, *, at_any_time: bool = False) -> Choice | None:
        """Return the shortest choice found that needs no swapping; None if there is none.

        With `at_any_time`, the search also exchanges dropped tensors, and tries copies that are
        freed after each use; this takes several times as long.
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
                    self.look(points.cheapest(share)._replace(free=self._every))
        return next(iter(self._alone()), None)

    def _shrink(self) -> None:
        """Change group after group of the choices with the lowest peaks, where the peak falls."""
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
        """Change a few tensors at random, and continue from what fits and is shorter; seeded."""
        graph, generator = self.small, random.Random(0)  # noqa: S311 - no secret
        saved = np.flatnonzero(graph.droppable)
        looks = min(_EXCHANGED // max(len(graph.step.access_tensor), 1), _EXCHANGES)
        for _ in range(looks if len(saved) else 0):
            other = self._exchanged(choice, saved, generator)
            if other.fits and other.compute_us < choice.compute_us:
                choice = other

    def _alone(self) -> list[Choice]:
        """Return the shortest known choice that needs no swapping, as a list of one or none."""
        fitting = [choice for choice in self._known.values() if choice.fits]
        return sorted(fitting, key=lambda choice: choice.compute_us)[:1]

    def _fastest(self, choices: Iterable[Choice], factor: float = 1.0) -> Choice:
        return min(choices, key=lambda choice: self.estimate_us(choice, factor))

    def _grid(self) -> Iterator[Choice]:
        """Yield choices by number of checkpoints and share, in finer steps around the best."""
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
        """Return the places of the best two lines per link factor, and of the shortest that fit."""
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
        """Change group after group of tensors, where the bound at a link factor falls."""
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
        """Change a few tensors at random, where the estimate at a link factor falls; seeded.

        First copies are kept; then those idle for the longest are freed one by one, and others at
        random. Freeing all is not tried: it runs most ops many times.
        """
        accesses = max(len(self.small.step.access_tensor), 1)
        choice = self._walked(choice, factor, _TRIED // accesses)
        if choice.fits:  # more recomputation makes no step shorter that swaps nothing
            return choice
        looks = _FREED // accesses
        for tensor in self._idle_copies(choice)[: looks // 4]:
            free = choice.selection.free.copy()
            free[tensor] = True
            other = self.look(choice.selection._replace(free=free))
            choice = self._fastest([choice, other], factor)
            looks -= 2
        return self._walked(choice, factor, looks, _TOGGLED)

    def _walked(self, choice: Choice, factor: float, looks: int, toggled: float = 0.0) -> Choice:
        """Change a few tensors at random; `toggled` is the share of trials that free copies."""
        graph, generator = self.small, random.Random(0)  # noqa: S311 - a reproducible walk
        saved = np.flatnonzero(graph.droppable)
        temporary = np.flatnonzero(self._every & ~graph.saved)
        now = self.estimate_us(choice, factor)
        left = looks if len(saved) else 0
        seen = {choice}
        repeated = 0
        while left > 0 and repeated < _REPEATED:
            if toggled and generator.random() < toggled:
                other = self._toggled(choice, generator)
            elif len(temporary) and generator.random() < _KEPT:
                keep = choice.selection.keep.copy()
                keep[generator.choice(temporary.tolist())] ^= True
                other = self.look(choice.selection._replace(keep=keep))
            else:
                other = self._exchanged(choice, saved, generator)
            repeated = repeated + 1 if other in seen else 0
            if repeated:
                continue
            seen.add(other)
            left -= 1
            if other.min_us(factor) < now:
                left -= 0 if other.fits else 1  # an estimate takes about as long as a score
                if self.estimate_us(other, factor) < now:
                    choice, now = other, self.estimate_us(other, factor)
        return choice

    def _exchanged(self, choice: Choice, saved: Ints, generator: random.Random) -> Choice:
        """Exchange one dropped tensor for one or two kept ones at random, or flip neighbours."""
        dropped = choice.selection.drop[saved]
        gone, kept = saved[dropped].tolist(), saved[~dropped].tolist()
        if gone and kept and generator.random() < _EXCHANGE:
            if generator.random() < _SLID:
                tensors = saved[_slid(dropped, generator) != dropped]
            else:
                more = generator.choices(kept, k=generator.choice((1, 1, 2)))
                tensors = np.unique([generator.choice(gone), *more])
        else:
            begin = generator.randrange(len(saved))
            tensors = saved[begin : begin + generator.choice(_FLIPPED)]
        return self.look(_flipped(choice.selection, tensors))

    def _toggled(self, choice: Choice, generator: random.Random) -> Choice:
        """Free copies of a few dropped tensors next to each other, or keep them, at random."""
        drop, keep, free = choice.selection
        gone = np.flatnonzero(dropped_by(self.small, drop, keep))
        if not len(gone):
            return choice
        begin = generator.randrange(len(gone))
        tensors = gone[begin : begin + generator.choice(_TOGGLED_RUNS)]
        free = free.copy()
        free[tensors] = not free[tensors[0]]
        return self.look(Selection(drop, keep, free))

    def _idle_copies(self, choice: Choice) -> list[int]:
        """Return the tensors whose copies take the most bytes for the longest time between uses."""
        new = rewrite(self.small, *choice.selection, labels=False)
        step, count = new.step, self.small.step.n_tensors
        order = np.lexsort((step.access_op, step.access_tensor))
        order = order[step.access_tensor[order] >= count]
        tensor, op = step.access_tensor[order], step.access_op[order]
        ends = np.cumsum(step.op_us)
        idle = np.where(np.diff(tensor) == 0, (ends - step.op_us)[op[1:]] - ends[op[:-1]], 0)
        cost = idle * step.bytes[tensor[1:]]
        most: Floats = np.zeros(count)
        np.maximum.at(most, new.copy_of[tensor[1:]], cost)
        found = np.argsort(-most, kind="stable")[:_IDLE]
        return [int(one) for one in found[most[found] > 0]]

    def _groups(self, choice: Choice) -> Iterator[Ints]:
        """Yield groups of alike droppable tensors, such as a layer of all blocks: all, then parts.

        Dropped tensors come first, in descending order of cost per byte; then kept ones, ascending.
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


def _slid(dropped: Bools, generator: random.Random) -> Bools:
    """Return the selection with a random stretch of it moved to the next or previous tensors.

    The kept tensor of a chain, such as an activation or its source, determines the cost of
    rebuilding the others. Changing it takes two flips or more, each of which alone makes the step
    slower, and often the same change in several layers.
    """
    length = min(generator.choice(_STRETCHES), len(dropped))
    begin = generator.randrange(len(dropped) - length + 1)
    slid = dropped.copy()
    slid[begin : begin + length] = np.roll(slid[begin : begin + length], generator.choice((-1, 1)))
    return slid


def _flipped(selection: Selection, tensors: Ints) -> Selection:
    """Return the selection with `tensors` kept if they were dropped, and dropped if not."""
    drop, keep = selection.drop.copy(), selection.keep.copy()
    drop[tensors] = ~drop[tensors]
    keep[tensors] &= ~drop[tensors]
    return selection._replace(drop=drop, keep=keep)


def _top(choices: Sequence[Choice], factor: float, count: int) -> list[Choice]:
    return sorted(choices, key=lambda choice: choice.rank(factor))[:count]


def _unique(lists: Iterable[Iterable[Choice]]) -> list[Choice]:
    return list({id(choice): choice for some in lists for choice in some}.values())
