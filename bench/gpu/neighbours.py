"""umem with torch and other libraries: the allocation loop, autoload, pools, CuPy, NCCL.

Programs of `gpu.programs` answer, each of which asks several questions in one process.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from gpu import software
from gpu.children import environment
from gpu.context import Context
from gpu.programs import SIZES
from gpu.record import Item, take
from umem.base.units import format_bytes

QUESTIONS = {
    "alloc_loop": ("13", "is the allocation loop as fast as torch's?"),
    "autoload": ("17", "does UMEM=1 alone train a step?"),
    "accounting": ("17 accounting", "does torch.cuda's accounting work?"),
    "cudnn_benchmark": ("17 cudnn", "does cudnn.benchmark run?"),
    "pool": ("17 pool", "are a MemPool's allocations in backward umem's?"),
    "cupy": ("18", "does CuPy's ManagedMemory.prefetch to the host work?"),
    "fake_backward": ("19", "does a fake backward run beside a GPU?"),
    "nccl": ("20", "do collectives work on managed pointers?"),
}
LONGEST_ANSWER = 60.0  # seconds of one program


@dataclass(frozen=True)
class Program:
    """A process: how umem is on in it, and what it is asked; last what may hang."""

    umem: str
    asked: tuple[str, ...]


PROGRAMS = (
    Program("on", ("alloc_loop", "accounting", "cudnn_benchmark", "nccl")),
    Program("off", ("alloc_loop", "fake_backward", "cupy")),
    Program("autoload", ("autoload",)),
    Program("pool", ("pool",)),
)


def run(context: Context) -> None:
    """Fill the record; the programs run one at a time."""
    bench = _Neighbours(context)
    items = [
        Item(f"umem {program.umem}", "does it answer?", lambda p=program: bench.ask(p))  # type: ignore[misc]
        for program in PROGRAMS
    ]
    number, question = QUESTIONS["alloc_loop"]
    items.append(Item(number, question, bench.compare_loops))
    take(context.record, items, context.deadline)


class _Neighbours:
    def __init__(self, context: Context) -> None:
        self._guard, self._record, self._config = context.guard, context.record, context.config
        self._deadline, self._cache = context.deadline, context.cache
        self._loops: dict[str, dict[str, list[float]]] = {}  # by who allocates, then by size

    def ask(self, program: Program) -> None:
        """Start a program and keep its answers, each in the program's own words.

        Raises:
            RuntimeError: it did not answer all.
        """
        asked = []
        for name in program.asked:
            if (why := _why_not(name)) is None:
                asked.append(name)
            else:
                self._record.decide(*QUESTIONS[name], f"not asked: {why}")
        answers, end = self._answers(program.umem, asked)
        for name, answer in answers.items():
            if name == "alloc_loop":
                self._loops[program.umem] = json.loads(answer)
            else:
                self._record.decide(*QUESTIONS[name], answer)
        missing = [name for name in asked if name not in answers]
        for name in missing:
            self._record.decide(*QUESTIONS[name], f"no answer: the program {end}")
        if missing:
            raise RuntimeError(f"no answer to {', '.join(missing)}: the program {end}")

    def _answers(self, umem: str, asked: Sequence[str]) -> tuple[dict[str, str], str]:
        """Return the answers until the program ended, and how it ended."""
        budget = self._guard.room // 2
        command = [sys.executable, "-W", "ignore", "-m", "gpu.programs", umem, *asked]
        command += ["--loops", str(self._config.loops)]
        with self._guard.share(self._guard.room, "a program under umem") as room:
            variables = environment(budget, room - budget, self._cache)
            seconds = max(min(self._deadline.left, LONGEST_ANSWER), 5.0)
            try:
                done = subprocess.run(
                    command,
                    env=variables | ({"UMEM": "1"} if umem == "autoload" else {}),
                    capture_output=True,
                    text=True,
                    check=False,
                    timeout=seconds,
                )
            except subprocess.TimeoutExpired as error:
                output = error.stdout or b""
                text = output.decode() if isinstance(output, bytes) else output
                return _parse(text), f"did not end within {seconds:.0f} s"
        words = done.stderr.strip().splitlines() or ["it said nothing"]
        return _parse(done.stdout), f"ended with exit code {done.returncode}: {words[-1]}"

    def compare_loops(self) -> None:
        """Compare the loops of the two programs that ran one."""
        if set(self._loops) != {"on", "off"}:
            raise RuntimeError("a program has no times of its loop")
        words = []
        for size in SIZES:
            label = f"alloc and free of {format_bytes(size)}"
            theirs, ours = (self._loops[umem][str(size)] for umem in ("off", "on"))
            native = self._record.add(f"{label}, torch", theirs, "ns").median
            spread = self._record.add(f"{label}, umem", ours, "ns", target=native)
            words.append(f"{format_bytes(size)}: {spread.median / native:.2f}x of torch's")
        outcome = software.NOT_COMPARABLE if software.asked_for() else "; ".join(words)
        self._record.decide(*QUESTIONS["alloc_loop"], outcome)


def _parse(output: str) -> dict[str, str]:
    """Return the answers by name; of a program that was stopped the last line may be cut."""
    answers = {}
    for line in output.splitlines():
        name, tab, answer = line.partition("\t")
        if tab and name in QUESTIONS:
            answers[name] = answer
    return answers


def _why_not(name: str) -> str | None:
    """Return why a question is not asked here; None if it is."""
    if name == "cupy" and importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed"
    if name in ("nccl", "cupy") and software.asked_for():
        return "the software driver has no such library"
    return None
