"""Children that inherit umem's options: the files that these name belong to one process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from support import forkserver

from umem.config import ranks
from umem.trace.reader import read
from umem.trace.schema import Step

PROGRAM = """
import multiprocessing, os, subprocess, sys
import torch, umem

def work(i):
    return float(torch.full((1 << 20,), float(i)).sum())

def train(steps):
    net = torch.nn.Linear(64, 64)
    for _ in range(steps):
        net(torch.randn(8, 64)).square().mean().backward()
        umem.step()  # an optimizer would import torch._dynamo, which takes longer than all else

def spawned(way="spawn"):
    with multiprocessing.get_context(way).Pool(1) as pool:
        assert pool.map(work, [1, 2]) == [float(1 << 20), float(2 << 20)]

def served():
    spawned("forkserver")

def compiling():
    from torch._inductor.compile_worker.subproc_pool import SubprocPool
    pool = SubprocPool(1)
    assert pool.submit(torch.ones, 3).result().sum() == 3
    pool.shutdown()

def executed():
    child = "import torch; torch.ones(3)"
    subprocess.run([sys.executable, "-c", child], check=True)

def forked():
    if os.fork() == 0:
        executed()
        os._exit(0)
    assert os.wait()[1] == 0

if __name__ == "__main__":
    train(3)
    globals()[sys.argv[1]]()
    train(3)
"""


def start(folder: Path, how: str, **options: str) -> str:
    """Run the program, fresh because `import torch` turns umem on; return its error."""
    (folder / "train.py").write_text(PROGRAM)
    options = {"UMEM": "1", "UMEM_DEVICE": "soft", "UMEM_BUDGET": "64MiB"} | options
    environ = os.environ | options
    done = forkserver.run(["train.py", how], environ, folder, fresh=True)
    assert done.returncode == 0, done.stderr
    assert "stays off" not in done.stderr
    return done.stderr


# That one imports torch._inductor.
@pytest.mark.parametrize(
    "how",
    [
        "spawned",
        pytest.param("served", marks=pytest.mark.nightly),
        pytest.param("compiling", marks=pytest.mark.nightly),
        pytest.param("executed", marks=pytest.mark.nightly),  # as in the next test
        "forked",
    ],
)
def test_the_trace_is_that_of_the_program(how: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    start(tmp_path, how, UMEM_TRACE=str(path))
    _, events = read(path)
    assert sum(type(event) is Step for event in events) == 6
    assert [each.name for each in tmp_path.glob("*.jsonl*")] == ["trace.jsonl"]


def test_a_worker_that_trains_nothing_says_nothing_and_has_its_own_trace(tmp_path: Path) -> None:
    folder = tmp_path / "sockets"
    folder.mkdir(mode=0o700)
    said = start(
        tmp_path, "executed", UMEM_SUMMARY="1", UMEM_TOP=str(folder / "socket"),
        UMEM_TRACE=str(tmp_path / "trace.%p.jsonl"),
    )  # fmt: skip
    assert [line.split(",")[0] for line in said.splitlines()] == ["umem: 6 steps"]
    assert not [*folder.iterdir()]  # the socket is the program's, which removed it at its end
    assert len([*tmp_path.glob("trace.*.jsonl")]) == 2


@pytest.mark.parametrize(
    "variables", [pytest.param({}, marks=pytest.mark.nightly), {"UMEM_SUMMARY": "1"}]
)
def test_an_interrupt_ends_a_program_as_without_umem(
    variables: dict[str, str], tmp_path: Path
) -> None:
    """By the signal, or a shell's loop would go on."""
    (tmp_path / "program.py").write_text(
        "import os, signal, torch\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's job ignores it
        "torch.ones(1 << 20).sum()\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
    )
    variables = {"UMEM": "1", "UMEM_DEVICE": "soft", "UMEM_BUDGET": "96MiB", **variables}
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, env=os.environ | variables,
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == -signal.SIGINT, done.stderr
    assert ("umem: " in done.stderr) == ("UMEM_SUMMARY" in variables)


def test_a_trace_that_another_process_writes_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    program = f"""
import subprocess, sys, umem
with umem.enable(budget="64MiB", device="soft", trace={str(path)!r}):
    umem.step()
    again = "import umem; umem.enable(budget='64MiB', device='soft', trace=sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", "import sys; " + again, {str(path)!r}],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    umem.step()
print(done.stderr, end="")
"""
    done = forkserver.run(["-c", program])
    assert done.returncode == 0, done.stderr
    assert "another process is writing it; %p in the name" in done.stdout
    _, events = read(path)
    assert sum(type(event) is Step for event in events) == 2


def test_a_file_belongs_to_the_first_process_of_a_rank() -> None:
    environ = {"UMEM_TRACE": "a.jsonl"}
    assert ranks.owns("UMEM_TRACE", environ)
    assert ranks.owns("UMEM_TRACE", environ)
    child = environ | {"_UMEM_TRACE_OWNER": f"{os.getpid() + 1}  a.jsonl"}
    assert not ranks.owns("UMEM_TRACE", child)
    assert ranks.owns("UMEM_TRACE", child | {"UMEM_TRACE": "b.jsonl"})
    assert ranks.owns("UMEM_TRACE", child | {"UMEM_TRACE": "a.%p.jsonl"})
    assert ranks.owns("UMEM_TRACE", child | {"RANK": "1", "WORLD_SIZE": "2"})


@pytest.mark.parametrize("closed", ["1", "2"])
def test_a_program_runs_where_a_stream_is_closed(closed: str, tmp_path: Path) -> None:
    """As under cron. The descriptor is free, and no file of umem may take it."""
    (tmp_path / "train.py").write_text(
        f"import os, torch, umem\ntry: os.write({closed}, b'not in the trace')\n"
        "except OSError: pass\numem.step()\nopen('ran', 'w').close()\n"
    )
    command = f"{sys.executable} -m umem run --budget 16MiB --trace t.jsonl train.py {closed}>&-"
    environ = os.environ | {"UMEM_DEVICE": "soft"}
    done = subprocess.run(
        command, shell=True, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "ran").exists()
    assert done.stdout == ""
    _, events = read(tmp_path / "t.jsonl")
    assert sum(type(event) is Step for event in events) == 1
