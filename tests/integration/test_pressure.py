"""A control group with little memory: umem refuses before the kernel kills."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from umem.base import host

MIB = 1 << 20
LIMIT = 1000 * MIB  # Python with torch takes a third of it


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group inside of this process's, bounded."""
    for outer in host.memory_groups():
        inner = outer / f"umem-test-{os.getpid()}"
        try:
            inner.mkdir()
        except OSError:
            continue
        limits = [inner / "memory.max", inner / "memory.limit_in_bytes"]
        bounded = [file for file in limits if file.exists()]
        try:
            if bounded and (inner / "cgroup.procs").exists():
                bounded[0].write_text(str(LIMIT))
                yield inner
                return
        except PermissionError:
            pass
        finally:
            inner.rmdir()
    pytest.skip("no control group can be made here: that takes root and a writable hierarchy")


def test_a_control_group_bounds_the_host_budget(group: Path) -> None:
    program = """
    import os, sys
    open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
    import torch, umem
    torch.set_num_threads(1)
    umem.enable(budget="64MiB", device="soft", policy="lru")
    tensors = []
    try:
        while len(tensors) < 100: tensors.append(torch.full((4 << 20,), float(len(tensors))))
    except torch.OutOfMemoryError as error:
        print("host budget" in str(error))
    del tensors[-2:]  # room to look at the others
    print(len(tensors) > 10, all(bool(t.eq(float(i)).all()) for i, t in enumerate(tensors)))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(group)],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "True\nTrue True\n"), done.stderr
