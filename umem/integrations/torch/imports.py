"""Calls at the import of modules that umem does not import itself, since that would take long."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


class Imports(importlib.abc.MetaPathFinder):
    """Calls a function with each of some modules: now if it is imported, else when it is.

    Args:
        calls: the function of each module, by the module's name.
    """

    def __init__(self, calls: dict[str, Callable[[ModuleType], None]]) -> None:
        self._calls = calls
        self._on = False

    def install(self) -> None:
        self._on = True
        sys.meta_path.insert(0, self)
        for name in self._calls:
            if (module := sys.modules.get(name)) is not None:
                self._imported(module)

    def remove(self) -> None:
        self._on = False
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def load(self, loader: Any, module: ModuleType) -> None:
        """Load a module of which this found the loader."""
        loader.exec_module(module)
        self._imported(module)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self._calls:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)
        return spec

    def _imported(self, module: ModuleType) -> None:
        if self._on:
            self._calls[module.__name__](module)


class _Loader(importlib.abc.Loader):
    """The loader of a module, who lets the imports know."""

    def __init__(self, loader: Any, imports: Imports) -> None:
        self._loader = loader
        self._imports = imports

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # of a copy that is not made yet
            raise AttributeError(name)
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._imports.load(self._loader, module)
