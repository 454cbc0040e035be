"""Prints the figures of the structure of umem/ and src/ and their bounds; exit code 1 above one.

Rooms are the entries at the top of umem/ and the folders of src/. Every import counts, also inside
functions and for types.

The way of the budget is the list of files with a function that takes, holds or returns the budget,
in the order of the calls from `umem.enable` to the engine. A file counts once for each visit.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import check_layers
import native_units

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "umem"
SRC = ROOT / "src"

# tests/arch/test_budget_way.py traces a call of `umem.enable` and reads the native functions: it
# fails where the budget takes another way. Each stay has a file, and its functions on the way.
BUDGET_WAY = (
    ("umem/__init__.py", "enable"),
    ("umem/config/settings.py", "load"),
    ("umem/config/parsers.py", "parse_budget"),
    ("umem/base/units.py", "parse_bytes"),
    ("umem/session/session.py", "start"),
    ("umem/session/resolve.py", "native_options"),
    ("src/bindings/bind_runtime.cpp", "bind_runtime"),
    ("src/runtime/runtime.cpp", "start check_options"),
    ("src/runtime/devices.cpp", "check_limits"),
    ("src/runtime/runtime.cpp", "open_locked"),
    ("src/runtime/devices.cpp", "open_device make_device resolve_budget limits_of"),
    ("src/engine/engine.cpp", "open"),
)


def modules(package: Path) -> dict[Path, ast.Module]:
    """Return the tree of each module by its path in the package."""
    names = (path.relative_to(package) for path in sorted(package.rglob("*.py")))
    return {
        name: ast.parse((package / name).read_text("utf-8"))
        for name in names
        if name.parts[0] != "_src"
    }


def entries(package: Path) -> list[str]:
    """Return the modules and packages at the top; `py.typed` is not one of them."""
    found = (path for path in package.iterdir() if path.suffix in (".py", ".pyi") or _is_room(path))
    return sorted(path.name for path in found)


def _is_room(path: Path) -> bool:
    return (path / "__init__.py").is_file()


def graph(package: Path, trees: Mapping[Path, ast.Module]) -> dict[str, set[str]]:
    """Return the modules that each module imports."""
    found: dict[str, set[str]] = {}
    for name, tree in trees.items():
        module = check_layers.module_name(name)
        found[module] = {*check_layers.imports(tree, package, name)} - {module}
    return found


def arrows(imports: Mapping[str, set[str]]) -> set[tuple[str, str]]:
    """Return the pairs of packages in which the first imports the second."""
    pairs = ((_room(a), _room(b)) for a, targets in imports.items() for b in targets)
    return {(a, b) for a, b in pairs if a != b}


def upward(found: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Return the arrows that do not point to a lower layer."""
    order = {room: i for i, room in enumerate(check_layers.PY_LAYERS)}
    return {(a, b) for a, b in found if order[a] < order[b]}


def circles(imports: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that import each other in a loop (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for target in imports.get(module, ()):
            if target not in index:
                visit(target)
            if target in stack:
                low[module] = min(low[module], low[target])
        if low[module] == index[module]:
            at = stack.index(module)
            group = stack[at:]
            del stack[at:]
            if len(group) > 1:
                found.append(sorted(group))

    for module in imports:
        if module not in index:
            visit(module)
    return found


def classes_twice(trees: Mapping[Path, ast.Module]) -> dict[str, list[str]]:
    """Return the public class names that several modules define, with those modules."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path, tree in trees.items():
        for name in _classes(tree):
            places[name].append(check_layers.module_name(path))
    return {name: found for name, found in sorted(places.items()) if len(found) > 1}


def returns(way: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the stays in a file that the way has visited before."""
    return [stay for i, stay in enumerate(way) if stay[0] in {file for file, _ in way[:i]}]


def _classes(tree: ast.AST) -> Iterator[str]:
    names = Counter(node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    return (name for name in names if not name.startswith("_"))


def _room(module: str) -> str:
    return module.partition(".")[0]


def native_figures(src: Path) -> list[tuple[str, Sequence[object], int]]:
    """Return the figures of the native code: a unit is a header and the source of its name."""
    includes = native_units.units(src)
    between = native_units.arrows(includes)
    return [
        ("rooms of src/", sorted(check_layers.CPP_LAYERS), 16),
        ("include arrows between rooms", sorted(between), 51),
        ("upward includes", native_units.upward(includes), 0),
        ("circles of units", circles(includes), 0),
        ("definitions in foreign units", native_units.foreign_definitions(src), 0),
    ]


def main() -> int:
    trees = modules(PACKAGE)
    imports = graph(PACKAGE, trees)
    between = arrows(imports)
    twice = classes_twice(trees)
    figures: list[tuple[str, Sequence[object], int]] = [
        ("entries at the top of umem/", entries(PACKAGE), 23),
        ("import arrows between rooms", sorted(between), 97),
        ("upward", sorted(upward(between)), 0),
        ("circles of files", circles(imports), 0),
        ("class names defined twice", [f"{name}: {', '.join(twice[name])}" for name in twice], 10),
        ("stays of the budget from enable() to the engine", BUDGET_WAY, 12),
        ("returns among these stays", returns(BUDGET_WAY), 2),
    ]
    figures += native_figures(SRC)
    for name, found, bound in figures:
        print(f"{name:47} {len(found):4}   at most {bound}")
    over = [(name, found) for name, found, bound in figures if len(found) > bound]
    for name, found in over:
        print(f"\n{name}:", file=sys.stderr)
        print("\n".join(f"  {row}" for row in found), file=sys.stderr)
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
