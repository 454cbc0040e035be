"""tests/upstream/run.py, on two files of tests that need no torch, and its two tables."""

from __future__ import annotations

from pathlib import Path

import pytest
from upstream import run

PLAIN, UMEM = run.Variant({}, []), run.Variant({"UMEM": "1"}, [])
ONE = """
import os, signal, time, pytest
UMEM = "UMEM" in os.environ
def test_alike(): pass
def test_crashes(): UMEM and os.kill(os.getpid(), signal.SIGKILL)
def test_fails_alike(): assert False
def test_fails(): assert not UMEM, "other words"
def test_is_skipped(): UMEM and pytest.skip("not here")
def test_is_better(): assert UMEM
@pytest.mark.parametrize("n", [0] if UMEM else [0, 1])
def test_cases(n): pass
def test_hangs(): UMEM and time.sleep(60)
def test_not_chosen(): assert not UMEM
def test_last(): pass
"""
TWO = """
import atexit, os
@atexit.register
def leave(): "UMEM" in os.environ and os._exit(7)
def test_alike(): pass
"""
CHOSEN = [
    run.Chosen("test_one.py", "cpu", "a reason", "not chosen"),
    run.Chosen("nn/test_two.py", "cpu", "a reason"),
]


def upstream(folder: Path, one: str = ONE) -> Path:
    (folder / "test" / "nn").mkdir(parents=True)
    (folder / "test" / "test_one.py").write_text(one)
    (folder / "test" / "nn" / "test_two.py").write_text(TWO)
    return folder


@pytest.mark.nightly
def test_what_ends_worse_is_found_and_the_rest_of_the_file_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    explains = run.Expected("test_one.py::test_fa*", "cpu", "so it is meant")
    unneeded = run.Expected("test_one.py::test_alike", "cpu", "it was so once")
    of_others = run.Expected("test_three.py::test_it", "cpu", "it did not run")
    entries = [unneeded, explains, of_others]
    verdicts = run.run(upstream(tmp_path), CHOSEN, entries, (PLAIN, UMEM), 15)
    found = {
        one.test.split("::")[1]: (one.plain, one.umem, one.explained)
        for verdict in verdicts
        for one in verdict.differences
    }
    assert found == {
        "test_crashes": ("passed", "crash", None),
        "test_fails": ("passed", "failed", explains),
        "test_is_skipped": ("passed", "skipped", None),
        "test_cases[1]": ("passed", "missing", None),
        "test_hangs": ("passed", "hang", None),
        "[the process's end]": ("missing", "crash", None),
    }
    assert [verdict.broken for verdict in verdicts] == [[], []]
    assert run.no_longer_needed(entries, verdicts) == [unneeded]
    rows = [line.split()[:-1] for line in capsys.readouterr().out.splitlines()]
    assert rows == [
        ["file", "tests", "passed", "explained", "unexplained"],
        ["test_one.py", "10", "3", "1", "4"],
        ["nn/test_two.py", "2", "1", "0", "1"],
        ["all", "12", "4", "1", "5"],
    ]
    run.report(verdicts, [unneeded])
    said = capsys.readouterr().out
    assert "no longer needed: test_one.py::test_alike: it was so once" in said
    assert "test_one.py::test_crashes: passed -> crash: crash with exit code -9" in said


def test_a_file_that_does_not_run_is_no_success(tmp_path: Path) -> None:
    source = upstream(tmp_path, "import no_such_module\n")
    (verdict,) = run.run(source, CHOSEN[:1], [], (PLAIN, UMEM), 30)
    assert any("without umem: " in why and "no_such_module" in why for why in verdict.broken)
    nothing = run.Verdict("test_one.py", run.Ran({"a": run.End("skipped")}), run.Ran(), [])
    assert nothing.broken == ["without umem: no test passes"]


def test_umem_that_does_nothing_is_no_success(tmp_path: Path) -> None:
    idle = run.Variant({}, ["--umem"])
    (verdict,) = run.run(upstream(tmp_path), CHOSEN[1:], [], (PLAIN, idle), 30)
    assert verdict.broken == ["umem was not at work: {'allocs': 0, 'bytes_out': 0}"]


@pytest.mark.parametrize("plain", [*run.RANKS, None])
@pytest.mark.parametrize("umem", [*run.RANKS, None])
def test_a_difference_is_an_end_that_is_worse(plain: str | None, umem: str | None) -> None:
    order: list[list[str | None]] = [
        ["passed"],
        ["skipped"],
        ["failed", "error", "race"],
        ["hang", "crash", None],
    ]
    before = 0 if plain is None else next(i for i, ends in enumerate(order) if plain in ends)
    after = next(i for i, ends in enumerate(order) if umem in ends)
    ran = [{} if end is None else {"test": run.End(end)} for end in (plain, umem)]
    worse = after > before and ran != [{}, {}]
    assert len(run.differences(ran[0], ran[1], [])) == worse


def test_an_entry_holds_for_its_device_and_its_versions() -> None:
    everywhere = run.Expected("test", "cuda", "a reason")
    assert everywhere.holds("cuda", "2.15.0")
    assert not everywhere.holds("cpu", "2.15.0")
    some = run.Expected("test", "cuda", "a reason", ("2.11.", "2.12."))
    assert some.holds("cuda", "2.12.1+cu130")
    assert not some.holds("cuda", "2.1.2")


def test_both_tables_give_reasons_and_fit_together() -> None:
    files = run.selection(run.HERE / "selection.toml")
    entries = run.expected(run.HERE / "expected.toml")
    assert len({(one.path, one.device) for one in files}) == len(files) > 20
    for reason in [*(one.reason for one in files), *(one.reason for one in entries)]:
        assert len(reason) > 10
    there = {(one.path, one.device) for one in files}
    assert {(one.test.split("::")[0], one.device) for one in entries} <= there


def test_without_sources_a_line_says_how_to_get_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("UPSTREAM", raising=False)
    monkeypatch.setattr("importlib.metadata.version", lambda _: "2.13.0+cpu")
    assert run.main([]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert "--branch v2.13.0 https" in line
