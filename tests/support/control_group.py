"""Control groups whose memory is limited."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from umem.base import host


@contextlib.contextmanager
def limited(nbytes: int) -> Iterator[Path]:
    """Make a group with this much memory inside of this process's; skip the test where none can be.

    A process enters it by writing its number to `cgroup.procs`. Memory that it has by then does not
    count.
    """
    for outer in host.memory_groups():
        inner = outer / f"umem-test-{os.getpid()}"
        try:
            inner.mkdir()
        except OSError:
            continue
        limits = [inner / "memory.max", inner / "memory.limit_in_bytes"]
        bounded = [file for file in limits if file.exists()]
        try:
            if bounded and (inner / "cgroup.procs").exists() and _bound(bounded[0], nbytes):
                yield inner
                return
        finally:
            inner.rmdir()
    pytest.skip("no control group can be made here: that takes root and a writable hierarchy")


def _bound(file: Path, nbytes: int) -> bool:
    try:
        file.write_text(str(nbytes))
    except PermissionError:
        return False
    return True
