"""Chooses the test files that a change may break: the nearest first, within a time budget.

Prints the files to standard output for pytest, and to standard error why each was chosen and what
is left to `make test`. The change is the uncommitted one, or else the last commit; `--base REV`
compares with the merge base of REV instead, and FILE... names it without git.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("umem", "tests", "bench", "tools", "examples")
# Roots of absolute imports, as for pytest's `pythonpath` and the scripts of bench/.
IMPORT_ROOTS = ("", "tests", "tools", "bench")
ALWAYS = "tests/arch/"  # the rules for all files
NATIVE = ("src/", "tests/native/", "CMakeLists.txt", "setup.py")
NEVER = "tests/native/test_sanitizers.py"  # builds everything twice
OTHER_TORCH = ("tests/gpu/", "tests/softcuda/")  # run by `make test-cuda` only
# tests/conftest.py records what each test took here (pytest's cache).
DURATIONS = ".pytest_cache/v/umem/durations"
STARTS_S = 5.0  # until pytest has collected the tests
AT_A_TIME = 2.0  # test files
GUESSED_SECONDS = {"unit": 6.0, "native": 8.0, "integration": 20.0, "arch": 20.0}

_IMPORT_IN_STRING = re.compile(
    r"^\s*(?:from (umem[\w.]*) import ([\w, ]+)|import (umem[\w.]*))", re.MULTILINE
)
# Functions of tests that load a bench or tool by a name, which may have no dot.
_LOADERS = ("bench", "module", "imported")
_DOTTED = re.compile(r"[a-z_]\w*(\.[a-z_]\w*)+")


@dataclass(frozen=True)
class Choice:
    """A test file, how many imports it is away from the change, and why it is affected."""

    path: str
    distance: int
    why: str
    seconds: float

    @property
    def rank(self) -> tuple[int, float, str]:
        """The order in which the budget is spent."""
        return self.distance, self.seconds, self.path


class Tree:
    """The Python files of a source tree and their imports, including those inside functions."""

    def __init__(self, root: Path, changed: Iterable[str] = ()) -> None:
        self.root = root
        present = [
            path.relative_to(root).as_posix()
            for folder in FOLDERS
            for path in sorted((root / folder).rglob("*.py"))
        ]
        self.texts = {name: (root / name).read_text(encoding="utf-8") for name in present}
        # Deleted files are named by those that still import them.
        self._known = {*present, *(name for name in changed if name.endswith(".py"))}

    @property
    def tests(self) -> list[str]:
        """Every test file."""
        return [name for name in self.texts if _is_test(name)]

    @cached_property
    def importers(self) -> dict[str, set[str]]:
        """By file, the files that import it."""
        found: dict[str, set[str]] = {}
        for name, text in self.texts.items():
            for target in self._imports(name, ast.parse(text, name)):
                found.setdefault(target, set()).add(name)
            if _is_test(name):
                for folder in list(Path(name).parents)[:-1]:
                    found.setdefault(f"{folder.as_posix()}/conftest.py", set()).add(name)
        return found

    def distances(self, changed: Iterable[str]) -> dict[str, tuple[int, str]]:
        """By file that reaches a changed one: how many imports away, and the import on the way."""
        found = dict.fromkeys(changed, (0, ""))
        front = list(found)
        while front:
            reached = []
            for name in front:
                for importer in sorted(self.importers.get(name, set()) - found.keys()):
                    found[importer] = (found[name][0] + 1, name)
                    reached.append(importer)
            front = reached
        return found

    def _imports(self, name: str, tree: ast.AST) -> Iterator[str]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield from self._module(name, alias.name.split("."))
            elif isinstance(node, ast.ImportFrom):
                yield from self._from(name, node)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield from self._in_string(name, node.value)
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in _LOADERS:
                words = (arg.value for arg in node.args if isinstance(arg, ast.Constant))
                for word in words:
                    yield from self._module(name, [str(word)])

    def _from(self, name: str, node: ast.ImportFrom) -> Iterator[str]:
        tail = node.module.split(".") if node.module else []
        if node.level:
            parts = Path(name).parts[:-1]
            tail = [*parts[: len(parts) - node.level + 1], *tail]
        for alias in node.names:
            yield from self._module(name, [*tail, alias.name]) or self._module(name, tail)

    def _in_string(self, name: str, text: str) -> Iterator[str]:
        """Yield the modules that a string names, and those that a program in it imports.

        Tests start such programs; tables of lazy imports, and calls of import_module, name modules.
        """
        if _DOTTED.fullmatch(text):
            package = list(Path(name).parts[:-1])
            for parts in (text.split("."), [*package, *text.split(".")]):
                yield from self._module(name, parts)
        for package, names, module in _IMPORT_IN_STRING.findall(text):
            for item in names.split(","):
                parts = [*(package or module).split("."), *item.split()[:1]]
                yield from self._module(name, parts) or self._module(name, parts[:-1])

    def _module(self, importer: str, parts: list[str]) -> list[str]:
        """Return the file of a module, in a list; empty for a module of another tree."""
        for start in (*IMPORT_ROOTS, Path(importer).parent.as_posix()):
            stem = "/".join([start, *parts] if start else parts)
            for name in (f"{stem}.py", f"{stem}/__init__.py"):
                if name in self._known:
                    return [name]
        return []


def choose(root: Path, changed: list[str], seconds: dict[str, float]) -> list[Choice]:
    """Every test file that the change may break, the nearest first."""
    tree = Tree(root, changed)
    found = tree.distances(name for name in changed if name.endswith(".py"))
    by_test: dict[str, tuple[int, str]] = {}
    for test in tree.tests:
        if test.startswith(ALWAYS):
            by_test[test] = (-1, "always")
        elif reached := found.get(test):
            by_test[test] = (reached[0], f"imports {reached[1]}" if reached[0] else "changed")
    for name in changed:
        for test, why in _by_name(tree, name):
            if by_test.get(test, (2, ""))[0] > 1:
                by_test[test] = (1, why)
    return sorted(
        (
            Choice(test, distance, why, seconds.get(test, _guess(test)))
            for test, (distance, why) in by_test.items()
        ),
        key=lambda choice: choice.rank,
    )


def _by_name(tree: Tree, changed: str) -> Iterator[tuple[str, str]]:
    """Find tests that a change reaches without an import, and the reason."""
    for test in tree.tests:
        if changed.startswith(NATIVE) and test.startswith("tests/native/"):
            yield test, f"runs native code ({changed})"
        elif _named_after(test, changed):
            yield test, f"is named after {changed}"
        elif any(words in tree.texts[test] for words in _words_for(changed)):
            yield test, f"names {changed}"


def _named_after(test: str, changed: str) -> bool:
    words = Path(test).stem.removeprefix("test_").split("_")
    return changed.startswith("umem/") and Path(changed).stem in words


def _words_for(changed: str) -> list[str]:
    """Find the word of a test that reads this file: its name, or that of its folder."""
    path = Path(changed)
    if path.name in ("__init__.py", "conftest.py"):
        return []
    folder = [f'"{path.parent.name}"'] if len(path.parts) > 2 and path.suffix != ".py" else []
    return [path.name, *folder]


def within(choices: list[Choice], budget: float) -> tuple[list[Choice], list[Choice]]:
    """Split the choices, in order, into those that fit the budget in seconds and the rest.

    The tests of `ALWAYS` and the nearest one are always taken.
    """
    taken: list[Choice] = []
    left: list[Choice] = []
    for choice in choices:
        need = sum(one.seconds for one in taken) + choice.seconds
        first = all(one.path.startswith(ALWAYS) for one in taken)
        fits = (need <= budget or first) and choice.path != NEVER
        (taken if fits else left).append(choice)
    return taken, left


def changed_files(root: Path, base: str | None) -> list[str]:
    """Return changed names: since the merge base with `base`, else uncommitted, else HEAD's."""
    if base is not None:
        start = _git(root, "merge-base", base, "HEAD")[0]
        return [*_git(root, "diff", "--name-only", "--no-renames", start), *_untracked(root)]
    found = [*_git(root, "diff", "--name-only", "--no-renames", "HEAD"), *_untracked(root)]
    return found or _git(
        root, "show", "--first-parent", "-m", "--no-renames", "--name-only", "--format=", "HEAD"
    )


