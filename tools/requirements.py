"""Prints what umem, its build, its demo and its development need, for `pip install -r`.

umem's wheel names most of them too, but they are installed while it is built.
"""

from __future__ import annotations

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:  # tomli itself is one of the requirements
    from pip._vendor import tomli as tomllib

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
EXTRAS = ("demo", "dev")


def main() -> None:
    """Print a requirement a line."""
    document = tomllib.loads(PROJECT.read_text(encoding="utf-8"))
    project, build = document["project"], document["build-system"]
    print(*build["requires"], *project["dependencies"], sep="\n")
    for name in EXTRAS:
        print(*project["optional-dependencies"][name], sep="\n")


if __name__ == "__main__":
    main()
