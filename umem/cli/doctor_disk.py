"""``umem doctor --measure --disk``: the rates of a disk for the option `disk`."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..base.units import MIB
from ..errors import ConfigError, plain

BLOCK = 2 * MIB  # a page of the software device, and a transfer of the option `disk`
FILE_BYTES = 512 * MIB
SECONDS = 2.0  # at most, for each of four passes
_THREADS = 2  # each way, as the option `disk` has
_IN_MEMORY = ("tmpfs", "ramfs")
_ON_A_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "ceph", "9p", "lustre", "glusterfs", "fuse")
_COPY_ON_WRITE = ("btrfs", "zfs", "bcachefs", "overlay")


def measure(folder: Path, *, file_bytes: int = FILE_BYTES) -> dict[str, Any]:
    """Measure how fast a disk writes and reads blocks of 2 MiB past the page cache.

    Writes a file without a name up to three times, and takes at most 8 seconds in addition to the
    disk's own delays.

    Args:
        folder: on the disk.
        file_bytes: size of the file, a multiple of 2 MiB.

    Returns:
        The file system, its free bytes, the rates in GB/s (1e9) alone and of both directions at the
        same time, the option `--link` for that, and a warning or None.

    Raises:
        ConfigError: the folder cannot hold such a file.
    """
    kind = file_system(folder)
    if kind in _IN_MEMORY:
        raise ConfigError(
            f"--disk {plain(str(folder))}: it is in this machine's memory ({kind}); allowed: a "
            "folder on a disk"
        )
    try:
        with _unnamed(folder, file_bytes) as file:
            blocks = _fill(file, file_bytes // BLOCK)
            write = _rates(file, blocks, write=True)[1]
            read = _rates(file, blocks, read=True)[0]
            both = _rates(file, blocks, read=True, write=True)
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno == errno.EINVAL:
            reason = "its file system has no O_DIRECT"
        raise ConfigError(
            f"--disk {plain(str(folder))}: {reason}; allowed: a folder on a disk with "
            f"{file_bytes // MIB} MiB of free space, where files can be created"
        ) from error
    return {
        "folder": str(folder),
        "file_system": kind,
        "free_bytes": shutil.disk_usage(folder).free,
        "read_gb_s": round(read, 2),
        "write_gb_s": round(write, 2),
        "read_beside_writes_gb_s": round(both[0], 2),
        "write_beside_reads_gb_s": round(both[1], 2),
        "link": f"--link {both[0]:.2f},{both[1]:.2f}",
        "warning": warning(kind),
    }


def warning(kind: str) -> str | None:
    """Return what to know about a file system of this kind, if anything."""
    if kind.split(".", maxsplit=1)[0] in _ON_A_NETWORK:
        return f"{kind} is on a network: the option disk is not tested there"
    if kind in _COPY_ON_WRITE:
        return f"{kind} copies on write: it may not reserve space, and writes more than umem does"
    return None


def file_system(folder: Path) -> str:
    """Return the kind of the folder's file system, such as ext4; empty if it is unknown."""
    path = folder.resolve()
    best, kind = -1, ""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
            _, mount, found, *_ = line.split()
            mount = mount.replace("\\040", " ")
            if path.is_relative_to(mount) and len(mount) >= best:
                best, kind = len(mount), found
    return kind


@contextlib.contextmanager
def _unnamed(folder: Path, file_bytes: int) -> Iterator[int]:
    """Open a file without a name for O_DIRECT, with its space reserved."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix="umem-") as named:
        os.posix_fallocate(named.fileno(), 0, file_bytes)
        file = os.open(named.name, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    try:
        yield file
    finally:
        os.close(file)


def _fill(file: int, blocks: int) -> int:
    """Write the blocks, since unwritten ones are read without the disk; return how many are."""
    moved, _ = _transfer(os.pwritev, file, range(blocks), time.perf_counter())
    return moved // BLOCK


def _rates(
    file: int, blocks: int, *, read: bool = False, write: bool = False
) -> tuple[float, float]:
    """Return the GB/s of reads and of writes over all blocks, at the same time; 0 if not made."""
    with concurrent.futures.ThreadPoolExecutor(2 * _THREADS) as pool:
        begin = time.perf_counter()
        ways: Sequence[tuple[bool, Callable[..., int]]] = (
            (read, os.preadv), (write, os.pwritev),
        )  # fmt: skip
        jobs = [
            [
                pool.submit(_transfer, call, file, range(first, blocks, _THREADS), begin)
                for first in range(_THREADS)
            ]
            if asked
            else []
            for asked, call in ways
        ]
        found = [[job.result() for job in way] for way in jobs]
    reads, writes = (
        sum(moved for moved, _ in way) / max((s for _, s in way), default=1.0) / 1e9
        for way in found
    )
    return reads, writes


def _transfer(
    call: Callable[..., int], file: int, blocks: range, begin: float
) -> tuple[int, float]:
    """Transfer the blocks in turn until the time is up; return the bytes, and the seconds used."""
    with mmap.mmap(-1, BLOCK) as memory:
        memory.write(os.urandom(4096) * (BLOCK // 4096))  # not zeros, which some disks compress
        moved = 0
        for block in blocks:
            moved += call(file, [memory], block * BLOCK)
            if time.perf_counter() - begin > SECONDS:
                break
        return moved, time.perf_counter() - begin
