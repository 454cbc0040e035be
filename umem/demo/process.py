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
    """The training of a worker, and how umem runs it; sizes in bytes.

    `budget` None means plain torch: umem is not even enabled. with `sample_ms` 0 there are no
    samples.
    """

    workload: str
    budget: int | None = None
    policy: str = "lru"
    device: str = "soft"
    threads: int = 1
    observer: str = "auto"
    sample_ms: float = 0.0
    torch_ext_cache: str | None = None
    deterministic: bool = True  # on a GPU; False: the fastest algorithms
    optimizer: str = "device"  # where parameters are updated: umem's option
    trace: str | None = None  # a file for the trace of the training
    fused: bool = False  # the optimizer's kernels are torch's fused ones, as those for the host

    def __post_init__(self) -> None:
        if self.budget is not None and self.budget <= 0:
            raise ValueError(f"budget {self.budget} must be above 0 bytes")


class WorkerProcess:
    """A started worker. Use as a context manager: leaving it ends the process."""

    def __init__(
        self,
        spec: RunSpec,
        on_note: Callable[[str], None] | None = None,
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
        self.spec = spec
        self._timeout = timeout
        self._words: collections.deque[str] = collections.deque(maxlen=30)
        self._on_note = on_note
        self._process = subprocess.Popen(
            command or [sys.executable, "-m", "umem.demo.worker", "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=child_environment() | REPRODUCIBLE | dict(environment or {}),
        )
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        try:
            self.hello = self.call("start", **asdict(spec))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def step(self, count: int = 1) -> list[dict[str, Any]]:
        """Train `count` steps; return one record each with `ms` and `loss`."""
        records: list[dict[str, Any]] = self.call("step", count=count)["steps"]
        return records

    def stats(self) -> dict[str, int]:
        """Return the worker's umem statistics; empty for plain torch."""
        record: dict[str, int] = self.call("stats")["stats"]
        return record

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
        try:
            process.stdin.write(json.dumps({"do": command, **arguments}) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            expired = not timer.is_alive()
            timer.cancel()
        if not line:
            raise StateError(self._obituary(command, expired))
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise StateError(f"the worker for {self.spec} failed at {command!r}: {reply['error']}")
        return reply

    def close(self) -> None:
        """End the process, by force if it does not end by itself."""
        process = self._process
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # the process has ended already
                process.stdin.close()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._listener.join(timeout=5)
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()

    def _listen(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._words.append(line.rstrip())
            if self._on_note is not None:
                self._on_note(line.rstrip())

    def _obituary(self, command: str, expired: bool) -> str:
        if expired:
            return (
                f"the worker for {self.spec} did not answer {command!r} within "
                f"{self._timeout:g} s and was killed"
            )
        code = self._process.wait(timeout=10)
        self._listener.join(timeout=5)
        words = "\n".join(self._words) or "(no output)"
        return f"the worker for {self.spec} died at {command!r} (exit code {code}):\n{words}"
