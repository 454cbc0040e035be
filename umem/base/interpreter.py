"""Refuses the native core in sub-interpreters, where loading it would hang."""

from __future__ import annotations

import sys
from typing import Any


class SubInterpreterError(ImportError):
    """The native core was imported in a sub-interpreter."""

    def __init__(self) -> None:
        super().__init__(
            "umem works in the main interpreter only: its native core cannot be loaded in a "
            "sub-interpreter"
        )


def refuse(module: str) -> None:
    """Make every import of `module` in this interpreter fail."""
    sys.meta_path.insert(0, _Refusal(module))


class _Refusal:
    def __init__(self, module: str) -> None:
        self._module = module

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        del path, target
        if name == self._module:
            raise SubInterpreterError
