"""The corpus of the fuzz targets (tests/fuzz), and random changes to it, without atheris."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from fuzz import targets
from hypothesis import strategies as st

from umem.errors import TraceError

ROOT = Path(__file__).resolve().parents[1] / "fuzz" / "corpus"
CORPUS = {name: sorted((ROOT / name).iterdir()) for name in targets.TARGETS}
FILES = [(name, path) for name, paths in CORPUS.items() for path in paths]
# The reader that each target calls first.
READERS = {
    "trace": "fuzz.targets.read",
    "snapshot": "umem.trace.torch_snapshot.read",
    "columns": "fuzz.targets.copy.copy",
    "options": "umem.config.settings.load",
    "checkpoint": "fuzz.targets.load_checkpoint",
    "top": "fuzz.targets.completed",
}
# torch warns of kinds of tensors that a file can name.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(autouse=True, scope="module")
def _closed() -> Iterator[None]:
    yield
    targets.close()


def test_a_corpus_is_small_and_its_files_are_named_by_their_content() -> None:
    assert {path.name for path in ROOT.iterdir()} == set(targets.TARGETS)
    for paths in CORPUS.values():
        contents = [path.read_bytes() for path in paths]
        names = [hashlib.sha1(data).hexdigest()[:12] for data in contents]
        assert [path.name for path in paths] == names
        assert 0 < len(paths) <= 64
        assert sum(map(len, contents)) <= 100 << 10


@pytest.mark.parametrize(("name", "path"), FILES, ids=[f"{n}-{p.name}" for n, p in FILES])
def test_a_file_of_the_corpus_breaks_no_reader(name: str, path: Path) -> None:
    targets.TARGETS[name](path.read_bytes())


@pytest.mark.parametrize("name", targets.TARGETS)
@hypothesis.settings(
    max_examples=200,
    derandomize=True,  # `make fuzz` searches for more
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
@hypothesis.given(data=st.data())
def test_a_changed_file_breaks_no_reader(name: str, data: st.DataObject) -> None:
    files = st.sampled_from(CORPUS[name])
    changed = bytearray(data.draw(files).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(changed)))
        end = min(at + data.draw(st.integers(0, 16)), len(changed))
        other = data.draw(files).read_bytes()
        place = data.draw(st.integers(0, len(other)))
        changed[at:end] = data.draw(
            st.one_of(
                st.binary(max_size=8),
                st.just(other[place : place + 64]),
                st.sampled_from([b"\0", b"\x1b", b"-1", b"1e999", b"\xff" * 8, b"null", b"[" * 99]),
            )
        )
    targets.TARGETS[name](bytes(changed))


@pytest.mark.parametrize("name", targets.TARGETS)
def test_a_target_raises_what_its_reader_should_not(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class UnexpectedError(Exception):
        pass

    def fail(*_: object, **__: object) -> None:
        raise UnexpectedError

    monkeypatch.setattr(READERS[name], fail)
    with pytest.raises(UnexpectedError):
        targets.TARGETS[name](CORPUS[name][0].read_bytes())


@pytest.mark.parametrize("text", ["", "\x1b[2J", "two\nlines", "half a pair: \ud800"])
def test_a_message_that_controls_a_terminal_is_found(text: str) -> None:
    targets.check_message(TraceError("\u00e4 message"))
    with pytest.raises(AssertionError):
        targets.check_message(TraceError(text))
