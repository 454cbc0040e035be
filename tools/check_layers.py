"""Checks that includes and imports point down only.

Run it in the source tree (exit code 1 with one line a violation), or call `violations(root)`.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

# C++: the layers that a layer may include in addition to itself.
_DRIVER = {"base", "driver"}
_MIDDLE = _DRIVER | {"managed", "trace"}
_RUNTIME = _MIDDLE | {"soft", "arena", "residency", "policy", "engine", "runtime"}
CPP_LAYERS: dict[str, set[str]] = {
    "base": set(),
    "driver": {"base"},
    "managed": _DRIVER,
    "soft": _DRIVER,
    "trace": _DRIVER,
    "arena": _MIDDLE,  # not soft: everything from here up sees the driver table only
    "residency": _DRIVER | {"managed"},
    "policy": {"base", "residency"},  # facts only: what moves is above
    "engine": _DRIVER | {"managed", "residency", "policy"},
    "planner": {"base"},
    "runtime": _RUNTIME,
    "replay": _RUNTIME,
    "abi": _RUNTIME,
    "python": set(),
    "bindings": _RUNTIME | {"replay", "planner", "python"},
    "torch_ext": _RUNTIME | {"python"},
}
# Foreign headers that only the borders may see.
CPP_BORDERS = {
    "pybind11/": {"bindings", "torch_ext"},
    "Python.h": {"python", "bindings", "torch_ext"},
    "torch/": {"torch_ext"},
    "ATen/": {"torch_ext"},
    "c10/": {"torch_ext"},
}

# Python: the packages of umem/, from the bottom up. A package imports itself and earlier ones, also
# inside functions and for types. `umem` is the façade, umem/__init__.py.
PY_LAYERS = (
    "_core", "errors", "base", "config", "trace", "policies", "capture", "analysis", "layout",
    "lint", "integrations", "recompute", "monitor", "session", "residency", "offload",
    "simulation", "report", "umem", "demo", "cli", "__main__",
)  # fmt: skip
# Independent parts: none of them imports another.
PY_APART = ("lint", "monitor", "offload.checkpoint", "offload.optimizer")
# integrations/torch/build.py is independent for setup.py and reads the compiler, CXX.
ENVIRONMENT_READERS = (
    "config/settings.py",
    "config/ranks.py",
    "integrations/torch/build.py",
)

# Modules of umem that are imported by a name in a table, when they are first used. The targets in
# these tables count as imports.
LAZY_TABLES = {
    "__init__.py": ("_NAMES", "_MODULES"),
    "policies/__init__.py": ("_HOMES",),
    "policies/registry.py": ("_BUILT_IN",),
    "cli/__init__.py": ("COMMANDS",),
}
# These import what a caller or a user names, and no module of umem.
FOREIGN_IMPORTERS = ("base/extras.py", "capture/program.py")

_INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)
_GETENV = re.compile(r"\b(?:secure_)?getenv\s*\(|\benviron\b")


def violations(root: Path) -> list[str]:
    """Every breach under `root`, one line each; empty when all is well."""
    found = [*_cpp(root / "src"), *_python(root / "umem")]
    return sorted(set(found))


def _cpp(src: Path) -> Iterator[str]:
    for path in sorted(p for p in src.rglob("*") if p.suffix in (".h", ".cpp", ".def")):
        name = path.relative_to(src)
        layer = name.parts[0]
        if layer not in CPP_LAYERS or len(name.parts) < 2:
            yield f"src/{name}: not on a layer of the architecture"
            continue
        text = path.read_text(encoding="utf-8")
        if _GETENV.search(_without_comments(text)):
            yield f"src/{name}: reads the environment; only umem/config/settings.py may"
        for quote, target in _INCLUDE.findall(text):
            problem = _include_problem(src, path, layer, quote, target)
            if problem:
                yield f"src/{name}: includes {target}, {problem}"


def _include_problem(src: Path, path: Path, layer: str, quote: str, target: str) -> str | None:
    for prefix, allowed in CPP_BORDERS.items():
        if target.startswith(prefix) and layer not in allowed:
            return f"which only {' and '.join(sorted(allowed))} may"
    if quote == "<" and target.partition("/")[0] not in CPP_LAYERS:
        return None
    if "/" not in target and (path.parent / target).is_file():
        return None
    other = target.partition("/")[0]
    if other == layer or other in CPP_LAYERS[layer]:
        return None if (src / target).is_file() else "which does not exist"
    if other not in CPP_LAYERS and layer == "torch_ext":
        return None
    return f"which is not below {layer}"


def _without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)


def _python(package: Path) -> Iterator[str]:
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package)
        if name.parts[0] == "_src":
            continue
        room = room_of(name)
        if room not in PY_LAYERS:
            yield f"umem/{name}: not in a room of the architecture"
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if str(name) not in ENVIRONMENT_READERS and _reads_environment(tree):
            yield f"umem/{name}: reads the environment; only umem/config/settings.py may"
        if str(name) not in (*LAZY_TABLES, *FOREIGN_IMPORTERS) and _computes_imports(tree):
            yield f"umem/{name}: imports a module whose name it computes; write an import statement"
        for target in imports(tree, package, name):
            problem = _import_problem(room, module_name(name), target)
            if problem:
                yield f"umem/{name}: imports umem.{target}, {problem}"


def _import_problem(room: str, module: str, target: str) -> str | None:
    other = target.partition(".")[0]
    if other not in PY_LAYERS:
        return "which does not exist"
    if PY_LAYERS.index(other) > PY_LAYERS.index(room):
        return f"which is not below {room}"
    mine, theirs = (_part(PY_APART, name) for name in (module, target))
    return f"and {mine} stands for itself" if mine and theirs and mine != theirs else None


def _part(parts: tuple[str, ...], module: str) -> str | None:
    return next((part for part in parts if f"{module}.".startswith(f"{part}.")), None)


def room_of(name: Path) -> str:
    """Return the room of a file by its path in umem/: a folder or a module at the top."""
    return "umem" if name.parts == ("__init__.py",) else name.parts[0].removesuffix(".py")


def module_name(name: Path) -> str:
    """Return the module of a file by its path in umem/, as `trace.reader`, or `umem`."""
    parts = name.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "umem"


def _reads_environment(tree: ast.AST) -> bool:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv"):
            return True
        names = {alias.name for alias in getattr(node, "names", []) if isinstance(alias, ast.alias)}
        if getattr(node, "module", None) == "os" and names & {"environ", "environb", "getenv"}:
            return True
    return False


def _computes_imports(tree: ast.AST) -> bool:
    return any(
        not isinstance(target, ast.Constant) or str(target.value).startswith(".")
        for target in _imported_by_call(tree)
    )


def _imported_by_call(tree: ast.AST) -> Iterator[ast.expr]:
    """Yield the first argument of each call of `import_module` or `__import__`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args:
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if called in ("import_module", "__import__"):
                yield node.args[0]


