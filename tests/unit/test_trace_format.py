"""The trace format: a written trace reads back, and a malformed one gives one line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.synthetic import random_trace, training

from umem import TraceError
from umem.trace import reader, writer
from umem.trace.reader import read
from umem.trace.schema import MAX_BYTES, MAX_ID, Alloc, Event, Free, Header, Op, Step, Validator
from umem.trace.step_builder import read_step
from umem.trace.step_trace import Kind
from umem.trace.writer import Writer, to_json

HEADER = '{"kind":"umem-trace","v":1,"device":"d","source":"s","note":"n"}\n'
ALLOC = '{"e":"alloc","id":1,"bytes":4096}\n'
FREE = '{"e":"free","id":1}\n'
IN_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])

text = st.text(st.characters(codec="utf-8"), max_size=12)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=5,
)  # fmt: skip
KNOWN = {"e", "kind", "v", "device", "source", "note", "id", "bytes", "tag", "family"}
KNOWN |= {"i", "name", "r", "w", "us", "flops", "parts"}
extras = st.none() | st.dictionaries(
    text.filter(lambda key: key not in KNOWN), json_values, min_size=1, max_size=2
)


def _parts(which: int, size: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Draw rows of the access `which`, of a block of `size` bytes, or none."""
    if size == 0:
        return st.just(())
    begins = st.lists(st.integers(0, size - 1), max_size=2, unique=True)
    return begins.flatmap(
        lambda found: st.tuples(*(st.integers(begin + 1, size) for begin in found)).map(
            lambda ends: tuple(n for row in zip(found, ends, strict=True) for n in (which, *row))
        )
    )


@st.composite
def traces(draw: st.DrawFn) -> list[Event]:
    """Valid events in a valid order."""
    events: list[Event] = []
    live: dict[int, int] = {}  # bytes
    numbers = st.none() | st.floats(0, 1e15)
    for _ in range(draw(st.integers(0, 12))):
        kinds = ["alloc", "op", "step", *(["free"] if live else [])]
        kind = draw(st.sampled_from(kinds))
        extra = draw(extras)
        if kind == "alloc":
            block = draw(st.integers(0, MAX_ID).filter(lambda i: i not in live))
            # All blocks together remain below the limit of live bytes.
            live[block] = draw(st.integers(0, MAX_BYTES) | st.just(0)) >> 4
            events.append(
                Alloc(block, live[block], draw(text), draw(text), draw(st.integers(0, 3)), extra)
            )
        elif kind == "free":
            block = draw(st.sampled_from(list(live)))
            del live[block]
            events.append(Free(block, extra))
        elif kind == "op":
            ids = st.lists(st.sampled_from(list(live)), max_size=4) if live else st.just([])
            reads, writes = tuple(draw(ids)), tuple(draw(ids))
            index = draw(st.none() | st.integers(0, MAX_ID))
            us, flops = draw(numbers), draw(numbers)
            parts = [
                part
                for which, block in enumerate(reads + writes)
                for part in draw(_parts(which, live[block]))
            ]
            family = draw(text)
            events.append(
                Op(draw(text), reads, writes, us, flops, index, family, tuple(parts), extra)
            )
        else:
            events.append(Step(extra))
    return events


@IN_FOLDER
@given(traces(), st.builds(Header, text, text, text, extra=extras), st.sampled_from(["", ".gz"]))
def test_what_is_written_is_read(
    tmp_path: Path, events: list[Event], header: Header, packed: str
) -> None:
    path = tmp_path / f"t.jsonl{packed}"
    with Writer(path, header) as writer:
        for event in events:
            writer.write(event)
    assert (path.read_bytes()[:2] == b"\x1f\x8b") is bool(packed)
    found_header, found = read(path)
    assert found_header == header
    assert list(found) == events


def test_a_line_is_as_documented() -> None:
    op = Op("aten::convolution", (1, 2), (7,), 153.2, 1.2e9, 12, extra={"stream": 7})
    assert to_json(op) == (
        '{"e":"op","i":12,"name":"aten::convolution","r":[1,2],"w":[7],"us":153.2,'
        '"flops":1200000000.0,"stream":7}'
    )
    assert to_json(Alloc(7, 0, "activation")) == '{"e":"alloc","id":7,"bytes":0,"tag":"activation"}'
    assert to_json(Step()) == '{"e":"step"}'


def test_packed_is_known_by_content(tmp_path: Path) -> None:
    path = tmp_path / "named.jsonl"
    path.write_bytes(gzip.compress((HEADER + ALLOC).encode()))
    assert list(read(path)[1]) == [Alloc(1, 4096)]


