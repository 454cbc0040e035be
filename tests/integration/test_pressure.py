"""A control group with little memory: umem refuses before the kernel kills."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("torch")

from support import control_group

MIB = 1 << 20
LIMIT = 1000 * MIB  # Python with torch takes a third of it


def test_a_control_group_bounds_the_host_budget() -> None:
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
    with control_group.limited(LIMIT) as group:
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program), str(group)],
            capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "True\nTrue True\n"), done.stderr
