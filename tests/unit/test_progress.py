"""Progress of long work: on a terminal, gone at the end, and nowhere else."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.synthetic import training

from umem.base.progress import over, progress
from umem.trace.schema import Header
from umem.trace.writer import Writer

PROGRAM = """
import time
from umem.base.progress import progress
with progress("moving boxes", 4) as advance:
    for _ in range(4):
        time.sleep(0.15)
        advance(1)
"""


def on_a_terminal(*command: str) -> tuple[str, str]:
    """Standard output, and what a terminal at standard error was given."""
    terminal, theirs = pty.openpty()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=theirs, text=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(terminal, 1 << 16):
            shown += part
    except OSError:  # the other side was closed
        pass
    finally:
        os.close(terminal)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, shown
    return out, re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode())


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "t.jsonl"
    with Writer(path, Header("a100-pcie4", "test", "")) as writer:
        for event in training(3, 8 << 20, 4 << 20, 2):
            writer.write(event)
    return str(path)


def test_a_terminal_shows_what_is_done_and_the_time_left() -> None:
    pytest.importorskip("rich")
    out, shown = on_a_terminal(sys.executable, "-c", PROGRAM)
    assert out == ""
    assert "moving boxes" in shown
    assert "75%" in shown
    assert re.search(r"left 0:00:0\d", shown)


def test_replays_show_it_but_not_with_json(trace: str) -> None:
    pytest.importorskip("rich")
    command = [
        sys.executable,
        "-m",
        "umem",
        "replay",
        trace,
        "--policy",
        "lru",
        "none",
        "--budget",
        "50%",
    ]
    out, shown = on_a_terminal(*command)
    assert "lru" in out
    assert "replays" in shown
    out, shown = on_a_terminal(*command, "--json")
    assert out.count("\n") == 2
    assert "replays" not in shown


def test_elsewhere_nothing_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    with progress("moving boxes", 2) as advance:
        assert list(over("ab", advance)) == ["a", "b"]
    assert capfd.readouterr() == ("", "")


def test_without_rich_nothing_is_shown() -> None:
    hidden = f"import sys; sys.modules['rich'] = None\n{PROGRAM}"
    assert on_a_terminal(sys.executable, "-c", hidden) == ("", "")


def test_a_standard_error_that_is_closed_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    with progress("moving boxes", 1) as advance:
        advance(1)
