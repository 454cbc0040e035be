"""This process's rank, according to the variables of launchers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from umem.base import host
from umem.config import ranks, settings
from umem.errors import ConfigError
from umem.session import resolve

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        (TORCHRUN, (5, 8, 1, 4)),
        ({**TORCHRUN, "WORLD_SIZE": "1", "RANK": "0"}, None),
        ({**TORCHRUN, "RANK": "x"}, None),
        ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, (1, 4, 1, 4)),  # Lightning's
        ({"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "3",
          "SLURM_NTASKS_PER_NODE": "4"}, (3, 8, 3, 4)),
        ({"SLURM_PROCID": "9", "SLURM_STEP_NUM_TASKS": "16", "SLURM_LOCALID": "1",
          "SLURM_NODEID": "1", "SLURM_TASKS_PER_NODE": "8(x2)"}, (9, 16, 1, 8)),
        ({"SLURM_PROCID": "17", "SLURM_STEP_NUM_TASKS": "20", "SLURM_LOCALID": "1",
          "SLURM_NODEID": "2", "SLURM_TASKS_PER_NODE": "8(x2),4",
          "SLURM_NTASKS_PER_NODE": "8"}, (17, 20, 1, 4)),
        ({"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "3",
          "SLURM_NODEID": "4", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, (3, 8, 3, 8)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
          "SLURM_TASKS_PER_NODE": "8"}, None),  # a batch script
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2",
          "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, (0, 2, 0, 2)),
    ],
)  # fmt: skip
def test_the_rank_is_what_the_launcher_says(
    environ: dict[str, str], expected: tuple[int, ...] | None
) -> None:
    assert ranks.rank(environ) == expected


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["/usr/bin/python", "/venv/bin/torchrun", "--nproc-per-node", "2", "train.py"], True),
        (["python", "-m", "torch.distributed.run", "train.py"], True),
        (["python", "-u", "/venv/bin/accelerate", "launch", "train.py"], True),
        (["python", "-X", "dev", "-Wignore", "-W", "ignore", "/venv/bin/torchrun", "x.py"], True),
        (["python", "train.py", "torchrun"], False),
        (["python", "train.py", "-m", "torch.distributed.run"], False),
        (["python", "ray.py"], False),
        (["python", "-m", "umem", "run", "train.py"], False),
        (["python", "-c", "pass"], False),
    ],
)
def test_a_launcher_is_known_by_its_command(argv: list[str], expected: bool) -> None:
    assert ranks.is_launcher(argv, {}) is expected
    assert not ranks.is_launcher(argv, TORCHRUN)  # it is its own launcher's rank


def test_each_rank_has_its_files() -> None:
    path = Path("out/x.jsonl.gz")
    assert ranks.placed(path, {}) == path
    assert ranks.placed(path, TORCHRUN) == Path("out/x.rank5.jsonl.gz")
    assert ranks.placed(Path("%r/x.jsonl"), TORCHRUN) == Path("5/x.jsonl")
    with pytest.raises(ConfigError, match="allowed: %p"):
        ranks.placed(Path("x%r.jsonl"), {})


def test_each_process_has_its_files_also_if_ids_repeat(tmp_path: Path) -> None:
    """As those of two containers that share a folder."""
    pattern, process = tmp_path / "x-%p.jsonl", os.getpid()
    files = [ranks.placed(pattern, environ) for environ in (TORCHRUN, {}, {})]
    assert [path.name for path in files] == [
        f"x-{process}.jsonl", f"x-{process}-2.jsonl", f"x-{process}-3.jsonl"
    ]  # fmt: skip
    assert all(path.exists() for path in files)
    # Whoever opens it reports that the folder is missing.
    assert ranks.placed(tmp_path / "%p" / "x.jsonl", {}) == tmp_path / str(process) / "x.jsonl"


def test_the_ranks_of_a_host_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "available_memory", lambda: 16 << 30)
    loaded = settings.load({"device": "soft"}, environ={})
    promised = []
    for mine in (None, ranks.Rank(1, 8, 1, 4)):
        monkeypatch.setattr(ranks, "rank", lambda mine=mine: mine)
        promised.append(sum(resolve.budgets(loaded, "soft", threads=1)))
    assert promised[0] <= 0.9 * (16 << 30)
    assert 4 * promised[1] <= 0.9 * (16 << 30)
