"""The mechanical rules of the project's language; ruff's D401 checks the imperative first line.

The rules apply to comments, docstrings, texts in code, and pages.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WIDTH = 100
# Pages with tables that cannot be narrower.
WIDE_TABLES = {
    "docs/architecture.md", "docs/compile.md", "docs/compose.md",
    "docs/decisions/README.md", "docs/planning.md", "docs/planning_models.md",
}  # fmt: skip

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# A docstring that opens so is no noun phrase and no instruction.
OPENINGS = {"What", "Who", "Whose", "Of", "Where", "Which", "Those", "How"}
# A sentence that opens so puts its object or its condition first; questions do not.
FRONTED = re.compile(r"(?:^|[.!?:;)] )[(*_]*(?:Of|What|Whether|Where)\b(?! course)")
ENDS = re.compile(r"[.?!](?=[\s*_)\"]|$)")
# The standard words are: again, no one or a role (the program, the caller).
WORDS = re.compile(r"\b(?:anew|nobody|somebody|anybody)\b", re.IGNORECASE)
PHRASES = re.compile(
    rf"{WORDS.pattern}|\b(?:"
    r"(?:go|goes|going|gone|went) by|"  # follow
    r"(?:go|goes|went) (?:as|again and again)|"  # run as, repeatedly
    r"as ever|"  # as usual
    r"for ever|"  # hang, deadlock
    r"stands? (?:here|there|above|below|before|in the|next to)|"  # is
    r"as (?:it|they) stands?|"  # unchanged
    r"(?:is|are|was|were) said|said once|"  # is logged, once
    r"(?:have|has) to hold|holds (?:there|here|too)|"  # must be true, applies
    r"from \S+ (?:[KMGT]i?B )?on(?= (?:the|it|a|all)\b|[,.;:])|"  # at 8 GiB and more
    r"as by"  # as under
    r")\b",
    re.IGNORECASE,
)
LEGITIMATE = re.compile(r"from (?:then|now|here|there|that (?:point|line)) on", re.IGNORECASE)


def folders() -> dict[str, list[Path]]:
    """Return the checked files, by folder: second level for large trees, first for the others."""
    found: dict[str, list[Path]] = {}
    for top in ("src", "umem", "tests", "bench", "tools", "examples", "docs"):
        for path in sorted((ROOT / top).rglob("*")):
            parts = path.relative_to(ROOT).parts
            if path.suffix in (".py", ".pyi", ".h", ".cpp", ".def", ".md") and not {
                "results", "_build", "corpus", "__pycache__"
            } & {*parts}:  # fmt: skip
                deep = len(parts) > 2 and top in ("src", "umem", "tests", "bench")
                found.setdefault("/".join(parts[: 2 if deep else 1]), []).append(path)
    found["."] = [*ROOT.glob("*.md"), ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / ".ci/run"]
    return found


FOLDERS = folders()


def paragraphs(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the prose of a file, paragraph by paragraph, each with the line on which it begins."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield from _of_page(text)
        return
    if path.suffix in (".h", ".cpp", ".def"):
        yield from _of_comments(text, "//")
        yield from _of_literals(text)
        return
    yield from _of_comments(text, "#")
    if path.suffix in (".py", ".pyi"):
        yield from _of_strings(ast.parse(text))


def _of_page(text: str) -> Iterator[tuple[int, str]]:
    """Without code and headings; a list's item and a table's cell are paragraphs."""
    blank = re.sub(r"^```.*?^```$", lambda m: "\n" * m[0].count("\n"), text, flags=re.M | re.S)
    lines: list[str] = []
    for number, line in enumerate([*blank.splitlines(), ""], 1):
        opens = re.match(r"\s*(?:[-*+]|\d+\.) ", line)
        if lines and (not line.strip() or opens or line.startswith(("#", "|"))):
            yield number - len(lines), " ".join(lines)
            lines = []
        if line.startswith("|"):
            for cell in line.split(" | "):
                yield number, cell.strip("| ")
        elif line.strip() and not line.startswith("#"):
            lines.append(line[opens.end() :] if opens else line.strip())


def _of_comments(text: str, mark: str) -> Iterator[tuple[int, str]]:
    lines: list[str] = []
    for number, line in enumerate([*text.splitlines(), ""], 1):
        found = re.match(rf"(\s*|.*?\S  ){mark}+ (.*)", line)
        whole = found is not None and not found[1].strip()
        if lines and not whole:
            yield number - len(lines), " ".join(lines)
            lines = []
        if found is not None and whole:
            lines.append(found[2].strip())
        elif found is not None:
            yield number, found[2].strip()


def _of_strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The paragraphs of docstrings and of all other strings; values in f-strings are left out."""
    inner: set[int] = set()
    for node in ast.walk(tree):
        words = ""
        if isinstance(node, ast.JoinedStr):
            parts = [part for part in node.values if isinstance(part, ast.Constant)]
            inner |= {id(part) for part in parts}
            words = "x".join(str(part.value) for part in parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            words = node.value if id(node) not in inner else ""
        for part in re.split(r"\n\s*\n", words):
            yield getattr(node, "lineno", 1), " ".join(part.split())


def _of_literals(text: str) -> Iterator[tuple[int, str]]:
    """The strings of C++, also those in parts."""
    for match in re.finditer(r'"(?:[^"\\\n]|\\.)*"(?:\s*"(?:[^"\\\n]|\\.)*")*', text):
        yield text.count("\n", 0, match.start()) + 1, re.sub(r'"\s*"', "", match[0]).strip('"')


@cache
def findings(folder: str) -> tuple[str, ...]:
    """Return what a folder's prose has against the rules."""
    found: list[str] = []
    for path in FOLDERS[folder]:
        if path == Path(__file__):
            continue
        for line, paragraph in paragraphs(path):
            prose = re.sub(r"`[^`]*`", "`x`", LEGITIMATE.sub("", paragraph))
            for match in (*PHRASES.finditer(prose), *_fronted(prose)):
                where = f"{path.relative_to(ROOT)}:{line}"
                found.append(f"{where}: {prose[max(match.start(), 0) : match.end() + 40]}")
    return tuple(found)


def _fronted(prose: str) -> Iterator[re.Match[str]]:
    for match in FRONTED.finditer(prose):
        end = ENDS.search(prose, match.end())
        if end is None or end[0] != "?":
            yield match


@pytest.mark.parametrize("folder", FOLDERS)
def test_sentences_open_with_their_subject_and_phrases_are_the_usual_ones(folder: str) -> None:
    assert findings(folder) == ()


@pytest.mark.parametrize("top", ["umem", "tools"])
def test_words_are_the_usual_ones(top: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in sorted((ROOT / top).rglob("*.py"))
        for match in WORDS.finditer(path.read_text(encoding="utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize("top", ["umem", "tools"])
def test_docstrings_open_with_what_the_thing_is_or_does(top: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}: {text[:80]}"
        for path in sorted((ROOT / top).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node))
        if text.split()[0].strip("`*:,") in OPENINGS
    ]
    assert found == []


@pytest.mark.parametrize(
    "page", [path for paths in FOLDERS.values() for path in paths if path.suffix == ".md"],
    ids=lambda path: str(path.relative_to(ROOT)),
)  # fmt: skip
def test_lines_of_pages_fit(page: Path) -> None:
    """Links do not count: they cannot be broken. Code is as it is printed."""
    text = re.sub(
        r"^```.*?^```$", lambda m: "\n" * m[0].count("\n"), page.read_text("utf-8"),
        flags=re.M | re.S,
    )  # fmt: skip
    wide = str(page.relative_to(ROOT)) in WIDE_TABLES
    found = [
        f"{number}: {line}"
        for number, line in enumerate(text.splitlines(), 1)
        if len(re.sub(r"\]\([^)]*\)", "]", line)) > WIDTH and not (wide and line.startswith("|"))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("prose", "count"),
    [
        ("Of two policies the first wins.", 1),
        ("It moves bytes. Where it can, it does not.", 1),
        ("What moves? Bytes.", 0),
        ("Ops went by the plan, as ever.", 2),
        ("Blocks from 8 GiB on, and from then on", 1),
        ("Where the plan differs, it is left.", 1),
    ],
)
def test_the_rules_find_what_they_name(prose: str, count: int) -> None:
    text = LEGITIMATE.sub("", prose)
    assert len([*PHRASES.finditer(text), *_fronted(text)]) == count
