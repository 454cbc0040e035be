"""``umem doctor --measure --disk``: the rates of a disk for the option `disk`."""

from __future__ import annotations

import concurrent.futures
import contextlib
import mmap
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..base.scratch_file import file_system, open_unnamed
from ..base.units import MIB
from ..errors import ConfigError, plain

BLOCK = 2 * MIB  # a page of the software device, and a transfer of the option `disk`
FILE_BYTES = 512 * MIB
SECONDS = 2.0  # at most, for each of four passes
_THREADS = 2  # each way, as the option `disk` has
_ON_A_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "ceph", "9p", "lustre", "glusterfs", "fuse")
_COPY_ON_WRITE = ("btrfs", "zfs", "bcachefs")


def measure(folder: Path, *, file_bytes: int = FILE_BYTES) -> dict[str, Any]:
    """Measure how fast a disk writes and reads blocks of 2 MiB past the page cache.

    Writes a file that has no name, up to three times. Takes at most 8 seconds in addition to the
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
    try:
        with _unnamed(folder, file_bytes) as file:
            blocks = _fill(file, file_bytes // BLOCK)
            write = _rates(file, blocks, write=True)[1]
            read = _rates(file, blocks, read=True)[0]
            both = _rates(file, blocks, read=True, write=True)
    except OSError as error:
        raise ConfigError(
            f"--disk {plain(str(folder))}: {error.strerror or error}; allowed: a folder on a disk "
            f"with {file_bytes // MIB} MiB of free space, where files can be created"
        ) from error
    kind = file_system(folder)
    return {
        "folder": str(folder),
        "file_system": kind,
        "free_bytes": shutil.disk_usage(folder).free,
        "read_gb_s": float(f"{read:.3g}"),
        "write_gb_s": float(f"{write:.3g}"),
        "read_beside_writes_gb_s": float(f"{both[0]:.3g}"),
        "write_beside_reads_gb_s": float(f"{both[1]:.3g}"),
        "link": f"--link {both[0]:.3g},{both[1]:.3g}",
        "warning": warning(kind),
    }


def warning(kind: str) -> str | None:
    """Return what to know about a file system of this kind, if anything."""
    if kind.split(".", maxsplit=1)[0] in _ON_A_NETWORK:
        return f"{kind} is on a network: the option disk is not tested there"
    if kind in _COPY_ON_WRITE:
        return f"{kind} copies on write: it may not reserve space, and writes more than umem does"
    return None


@contextlib.contextmanager
def _unnamed(folder: Path, file_bytes: int) -> Iterator[int]:
    """Open a file without a name past the page cache, with its space reserved."""
    plain_file, direct = open_unnamed(folder)
    try:
        os.posix_fallocate(plain_file, 0, file_bytes)
        yield direct
    finally:
        os.close(plain_file)
        os.close(direct)


def _fill(file: int, blocks: int) -> int:
    """Write the blocks, since unwritten ones are read without the disk; return how many are."""
    return (
        _transfer(os.pwritev, file, range(blocks), time.perf_counter(), threading.Event()) // BLOCK
    )


def _rates(
    file: int, blocks: int, *, read: bool = False, write: bool = False
) -> tuple[float, float]:
    """Return the GB/s of reads and of writes, at the same time; 0 if not made.

    All end when one of the threads has no more blocks, so that nothing is counted that ran alone.
    """
    ended = threading.Event()
    begin = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(2 * _THREADS) as pool:
        jobs = [
            [
                pool.submit(_transfer, call, file, range(first, blocks, _THREADS), begin, ended)
                for first in range(_THREADS)
            ]
            if asked
            else []
            for asked, call in ((read, os.preadv), (write, os.pwritev))
        ]
        moved = [sum(job.result() for job in way) for way in jobs]
    seconds = time.perf_counter() - begin
    return moved[0] / seconds / 1e9, moved[1] / seconds / 1e9


def _transfer(
    call: Callable[..., int], file: int, blocks: range, begin: float, ended: threading.Event
) -> int:
    """Transfer blocks in turn until one thread has ended or the time is up; return the bytes."""
    with mmap.mmap(-1, BLOCK) as memory:
        memory.write(os.urandom(BLOCK))  # some disks compress
        moved = 0
        for block in blocks:
            moved += call(file, [memory], block * BLOCK)
            if ended.is_set() or time.perf_counter() - begin > SECONDS:
                break
        ended.set()
        return moved
