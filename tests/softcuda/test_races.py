"""The race detector: accesses that no order of CUDA's relates are reported, and only those."""

from __future__ import annotations

import textwrap

import pytest
from softcuda.programs import driver_program, reason_without_libraries

pytestmark = pytest.mark.skipif(
    reason_without_libraries() is not None, reason=str(reason_without_libraries())
)
SEEDS = pytest.mark.parametrize("seed", ["0", "3"])
RACES_EXIT = 70

SETUP = """
import gc
class Range(ctypes.Structure):
    _fields_ = [("begin", c_void_p), ("bytes", c_size_t), ("written", c_int)]
class Kernel(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("ranges", c_void_p), ("count", c_size_t)]
NOTHING = ctypes.CFUNCTYPE(None, c_void_p)(lambda _: None)

def kernel(name, stream, reads=(), writes=()):
    ranges = [(p.value + first, n, 0) for p, first, n in reads]
    ranges += [(p.value + first, n, 1) for p, first, n in writes]
    array = (Range * len(ranges))(*ranges)
    described = Kernel(name.encode(), ctypes.addressof(array), len(ranges))
    ok(d.softcuda_enqueue(stream, byref(described), NOTHING, NOTHING, None, 0))

def record(event, stream):
    ok(d.cuEventRecord(event, stream))

def wait(stream, event):
    ok(d.cuStreamWaitEvent(stream, event, 0))

def to_host(ptr, stream):
    ok(d.cuMemPrefetchAsync_v2(ptr, c_size_t(2 * MIB), Location(2, 0), 0, stream))

def to_device(ptr, stream):
    ok(d.cuMemPrefetchAsync_v2(ptr, c_size_t(2 * MIB), Location(1, 0), 0, stream))

def populate(ptr, stream):
    first = c_size_t(0)
    ok(d.cuMemDiscardAndPrefetchBatchAsync(byref(ptr), byref(c_size_t(2 * MIB)), c_size_t(1),
        byref(Location(1, 0)), byref(first), c_size_t(1), c_uint64(0), stream))

def captured(stream, work):
    graph, executable = c_void_p(), c_void_p()
    ok(d.cuStreamBeginCapture_v2(stream, 0))
    work()
    ok(d.cuStreamEndCapture(stream, byref(graph)))
    ok(d.cuGraphInstantiateWithFlags(byref(executable), graph, c_uint64(0)))
    return executable

context()
a, b, c, event, other = new_stream(), new_stream(), new_stream(), new_event(), new_event()
ptr, second = managed(2 * MIB), managed(2 * MIB)
"""


def found(code: str, seed: str = "0") -> list[str]:
    """The reports of a program, one after the other."""
    out, _ = driver_program(
        SETUP + textwrap.dedent(code) + "\nfor line in soft.races():\n    print(line)\n",
        SOFTCUDA_SEED=seed,
    )  # fmt: skip
    return out.splitlines()


FIRST = """
    kernel("first", a, writes=[(ptr, 0, 4096)])
    {between}
    kernel("second", b, writes=[(ptr, 0, 4096)])
    """
ORDERS = {
    "an event": "record(event, a); wait(b, event)",
    "an event of a third stream": "record(event, a); wait(c, event); record(other, c); "
    "wait(b, other)",
    "an event twice recorded": "record(event, a); wait(b, event); record(event, c)",
    "waiting for the stream": "ok(d.cuStreamSynchronize(a))",
    "waiting for an event": "record(event, a); ok(d.cuEventSynchronize(event))",
    "waiting for the device": "ok(d.cuCtxSynchronize())",
    "asking the stream until it is done": "[0 for _ in iter(lambda: d.cuStreamQuery(a), 0)]",
    "asking an event until it is done": "record(event, a); "
    "[0 for _ in iter(lambda: d.cuEventQuery(event), 0)]",
    "a copy to pageable memory": "host = ctypes.create_string_buffer(8); "
    "ok(d.cuMemcpyDtoHAsync_v2(host, second, c_size_t(8), a))",
    "a host function that has run": "done = threading.Event(); "
    "function = ctypes.CFUNCTYPE(None, c_void_p)(lambda _: done.set()); "
    "ok(d.cuLaunchHostFunc(a, function, None)); ok(d.cuStreamSynchronize(c)); "
    "[0 for _ in iter(lambda: (d.cuStreamQuery(c), done.wait(0.01))[1], True)]",
    "an allocation freed": "ok(d.cuMemFree_v2(second))",
    "a stream waited for that waited": "record(event, a); wait(c, event); "
    "ok(d.cuStreamSynchronize(c))",
}
NO_ORDERS = {
    "nothing": "pass",
    "an event without a wait": "record(event, a)",
    "an event of another stream": "record(event, c); wait(b, event)",
    "an event never recorded": "wait(b, event)",
    "a wait of another stream": "record(event, a); wait(c, event)",
    "waiting for another stream": "ok(d.cuStreamSynchronize(c))",
    "the legacy stream, which waits for neither": "kernel('between', None)",
    "a destroyed event's memory": "record(event, a); ok(d.cuEventDestroy_v2(event))",
}


