"""Files of the tree that a tool writes and a check compares: code shared by the generators."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path


def write_or_check(description: str | None, path: Path, render: Callable[[], str], how: str) -> int:
    """Write the file, or with `--check` on the command line compare it; return the exit status.

    Args:
        description: for `--help`.
        render: returns the file's content.
        how: the message for a file that is not up to date.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--check", action="store_true", help="compare only")
    args = parser.parse_args()
    text = render()
    if not args.check:
        path.write_text(text, encoding="utf-8")
        return 0
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return 0
    print(how, file=sys.stderr)
    return 1
