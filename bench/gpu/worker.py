"""The process that trains on the GPU: ``python -m gpu.worker``, driven by `trainings.training`."""

from __future__ import annotations

import contextlib
import hashlib
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, cast

import umem
from gpu import device
from umem.demo import worker, workloads
from umem.demo.process import RunSpec


class GpuRun:
    """The training of a workload of policies/workloads.py, by torch's allocator or under umem."""

    def __init__(self, spec: RunSpec) -> None:
        software = device.software_driver()
        import torch
        from policies.workloads import WORKLOADS

        self._cuda: Any = torch.cuda
        self._under_umem = spec.budget is not None
        workloads.set_threads(spec.threads)
        if self._under_umem:
            umem.enable(budget=spec.budget, policy=spec.policy, device="cuda")
        if software is not None and spec.deterministic:
            software.compute()  # else there are no bits to compare
        workloads.seed("cuda", spec.deterministic)
        with torch.device("cuda"):
            self._net, self._step = WORKLOADS[spec.workload].make()

    def commands(self) -> dict[str, Callable[..., dict[str, Any]]]:
        """Return the commands of `WorkerProcess.call` by name."""
        return {"train": self.train, "peak": self.peak, "digest": self.digest}

    def train(
        self, steps: int, budget: int = 0, host_budget: int = 0, offload: bool = False
    ) -> dict[str, Any]:
        """Train; return the ms of each step, and what umem did in them by its statistics.

        `budget` 0 keeps the present ones; `offload` saves activations on the host by torch.
        """
        from torch.autograd.graph import save_on_cpu

        if budget:
            umem.set_budget(budget, host_budget)
        before, times = self._stats(), []
        self._cuda.reset_peak_memory_stats()
        with save_on_cpu(pin_memory=True) if offload else contextlib.nullcontext():
            for _ in range(steps):
                begin = time.perf_counter()
                self._step()
                self._cuda.synchronize()
                times.append(1e3 * (time.perf_counter() - begin))
        after = self._stats()
        return {"ms": times, "did": {name: after[name] - before[name] for name in before}}

    def _stats(self) -> dict[str, int]:
        return asdict(umem.stats()) if self._under_umem else {}

    def peak(self) -> dict[str, Any]:
        """Return torch's peak of allocated bytes in the last `train`, after cuDNN's trials."""
        return {"bytes": self._cuda.max_memory_allocated()}

    def digest(self) -> dict[str, Any]:
        """Return SHA-256 over the network's weights."""
        import torch

        weights = [each.detach().cpu().view(torch.uint8) for each in self._net.parameters()]
        data = b"".join(weight.numpy().tobytes() for weight in weights)
        return {"sha256": hashlib.sha256(data).hexdigest()}


def start(request: dict[str, Any]) -> worker.Run:
    """Start the training that a `RunSpec` describes."""
    return cast("worker.Run", GpuRun(RunSpec(**request)))  # `serve` asks for its commands only


if __name__ == "__main__":
    with worker.private_stdout() as answers:
        worker.serve(sys.stdin, answers, start)