def test_the_file_is_closed_when_the_events_are_dropped(tmp_path: Path) -> None:
    # An open file that is dropped is a ResourceWarning, and warnings are errors here.
    path = tmp_path / "t.jsonl"
    path.write_text(HEADER + ALLOC)
    read(path)
    next(read(path)[1])


def test_memory_is_linear_in_live_blocks() -> None:
    validator = Validator()
    for i in range(10_000):
        validator.check(Alloc(i, 1))
        if i >= 5:
            validator.check(Free(i - 5))
    assert len(validator.live) == 5


def _op_with(parts: str) -> str:
    return ALLOC + f'{{"e":"op","name":"x","r":[1],"parts":{parts}}}\n'


BAD: dict[str, tuple[str | bytes, str]] = {
    "empty": ("", "1: the file is empty"),
    "an empty line": (HEADER + "\n", "2: not JSON"),
    "not JSON": ("hello\n", "1: not JSON: Expecting value at column 1"),
    "no header": (ALLOC, "1: not a trace"),
    "another header": ('{"kind":"x","v":1}\n', "1: not a trace"),
    "a later version": ('{"kind":"umem-trace","v":2,"x":3}\n', "1: version 2 is unknown"),
    "version true": ('{"kind":"umem-trace","v":true}\n', "1: version True is unknown"),
    "no version": ('{"kind":"umem-trace"}\n', "1: the key 'v' is missing"),
    "a device that is none": ('{"kind":"umem-trace","v":1,"device":3}\n', "1: device is 3"),
    "a list": (HEADER + "[1]\n", "2: the line is not a JSON object"),
    "no event": (HEADER + '{"id":1}\n', '2: no event: the key "e" is missing'),
    "an unknown event": (
        HEADER + '{"e":"aloc"}\n',
        "2: the event 'aloc' is unknown \\(did you mean",
    ),
    "an event that is no name": (HEADER + '{"e":[]}\n', "2: the event \\[\\] is unknown"),
    "the end cut off": (HEADER + ALLOC[:-8], "2: not JSON: .*; the file ends in this line"),
    "no bytes": (HEADER + '{"e":"alloc","id":1}\n', "2: the key 'bytes' is missing"),
    "no name": (HEADER + '{"e":"op"}\n', "2: the key 'name' is missing"),
    "id text": (HEADER + '{"e":"alloc","id":"1","bytes":1}\n', "2: id is '1', not an integer"),
    "id true": (HEADER + '{"e":"alloc","id":true,"bytes":1}\n', "2: id is True, not an integer"),
    "id float": (HEADER + '{"e":"alloc","id":1.0,"bytes":1}\n', "2: id is 1.0, not an integer"),
    "id -1": (HEADER + '{"e":"alloc","id":-1,"bytes":1}\n', "2: id is -1; allowed: 0 to"),
    "device 128": (
        HEADER + '{"e":"alloc","id":1,"bytes":1,"device":128}\n',
        "2: device is 128; allowed: 0 to",
    ),
    "id 2^63": (HEADER + '{"e":"alloc","id":9223372036854775808,"bytes":1}\n', "2: id is 9223"),
    "id null": (HEADER + '{"e":"free","id":null}\n', "2: id is None, not an integer"),
    "bytes -1": (HEADER + '{"e":"alloc","id":1,"bytes":-1}\n', "2: bytes is -1; allowed"),
    "bytes 2^60+1": (HEADER + '{"e":"alloc","id":1,"bytes":1152921504606846977}\n', "2: bytes is"),
    "bytes float": (HEADER + '{"e":"alloc","id":1,"bytes":1e3}\n', "2: bytes is 1000.0, not an in"),
    "tag 3": (HEADER + '{"e":"alloc","id":1,"bytes":1,"tag":3}\n', "2: tag is 3, not a string"),
    "too much live": (
        HEADER + "".join(f'{{"e":"alloc","id":{i},"bytes":{1 << 60}}}\n' for i in range(5)),
        "6: 5764607523034234880 bytes are live; allowed",
    ),
    "allocated twice": (HEADER + ALLOC + ALLOC, "3: id 1 is allocated twice"),
    "double free": (HEADER + ALLOC + FREE + FREE, "4: free of id 1, which is not live"),
    "free before alloc": (HEADER + FREE + ALLOC, "2: free of id 1, which is not live"),
    "use before alloc": (HEADER + '{"e":"op","name":"x","r":[1]}\n' + ALLOC, "2: op 'x' uses id 1"),
    "use after free": (
        HEADER + ALLOC + FREE + '{"e":"op","name":"x","w":[1]}\n',
        "4: op 'x' uses id 1, which is not live",
    ),
    "r a number": (HEADER + '{"e":"op","name":"x","r":1}\n', "2: r and w must be lists of ids"),
    "r text": (HEADER + '{"e":"op","name":"x","r":"1"}\n', "2: r and w must be lists of ids"),
    "r true": (HEADER + ALLOC + '{"e":"op","name":"x","r":[true]}\n', "3: r is True, not an int"),
    "w float": (HEADER + ALLOC + '{"e":"op","name":"x","w":[1.0]}\n', "3: w is 1.0, not an int"),
    "r of lists": (HEADER + ALLOC + '{"e":"op","name":"x","r":[[1]]}\n', "3: r is \\[1\\], not an"),
    "us NaN": (HEADER + '{"e":"op","name":"x","us":NaN}\n', "2: NaN is not a number in JSON"),
    "us inf": (HEADER + '{"e":"op","name":"x","us":-Infinity}\n', "2: -Infinity is not a number"),
    "us 1e999": (HEADER + '{"e":"op","name":"x","us":1e999}\n', "2: us is inf; allowed"),
    "us -1": (HEADER + '{"e":"op","name":"x","us":-1}\n', "2: us is -1; allowed: 0 to 1e"),
    "us text": (HEADER + '{"e":"op","name":"x","us":"1"}\n', "2: us is '1', not a number"),
    "us huge": (HEADER + f'{{"e":"op","name":"x","us":{"9" * 4000}}}\n', "2: us is 999"),
    "us very huge": (HEADER + f'{{"e":"op","name":"x","us":{"9" * 5000}}}\n', "2: Exceeds"),
    "flops -1": (HEADER + '{"e":"op","name":"x","flops":-1}\n', "2: flops is -1; allowed"),
    "parts a number": (HEADER + _op_with("3"), "3: parts must be a list of numbers"),
    "parts of lists": (HEADER + _op_with("[[0,0,1]]"), "3: parts is \\[0, 0, 1\\], not an integer"),
    "parts float": (HEADER + _op_with("[0,0,1.0]"), "3: parts is 1.0, not an integer"),
    "parts -1": (HEADER + _op_with("[0,-1,1]"), "3: parts is -1; allowed"),
    "parts in twos": (HEADER + _op_with("[0,0,1,0]"), "3: parts is in rows of three, not 4"),
    "parts of no access": (HEADER + _op_with("[1,0,1]"), "3: parts names access 1 of an op that"),
    "parts of nothing": (HEADER + _op_with("[0,5,5]"), "3: parts has bytes 5 to 5 of id 1"),
    "parts too long": (HEADER + _op_with("[0,0,4097]"), "to 4097 of id 1, which has 4096"),
    "i -1": (HEADER + '{"e":"op","name":"x","i":-1}\n', "2: i is -1; allowed"),
    "nested": (HEADER + '{"e":"step","x":' + "[" * 9999 + "]" * 9999 + "}\n", "2: .*nested"),
    "nested a little": (
        HEADER + '{"e":"step","x":' + "[" * 20 + "]" * 20 + "}\n",
        "2: 'x' is nest",
    ),
    "extra inf": (
        HEADER + '{"e":"step","x":[1e999]}\n',
        "2: 'x' holds inf, which JSON cannot hold",
    ),
    "a long line": (
        HEADER + '{"e":"step","x":"' + "y" * (1 << 20) + '"}\n',
        "2: the line is longer",
    ),
    "no lines": (b"x" * (3 << 20), "1: the line is longer than 1048576 bytes"),
    "not UTF-8": (HEADER.encode() + b'{"e":"step","x":"\xff"}\n', "2: byte 18 of the line is not"),
    "UTF-16": (HEADER.encode("utf-16"), "1: byte 1 of the line is not UTF-8"),
    "half a pair": (HEADER + '{"e":"op","name":"\\ud800"}\n', "2: name holds half of a surrogate"),
    "gzip cut": (gzip.compress(HEADER.encode() * 9)[:-9], "cut off: the gzip data has no end"),
    "gzip damaged": (b"\x1f\x8bhello, this is no gzip at all", "1: the gzip data is damaged"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_its_place_and_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.setattr(reader, "MAX_LINE", 1 << 20)
    content, reason = BAD[case]
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TraceError, match=f"^{path}:.*{reason}") as caught:
        list(read(path)[1])
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)


