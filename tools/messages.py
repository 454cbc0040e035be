"""Every message of an error or warning of umem, read from the sources; for the site.

A message is the text of a `raise` of an error class of umem, of a `warning` of the log, or of a
`Status` of native code. Parts that vary at run time are shown as `…`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from umem import errors

ROOT = Path(__file__).resolve().parents[1]
VARIES = "…"
WARNING = "warning"
LOGGERS = ("_log", "log", "warnings")
WARNS = ("warning", "warn", "error", "exception")
# The class that a code of native code becomes.
CODES = {
    "kInvalidArgument": "ConfigError",
    "kOutOfDeviceMemory": "OutOfMemoryError",
    "kOutOfHostMemory": "OutOfMemoryError",
    "kNotSupported": "NotSupportedError",
    "kBadState": "StateError",
    "kDriver": "DriverError",
}
CLASSES = sorted(
    name
    for name, kind in vars(errors).items()
    if isinstance(kind, type)
    and issubclass(kind, errors.UmemError)
    and kind is not errors.UmemError
)
_CODE = re.compile(r"\bCode::(\w+),")
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
_STRING_OR_BRACKET = re.compile(rf"{_STRING.pattern}|[()]")


class Message(NamedTuple):
    """A message and the file that has it."""

    kind: str  # a class of umem.errors, or WARNING
    text: str
    path: str  # from the root of the repository


def messages() -> list[Message]:
    """Return all messages, by kind and text, each once for each file."""
    found = [*_of_python(ROOT / "umem"), *_of_native(ROOT / "src")]
    return sorted({message for message in found if re.search(r"\w{3}", message.text)})


def _of_python(folder: Path) -> Iterator[Message]:
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            kind, argument = _raised(node) or _warned(node) or ("", None)
            if argument is not None:
                yield Message(kind, _text(argument), str(path.relative_to(ROOT)))


def _raised(node: ast.AST) -> tuple[str, ast.expr] | None:
    if not (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args):
        return None
    function = node.exc.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return (name, node.exc.args[0]) if name in CLASSES else None


def _warned(node: ast.AST) -> tuple[str, ast.expr] | None:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
        return None
    logger = getattr(node.func.value, "id", "")
    return (WARNING, node.args[0]) if logger in LOGGERS and node.func.attr in WARNS else None


def _text(node: ast.expr) -> str:
    """Return the text of an expression, with `VARIES` for what is known at run time only."""
    return re.sub(
        rf"{VARIES}(\s*{VARIES})+", VARIES, re.sub(r"%[sdrg]|%\.\d[fg]", VARIES, _raw(node))
    )


def _raw(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_raw(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _raw(node.left) + _raw(node.right)
    return VARIES


def _of_native(folder: Path) -> Iterator[Message]:
    for path in sorted(p for p in folder.rglob("*") if p.suffix in (".cpp", ".h")):
        source = path.read_text(encoding="utf-8")
        for found in _CODE.finditer(source):
            if found[1] in CODES:  # another code: the other branch of a choice
                text = _native_text(_to_closing_bracket(source, found.end()).partition("Code::")[0])
                yield Message(CODES[found[1]], text, str(path.relative_to(ROOT)))


def _to_closing_bracket(source: str, start: int) -> str:
    depth = 0
    for found in _STRING_OR_BRACKET.finditer(source, start):
        depth += {"(": 1, ")": -1}.get(found[0], 0)
        if depth < 0:
            return source[start : found.start()]
    return ""


def _native_text(expression: str) -> str:
    parts, end = [], 0
    for found in _STRING.finditer(expression):
        if expression[end : found.start()].strip(" \n+"):  # adjacent literals are one
            parts.append(VARIES)
        parts.append(found[1].replace('\\"', '"').replace("\\n", " "))
        end = found.end()
    if expression[end:].strip(" \n+"):
        parts.append(VARIES)
    return re.sub(rf"{VARIES}+", VARIES, "".join(parts))