def recorded_seconds(root: Path) -> dict[str, float]:
    """Return the seconds that each test file took when its tests last ran here."""
    path = root / DURATIONS
    by_test = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    found: dict[str, float] = {}
    for test, seconds in by_test.items():
        name = test.partition("::")[0]
        found[name] = found.get(name, 0.0) + seconds
    return found


def _untracked(root: Path) -> list[str]:
    return _git(root, "ls-files", "--others", "--exclude-standard")


def _git(root: Path, *words: str) -> list[str]:
    command = ["git", "-C", str(root), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command)}: {done.stderr.strip()}\n"
            "name the changed files instead: tools/affected_tests.py FILE..."
        )
    return done.stdout.splitlines()


def _is_test(name: str) -> bool:
    return name.startswith("tests/") and Path(name).name.startswith("test_")


def _guess(test: str) -> float:
    return GUESSED_SECONDS.get(Path(test).parts[1], max(GUESSED_SECONDS.values()))


def _report(changed: list[str], taken: list[Choice], left: list[Choice]) -> Iterator[str]:
    more = f" and {len(changed) - 5} more" if len(changed) > 5 else ""
    yield f"changed: {', '.join(changed[:5])}{more}"
    for choice in taken:
        yield f"  {choice.path} ({choice.seconds:.0f} s): {choice.why}"
    if left:
        seconds = sum(choice.seconds for choice in left)
        nearest = ", ".join(choice.path for choice in left[:5])
        more = ", ..." if len(left) > 5 else ""
        yield f"left to `make test`: {len(left)} files, about {seconds:.0f} s: {nearest}{more}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", metavar="FILE", help="the change, without git")
    parser.add_argument("--base", metavar="REV", help="compare with the merge base of REV")
    parser.add_argument("--max-seconds", type=float, default=100.0, help="of tests, one by one")
    parser.add_argument("--until", type=float, metavar="TIME", help="instead, in s since 1970")
    args = parser.parse_args(argv)
    if args.until is not None:
        args.max_seconds = AT_A_TIME * (args.until - time.time() - STARTS_S)
    changed = sorted(set(args.files or changed_files(ROOT, args.base)))
    choices = choose(ROOT, changed, recorded_seconds(ROOT))
    here = [choice for choice in choices if not choice.path.startswith(OTHER_TORCH)]
    taken, left = within(here, args.max_seconds)
    print("\n".join(_report(changed, taken, left)), file=sys.stderr)
    if len(here) < len(choices):
        print(f"left to `make test-cuda`: {len(choices) - len(here)} files", file=sys.stderr)
    print("\n".join(choice.path for choice in taken))
    return 0


if __name__ == "__main__":
    sys.exit(main())
