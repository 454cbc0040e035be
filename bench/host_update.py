"""Updates on the host against other ways to do them: ``python bench/host_update.py [--smoke]``.

Writes host-update_<hardware>_<date>.{json,md} to bench/results. Libraries that are not installed,
or do not run here, are left out; the report gives the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

from harness import Report, Result, Spread, add_outputs, cases, interleave, ratios, results_folder

import umem
from umem.base.progress import Advance
from umem.base.units import MIB, PAGE_BYTES
from umem.config import settings
from umem.demo.process import RunSpec, WorkerProcess
from umem.session.session import host_memory

PLAIN = "torch fused"
UMEM = "umem, share 100 %"
SHARES = ("device", "50%", "host", "auto")
AMPLE = 1 << 30


@dataclass(frozen=True)
class Config:
    """Benchmark parameters and repetitions."""

    tensors: int = 8
    numel: int = 4 << 20  # per case
    rounds: int = 15
    step_rounds: int = 9
    fraction: int = 4  # the small language model's budget, as a share of the peak
    warm_steps: int = 14  # by then all has been recorded, planned and tried
    threads: int = 1


SMOKE = Config(tensors=2, numel=1 << 18, rounds=2, step_rounds=2, warm_steps=4)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench/host_update.py", description=__doc__)
    add_outputs(parser)
    args = parser.parse_args(argv)
    folder = results_folder(parser, args)
    config = SMOKE if args.smoke else Config()
    report = Report("host-update", asdict(config))
    with cases(config.rounds + config.step_rounds) as advance:
        updates(config, report, advance)
        steps(config, report, advance)
    print(report.markdown())
    if folder is not None:
        print("\n".join(map(str, report.write(folder))))
    return 0


def updates(config: Config, report: Report, advance: Advance) -> None:
    """Add the time of an update for each parameter, by each way, in one process."""
    import torch

    torch.set_num_threads(config.threads)
    left_out: dict[str, str] = {}
    with umem.enable(budget=AMPLE, device="soft", policy="lru"), contextlib.ExitStack() as stack:
        ways: dict[str, Callable[[], object]] = {}
        for name, make in WAYS.items():
            try:
                ways[name] = stack.enter_context(make(config))
                ways[name]()  # creates the states
            except Exception as error:  # noqa: BLE001 - of another library, which is reported
                left_out[name] = f"{type(error).__name__}: {error}".splitlines()[0][:160]
                ways.pop(name, None)
        count = config.tensors * config.numel
        timers = {name: _timer(step, count) for name, step in ways.items()}
        times = interleave(timers, config.rounds, advance)
        timers.clear()
        ways.clear()
    for name, values in times.items():
        report.results.append(Result(f"update: {name}", Spread.of(values), "ns a parameter"))
    for name in times:
        if name != PLAIN:
            spread = ratios(times[name], times[PLAIN])
            report.results.append(Result(f"update: {name} / {PLAIN}", spread, "x"))
    report.details["left_out"] = left_out
    report.sections += [f"Left out: {name} ({why})." for name, why in left_out.items()]
    report.sections += [""] if left_out else []


def _timer(step: Callable[[], object], count: int) -> Callable[[], float]:
    def timed() -> float:
        begin = time.perf_counter()
        step()
        return (time.perf_counter() - begin) / count * 1e9

    return timed


def _parameters(config: Config) -> list[Any]:
    import torch

    made = [torch.nn.Parameter(torch.ones(config.numel)) for _ in range(config.tensors)]
    for parameter in made:
        parameter.grad = torch.full_like(parameter, 1e-3)
    return made


@contextlib.contextmanager
def _plain(config: Config) -> Iterator[Callable[[], object]]:
    """Provide the kernel alone, on plain host memory: no copies."""
    import torch

    with host_memory():
        optimizer = torch.optim.AdamW(_parameters(config), fused=True)
        optimizer.step()
    yield optimizer.step


@contextlib.contextmanager
def _umem(config: Config) -> Iterator[Callable[[], object]]:
    """Provide the step of `page_optimizer`: gradients and parameters out, parameters back."""
    import torch

    optimizer = torch.optim.AdamW(_parameters(config), fused=True)
    with umem.page_optimizer(optimizer, update="host"):
        yield optimizer.step


@contextlib.contextmanager
def _torchao(config: Config) -> Iterator[Callable[[], object]]:
    import torch

    made = import_module("torchao.optim").CPUOffloadOptimizer
    optimizer = made(_parameters(config), torch.optim.AdamW, fused=True)
    yield optimizer.step


@contextlib.contextmanager
def _deepspeed(config: Config) -> Iterator[Callable[[], object]]:
    """Provide DeepSpeed's kernel alone, on plain host memory: no copies."""
    with host_memory():
        made = import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
        optimizer = made(_parameters(config), adamw_mode=True)
        optimizer.step()
    yield optimizer.step


WAYS: dict[str, Callable[[Config], Any]] = {
    PLAIN: _plain,
    UMEM: _umem,
    "torchao CPUOffloadOptimizer": _torchao,
    "DeepSpeed CPU Adam": _deepspeed,
}


def steps(config: Config, report: Report, advance: Advance) -> None:
    """Add step times of the demo's language model at a fraction of its peak, by share."""
    cache = str(settings.load().torch_ext_cache)

    def spec(budget: int, where: str) -> RunSpec:
        return RunSpec(
            "gpt", budget=budget, policy="auto", threads=config.threads, torch_ext_cache=cache,
            optimizer=where, fused=True,
        )  # fmt: skip

    with WorkerProcess(spec(AMPLE, "device")) as roomy:
        roomy.step(2)
        peak = roomy.stats()["peak_live_bytes"]
    budget = peak // config.fraction // PAGE_BYTES * PAGE_BYTES
    with contextlib.ExitStack() as stack:
        workers = {
            where: stack.enter_context(WorkerProcess(spec(budget, where))) for where in SHARES
        }
        for worker in workers.values():
            worker.step(config.warm_steps)
        before = {where: worker.stats() for where, worker in workers.items()}
        times = interleave(
            {where: _stepper(worker) for where, worker in workers.items()},
            config.step_rounds,
            advance,
        )
        moved = {
            where: sum(
                worker.stats()[key] - before[where][key] for key in ("bytes_in", "bytes_out")
            )
            / config.step_rounds
            for where, worker in workers.items()
        }
        digests = {where: worker.finish()["fingerprint"] for where, worker in workers.items()}
    report.config["budget"] = f"{budget // MIB} MiB"
    same = all(digest == digests["device"] for digest in digests.values())
    report.sections += [f"The bits of all shares are {'equal' if same else '**not equal**'}.", ""]
    report.details |= {"bits_equal": same, "bytes_a_step": moved}
    for where, values in times.items():
        note = f"{moved[where] / MIB:.0f} MiB in and out a step"
        report.results.append(Result(f"gpt, step: {where}", Spread.of(values), "ms", note=note))
    for where in SHARES[1:]:
        spread = ratios(times[where], times["device"])
        report.results.append(Result(f"gpt, step: {where} / device", spread, "x"))


def _stepper(worker: WorkerProcess) -> Callable[[], float]:
    return lambda: float(worker.step()[0]["ms"])


if __name__ == "__main__":
    raise SystemExit(main())