@SEEDS
@pytest.mark.parametrize("between", ORDERS)
def test_what_cuda_orders_is_no_race(seed: str, between: str) -> None:
    assert found(FIRST.format(between=ORDERS[between]), seed) == []


@SEEDS
@pytest.mark.parametrize("between", NO_ORDERS)
def test_what_nothing_orders_is_reported_with_both_sides(seed: str, between: str) -> None:
    (report,) = found(FIRST.format(between=NO_ORDERS[between]), seed)
    assert report.startswith("first writes 0x")
    assert "+4096 on stream " in report
    assert ", second writes it on stream " in report
    assert report.endswith(": nothing orders them")


def test_an_event_recorded_too_early_orders_nothing() -> None:
    (report,) = found(
        """
        record(event, a)
        kernel("first", a, writes=[(ptr, 0, 8)])
        wait(b, event)
        kernel("second", b, reads=[(ptr, 0, 8)])
        """
    )
    assert "first writes" in report
    assert "second reads" in report


def test_a_stream_that_says_it_is_not_done_orders_nothing() -> None:
    (report,) = found(
        """
        kernel("first", a, writes=[(ptr, 0, 64)])
        for _ in range(20):
            kernel("more", a)
        assert d.cuStreamQuery(a) == NOT_READY
        kernel("second", b, writes=[(ptr, 0, 64)])
        """,
        "3",
    )
    assert "first writes" in report


@SEEDS
def test_the_legacy_stream_orders_blocking_streams_only(seed: str) -> None:
    code = """
        a, b = new_stream(FLAGS), new_stream(FLAGS)
        kernel("first", a, writes=[(ptr, 0, 8)])
        kernel("legacy", None, writes=[(ptr, 0, 8)])
        kernel("second", b, writes=[(ptr, 0, 8)])
        """
    assert found(code.replace("FLAGS", "0"), seed) == []
    reports = found(code.replace("FLAGS", "1"), seed)
    assert [report.split()[0] for report in reports] == ["first", "legacy"]
    # The stream per thread is blocking as well.
    assert found(code.replace("new_stream(FLAGS)", "c_void_p(2)"), seed) == []


@SEEDS
def test_one_stream_is_in_order_and_neighbours_are_apart(seed: str) -> None:
    assert (
        found(
            """
            kernel("first", a, writes=[(ptr, 0, 100)])
            kernel("first again", a, reads=[(ptr, 50, 20)], writes=[(ptr, 0, 100)])
            kernel("second", b, reads=[(ptr, 100, 28)], writes=[(ptr, 128, 72)])
            """,
            seed,
        )
        == []
    )


def test_only_the_bytes_that_both_touch_are_named() -> None:
    (report,) = found(
        """
        kernel("first", a, writes=[(ptr, 0, 100)])
        kernel("second", b, reads=[(ptr, 90, 100)])
        """
    )
    assert "+10 on stream" in report


ACCESSES = {
    "read": ("kernel('K', {s}, reads=[(ptr, 0, 64)])", "K reads"),
    "write": ("kernel('K', {s}, writes=[(ptr, 0, 64)])", "K writes"),
    "fill": ("fill(ptr, 1, MIB, {s})", "cuMemsetD8Async writes"),
    "copy from": (
        "ok(d.cuMemcpyAsync(c_uint64(second.value + 64 * ({s} is a)), ptr, c_size_t(64), {s}))",
        "cuMemcpyAsync reads",
    ),
    "copy to": ("ok(d.cuMemcpyAsync(ptr, second, c_size_t(64), {s}))", "cuMemcpyAsync writes"),
    "to the host": ("to_host(ptr, {s})", "cuMemPrefetchAsync moves"),
    "to the device": ("to_device(ptr, {s})", "cuMemPrefetchAsync moves"),
    "discard": ("ok(discard(ptr, 2 * MIB, {s}))", "cuMemDiscardBatchAsync discards"),
    "populate": ("populate(ptr, {s})", "cuMemDiscardAndPrefetchBatchAsync discards"),
    "free": ("ok(d.softcuda_free_async(ptr, {s}))", "cudaFreeAsync frees"),
}
READS, MOVES = {"read", "copy from"}, {"to the host", "to the device"}
PAIRS = [
    (x, y) for x in ACCESSES for y in ACCESSES
    if x != "free" and not (y == "free" and x in ("fill", "copy from", "copy to"))
]  # fmt: skip


