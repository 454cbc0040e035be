"""Kernels that torch.compile generates: each call of one is an operator for umem.

Inductor's code calls them without torch's dispatcher, so the observer does not see them. They are
wrapped at their source: on the CPU when a module of Inductor's code is loaded, compiled now or
found in a cache; on a GPU in the launcher of Triton kernels.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

from ...base.replaced import Replaced

_log = logging.getLogger("umem")
_LOADER = "torch._inductor.async_compile"
_LAUNCHER = "torch._inductor.runtime.triton_heuristics"
# Inductor's HeuristicTypes of kernels whose argument names identify the outputs.
_GENERATED = ("POINTWISE", "REDUCTION", "PERSISTENT_REDUCTION", "SPLIT_SCAN")
_MADE = "_umem_made"  # in an AsyncCompile: the kernels of the module that it loads, and their uses


class CompiledKernels:
    """Shows umem the generated kernels of modules loaded between its construction and `remove`.

    Inductor is not imported for this: it takes long, and most programs compile nothing. Wrapped
    kernels remain wrapped; while umem is off they are called directly.

    Args:
        ext: the C++ extension.
    """

    def __init__(self, ext: ModuleType) -> None:
        self._ext = ext
        self._replaced: list[Replaced] = []
        self._said: set[str] = set()
        self._launches: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._imports = _Imports({_LOADER: self._put_loader, _LAUNCHER: self._put_launcher})
        self._imports.install()

    def remove(self) -> None:
        """Restore Inductor's functions."""
        self._imports.remove()
        for replaced in self._replaced:
            replaced.remove()

    def _put(self, module: ModuleType, owner: str, name: str, around: Callable[..., Any]) -> None:
        """Wrap a method by `around(original, *args)`; leave a torch without it unchanged."""
        found = getattr(module, owner, None)
        if not callable(getattr(found, name, None)):
            self._say(
                f"{module.__name__} has no {owner}.{name} in this torch: umem does not see the "
                "kernels of torch.compile, whose data moves by page faults"
            )
            return
        self._replaced.append(Replaced(found, name, around))

    def _put_loader(self, module: ModuleType) -> None:
        self._put(module, "AsyncCompile", "cpp_pybinding", self._made)
        self._put(module, "AsyncCompile", "wait", self._loaded)

    def _put_launcher(self, module: ModuleType) -> None:
        self._put(module, "CachingAutotuner", "run", self._launched)

    def _made(
        self, original: Any, compiler: Any, argtypes: Any, source: str, *args: Any, **kwargs: Any
    ) -> Any:
        made = original(compiler, argtypes, source, *args, **kwargs)
        try:
            uses = cpp_uses(argtypes)
            compiler.__dict__.setdefault(_MADE, []).append((made, uses))
        except Exception as error:  # noqa: BLE001 - must not end the program
            self._say_unknown("C++", error)
        return made

    def _loaded(self, original: Any, compiler: Any, scope: dict[str, Any], *args: Any) -> Any:
        made = compiler.__dict__.pop(_MADE, [])
        wrapped = {
            name: uses for name, value in scope.items() for known, uses in made if known is value
        }
        result = original(compiler, scope, *args)
        for name, uses in wrapped.items():
            scope[name] = self._ext.Kernel(name, uses, scope[name])
        return result

    def _launched(self, original: Any, tuner: Any, *args: Any, **kwargs: Any) -> Any:
        kernel = self._launch(original, tuner, args)
        return (
            original(tuner, *args, **kwargs) if kernel is None else kernel(tuner, *args, **kwargs)
        )

    def _launch(self, original: Any, tuner: Any, args: Sequence[Any]) -> Any:
        """Return a launcher of `tuner`'s kernel as an operator; None if the kernel is unknown."""
        try:
            kernel = self._launches.get(tuner)
            if kernel is None:
                name, uses = triton_uses(tuner, args)
                # The first argument is the tuner.
                kernel = self._launches[tuner] = self._ext.Kernel(name, "-" + uses, original)
        except Exception as error:  # noqa: BLE001 - must not end the program
            self._say_unknown("Triton", error)
            return None
        return kernel

    def _say_unknown(self, kind: str, error: Exception) -> None:
        self._say(
            f"umem does not understand the {kind} kernels that this torch generates ({error!r}) "
            "and does not see them; their data moves by page faults"
        )

    def _say(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            _log.warning("%s", message)


def cpp_uses(argtypes: Sequence[str]) -> str:
    """Return for each argument of a C++ kernel r (reads), w (writes) or - (no tensor).

    The kernel may also read through a non-const pointer, or write only a part.
    """
    return "".join("-" if "*" not in kind else "r" if "const" in kind else "w" for kind in argtypes)


def triton_uses(tuner: Any, args: Iterable[Any]) -> tuple[str, str]:
    """Return the name of a Triton kernel, and for each argument r, w or - as in `cpp_uses`.

    Kernels that Inductor generates name their outputs, and list the arguments changed in place.
    Templates, and the program's own kernels, may write any argument.

    Args:
        tuner: the CachingAutotuner that launches the kernel.
    """
    import torch

    kinds = {name: str(k) for name, k in tuner.triton_meta["signature"].items() if k != "constexpr"}
    given = [isinstance(value, torch.Tensor) for value in args]
    expected = [kind.startswith("*") for kind in kinds.values()]
    name = str(tuner.inductor_meta.get("kernel_name") or tuner.fn.__name__)
    known = tuner.heuristic_type.name in _GENERATED and given == expected[: len(given)]
    mutated = set(tuner.mutated_arg_names)
    if not known:
        return name, "".join("w" if is_tensor else "-" for is_tensor in given)
    written = (arg in mutated or arg.startswith(("out_ptr", "in_out_ptr")) for arg in kinds)
    return name, "".join(
        "-" if not is_tensor else "w" if writes else "r"
        for is_tensor, writes in zip(given, written, strict=False)
    )


class _Imports(importlib.abc.MetaPathFinder):
    """Calls a function for each of some modules: now if it is imported, else on its import."""

    def __init__(self, calls: dict[str, Callable[[ModuleType], None]]) -> None:
        self._calls = calls
        self._on = False

    def install(self) -> None:
        self._on = True
        sys.meta_path.insert(0, self)
        for name in self._calls:
            if (module := sys.modules.get(name)) is not None:
                self.imported(module)

    def remove(self) -> None:
        self._on = False
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def imported(self, module: ModuleType) -> None:
        if self._on:
            self._calls[module.__name__](module)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self._calls:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.imported)
        return spec


class _Loader(importlib.abc.Loader):
    """The loader of a module, which reports the loaded module."""

    def __init__(self, loader: Any, imported: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._imported = imported

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # a copy that is not initialised yet
            raise AttributeError(name)
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._imported(module)