def test_what_is_no_file_is_an_error_with_its_name(tmp_path: Path) -> None:
    for path, reason in ((tmp_path, "Is a directory"), (tmp_path / "none", "No such file")):
        with pytest.raises(TraceError, match=f"^{path}: {reason}"):
            read(path)
    with pytest.raises(TraceError, match="null byte"):
        read("a\0b")


def test_an_op_of_all_tensors_is_written_and_read(tmp_path: Path) -> None:
    path, count = tmp_path / "many.jsonl.gz", 200_000
    op = Op("aten::_foreach_add_", tuple(range(count)), ())
    with Writer(path, Header("d", "s", "")) as writer:
        for tensor in range(count):
            writer.write(Alloc(tensor, 512))
        writer.write(op)
    *_, read_op = read(path)[1]
    assert read_op == op


def test_no_line_is_written_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "long.jsonl"
    monkeypatch.setattr(writer, "MAX_LINE", 100)
    with Writer(path, Header("d", "s", "")) as file:
        with pytest.raises(TraceError, match=f"^{path}: line 2 would be longer than 100 bytes"):
            file.write(Op("x" * 100, (), ()))
        file.write(Op("y", (), ()))
    assert [*read(path)[1]] == [Op("y", (), ())]


def test_a_packed_bomb_is_not_unpacked_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "MAX_LINE", 1000)
    path = tmp_path / "bomb.jsonl.gz"
    path.write_bytes(gzip.compress(bytes(10_000_000)))
    with pytest.raises(TraceError, match=f"^{path}:1: the line is longer than 1000 bytes"):
        read(path)