@pytest.mark.parametrize(("x", "y"), PAIRS)
def test_every_pair_of_accesses(x: str, y: str) -> None:
    (one, says_one), (two, says_two) = ACCESSES[x], ACCESSES[y]
    lines = [one.format(s="a"), "ORDER", two.format(s="b"), "print('slow', soft.slow_moves())"]
    code = "\n".join(lines)
    ordered = code.replace("ORDER", "record(event, a); wait(b, event)")
    assert found(ordered) == ["slow 0"]
    slow, *reports = found(code.replace("ORDER", ""))
    harmless = {x, y} <= READS or {x, y} <= MOVES
    is_slow = bool({x, y} & MOVES) and not {x, y} & {"discard", "populate", "free"}
    assert slow == ("slow 1" if is_slow and not harmless else "slow 0")
    if harmless or is_slow:
        assert reports == []
        return
    assert any(r.startswith(says_one) and f", {says_two} it" in r for r in reports), reports


def test_an_access_after_the_free_is_reported_though_it_is_ordered() -> None:
    (report,) = found(
        """
        ok(d.cuMemFree_v2(ptr))
        kernel("late", a, reads=[(ptr, 0, 64)])
        """
    )
    assert report.startswith("cuMemFree frees 0x")
    assert "on the host, late reads it on stream" in report
    assert report.endswith(": it is freed")


def test_an_address_that_is_allocated_again_has_no_past() -> None:
    assert (
        found(
            """
            places = set()
            for i in range(20):
                block = managed(2 * MIB)
                places.add(block.value)
                kernel("owner", (a, b)[i % 2], writes=[(block, 0, 2 * MIB)])
                ok(d.cuMemFree_v2(block))
            assert len(places) < 20
            """
        )
        == []
    )


@SEEDS
def test_a_reuse_on_another_stream_needs_an_event(seed: str) -> None:
    code = """
        for i in range(3):
            s, t = (a, b) if i % 2 else (b, a)
            kernel("first owner", s, writes=[(ptr, 0, MIB)])
            record(event, s)
            if WAITS:
                wait(t, event)
            kernel("new owner", t, writes=[(ptr, 0, MIB)])
        """
    assert found(code.replace("WAITS", "True"), seed) == []
    reports = found(code.replace("WAITS", "False"), seed)
    assert all("first owner writes" in r and "new owner writes" in r for r in reports)
    assert len(reports) == 2  # one in each direction: the same pair is reported once


@SEEDS
def test_a_graph_is_what_its_nodes_are_when_it_is_launched(seed: str) -> None:
    code = """
        def work():
            fill(ptr, 1, 64, c)
            kernel("node", c, reads=[(second, 0, 8)])
        graph = captured(c, work)
        kernel("before", a, writes=[(second, 0, 8)])
        record(event, a)
        if WAITS:
            wait(b, event)
        ok(d.cuGraphLaunch(graph, b))
        record(event, b)
        if WAITS:
            wait(a, event)
        kernel("after", a, writes=[(ptr, 0, 8)])
        """
    assert found(code.replace("WAITS", "True"), seed) == []
    before, after = found(code.replace("WAITS", "False"), seed)
    assert "before writes" in before
    assert "node reads it" in before
    assert "cuMemsetD8Async writes" in after
    assert "after writes it" in after


def test_streams_that_come_and_go_are_told_apart() -> None:
    assert (
        found(
            """
            for _ in range(200):
                stream = new_stream()
                kernel("one of many", stream, writes=[(ptr, 0, 64)])
                ok(d.cuStreamDestroy_v2(stream))
                ok(d.cuCtxSynchronize())
            """
        )
        == []
    )
    (report,) = found(
        """
        for _ in range(2):
            stream = new_stream()
            kernel("one of two", stream, writes=[(ptr, 0, 64)])
            ok(d.cuStreamDestroy_v2(stream))
        """
    )
    assert "one of two writes" in report


