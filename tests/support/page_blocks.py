"""The code blocks of the documentation's pages, and the expected effect of each."""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
RUN = ("python", "console")
LANGUAGES = (*RUN, "text", "toml")
PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in (ROOT / "README.md", ROOT / "examples" / "README.md", *(ROOT / "docs").glob("*.md"))
)
# Directives of the site: its build runs them.
_DIRECTIVE = re.compile(r"\{[\w-]+\}")
_BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SAVED = re.compile(r"Save it as `([\w.]+)`:\n\n\Z")
_PRINTS = re.compile(r"\A\n\nIt prints\n\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SECONDS = 600
# Names of programs, and how this interpreter runs them.
PROGRAMS = {
    "python": "",
    "umem": " -m umem",
    "torchrun": " -m torch.distributed.run",
    "accelerate": " -m accelerate.commands.accelerate_cli",
}


class Block(NamedTuple):
    """A block of a page."""

    page: str
    language: str
    text: str
    saved_as: str | None  # the file to save it as, if the page names one
    prints: str | None  # the output of a Python program, if the page has it

    @property
    def name(self) -> tuple[str, str]:
        """The page and the block's first line."""
        return self.page, self.text.split("\n", 1)[0]


class Command(NamedTuple):
    """A command of a console's block."""

    text: str
    output: str  # as the page shows it, `...` for anything; empty: not shown


def blocks(page: str) -> Iterator[Block]:
    """Yield the blocks of a page in their order, except directives of the site."""
    source = (ROOT / page).read_text(encoding="utf-8")
    for found in _BLOCK.finditer(source):
        language = found[1].strip()
        if not _DIRECTIVE.match(language):
            saved = _SAVED.search(source[: found.start()])
            prints = _PRINTS.match(source[found.end() :])
            yield Block(page, language, found[2], saved and saved[1], prints and prints[1])


def commands(text: str) -> list[Command]:
    """Return the commands of a console's block, each with the output that follows it."""
    found: list[Command] = []
    for line in text.splitlines(keepends=True):
        if line.startswith("$ "):
            found.append(Command(line[2:].rstrip("\n"), ""))
        else:
            found[-1] = found[-1]._replace(output=found[-1].output + line)
    return found


def run(block: Block, folder: Path) -> str:
    """Run a block in `folder`, or save it there; return its output.

    Fails if it contradicts the page.
    """
    all_printed = ""
    if block.saved_as:
        (folder / block.saved_as).write_text(block.text)
    elif block.language == "python":
        printed = _started([sys.executable, "-c", block.text], folder, block, subprocess.PIPE)
        assert block.prints in (None, printed), printed
        all_printed += printed
    else:
        for command in commands(block.text):
            line = ["bash", "-c", command.text]
            printed = _started(line, folder, block, subprocess.STDOUT)
            assert not command.output or _matches(command.output, printed), printed
            all_printed += printed
    return all_printed


def _matches(shown: str, printed: str) -> bool:
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    return doctest.OutputChecker().check_output(shown, printed, flags)


def _started(arguments: list[str], folder: Path, block: Block, stderr: int) -> str:
    done = subprocess.run(
        arguments, stdout=subprocess.PIPE, stderr=stderr, text=True, timeout=SECONDS,
        check=False, cwd=folder, env=_environment(folder),
    )  # fmt: skip
    assert done.returncode == 0, (block.name, done.stdout, done.stderr)
    return done.stdout


def _environment(folder: Path) -> dict[str, str]:
    bin_folder = folder / "bin"
    bin_folder.mkdir(exist_ok=True)
    for name, module in PROGRAMS.items():
        (bin_folder / name).write_text(f'#!/bin/sh\nexec "{sys.executable}"{module} "$@"\n')
        (bin_folder / name).chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{bin_folder}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",  # lines appear in the order that a terminal shows
    }
