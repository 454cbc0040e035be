"""The rank that a launcher gave this process, the detection of launchers, and the owners of files.

Sources: docs.pytorch.org "torchrun (Elastic Launch)", environment variables; Slurm's srun(1),
output environment variables; Open MPI's mpirun(1), OMPI_COMM_WORLD_*.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import sys
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ..errors import ConfigError

# The variables of the rank, the number of ranks, the rank on this host, the number of ranks here.
_VARIABLES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE"),
    # A batch script has all but the number of a step's tasks, which srun gives to what it starts.
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
)  # fmt: skip
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_LAUNCHERS = ("torchrun", "accelerate", "accelerate-launch", "deepspeed", "ray", "horovodrun")
_LAUNCHER_MODULES = ("torch.distributed.run", "torch.distributed.launch",
                     "accelerate.commands.launch", "deepspeed.launcher.launch")  # fmt: skip
_RANK, _PROCESS = "%r", "%p"


class Rank(NamedTuple):
    """One of `world` processes, of which `local_world` run on this host."""

    rank: int
    world: int
    local_rank: int
    local_world: int


def rank(environ: Mapping[str, str] | None = None) -> Rank | None:
    """Return the rank that a launcher gave this process; None if it is the only process."""
    environ = os.environ if environ is None else environ
    for names in _VARIABLES:
        texts = [environ.get(name, "") for name in names]
        if not (texts[0].isdecimal() and texts[1].isdecimal()) or int(texts[1]) < 2:
            continue
        number, world = int(texts[0]), int(texts[1])
        local = int(texts[2]) if texts[2].isdecimal() else 0
        if names[0] == "SLURM_PROCID":
            texts[3] = _tasks_of_node(environ) or texts[3]
        # A launcher that does not give the number of ranks here may have started all of them here.
        here = int(texts[3]) if texts[3].isdecimal() else world
        return Rank(number, world, local, max(here, local + 1))
    return None


def _tasks_of_node(environ: Mapping[str, str]) -> str:
    """Return the number of Slurm's tasks on this node: `8(x2),4` says 8, 8 and 4; "": unknown."""
    counts = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", "")
    node = environ.get("SLURM_NODEID", "")
    left = int(node) if node.isdecimal() else -1
    for count, nodes in _TASKS.findall(counts) if left >= 0 else ():
        left -= int(nodes or 1)
        if left < 0:
            return str(count)
    return ""


@contextlib.contextmanager
def told_rank_0(world: int, local_world: int) -> Iterator[None]:
    """Set the environment of rank 0 of a launcher inside the context."""
    values = ("0", str(world), "0", str(local_world))
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    told.update(zip(_VARIABLES[0], values, strict=True))
    before = {name: os.environ.get(name) for name in told}
    os.environ.update(told)
    try:
        yield
    finally:
        for name, text in before.items():
            if text is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = text


def name() -> str:
    """Return the prefix of this process's messages: `umem` and the rank."""
    mine = rank()
    return "umem" if mine is None else f"umem [rank {mine.rank}]"


def is_launcher(
    argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None
) -> bool:
    """Return whether this process only starts the ranks and trains nothing itself."""
    environ = os.environ if environ is None else environ
    if "LOCAL_RANK" in environ:
        return False
    words = list(sys.orig_argv if argv is None else argv)
    script = _script(words)
    if script is not None:
        return Path(script).name in _LAUNCHERS and not os.path.isdir(script)
    return any(
        flag == "-m" and module in _LAUNCHER_MODULES for flag, module in itertools.pairwise(words)
    )


def _script(words: Sequence[str]) -> str | None:
    """Return the script of a Python command line; None for `-m` or `-c`."""
    rest = iter(words[1:])
    for word in rest:
        if not word.startswith("-"):
            return word
        if word in ("-c", "-m"):
            return None
        if word in ("-W", "-X"):
            next(rest, None)  # the value of the option
    return None


def placed(path: Path, environ: Mapping[str, str] | None = None, *, create: bool = True) -> Path:
    """Return the file of this process, with its rank in place of `%r` and its ID in place of `%p`.

    Without either, each of several ranks gets its own file: `x.rank1.jsonl` for `x.jsonl`.

    Args:
        path: the file.
        environ: variables in place of the process's own.
        create: create a file with the ID; if it exists, the ID is followed by `-2`, `-3` and so on.

    Raises:
        ConfigError: the name has `%r`, and no launcher gave this process a rank.
    """
    mine, text = rank(environ), str(path)
    if _RANK in text and mine is None:
        raise ConfigError(
            f"{path}: %r is the rank of a process, and this process has none (RANK and WORLD_SIZE "
            "are not set); allowed: %p, the process ID"
        )
    if _RANK in text or _PROCESS in text:
        named = text.replace(_RANK, "" if mine is None else str(mine.rank))
        if create and _PROCESS in named:
            return _of_process(named)
        return Path(named.replace(_PROCESS, str(os.getpid())))
    if mine is None:
        return path
    stem, dot, rest = path.name.partition(".")
    return path.with_name(f"{stem}.rank{mine.rank}{dot}{rest}")


def _of_process(text: str) -> Path:
    """Create a file, and leave that of a process of the same ID in another container alone."""
    name, number = str(os.getpid()), 1
    while True:
        path = Path(text.replace(_PROCESS, name))
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            number += 1
            name = f"{os.getpid()}-{number}"
        except OSError:  # opening it reports the same
            return path
        else:
            return path


def owns(variable: str, environ: MutableMapping[str, str] | None = None) -> bool:
    """Return whether the file that a variable of umem names belongs to this process.

    It belongs to the first process that asks. The children of that process inherit the variable and
    the answer, such as workers of a DataLoader or of a compiler. A child with another rank or
    another value of the variable has a file of its own.
    """
    environ = os.environ if environ is None else environ
    mine, process = rank(environ), str(os.getpid())
    if _PROCESS in (value := environ.get(variable, "")):
        return True
    asked = f"{'' if mine is None else mine.rank} {value}"
    owner, _, of_what = environ.get(key := f"_{variable}_OWNER", "").partition(" ")
    if owner and of_what == asked:
        return owner == process
    environ[key] = f"{process} {asked}"
    return True
