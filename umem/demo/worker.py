"""The process that trains: ``python -m umem.demo.worker`` serves `process.WorkerProcess`."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, TextIO

import umem
from umem.errors import UmemError

from . import workloads
from .process import RunSpec
from .training import Training


class Sampler:
    """Sampler of resident and live bytes over time, by a thread and at the end of each step."""

    def __init__(self, period_ms: float) -> None:
        self._period = period_ms / 1000.0
        self._origin = time.perf_counter()
        self._points: list[tuple[float, int, int]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="umem-sampler", daemon=True)
        self._thread.start()

    def take(self) -> None:
        """Add one point: (ms since the start, resident bytes, live bytes)."""
        stats = umem.stats()
        elapsed = (time.perf_counter() - self._origin) * 1e3
        self._points.append((elapsed, stats.resident_bytes, stats.live_bytes))

    def close(self) -> list[tuple[float, int, int]]:
        """Stop sampling; return the points in time order."""
        self._stop.set()
        self._thread.join()
        return sorted(self._points)

    def _run(self) -> None:
        while not self._stop.wait(self._period):
            self.take()


class Run:
    """A training for one spec."""

    def __init__(self, spec: RunSpec) -> None:
        self.spec = spec
        workloads.set_threads(spec.threads)  # before umem checks its minimum budget against them
        if spec.budget is not None:
            umem.enable(
                budget=spec.budget,
                policy=spec.policy,
                device=spec.device,
                optimizer=spec.optimizer,
                disk=spec.disk,
                torch_ext_cache=spec.torch_ext_cache,
                trace=spec.trace,
            )
        self.training = self.build(spec.workload)
        sampled = spec.budget is not None and spec.sample_ms > 0
        self._sampler = Sampler(spec.sample_ms) if sampled else None

    def build(self, workload: str) -> Training:
        """Make the training of a workload on the device."""
        target = "cuda" if self.spec.device.startswith("cuda") else "cpu"
        config = workloads.WORKLOADS[workload]
        return workloads.build(config, target, self.spec.deterministic, fused=self.spec.fused)

    def step(self) -> dict[str, Any]:
        """Train one step; return its time in ms (reading the loss completes it) and its loss."""
        begin = time.perf_counter()
        loss = self.training.step()
        elapsed = (time.perf_counter() - begin) * 1e3
        if self._sampler is not None:
            self._sampler.take()
        return {"ms": elapsed, "loss": loss}

    def stats(self) -> dict[str, int]:
        """Return umem's current statistics; empty without umem."""
        return {} if self.spec.budget is None else asdict(umem.stats())

    def commands(self) -> dict[str, Callable[..., dict[str, Any]]]:
        """Return the commands of `WorkerProcess.call` by name."""
        return {
            "step": lambda count: {"steps": [self.step() for _ in range(count)]},
            "stats": lambda: {"stats": self.stats()},
            "finish": self.finish,
        }

    def finish(self) -> dict[str, Any]:
        """Return fingerprint, then statistics: reading all weights has to keep the budget too."""
        samples = [] if self._sampler is None else self._sampler.close()
        fingerprint = self.training.fingerprint()
        return {"fingerprint": fingerprint, "stats": self.stats(), "samples": samples}


Start = Callable[[dict[str, Any]], Run]


def start_run(request: dict[str, Any]) -> Run:
    """Start the training that a `RunSpec` describes."""
    return Run(RunSpec(**request))


def serve(commands: TextIO, replies: TextIO, start: Start = start_run) -> None:
    """Run commands until the input ends; the first one is `start`."""
    known: dict[str, Callable[..., dict[str, Any]]] = {}
    for line in commands:
        request = json.loads(line)
        command = request.pop("do")
        reply: dict[str, Any] = {}
        try:
            if command == "start":
                known = start(request).commands()
            else:
                reply = known[command](**request)
        except UmemError as error:
            reply = {"error": str(error)}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


@contextlib.contextmanager
def private_stdout() -> Iterator[TextIO]:
    """Provide the replies' stream; other output goes to stderr, so it cannot break the protocol.

    So does that of native code and of child processes, which write to the descriptor.
    """
    own = sys.stdout
    own.flush()
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as replies:
        os.dup2(2, 1)
        sys.stdout = sys.stderr
        try:
            yield replies
        finally:
            sys.stdout = own
            os.dup2(replies.fileno(), 1)


if __name__ == "__main__":
    with private_stdout() as answers:
        serve(sys.stdin, answers)
