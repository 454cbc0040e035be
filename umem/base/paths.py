"""Checks of output paths, made before the work whose result they get."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import ConfigError


def check_folder(path: Path, option: str) -> None:
    """Check that the folder of the file `path`, given by `option`, exists.

    Raises:
        ConfigError: the folder does not exist.
    """
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{option} {path}: the folder does not exist; create it or name another")


def can_hold(folder: Path) -> bool:
    """Return whether this process can write to the folder, which may have to be made first."""
    found = next(path for path in (folder, *folder.parents) if path.exists())
    return found.is_dir() and os.access(found, os.W_OK | os.X_OK)
