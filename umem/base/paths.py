"""Output paths: checks before the work whose result they get, and files that appear whole."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from ..errors import ConfigError, UmemError


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


@contextlib.contextmanager
def replacing(target: Path, refused: type[UmemError]) -> Iterator[Path]:
    """Give a path next to the target, whose file becomes the target only when it is complete.

    Raises:
        refused: the file cannot be written, or the body raises it, with the path named `target`.
    """
    part = target.with_name(f".{os.getpid()}.{target.name}")  # the suffix is kept
    try:
        yield part
        part.replace(target)
    except OSError as error:
        reason = error.strerror or error
        raise refused(f"{target}: {reason}; name a file that can be written") from None
    except refused as error:
        raise refused(str(error).replace(str(part), str(target))) from None
    finally:
        with contextlib.suppress(OSError):  # it was moved, or never made
            part.unlink()