def test_the_calls_that_order_may_be_planned_to_be_left_out() -> None:
    code = FIRST.format(between="soft.skip('CALL'); record(event, a); wait(b, event)")
    for call in ("cuStreamWaitEvent", "cuEventRecord"):
        (report,) = found(code.replace("CALL", call))
        assert "first writes" in report


def test_memory_of_the_detector_is_bounded() -> None:
    assert (
        found(
            """
            for i in range(40):
                for j in range(1000):
                    kernel("small", a, writes=[(ptr, (j * 37 % 1000) * 64, 32)])
                    kernel("other", b, reads=[(second, (i * 1000 + j) % 30000 * 64, 32)])
                ok(d.cuCtxSynchronize())
            assert d.softcuda_race_segments() < 10000, d.softcuda_race_segments()
            """
        )
        == []
    )


def test_a_program_that_did_not_ask_for_its_races_fails() -> None:
    race = SETUP + "fill(ptr, 1, 64, a)\nfill(ptr, 1, 64, b)\n"
    out, err = driver_program(race + "print('end')", expected=RACES_EXIT)
    assert out == "end\n"
    assert "softcuda: race: cuMemsetD8Async writes 0x" in err
    driver_program(race + "assert len(soft.races()) == 1 and soft.races() == []")
    assert driver_program(race, SOFTCUDA_RACES="0")[1] == ""
    # A child leaves its parent's races to the parent.
    driver_program(
        race + "child = os.fork()\nif child == 0:\n    sys.exit(3)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3\nsoft.races()"
    )


RANDOM_PROGRAMS = """
import random

class Model:
    "The same order by sets of operations, and the same accesses byte by byte."

    def __init__(self, streams):
        self.known = {stream: set() for stream in streams}
        self.host, self.events, self.done = set(), {}, []

    def before(self, stream):
        blocking = [s for s in self.known if s not in (0, 1, None)]
        others = blocking if stream is None else [None] if stream in blocking else []
        return set().union(self.known[stream], self.host, *(self.known[s] for s in others))

    def run(self, stream, reads, writes):
        known = self.before(stream)
        races = {
            (i, len(self.done)) for i, (r, w) in enumerate(self.done)
            if i not in known and (w & (reads | writes) or r & writes)
        }
        self.known[stream] = known | {len(self.done)}
        self.done.append((reads, writes))
        return races

def stream_of(s):
    return None if s is None else streams[s]

streams = [new_stream(1), new_stream(1), new_stream(0), new_stream(0)]
places, chance = [0, 1, 2, 3, None], random.Random(SEED)
events, clean = [new_event(), new_event()], 0
for program in range(250):
    model, expected, base = Model(places), set(), program * 64
    for _ in range(chance.randrange(3, 14)):
        s, e = chance.choice(places), chance.randrange(2)
        action = chance.choice(["run"] * 4 + ["record", "wait", "wait", "stream", "event"])
        if action == "run":
            (r, rn), (w, wn) = [(chance.randrange(0, 60), chance.randrange(1, 5)) for _ in range(2)]
            name = f"k{len(model.done)}"
            kernel(name, stream_of(s), [(ptr, base + r, rn)], [(ptr, base + w, wn)])
            expected |= model.run(s, set(range(r, r + rn)), set(range(w, w + wn)))
        elif action == "record":
            record(events[e], stream_of(s))
            model.known[s] = model.before(s)
            model.events[e] = set(model.known[s])
        elif action == "wait" and e in model.events:
            wait(stream_of(s), events[e])
            model.known[s] |= model.events[e]
        elif action == "stream" and s is not None:
            ok(d.cuStreamSynchronize(stream_of(s)))
            model.host |= model.known[s]
        elif action == "event" and e in model.events:
            ok(d.cuEventSynchronize(events[e]))
            model.host |= model.events[e]
    pattern = re.compile(r"k(\\d+) .*, k(\\d+) ")
    reported = {tuple(map(int, pattern.match(line).groups())) for line in soft.races()}
    # Accesses after a race may hide a later one with the same earlier access.
    assert reported <= expected, (program, reported - expected)
    assert bool(reported) == bool(expected), (program, expected)
    clean += not expected
    ok(d.cuCtxSynchronize())
assert 50 < clean < 200, clean
"""


@SEEDS
@pytest.mark.parametrize("number", range(3))
def test_random_programs_against_a_model(seed: str, number: int) -> None:
    assert found(RANDOM_PROGRAMS.replace("SEED", str(number)), seed) == []
