"""Progress of long work: on a terminal only, and cleared at the end."""

from __future__ import annotations

import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.synthetic import training, write
from support.terminal import Shown, on_a_terminal

from umem.base.progress import over, progress
from umem.trace.convert import convert
from umem.trace.reader import read

PROGRAM = """
import time
from umem.base.progress import progress
with progress("moving boxes", 4) as advance:
    for _ in range(4):
        time.sleep(0.15)
        advance(1)
"""

BOXES = "        advance(1); import threading; print(threading.active_count(), flush=True)"


def umem_on_a_terminal(*arguments: str) -> Shown:
    found = on_a_terminal(sys.executable, "-m", "umem", *arguments)
    assert found.code == 0, found.terminal
    return found


@pytest.fixture
def trace(tmp_path: Path) -> str:
    return str(write(tmp_path / "t.jsonl", training(3, 8 << 20, 4 << 20, 2)))


def test_a_terminal_shows_what_is_done_and_the_time_left() -> None:
    pytest.importorskip("rich")
    found = on_a_terminal(sys.executable, "-c", PROGRAM)
    assert (found.code, found.out) == (0, "")
    assert "moving boxes" in found.terminal
    assert "75%" in found.terminal
    assert re.search(r"left 0:00:0\d", found.terminal)


def test_nothing_is_drawn_between_advances_if_that_would_disturb() -> None:
    pytest.importorskip("rich")
    program = PROGRAM.replace("4)", "4, between=False)", 1)
    program = f"{program}import threading; print(threading.active_count())"
    found = on_a_terminal(sys.executable, "-c", program.replace("        advance(1)", BOXES))
    assert (found.code, found.out) == (0, "1\n1\n1\n1\n1\n")
    assert "75%" in found.terminal


def test_a_terminal_that_goes_away_ends_the_bar_and_not_the_work() -> None:
    pytest.importorskip("rich")
    program = f"{PROGRAM}print('done')"
    found = on_a_terminal(sys.executable, "-c", program, gone_after="moving boxes")
    assert (found.code, found.out) == (0, "done\n")
    assert "100%" not in found.terminal


def test_what_is_printed_meanwhile_goes_where_it_would_without_a_bar() -> None:
    pytest.importorskip("rich")
    program = PROGRAM.replace("        advance(1)", BOXES) + "print('done')"
    found = on_a_terminal(sys.executable, "-c", program)
    assert (found.code, found.out) == (0, "2\n2\n2\n2\ndone\n")
    assert "moving boxes" in found.terminal


def test_a_standard_output_that_is_closed_is_no_error_of_the_work() -> None:
    pytest.importorskip("rich")
    found = on_a_terminal(sys.executable, "-c", f"import sys; sys.stdout.close(){PROGRAM}")
    assert found.code == 0, found.terminal
    assert "75%" in found.terminal


def test_a_title_is_shown_as_it_is() -> None:
    pytest.importorskip("rich")
    title = "reading run[bold][/x].jsonl"
    found = on_a_terminal(sys.executable, "-c", PROGRAM.replace("moving boxes", title))
    assert found.code == 0, found.terminal
    assert title in found.terminal


def test_replays_show_it_but_not_with_json(trace: str) -> None:
    pytest.importorskip("rich")
    command = ["replay", trace, "--policy", "lru", "none", "--budget", "50%"]
    found = umem_on_a_terminal(*command)
    assert "lru" in found.out
    assert "replays" in found.terminal
    found = umem_on_a_terminal(*command, "--json")
    assert found.out.count("\n") == 2
    assert "replays" not in found.terminal


def test_reports_show_it_but_not_with_json(trace: str, tmp_path: Path) -> None:
    pytest.importorskip("rich")
    command = ["report", trace, "--out", str(tmp_path / "t.html"), "--budget", "50%"]
    found = umem_on_a_terminal(*command)
    assert "Report: " in found.out
    assert "reading t.jsonl" in found.terminal
    assert re.search(r"making the report .* [1-9]\d*% left", found.terminal)
    found = umem_on_a_terminal(*command, "--json")
    assert found.out.startswith("{")
    assert found.terminal == ""


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_reading_a_trace_counts_the_bytes_of_its_file(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, training(20, 8 << 20, 4 << 20, 600))
    counted: list[float] = []
    events = sum(1 for _ in read(path, advance=counted.append)[1])
    assert len(counted) == (events + 1) // 4096 > 1
    assert min(counted) >= 0
    assert 0.8 * path.stat().st_size < sum(counted) <= path.stat().st_size


def test_a_pipe_that_is_read_has_no_progress(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    os.mkfifo(path)
    lines = ['{"kind":"umem-trace","v":1,"device":"","source":"a test","note":""}']
    lines += ['{"e":"step"}'] * 10_000
    with ThreadPoolExecutor() as pool:
        written = pool.submit(path.write_text, "".join(f"{line}\n" for line in lines))
        counted: list[float] = []
        assert sum(1 for _ in read(path, advance=counted.append)[1]) == 10_000
        written.result()
    assert counted == []


def test_a_pipe_may_be_converted(tmp_path: Path) -> None:
    path, target = tmp_path / "t.jsonl", tmp_path / "t.json"
    os.mkfifo(path)
    lines = ['{"kind":"umem-trace","v":1,"device":"","source":"a test","note":""}', '{"e":"step"}']
    with ThreadPoolExecutor() as pool:
        written = pool.submit(path.write_text, "".join(f"{line}\n" for line in lines))
        convert(path, target)
        written.result()
    assert "traceEvents" in target.read_text()


def test_elsewhere_nothing_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    with progress("moving boxes", 2) as advance:
        assert list(over("ab", advance)) == ["a", "b"]
    assert capfd.readouterr() == ("", "")


def test_without_rich_nothing_is_shown() -> None:
    hidden = f"import sys; sys.modules['rich'] = None\n{PROGRAM}"
    assert on_a_terminal(sys.executable, "-c", hidden) == Shown(0, "", "")


def test_a_standard_error_that_is_closed_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    with progress("moving boxes", 1) as advance:
        advance(1)
