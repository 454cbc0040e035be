"""Modules of bench/, imported as its scripts import them."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


def module(name: str) -> ModuleType:
    """A module of bench/ that imports no other one of it; it remains imported."""
    spec = importlib.util.spec_from_file_location(name, BENCH / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    made = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def imports(monkeypatch: pytest.MonkeyPatch, package: str) -> Iterator[Callable[[str], ModuleType]]:
    """Gives what imports a module of bench/`package`, or of bench; all are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(BENCH))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in (package, "harness", "facts"):
            del sys.modules[name]
