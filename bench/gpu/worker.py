"""The process that trains on the GPU: `umem.demo.worker`, with what only the GPU bench asks for."""

from __future__ import annotations

import gc
import importlib
import sys
import threading
from collections.abc import Callable
from typing import Any

import umem
from gpu import software, techniques, trace, workloads
from gpu.children import GpuSpec
from umem.demo import worker
from umem.demo.training import Training
from umem.errors import StateError

SAMPLE_SECONDS = 0.002


class DeviceSampler:
    """The min free bytes of the device that a thread saw."""

    def __init__(self) -> None:
        self.least = self._free()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> int:
        """Stop; return the min free bytes."""
        self._stop.set()
        self._thread.join()
        return self.least

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self.least = min(self.least, self._free())

    def _free(self) -> int:
        import torch

        return int(torch.cuda.mem_get_info()[0])


class GpuRun(worker.Run):
    """One training, which can change its budget, its workload and its batch as it goes."""

    def __init__(self, spec: GpuSpec) -> None:
        software.load_if_asked()
        import torch

        self._cuda: Any = torch.cuda
        super().__init__(spec)
        self._undo = techniques.use(self.training, "plain")
        self._ballast = 0

    def build(self, workload: str) -> Training:
        """Make a training of `gpu.workloads` on the GPU."""
        return workloads.build(workloads.lookup(workload), "cuda", self.spec.deterministic)

    def commands(self) -> dict[str, Callable[..., dict[str, Any]]]:
        """Beside those of every worker."""
        return {
            **super().commands(),
            "configure": self._configure,
            "ballast": self._hold_ballast,
            "technique": self._technique,
            "optimizer": self._page_optimizer,
            "torchao": self._use_torchao,
            "rebuild": self._rebuild,
            "peak": self._peak,
            "watch": self._watch,
            "trace": lambda: trace.record(self.training),
        }

    def _configure(self, budget: int, host_budget: int) -> dict[str, Any]:
        """Run with another budget from here on: umem's, or, without umem, torch's own allocator's.

        Peaks count from here on, too.
        """
        if self.spec.budget is None:
            total = self._cuda.mem_get_info()[1]
            self._cuda.set_per_process_memory_fraction(min(budget / total, 1.0))
            self._cuda.reset_peak_memory_stats()
            return {}
        umem.set_budget(budget, host_budget)
        umem.reset_peak_stats()
        return {}

    def _hold_ballast(self, leave: int) -> dict[str, Any]:
        """Take plain device memory until managed memory has only `leave` bytes; 0 gives it back."""
        from umem.base.native import core

        calls: Any = core.driver
        self._cuda.synchronize()
        if self._ballast:
            calls.cuMemFree(self._ballast)
            self._ballast = 0
        size = calls.cuMemGetInfo()[1] + umem.stats().resident_bytes - leave
        if leave and size > 0:
            code, self._ballast = calls.cuMemAlloc(size)
            if code:
                raise StateError(f"{size} bytes of ballast: CUresult {code}")
        return {}

    def _technique(self, name: str) -> dict[str, Any]:
        """Another technique from here on."""
        self._undo()
        self._undo = techniques.use(self.training, name)
        gc.collect()
        self._cuda.empty_cache()
        self._cuda.reset_peak_memory_stats()
        return {}

    def _page_optimizer(
        self, update: str | None, share: float | None, overlap: bool, release: bool
    ) -> dict[str, Any]:
        """Let umem page the optimizer of this training; `update` None leaves it as it is."""
        if update is not None:
            umem.page_optimizer(
                self.training.optimizer,
                update=update,
                share=share,
                overlap=overlap,
                release_gradients=release,
            )
        return {}

    def _use_torchao(self) -> dict[str, Any]:
        """Replace the optimizer by torchao's, whose states and updates are on the host."""
        import torch

        options = self.training.optimizer.param_groups[0]
        self.training.optimizer = importlib.import_module("torchao.optim").CPUOffloadOptimizer(
            self.training.net.parameters(),
            torch.optim.AdamW,
            fused=True,
            lr=options["lr"],
            weight_decay=options["weight_decay"],
        )
        return {}

    def _rebuild(self, workload: str, steps: int = 2) -> dict[str, Any]:
        """Train another workload from its start: whether the memory sufficed, or why not."""
        import torch

        self._forget()
        try:
            self.training = self.build(workload)
            self._undo = techniques.use(self.training, "plain")
            times = [self.step()["ms"] for _ in range(steps)]
        except torch.OutOfMemoryError as error:
            reason = str(error).splitlines()[0]
        else:
            return {"fits": True, "ms": times[-1] if times else 0.0, "losses": self.training.losses}
        self._forget()
        return {"fits": False, "reason": reason}

    def _forget(self) -> None:
        self.training = self._undo = None  # type: ignore[assignment]
        gc.collect()
        self._cuda.empty_cache()
        self._cuda.reset_peak_memory_stats()

    def _peak(self) -> dict[str, Any]:
        """Return torch's counters, and the used memory of the whole device."""
        self._cuda.synchronize()
        free, total = self._cuda.mem_get_info()
        return {
            "device": self._cuda.get_device_name(0),
            "allocated": self._cuda.max_memory_allocated(),
            "reserved": self._cuda.max_memory_reserved(),
            "reserved_now": self._cuda.memory_reserved(),
            "used_now": total - free,
            "total": total,
        }

    def _watch(self, count: int) -> dict[str, Any]:
        """Train `count` steps; return the max device bytes in use meanwhile, of all processes."""
        sampler = DeviceSampler()
        try:
            steps = [self.step() for _ in range(count)]
        finally:
            least = sampler.close()
        return {"steps": steps, "used": self._cuda.mem_get_info()[1] - least}


def start(request: dict[str, Any]) -> GpuRun:
    """Start the training that a `GpuSpec` describes."""
    return GpuRun(GpuSpec(**request))


if __name__ == "__main__":
    with worker.private_stdout() as answers:
        worker.serve(sys.stdin, answers, start)
