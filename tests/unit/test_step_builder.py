"""The columns built from events, against the definitions worked over the whole trace."""

from __future__ import annotations

import gzip
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.synthetic import cyclic, random_trace, training

from umem import TraceError
from umem.trace.event_columns import EventRows
from umem.trace.schema import Alloc, Event, Free, Header, Op, Step, Validator
from umem.trace.step_builder import StepBuilder, last_step, read_step
from umem.trace.step_trace import Kind, StepTrace
from umem.trace.writer import Writer

MIB = 1 << 20
PAGE = 2 * MIB


def build(events: Iterable[Event]) -> StepTrace:
    builder = StepBuilder()
    for event in events:
        builder.add(event)
    return builder.step()


@dataclass
class Life:
    """One block, from the event that allocates it to the one that frees it, if any."""

    alloc: Alloc
    begin: int
    end: int | None = None
    ordinal: int = 0


@dataclass
class Whole:
    """A trace with places: every life, and of the last step its ops with accesses."""

    lives: list[Life] = field(default_factory=list)
    ops: list[tuple[int, Op, dict[int, bool]]] = field(default_factory=list)
    begin: int = -1  # in the last step
    before: int = -1  # in the previous one
    end: int = 0


def whole(events: list[Event]) -> Whole:
    ends = [-1, *(i for i, event in enumerate(events) if isinstance(event, Step))]
    found = Whole(begin=ends[-2], before=ends[-3], end=ends[-1])
    live: dict[int, int] = {}
    ordinal = 0
    for place, event in enumerate(events):
        if isinstance(event, Step):
            ordinal = 0
        elif isinstance(event, Alloc):
            live[event.id] = len(found.lives)
            found.lives.append(Life(event, place, None, ordinal))
            ordinal += 1
        elif isinstance(event, Free):
            found.lives[live.pop(event.id)].end = place
        elif found.begin < place < found.end:
            uses = {live[i]: i in event.writes for i in (*event.reads, *event.writes)}
            uses = {t: write for t, write in uses.items() if found.lives[t].alloc.bytes}
            if uses:
                found.ops.append((place, event, uses))
    return found


def alive_in(trace: Whole, life: Life, op: int) -> bool:
    place = trace.ops[op][0]
    since = trace.ops[op - 1][0] if op else trace.begin
    # Events after the last op belong to it.
    until = trace.end if op == len(trace.ops) - 1 else place
    inside = since < life.begin < until
    return inside or (life.begin < place and (life.end is None or life.end > place))


def kind_of(trace: Whole, life: Life) -> Kind:
    freed = life.end is not None and life.end < trace.end
    if life.begin < trace.begin:
        return Kind.CARRIED if freed else Kind.PERSISTENT
    return Kind.TRANSIENT if freed else Kind.MADE