def _valid(packed: bool) -> bytes:
    lines = [HEADER, *(f"{to_json(event)}\n" for event in random_trace(1, ops=6, steps=2))]
    content = "".join(lines).encode()
    return gzip.compress(content) if packed else content


@IN_FOLDER
@given(st.data(), st.booleans())
def test_damage_is_an_error_or_a_valid_trace(
    tmp_path: Path, data: st.DataObject, packed: bool
) -> None:
    content = bytearray(_valid(packed))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "damaged.jsonl"
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    events: list[Event] = []
    failure = f"{path}:"
    try:
        events.extend(read(path)[1])
    except TraceError as error:
        failure = str(error)
    assert failure.startswith(f"{path}:")
    validator = Validator()  # events before the failure are valid too
    for event in events:
        validator.check(event)


@IN_FOLDER
@given(st.randoms(use_true_random=False))
def test_a_shuffled_trace_is_no_trace(tmp_path: Path, random: Any) -> None:
    events = [to_json(event) for event in training(2, 1, 1, 1)]
    shuffled = random.sample(events, len(events))
    path = tmp_path / "t.jsonl"
    path.write_text(HEADER + "\n".join(shuffled))
    first_use: dict[int, str] = {}
    for line in map(json.loads, shuffled):
        for block in (
            *line.get("r", ()),
            *line.get("w", ()),
            *([line["id"]] if "id" in line else ()),
        ):
            first_use.setdefault(block, line["e"])
    if any(event != "alloc" for event in first_use.values()):
        with pytest.raises(TraceError, match="which is not live"):
            list(read(path)[1])


def test_the_writer_refuses_what_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with Writer(path, Header("d", "s", "")) as writer:
        writer.write(Alloc(1, 10))
        refused: list[tuple[Any, str]] = [
            (Alloc(1, 10), ":3: id 1 is allocated twice"),
            (Free(2), ":4: free of id 2, which is not live"),
            (Op("x", (), (), float("nan")), ":5: us is nan; allowed"),
            (Step({"e": 1}), ":6: 'e' is a key of the format"),
            (Step({"x": object()}), ":7: 'x' holds an object"),
            ("step", ":8: str is not an event"),
        ]
        for event, reason in refused:
            with pytest.raises(TraceError, match=reason):
                writer.write(event)
    assert list(read(path)[1]) == [Alloc(1, 10)]
    with pytest.raises(TraceError, match="version 2"):
        Writer(path, Header(v=2))
    with pytest.raises(TraceError, match="No such file"):
        Writer(tmp_path / "no" / "t.jsonl", Header())


def test_a_full_disk_is_an_error() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    writer = Writer("/dev/full", Header())
    writer.write(Step())
    with pytest.raises(TraceError, match="/dev/full: No space left"):
        writer.close()


def test_the_example_of_the_documentation_is_a_trace(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "trace_format.md"
    example = page.read_text(encoding="utf-8").split("```text\n")[1].split("```")[0]
    path = tmp_path / "t.jsonl"
    path.write_text(example)
    _, events = read(path)
    assert [type(event) for event in events].count(Op) == 3
    step = read_step(path)
    assert step.compute_us == pytest.approx(153.2 + 150.9 + 12.0)
    assert step.kind.tolist() == [Kind.PERSISTENT] * 2 + [Kind.TRANSIENT] * 4


def test_the_code_of_the_documentation_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Path(__file__).parents[2] / "docs" / "trace_format.md"
    code = page.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["step"].n_ops == 1
    assert len(list(names["events"])) == 3