def _lazy_targets(tree: ast.Module, package: Path, name: Path) -> Iterator[str]:
    """Yield the modules that the tables of a file name, relative to its package."""
    tables = LAZY_TABLES.get(str(name), ())
    for node in tree.body:
        targets = [target.id for target in getattr(node, "targets", []) if hasattr(target, "id")]
        if not isinstance(node, ast.Assign) or not {*targets} & {*tables}:
            continue
        for text in (leaf.value for leaf in ast.walk(node.value) if isinstance(leaf, ast.Constant)):
            parts = [*name.parts[:-1], *str(text).split(".")]
            path = package.joinpath(*parts)
            if path.with_suffix(".py").is_file() or (path / "__init__.py").is_file():
                yield ".".join(parts)


def imports(tree: ast.Module, package: Path, name: Path) -> Iterator[str]:
    """Yield the umem module that each import in the file names, as `trace.reader`."""
    yield from _lazy_targets(tree, package, name)
    for called in _imported_by_call(tree):
        text = called.value if isinstance(called, ast.Constant) else None
        if isinstance(text, str) and text.partition(".")[0] == "umem":
            yield text.partition(".")[2] or "umem"
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first, _, rest = alias.name.partition(".")
                if first == "umem":
                    yield rest or "umem"
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, name)
            if base and base[0] == "umem":
                yield from sorted({_target(base[1:], alias.name, package) for alias in node.names})


def _absolute(node: ast.ImportFrom, name: Path) -> list[str]:
    tail = node.module.split(".") if node.module else []
    if node.level == 0:
        return tail
    here = ["umem", *name.parts[:-1]]
    return [*here[: len(here) - node.level + 1], *tail]


def _target(base: list[str], name: str, package: Path) -> str:
    """Return the module `name` for `from base import name` if there is one, else the base."""
    path = package.joinpath(*base, name)
    is_module = path.is_dir() or any(path.with_suffix(end).is_file() for end in (".py", ".pyi"))
    return ".".join([*base, name] if is_module else base) or "umem"


def main() -> int:
    found = violations(Path(__file__).resolve().parent.parent)
    print("\n".join(found) if found else "every include and import points down")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
