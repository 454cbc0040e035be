"""Files without a name that bypass the kernel's page cache, for the option `disk`."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import tempfile
from pathlib import Path

_IN_MEMORY = ("tmpfs", "ramfs")
_HIGH = 512  # the kernel's table of descriptors has room for all numbers below


def open_unnamed(folder: Path) -> tuple[int, int]:
    """Open a file that is gone when its descriptors are closed; only this user can read it.

    Returns:
        A descriptor for memory maps and for reserving space, and one for reads and writes past the
        page cache (`O_DIRECT`), whose addresses, offsets and lengths are multiples of 4096.

    Raises:
        OSError: the folder cannot hold such a file; `strerror` says why.
    """
    if file_system(folder) in _IN_MEMORY:
        raise OSError(errno.EINVAL, "it is in this machine's memory (tmpfs)")
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        mapped = os.open(folder, os.O_TMPFILE | flags, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):
            raise
        mapped, name = tempfile.mkstemp(dir=folder, prefix="umem-")
        Path(name).unlink()
    mapped = _moved_up(mapped)
    try:
        return mapped, _moved_up(os.open(f"/proc/self/fd/{mapped}", flags | os.O_DIRECT))
    except OSError as error:
        os.close(mapped)
        if error.errno == errno.EINVAL:
            raise OSError(errno.EINVAL, "its file system has no O_DIRECT") from error
        raise


def _moved_up(file: int) -> int:
    """Move a descriptor to a number that the kernel does not give out soon.

    A program that closes all of its descriptors, as daemons do, may then open others, and umem must
    not write to those.
    """
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        moved = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, min(most // 2, _HIGH))
    except OSError:
        return file
    os.close(file)
    return moved


def file_system(folder: Path) -> str:
    """Return the kind of the folder's file system, such as ext4; empty if it is unknown."""
    path = folder.resolve()
    best, kind = -1, ""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mounts").read_text(errors="surrogateescape").splitlines():
            _, mount, found, *_ = line.split()
            mount = mount.replace("\\040", " ")
            if path.is_relative_to(mount) and len(mount) >= best:
                best, kind = len(mount), found
    return kind
