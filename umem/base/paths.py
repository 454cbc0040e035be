"""Output paths: checks before the work whose result they get, and files that appear whole.

They use `os.path`, because `Path.exists()` raises the error of a folder that it may not enter.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ..errors import ConfigError, UmemError


def check_folder(path: Path, option: str) -> None:
    """Check that the file `path`, given by `option`, can be written, before there is work to lose.

    Raises:
        ConfigError: its folder does not exist, or this process cannot write there.
    """
    folder = path.absolute().parent
    if not os.path.isdir(folder):
        raise ConfigError(f"{option} {path}: the folder does not exist; create it or name another")
    if not can_hold(folder) and not (os.path.exists(path) and os.access(path, os.W_OK)):
        raise ConfigError(f"{option} {path}: this process cannot write there; name another folder")


def can_hold(folder: Path) -> bool:
    """Return whether this process can write to the folder, which may have to be made first."""
    found = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    return os.path.isdir(found) and os.access(found, os.W_OK | os.X_OK)


@contextlib.contextmanager
def replacing(target: Path, refused: type[UmemError]) -> Iterator[Path]:
    """Give a path whose file becomes the target only when it is complete.

    The path is next to the target. A link stays, and so does the mode of an existing file. A file
    in a folder that this process cannot write to is overwritten at the end, from a temporary
    folder. A pipe or a device is written itself.

    Raises:
        refused: the file cannot be written, or the body raises it, with the path named `target`.
    """
    place = Path(os.path.realpath(target))
    # Processes of two containers may have one number. The suffix is kept.
    part = place.with_name(f".{secrets.token_hex(4)}.{target.name}")
    fixed = os.path.isfile(place) and not can_hold(place.parent)
    if os.path.exists(place) and not (os.path.isfile(place) or os.path.isdir(place)):
        part = target
    try:
        with contextlib.ExitStack() as stack:
            if fixed:
                folder = tempfile.TemporaryDirectory(prefix="umem-")
                part = Path(stack.enter_context(folder)) / target.name
            elif part != target:
                stack.callback(_remove, part)
            yield part
            if fixed:
                shutil.copyfile(part, place)
            elif part != target:
                if os.path.isfile(place):
                    shutil.copymode(place, part)
                part.replace(place)
    except OSError as error:
        if error.filename not in (None, str(part), str(place)):  # such as one that the body reads
            raise
        reason = error.strerror or error
        raise refused(f"{target}: {reason}; name a file that can be written") from None
    except refused as error:
        raise refused(str(error).replace(str(part), str(target))) from None


def _remove(part: Path) -> None:
    with contextlib.suppress(OSError):  # it was moved, or never made
        part.unlink()
