"""`umem.watch` in IPython, whose display publisher records a notebook's output."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell

import umem
from umem import ConfigError


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    """The displays of a notebook, or with a parameter of another shell, in order."""
    shell: Any = InteractiveShell.instance()
    shell.kernel = getattr(request, "param", object())
    publisher = CapturingDisplayPublisher()
    monkeypatch.setattr(shell, "display_pub", publisher)
    yield publisher.outputs
    InteractiveShell.clear_instance()


def test_it_is_redrawn_in_place_until_it_is_stopped(shown: list[dict[str, Any]]) -> None:
    view = umem.watch(0.1)
    end = time.monotonic() + 20
    while len(shown) < 4 and time.monotonic() < end:
        time.sleep(0.02)
    view.stop()
    count = len(shown)
    assert count >= 4
    assert "<table><tr><th>budget" in shown[0]["data"]["text/html"]
    first, *later = shown
    assert not first["update"]
    assert all(entry["update"] for entry in later)
    assert {entry["transient"]["display_id"] for entry in shown} == {
        first["transient"]["display_id"]
    }
    view.stop()
    time.sleep(0.3)
    assert len(shown) == count
    assert "umem-watch" not in {thread.name for thread in threading.enumerate()}


def test_a_block_ends_it(shown: list[dict[str, Any]]) -> None:
    with umem.watch(3600):
        assert len(shown) == 1
    assert len(shown) == 2  # the last figures


@pytest.mark.parametrize("shown", [None], indirect=True)
def test_ipython_in_a_terminal_shows_it_once(shown: list[dict[str, Any]]) -> None:
    with umem.watch(0.1):
        time.sleep(0.3)
    assert len(shown) == 1


def test_outside_of_a_notebook_it_prints_once(capsys: pytest.CaptureFixture[str]) -> None:
    with umem.watch():
        pass
    # Figures of an earlier session of this process may follow, with advice on a budget.
    rows = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert rows.count("budget") == 1


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), 4000])
def test_a_time_out_of_range_is_refused(seconds: float) -> None:
    with pytest.raises(ConfigError, match=r"allowed: seconds from 0\.1 to 3600"):
        umem.watch(seconds)
