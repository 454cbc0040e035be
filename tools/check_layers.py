"""Checks that includes and imports point down only.

Run it in the source tree (exit code 1 with one line a violation), or call `violations(root)`.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

# C++: the floors that a floor may include besides itself.
_DRIVER = {"base", "driver"}
_MIDDLE = _DRIVER | {"backing", "trace"}
_RUNTIME = _MIDDLE | {"soft", "arena", "residency", "policy", "runtime"}
CPP_FLOORS: dict[str, set[str]] = {
    "base": set(),
    "driver": {"base"},
    "backing": _DRIVER,
    "soft": _DRIVER,
    "trace": _DRIVER,
    "arena": _MIDDLE,  # not soft: everything from here up sees the driver table only
    "residency": _MIDDLE,
    "policy": {"base"},
    "planning": {"base"},
    "runtime": _RUNTIME,
    "replay": _RUNTIME,
    "abi": _RUNTIME,
    "bindings": _RUNTIME | {"replay", "planning"},
    "torch_ext": _RUNTIME,
}
# Single headers beyond the floors: a policy sees the view that it decides on, and nothing else.
CPP_EXTRA = {"policy": {"residency/policy.h"}}
# Foreign headers that only the borders may see.
CPP_BORDERS = {
    "pybind11/": {"bindings", "torch_ext"},
    "Python.h": {"bindings", "torch_ext"},
    "torch/": {"torch_ext"},
    "ATen/": {"torch_ext"},
    "c10/": {"torch_ext"},
}

# Python: a module or package under umem, and what it may import besides itself. `lazily:` is for
# imports inside functions, which a plain import of the module does not run.
_LOW = {"errors", "units", "values", "machine", "statistics"}
_CONFIG = _LOW | {"options", "config"}
_FACADE = {"umem", "errors", "units", "statistics", "config"}
PY_FLOORS: dict[str, set[str]] = {
    "errors": set(),
    "units": set(),
    "machine": set(),
    "statistics": set(),
    "values": {"units"},
    "options": {"units", "values"},
    "config": _LOW | {"options"},
    "native": {"umem", "errors", "_core"},
    "torch_build": {"lazily:errors", "lazily:umem", "lazily:native", "lazily:_core"},
    "torch_program": set(),
    "report": _LOW,
    "devices": {"errors", "units", "values", "lazily:native"},
    "trace": _LOW | {"lazily:native", "lazily:_core"},
    "policies": _LOW | {"trace", "devices", "lazily:native"},
    # LP bounds, packing, and tracing on fake tensors (torch itself is imported lazily).
    "plan": _LOW | {"trace", "policies", "devices", "native", "torch_program"},
    "replay": _CONFIG | {"trace", "policies", "plan", "devices", "native", "_core"},
    "trial": {"native", "_core"},
    "recompute": _CONFIG
    | {"plan", "trace", "devices", "autoplan", "startup", "torch_program"}
    | {"lazily:native", "lazily:runtime"},
    "autolayout": _LOW | {"native", "trace", "lazily:plan"},
    "pressure": _LOW | {"native", "_core"},
    "live": _CONFIG | {"umem", "lazily:native"},
    "autoplan": _CONFIG
    | {"autolayout", "pressure", "trace", "trial", "policies", "devices", "native", "_core"},
    "integrations": _LOW
    | {"config", "native", "lazily:native", "_core", "torch_build", "torch_program"},
    "startup": _CONFIG | {"lazily:native", "lazily:_core", "lazily:policies"},
    "runtime": _CONFIG
    | {"startup", "lazily:native", "lazily:integrations", "lazily:report", "lazily:autoplan"}
    | {"report", "lazily:live", "lazily:recompute"},
    "sleeping": _LOW | {"runtime", "lazily:native"},
    "cupy": {"integrations", "lazily:integrations", "lazily:runtime"},
    "cuda_core": {"integrations"},
    "targets": {"errors"},
    "checkpoint": {"errors", "runtime", "targets", "lazily:native"},
    "whereabouts": {"errors", "targets"} | {"lazily:native", "lazily:_core", "lazily:report"},
    "hints": {"errors", "units", "runtime", "targets"} | {"lazily:native", "lazily:whereabouts"},
    "optimizers": {"errors", "runtime", "targets", "hints", "torch_program", "lazily:native"},
    "_autoload": {"lazily:runtime"},
    "demo": _FACADE | {"report", "lazily:runtime"},
    "cli": _FACADE
    | _CONFIG
    | {"lazily:runtime", "lazily:startup", "lazily:native", "demo", "report", "devices"}
    | {"lazily:trace", "lazily:policies", "lazily:plan", "lazily:replay", "lazily:live"},
    "umem": {"errors", "recompute", "runtime", "sleeping", "statistics", "hints", "whereabouts"}
    | {"checkpoint", "optimizers"}
    | {"lazily:integrations", "lazily:cupy", "lazily:cuda_core"},
    "__main__": {"cli"},
}
# _autoload imports only os; torch_build stands alone for setup.py and reads the compiler, CXX.
ENVIRONMENT_READERS = {"config", "_autoload", "torch_build"}

_INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)
_GETENV = re.compile(r"\b(?:secure_)?getenv\s*\(|\benviron\b")


def violations(root: Path) -> list[str]:
    """Every breach under `root`, one line each; empty when all is well."""
    found = [*_cpp(root / "src"), *_python(root / "umem")]
    return sorted(set(found))


def _cpp(src: Path) -> Iterator[str]:
    for path in sorted(p for p in src.rglob("*") if p.suffix in (".h", ".cpp", ".def")):
        name = path.relative_to(src)
        floor = name.parts[0]
        if floor not in CPP_FLOORS or len(name.parts) < 2:
            yield f"src/{name}: not on a floor of the architecture"
            continue
        text = path.read_text(encoding="utf-8")
        if _GETENV.search(_without_comments(text)):
            yield f"src/{name}: reads the environment; only umem/config.py may"
        for quote, target in _INCLUDE.findall(text):
            problem = _include_problem(src, path, floor, quote, target)
            if problem:
                yield f"src/{name}: includes {target}, {problem}"


def _include_problem(src: Path, path: Path, floor: str, quote: str, target: str) -> str | None:
    for prefix, allowed in CPP_BORDERS.items():
        if target.startswith(prefix) and floor not in allowed:
            return f"which only {' and '.join(sorted(allowed))} may"
    if quote == "<":
        return None
    if "/" not in target and (path.parent / target).is_file():
        return None
    other = target.partition("/")[0]
    if target in CPP_EXTRA.get(floor, ()) or other == floor or other in CPP_FLOORS[floor]:
        return None if (src / target).is_file() else "which does not exist"
    if other not in CPP_FLOORS and floor == "torch_ext":
        return None
    return f"which is not below {floor}"


def _without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)


def _python(package: Path) -> Iterator[str]:
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package)
        if name.parts[0] == "_src":
            continue
        floor = "umem" if name.parts == ("__init__.py",) else name.parts[0].removesuffix(".py")
        if floor not in PY_FLOORS:
            yield f"umem/{name}: not on a floor of the architecture"
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if floor not in ENVIRONMENT_READERS and _reads_environment(tree):
            yield f"umem/{name}: reads the environment; only umem/config.py may"
        for target, lazy in _imports(tree, package, name):
            if target != floor and not _may_import(floor, target, lazy):
                how = "lazily " if lazy else ""
                yield f"umem/{name}: {how}imports umem.{target}, which is not below {floor}"


def _may_import(floor: str, target: str, lazy: bool) -> bool:
    allowed = PY_FLOORS[floor]
    return target in allowed or (lazy and f"lazily:{target}" in allowed)


def _reads_environment(tree: ast.AST) -> bool:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv"):
            return True
        names = {alias.name for alias in getattr(node, "names", []) if isinstance(alias, ast.alias)}
        if getattr(node, "module", None) == "os" and names & {"environ", "environb", "getenv"}:
            return True
    return False


def _imports(tree: ast.AST, package: Path, name: Path) -> Iterator[tuple[str, bool]]:
    """(floor imported, inside a function or only for types) of each import of our own."""
    for node, lazy in _walk(tree, False):
        if isinstance(node, ast.Import):
            for alias in node.names:
                parts = alias.name.split(".")
                if parts[0] == "umem":
                    yield (parts[1] if len(parts) > 1 else "umem"), lazy
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, name)
            if base and base[0] == "umem":
                yield from ((floor, lazy) for floor in _targets(node, base, package))


def _absolute(node: ast.ImportFrom, name: Path) -> list[str]:
    tail = node.module.split(".") if node.module else []
    if node.level == 0:
        return tail
    here = ["umem", *name.parts[:-1]]
    return [*here[: len(here) - node.level + 1], *tail]


def _targets(node: ast.ImportFrom, base: list[str], package: Path) -> set[str]:
    if len(base) > 1:
        return {base[1]}
    names = {alias.name for alias in node.names}
    return {name if _is_module(package, name) else "umem" for name in names}


def _is_module(package: Path, name: str) -> bool:
    return (
        any((package / f"{name}{suffix}").is_file() for suffix in (".py", ".pyi"))
        or (package / name).is_dir()
    )


def _walk(node: ast.AST, lazy: bool) -> Iterator[tuple[ast.AST, bool]]:
    for child in ast.iter_child_nodes(node):
        inside = lazy or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            inside = True
        yield child, inside
        yield from _walk(child, inside)


def main() -> int:
    found = violations(Path(__file__).resolve().parent.parent)
    print("\n".join(found) if found else "every include and import points down")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