@given(st.integers(0, 10_000))
def test_a_step_is_what_its_definitions_say(seed: int) -> None:
    events = list(random_trace(seed, ops=seed % 13 + 2))
    trace = whole(events)
    step = build(events)
    n = len(trace.ops)
    assert step.op_names == tuple(op.name for _, op, _ in trace.ops)

    expected = []
    for life in trace.lives:
        alive = [i for i in range(n) if life.alloc.bytes and alive_in(trace, life, i)]
        if alive and life.begin < trace.end:
            expected.append((life, alive[0], alive[-1], kind_of(trace, life)))
    assert step.source.tolist() == [life.alloc.id for life, *_ in expected]
    assert step.first.tolist() == [first for _, first, _, _ in expected]
    assert step.last.tolist() == [last for _, _, last, _ in expected]
    assert step.kind.tolist() == [kind for *_, kind in expected]
    assert step.tags == tuple(life.alloc.tag for life, *_ in expected)
    sizes = [life.alloc.bytes for life, *_ in expected]
    assert step.large.tolist() == [size >= PAGE for size in sizes]
    assert step.bytes.tolist() == [
        -(-size // unit) * unit for size in sizes for unit in [PAGE if size >= PAGE else 256]
    ]

    number = {id(life): tensor for tensor, (life, *_) in enumerate(expected)}
    found = [
        {
            int(t): bool(w)
            for t, w in zip(step.access_tensor[a:b], step.access_write[a:b], strict=True)
        }
        for a, b in zip(step.access_start, step.access_start[1:], strict=False)
    ]
    assert found == [
        {number[id(trace.lives[t])]: write for t, write in uses.items()} for *_, uses in trace.ops
    ]
    check_twins(step, trace, [life for life, *_ in expected])


def check_twins(step: StepTrace, trace: Whole, lives: list[Life]) -> None:
    next_aliases = [t for t in step.next_alias.tolist() if t >= 0]
    assert len(next_aliases) == len(set(next_aliases))
    for tensor, next_alias in enumerate(step.next_alias.tolist()):
        if step.kind[tensor] != Kind.CARRIED:
            assert next_alias == -1
            continue
        life = lives[tensor]
        same = [
            t
            for t, other in enumerate(lives)
            if step.kind[t] == Kind.MADE
            and (other.ordinal, other.alloc.bytes) == (life.ordinal, life.alloc.bytes)
        ]
        if same and life.begin > trace.before:
            assert next_alias == same[0]
        elif next_alias >= 0:
            assert step.kind[next_alias] == Kind.MADE
            assert lives[next_alias].alloc.bytes == life.alloc.bytes
            assert lives[next_alias].alloc.tag == life.alloc.tag


@given(st.integers(0, 10_000))
def test_times_add_up(seed: int) -> None:
    events = list(random_trace(seed, ops=seed % 13 + 2))
    ops: list[Op] = []
    for event in events[:-1]:
        ops = [] if isinstance(event, Step) else [*ops, event] if isinstance(event, Op) else ops
    total = 0.0
    for op in ops:
        known = sorted(o.us for o in ops if o.name == op.name and o.us is not None)
        middle = known[(len(known) - 1) // 2 : len(known) // 2 + 1]
        total += sum(middle) / max(len(middle), 1) if op.us is None else op.us
    assert build(events).compute_us == pytest.approx(total)


def test_training_has_every_kind_of_life() -> None:
    step = build(training(3, 4 * MIB, 16 * MIB, 3, small=1, optimizer=True))
    of_kind = {
        kind: {step.tags[t] for t in range(step.n_tensors) if step.kind[t] == kind} for kind in Kind
    }
    assert of_kind == {
        Kind.PERSISTENT: {"param", "optimizer"},
        Kind.TRANSIENT: {"activation"},
        Kind.MADE: {"grad"},
        Kind.CARRIED: {"grad"},
    }
    carried = [t for t in range(step.n_tensors) if step.kind[t] == Kind.CARRIED]
    assert len(carried) == 3
    # The gradient of the last layer is made first, in both steps.
    assert [int(step.next_alias[t]) for t in carried] == [
        t for t in range(step.n_tensors) if step.kind[t] == Kind.MADE
    ]
    # Carried ones live until the first backward op, which is op 3.
    assert {int(step.last[t]) for t in carried} == {2}


def test_of_one_step_alone_the_weights_persist() -> None:
    step = build(training(2, 4 * MIB, MIB, 1, optimizer=True))
    kinds = dict(zip(step.tags, step.kind.tolist(), strict=True))
    assert kinds == {
        "param": Kind.PERSISTENT,
        "optimizer": Kind.PERSISTENT,
        "activation": Kind.TRANSIENT,
        "grad": Kind.MADE,
    }


def test_of_one_step_alone_what_the_first_op_makes_does_not_persist() -> None:
    there, read, made, late, output = (Alloc(i, MIB) for i in range(5))
    momentum = Alloc(5, MIB, "optimizer")
    step = build(
        [
            there,
            read,
            made,
            Op("first", (1,), (2,)),
            late,
            output,
            momentum,
            Op("second", (3,), (4, 5)),
            Free(3),
        ]
    )
    kinds = dict(zip(step.source.tolist(), step.kind.tolist(), strict=True))
    assert kinds == {
        0: Kind.PERSISTENT,
        1: Kind.PERSISTENT,
        2: Kind.MADE,
        3: Kind.TRANSIENT,
        4: Kind.MADE,
        5: Kind.PERSISTENT,
    }
    assert step.first.tolist() == [0, 0, 0, 1, 1, 0]


def test_a_recording_from_the_middle_tells_what_was_there() -> None:
    # The live blocks, and a step's end without ops: 1 is last step's gradient.
    events: list[Event] = [Alloc(0, MIB, "param"), Alloc(1, MIB, "grad"), Step()]
    events += [Free(1), Op("before", (0,), ())]
    events += [Alloc(2, MIB, "grad"), Op("backward", (0,), (2,)), Op("update", (2,), (0,)), Step()]
    builder = StepBuilder()
    for event in events:
        builder.add(event)
    assert builder.steps == 1
    step = builder.step()
    # Freed before the first op: alive in none.
    assert step.source.tolist() == [0, 2]
    step = build([*events[:3], Op("reads", (1,), ()), *events[3:]])
    assert step.source.tolist() == [0, 1, 2]
    assert step.kind.tolist() == [Kind.PERSISTENT, Kind.CARRIED, Kind.MADE]
    assert step.next_alias.tolist() == [-1, 2, -1]


def test_ordinals_compare_only_with_those_of_a_step() -> None:
    # 2 is the second allocation of its step as 1 was among the live blocks, which proves nothing.
    events: list[Event] = [Alloc(0, MIB, "param"), Alloc(1, MIB, "grad"), Step()]
    events += [Op("reads", (1,), ()), Free(1), Alloc(9, 4, "temp"), Alloc(2, MIB, "activation")]
    events += [Alloc(3, MIB, "grad"), Op("makes", (0,), (2, 3)), Step()]
    step = build(events)
    assert step.source.tolist() == [0, 1, 9, 2, 3]
    assert step.next_alias.tolist() == [-1, 4, -1, -1, -1]


def test_twins_are_counted_without_what_is_alive_in_no_op() -> None:
    one_step: list[Event] = [Alloc(2, MIB), Alloc(3, 2 * MIB), Op("makes", (), (2, 3)), Step()]
    events = [*one_step, Free(2), Op("reads", (3,), ()), Free(3), *one_step]
    step = build(events)
    assert step.source.tolist() == [3, 2, 3]
    assert step.kind.tolist() == [Kind.CARRIED, Kind.MADE, Kind.MADE]
    assert step.next_alias.tolist() == [2, -1, -1]


def test_ops_without_accesses_pass_their_time_on() -> None:
    nothing = Alloc(1, 0)
    events: list[Event] = [Alloc(0, MIB), nothing, Op("a", (), (), 1.0), Op("b", (0,), (), 10.0)]
    events += [Op("c", (1,), (1,), 2.0), Alloc(2, MIB), Op("d", (0, 0), (0, 2), 20.0)]
    step = build([*events, Op("e", (), (), 3.0)])
    assert step.op_names == ("b", "d")
    assert step.op_us.tolist() == [11.0, 25.0]
    assert step.access_tensor.tolist() == [0, 0, 1]
    assert step.access_write.tolist() == [False, True, True]
    assert step.access_read is not None
    assert step.access_read.tolist() == [True, True, False]


def test_an_op_without_a_time_takes_the_median_of_its_name() -> None:
    times = (1.0, None, 3.0, 100.0)
    step = build([Alloc(0, MIB), *(Op("x", (0,), (), us) for us in times), Op("y", (0,), ())])
    assert step.op_us.tolist() == [1.0, 3.0, 3.0, 100.0, 0.0]


def test_a_tensor_without_a_family_has_that_of_the_op_that_makes_it() -> None:
    events = [Alloc(0, MIB), Alloc(1, MIB, "", "conv"), Alloc(2, MIB)]
    step = build([*events, Op("x", (2,), (0, 1), family="norm"), Op("y", (), (2,), family="norm")])
    assert step.families == ("norm", "conv", "")


def test_scratch_of_an_op_is_alive_in_it_only() -> None:
    events: list[Event] = [Alloc(0, MIB), Op("a", (0,), ()), Alloc(1, MIB), Free(1)]
    events += [Op("b", (0,), ())]
    step = build([*events, Op("c", (0,), ())])
    assert (step.first[1], step.last[1], step.kind[1]) == (1, 1, Kind.TRANSIENT)


def test_steps_are_counted_and_the_last_two_kept() -> None:
    builder = StepBuilder()
    assert builder.steps == 0
    for event in cyclic(4, 5, PAGE):
        builder.add(event)
    assert builder.steps == 5
    assert builder.peak_bytes == 4 * PAGE
    builder.add(Step())  # reported twice
    assert builder.steps == 5
    builder.add(Op("next", (0,), ()))  # not complete
    assert builder.steps == 5
    assert builder.step(-1).op_names == builder.step(-2).op_names == ("use",) * 4
    for index in (-3, 0):
        with pytest.raises(TraceError, match="is not kept; kept: -2 to -1"):
            builder.step(index)


def test_accesses_to_parts() -> None:
    big, other, small = 64 * MIB, 40 * MIB, 3 * MIB
    events: list[Event] = [Alloc(1, big), Alloc(2, other), Alloc(3, small), Alloc(4, big)]
    events += [
        Op("whole", (1, 2), (3,), 1.0),
        Op("half", (1, 2), (), 1.0, parts=(0, 0, big // 2)),
        # A block that is read in one part and written in another is used in both.
        Op("both", (2,), (2,), 1.0, parts=(0, 8, 16, 1, 0, 4)),
        # Wholly in one of two: whole.
        Op("either", (1,), (1,), 1.0, parts=(1, 0, 4)),
        Op("again", (1,), (), 1.0, parts=(0, 0, big // 2)),
        Op("most", (4,), (), 1.0, parts=(0, 5, big)),
        Step(),
    ]
    trace = build(events)
    assert trace.parts is not None
    assert trace.access_part is not None
    of = [
        [list(zip(*(column.tolist() for column in trace.parts.of(which)), strict=True))
         if which >= 0 else [] for which in trace.access_part[
             trace.access_start[op] : trace.access_start[op + 1]].tolist()]
        for op in range(trace.n_ops)
    ]  # fmt: skip
    half = [(0, big // 2)]
    assert of == [[[], [], []], [half, []], [[(0, 4), (8, 16)]], [[]], [half], [[(5, big)]]]
    assert len(trace.parts.start) == 4  # three sets
    # 64 MiB and 40, as at most half of one is used; so is the other of 64.
    assert trace.cut is not None
    assert (trace.cut[trace.bytes >= other] == PAGE).all()
    assert trace.cut[trace.bytes < other].tolist() == [64 * MIB]


def test_blocks_are_cut_where_little_of_one_is_used_or_they_were_before() -> None:
    size = 64 * MIB
    blocks: list[Event] = [Alloc(1, size), Alloc(2, size + 5), Alloc(3, 5)]

    def cut(*parts: int, before: Iterable[int] = ()) -> list[int] | None:
        builder = StepBuilder()
        for event in (*blocks, Op("x", (1, 2, 3), (), 1.0, parts=parts), Step()):
            builder.add(event)
        found = builder.step(cut=before).cut
        return found if found is None else found.tolist()

    assert cut() is None
    assert cut(0, 0, size // 2 + 1) is None
    assert cut(0, 0, size // 2) == [PAGE, size, size]
    assert cut(0, 0, size // 2, 0, size // 2, size) is None  # all of it, in two rows
    assert cut(1, 7, 8) == [size, PAGE, size]  # another range: 72 MiB
    assert cut(2, 0, 1) is None  # it does not move on its own
    assert cut(before=[size]) == [PAGE, size, size]
    assert cut(before=[4 * MIB]) == [size, size, size]


def test_a_trace_without_steps_is_one() -> None:
    builder = StepBuilder()
    for event in (Alloc(0, MIB), Op("x", (0,), ())):
        builder.add(event)
    assert builder.steps == 1
    assert builder.step().n_ops == 1


def test_what_has_no_op_cannot_be_planned(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with Writer(path, Header()) as writer:
        writer.write(Alloc(1, 4))
    with pytest.raises(TraceError, match=f"{path}: the step has no op that accesses memory"):
        read_step(path)


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([Alloc(1, 1), Alloc(1, 1)], "id 1 is allocated twice"),
        ([Alloc(1, 1), Op("x", (1,), ()), Step(), Alloc(1, 1)], "id 1 is allocated twice"),
        ([Free(1)], "free of id 1"),
        ([Alloc(1, 1), Free(2)], "free of id 2"),
        ([Alloc(1, 1), Free(1), Free(1), Alloc(1, 1), Alloc(1, 1)], "free of id 1"),
        ([Alloc(1, 1), Alloc(1, 1), Free(1), Free(1), Free(1)], "id 1 is allocated twice"),
        ([Alloc(1, 1), Op("x", (1, 3), ())], "op 'x' uses id 3, which is not live"),
        ([Op("x", (), (3,))], "op 'x' uses id 3, which is not live"),
        ([Alloc(1, 1), Free(1), Op("x", (1,), ())], "op 'x' uses id 1, which is not live"),
    ],
)
def test_events_that_cannot_be_are_refused(events: list[Event], reason: str) -> None:
    with pytest.raises(TraceError, match=reason):
        build([*events, Step()])


@pytest.mark.parametrize("last", [[], [Op("x", (1,), ())]])
def test_events_after_the_last_step_are_no_step(last: list[Event]) -> None:
    """A program may be killed in its first step."""
    builder = StepBuilder()
    for event in [Alloc(1, PAGE), Step(), *last]:
        builder.add(event)
    assert builder.steps == 0
    with pytest.raises(TraceError, match="no step with an op has ended"):
        builder.step()
    with pytest.raises(TraceError, match="no step with an op has ended"):
        list(builder.events())


def test_a_trace_of_several_devices_is_no_step_of_one() -> None:
    events: list[Event] = [Alloc(1, PAGE), Alloc(2, PAGE, device=1)]
    events += [Op("x", (1,), ()), Op("y", (2,), ())]
    with pytest.raises(TraceError, match=r"of devices 0, 1; allowed: one device's"):
        last_step([*events, Step()])
    assert last_step([*events[:3], Step()]).n_ops == 1


def test_the_file_is_named_once(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"umem_trace":1}\nnonsense\n')
    with pytest.raises(TraceError) as caught:
        read_step(path)
    assert str(caught.value).count(str(path)) == 1


def test_an_id_may_name_another_block_once_it_is_free() -> None:
    step = build(
        [
            Alloc(7, MIB), Op("a", (), (7,)), Free(7), Alloc(7, 2 * MIB), Op("b", (7,), ()),
            Free(7), Alloc(7, 3 * MIB), Op("c", (7,), (7,)), Step(),
        ]
    )  # fmt: skip
    assert step.access_tensor.tolist() == [0, 1, 2]
    assert step.bytes.tolist() == [MIB, 2 * MIB, 4 * MIB]
    assert step.kind.tolist() == [Kind.TRANSIENT, Kind.TRANSIENT, Kind.MADE]


@given(st.integers(0, 1000))
def test_a_step_alone_is_the_same_step(seed: int) -> None:
    builder = StepBuilder()
    for event in random_trace(seed):
        builder.add(event)
    alone = list(builder.events())
    validator = Validator()
    for event in alone:
        validator.check(event)
    before, after = builder.step(), build(alone)
    for name in ("op_us", "bytes", "kind", "first", "last", "source", "access_tensor"):
        assert getattr(before, name).tolist() == getattr(after, name).tolist()
    assert before.tags == after.tags


@given(st.integers(0, 1000), st.lists(st.integers(0, 10_000), max_size=4))
def test_columns_in_any_batches_are_the_same_step(seed: int, cuts: list[int]) -> None:
    rows, builder = EventRows(), StepBuilder()
    events = list(random_trace(seed))
    sizes: dict[int, int] = {}
    for i, event in enumerate(events):
        if isinstance(event, Alloc):
            sizes[event.id] = event.bytes
        if isinstance(event, Op) and event.reads and sizes[event.reads[0]] > 1:
            events[i] = replace(event, parts=(0, 0, 1 + seed % (sizes[event.reads[0]] - 1)))
        rows.add(events[i])
    columns = rows.columns()
    bounds = sorted({0, len(columns), *(cut % len(columns) for cut in cuts)})
    for begin, end in pairwise(bounds):
        builder.take(columns.slice(begin, end))
    one_by_one, expected = StepBuilder(), build(events)
    for event in events:
        one_by_one.add(event)
    step = builder.step()
    for column in fields(StepTrace):
        found, wanted = getattr(step, column.name), getattr(expected, column.name)
        assert (
            np.array_equal(found, wanted)
            if isinstance(wanted, np.ndarray)
            else (repr(found) == repr(wanted))
        )
    assert (builder.steps, builder.peak_bytes) == (one_by_one.steps, one_by_one.peak_bytes)


def test_blocks_from_before_the_recording_are_no_part_of_its_first_step() -> None:
    builder = StepBuilder()
    builder.add(Alloc(0, MIB, "param"))
    builder.add(Alloc(1, MIB, "grad"))
    builder.begin()
    for event in (Op("reads", (0, 1), ()), Free(1), Alloc(2, MIB, "temp"), Op("x", (), (2,))):
        builder.add(event)
    builder.add(Step())
    step = builder.step()
    assert step.source.tolist() == [0, 1, 2]
    assert step.kind.tolist() == [Kind.PERSISTENT, Kind.CARRIED, Kind.MADE]
    assert step.next_alias.tolist() == [-1, -1, -1]  # another size or tag


def test_read_step_of_a_packed_file(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    events = list(training(4, PAGE, PAGE, 2))
    with Writer(path, Header()) as writer:
        for event in events:
            writer.write(event)
    assert gzip.decompress(path.read_bytes()).count(b"\n") == len(events) + 1
    assert read_step(path).access_tensor.tolist() == build(events).access_tensor.tolist()
