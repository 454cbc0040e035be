"""The units of src/ and the arrows between them, for `structure.py`.

A unit is a header and the source of its name. A source that implements a part of another unit's
header belongs to that unit, and is named in `PARTS`. So an arrow that no include shows, from a
header to a source that implements it elsewhere, is found as a definition in a foreign unit.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import check_layers

_ALLOCATOR = "torch_ext/cuda/cuda_allocator"
# Sources without a header of their own name, by the unit that they are a part of.
PARTS = {
    "arena/arena_map": "arena/arena",  # the class's other half: layouts and reports
    # The overrides of torch's allocator, by topic.
    "torch_ext/cuda/allocator": _ALLOCATOR,
    "torch_ext/cuda/forwards": _ALLOCATOR,
    "torch_ext/cuda/private_pools": _ALLOCATOR,
    "torch_ext/cuda/recording": _ALLOCATOR,
    "torch_ext/cuda/snapshot": "torch_ext/cuda/history",  # History in torch's snapshot format
    "torch_ext/cuda/statistics": _ALLOCATOR,
}
# A Python module by its folder: nothing includes it; a header lists what `module.cpp` registers.
_MODULES = {"bindings": "bindings/bind"}

_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
_HIDDEN = re.compile(r"^namespace \{\n.*?^\}  // namespace\n", re.MULTILINE | re.DOTALL)
_DEFINITION = re.compile(
    r"^(?!static\b|using\b|template\b|typedef\b|extern\b|inline\b|constexpr\b|return\b|[}/# ])"
    r"(?:(?:[\w:<>,&*() ]*[ &*])?((?:\w+::)+~?\w+|operator\W+)\("  # a member
    r"|[\w:<>,&*() ]*[ &*>](\w+)\("  # a function
    r"|[\w:<>,&*() ]*[ &*>]([gt]_\w+)(?:\{| =|;))",  # a variable
    re.MULTILINE,
)


def units(src: Path) -> dict[str, set[str]]:
    """Return the units that the files of each unit include."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for path in _files(src):
        unit = _unit(src, path)
        targets = (_target(src, path, name) for name in _INCLUDE.findall(path.read_text("utf-8")))
        found[unit] |= {_unit(src, target) for target in targets if target} - {unit}
    return dict(found)


def arrows(includes: dict[str, set[str]]) -> set[tuple[str, str]]:
    """Return the pairs of rooms of which the first includes the second."""
    pairs = ((_room(a), _room(b)) for a, targets in includes.items() for b in targets)
    return {(a, b) for a, b in pairs if a != b}


def upward(includes: dict[str, set[str]]) -> list[tuple[str, str]]:
    """Return the units that include a unit of a room that is not below theirs."""
    return sorted(
        (a, b) for a, targets in includes.items() for b in targets if not _points_down(a, b)
    )


def foreign_definitions(src: Path) -> list[str]:
    """Return the definitions that the header of their unit does not declare."""
    found = []
    for path in (path for path in _files(src) if path.suffix == ".cpp"):
        header = src / f"{_unit(src, path)}.h"
        declared = header.read_text("utf-8") if header.is_file() else ""
        for name in _definitions(path.read_text("utf-8")):
            if not re.search(rf"\b{re.escape(name)}\b", declared):
                found.append(f"{path.relative_to(src)}: {name}")
    return found


def _definitions(text: str) -> Iterator[str]:
    """Yield what the source defines for other files: functions, variables, classes of members."""
    for member, function, variable in _DEFINITION.findall(_HIDDEN.sub("", text)):
        yield member.partition("::")[0] or function or variable


def _files(src: Path) -> list[Path]:
    return sorted(path for path in src.rglob("*") if path.suffix in (".h", ".cpp", ".def"))


def _unit(src: Path, path: Path) -> str:
    name = path.relative_to(src).with_suffix("").as_posix()
    return PARTS.get(name) or _MODULES.get(name.rpartition("/")[0], name)


def _target(src: Path, path: Path, name: str) -> Path | None:
    beside = (folder / name for folder in (src, path.parent))
    return next((target for target in beside if target.is_file()), None)


def _points_down(unit: str, target: str) -> bool:
    room, other = _room(unit), _room(target)
    return other == room or other in check_layers.CPP_LAYERS[room]


def _room(unit: str) -> str:
    return unit.partition("/")[0]
