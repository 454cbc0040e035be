"""A training in a process of its own, driven from this one.

A run under umem must not share a process with a plain one: torch's allocator, its threads and its
caches would mix. Both sides exchange JSON lines: commands on stdin, replies on stdout.
"""

from __future__ import annotations

import collections
import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from umem.config.settings import child_environment
from umem.errors import StateError

# Without it torch refuses cuBLAS with deterministic algorithms.
REPRODUCIBLE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


@dataclass(frozen=True)
class RunSpec:
    """The training of a worker, and how umem runs it; sizes in bytes."""

    workload: str
    budget: int | None = None  # None: plain torch, umem is not even enabled
    policy: str = "lru"
    device: str = "soft"
    threads: int = 1
    sample_ms: float = 0.0  # 0: no samples
    torch_ext_cache: str | None = None
    deterministic: bool = True  # on a GPU; False: the fastest algorithms
    optimizer: str = "device"  # where parameters are updated: umem's option
    disk: str | None = None  # a folder on a disk for evicted memory
    trace: str | None = None  # a file for the trace of the training
    fused: bool = False  # the optimizer's kernels are torch's fused ones, as those for the host


class WorkerProcess:
    """A started worker. Use as a context manager: leaving it ends the process."""

    def __init__(
        self,
        spec: RunSpec,
        on_note: Callable[[str], None] = lambda _: None,
        timeout: float = 180.0,
        command: list[str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start the process and wait until its training is built.

        Args:
            spec: the training.
            on_note: called with each line that the worker writes to stderr.
            timeout: maximum seconds of a command, including the start.
            command: another program that speaks the same protocol.
            environment: variables added to this process's environment without umem's.

        Raises:
            StateError: the worker died, timed out or reported an error; with its last output.
        """
        self.spec, self._on_note, self._timeout = spec, on_note, timeout
        self._words: collections.deque[str] = collections.deque(maxlen=30)
        self._process = subprocess.Popen(
            command or [sys.executable, "-m", "umem.demo.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=child_environment() | REPRODUCIBLE | dict(environment or {}),
        )
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        try:
            self.call("start", **asdict(spec))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def step(self, count: int = 1) -> list[dict[str, Any]]:
        """Train `count` steps; return one record each with `ms` and `loss`."""
        steps: list[dict[str, Any]] = self.call("step", count=count)["steps"]
        return steps

    def stats(self) -> dict[str, int]:
        """Return the worker's umem statistics; empty for plain torch."""
        stats: dict[str, int] = self.call("stats")["stats"]
        return stats

    def finish(self) -> dict[str, Any]:
        """End the training; return fingerprint, statistics and samples."""
        return self.call("finish")

    def call(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Send a command and return its reply."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(self._timeout, process.kill)
        timer.start()
        line = ""
        try:
            with contextlib.suppress(BrokenPipeError):
                print(json.dumps({"do": command, **arguments}), file=process.stdin, flush=True)
                line = process.stdout.readline()
        finally:
            expired = not timer.is_alive()
            timer.cancel()
        if not line:
            how = f"did not answer within {self._timeout:g} s and was killed"
            raise self._failed(command, how if expired else f"died ({self._last_words()}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise self._failed(command, f"failed: {reply['error']}")
        return reply

    def close(self) -> None:
        """End the process, by force if it does not end by itself."""
        process = self._process
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process has ended already
            process.stdin.close()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
        self._listener.join(timeout=5)
        with process:  # closes the other pipes
            pass

    def _failed(self, command: str, how: str) -> StateError:
        return StateError(f"the worker for {self.spec}, asked for {command!r}, {how}")

    def _listen(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._words.append(line.rstrip())
            self._on_note(line.rstrip())

    def _last_words(self) -> str:
        code = self._process.wait(timeout=10)
        self._listener.join(timeout=5)
        return f"exit code {code}):\n" + ("\n".join(self._words) or "(no output)")
