"""The way of the budget from `umem.enable` to the engine is the one that tools/structure.py has."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import pytest
import structure

import umem

ROOT = Path(__file__).resolve().parents[2]
NATIVE = tuple(stay for stay in structure.BUDGET_WAY if stay[0].startswith("src/"))

# Prints each function of umem/ through whose frame the budget passes until `core.<ENTRY>` gets it:
# one of its arguments or locals, or what it returns, is the budget or has it.
TRACER = """
import json, sys
import umem
from umem.base.native import core
from umem.config.parsers import Budget
from umem.config.settings import Settings
from umem.session.session import Session

HOME, BYTES, TEXT = sys.argv[1], 67 << 20, "67MiB"
calls, open_frames, entries = [], {}, []

def has_budget(value, depth=3):
    if isinstance(value, (str, int)):
        return value in (TEXT, BYTES)
    if isinstance(value, Budget):
        return value.bytes == BYTES
    if isinstance(value, Settings):
        return has_budget(value.budget)
    if isinstance(value, Session):
        return has_budget(getattr(value, "settings", None))
    if isinstance(value, core.Options):
        return value.budget_bytes == BYTES
    if isinstance(value, dict):
        value = list(value.values())
    return depth > 0 and isinstance(value, (list, tuple)) and any(
        has_budget(each, depth - 1) for each in value
    )

def profile(frame, event, argument):
    if event == "c_call" and argument in (core.start, core.set_budget):
        entries.append(len(calls))
    code = frame.f_code
    if not code.co_filename.startswith(HOME):
        return
    if event == "call" and frame not in open_frames:
        open_frames[frame] = len(calls)
        calls.append([code.co_filename.removeprefix(HOME), code.co_name, False])
    if event in ("call", "return"):
        value = argument if event == "return" else None
        if has_budget([value, *frame.f_locals.values()]):
            calls[open_frames[frame]][2] = True

def trace(call):
    calls.clear(), open_frames.clear(), entries.clear()
    sys.setprofile(profile)
    call()
    sys.setprofile(None)
    assert len(entries) == 1
    return [(file, name) for file, name, holds in calls[: entries[0]] if holds]

options = {"host_budget": "1GiB", "device": "soft", "allocator": "none"}
enabled = trace(lambda: umem.enable(budget=TEXT, **options))
umem.set_budget("80MiB")
changed = trace(lambda: umem.set_budget(TEXT))
umem.disable()
print(json.dumps([enabled, changed]))
"""


@pytest.fixture(scope="module")
def traced() -> list[list[tuple[str, str]]]:
    """The stays of `umem.enable` and of `umem.set_budget`, each with its first function."""
    home = f"{Path(umem.__file__).parents[1]}/"
    done = subprocess.run(
        [sys.executable, "-c", TRACER, home], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return [
        [next((file, name) for file, name in visit) for _, visit in groupby(way, itemgetter(0))]
        for way in json.loads(done.stdout)
    ]


def test_enable_takes_the_way(traced: list[list[tuple[str, str]]]) -> None:
    in_python = [stay for stay in structure.BUDGET_WAY if stay not in NATIVE]
    names = [name for _, name in traced[0]]
    assert [file for file, _ in traced[0]] == [file for file, _ in in_python], traced[0]
    assert names == [functions.split()[0] for _, functions in in_python]


def test_a_change_of_the_budget_takes_the_same_way(traced: list[list[tuple[str, str]]]) -> None:
    files = [file for file, _ in traced[1]]
    assert files == [
        "umem/session/session.py", "umem/config/settings.py", "umem/config/parsers.py",
        "umem/base/units.py", "umem/session/resolve.py",
    ]  # fmt: skip


def test_the_native_functions_call_each_other() -> None:
    """Each function of the way is in its file, and one before it on the way calls it."""
    before = ""
    for file, names in NATIVE:
        text = (ROOT / file).read_text(encoding="utf-8")
        for name in names.split():
            assert not before or re.search(rf"\b{name}\b", before, re.IGNORECASE), (file, name)
            before += _definition(text, name)


def test_no_other_native_file_takes_the_options() -> None:
    folders = ("src/runtime", "src/engine", "src/policy")
    takers = {
        str(path.relative_to(ROOT))
        for folder in folders
        for path in (ROOT / folder).glob("*.cpp")
        if re.search(r"\bOptions& ", path.read_text(encoding="utf-8"))
    }
    assert takers == {"src/runtime/runtime.cpp", "src/runtime/devices.cpp"}


def _definition(text: str, name: str) -> str:
    """Return a function of C++ from its name to the end of its body."""
    pattern = rf"^\S[^\n]*\b{name}\([^;]*?\{{.*?\n\}}"
    found = re.search(pattern, text, re.MULTILINE | re.DOTALL)
    assert found is not None, name
    return found[0]
