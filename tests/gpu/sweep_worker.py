"""Runs the cases of sweep.py from standard input, one JSON line each, and answers likewise.

python tests/gpu/sweep_worker.py SEED DEVICE

A case trains a network, with kernels that compute: its numbers must be those of the same training
without umem and without failures. Concurrently, tensors of one value each are filled, copied and
read, on a GPU on two streams.

The failures that the sweep must notice can be planted: see `PLANTS`.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(1, str(TESTS))
MIB = 1 << 20
SEED, DEVICE = int(sys.argv[1]), sys.argv[2]
CUDA = DEVICE == "cuda"
# The device is smaller than the live bytes at the peak, and the budget is smaller still.
os.environ["SOFTCUDA_BYTES"] = str(32 * MIB)
BUDGET = 16 * MIB
os.environ["OMP_NUM_THREADS"] = "1"  # for equal bits

from softcuda import load  # noqa: E402

if CUDA:
    soft = load.load()

import _core_testing  # noqa: E402
import torch  # noqa: E402
from support.cells import Cell  # noqa: E402
from sweep import entry_points  # noqa: E402

import umem  # noqa: E402
from umem.base.native import core  # noqa: E402
from umem.errors import UmemError  # noqa: E402

if CUDA:
    load.compute()
gpu: Any = torch.cuda if CUDA else torch.cpu  # its streams do nothing
torch.set_num_threads(1)
TENSORS = "cuda" if CUDA else "cpu"
LAYERS, LARGE, SMALL = 4, 2 * MIB, 64 << 10
STEPS = 3  # two in which a call may fail, and the next one
kept: list[Any] = []  # by a planted leak
State = list[torch.Tensor]  # a network's, on the host


class Net:
    """A training of two large layers whose numbers depend only on the number of steps."""

    def __init__(self) -> None:
        self.steps = 0
        host = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(STEPS, 128, 512, generator=host)
        self.module = torch.nn.Sequential(
            torch.nn.Linear(512, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 512)
        )
        for parameter in self.module.parameters():
            parameter.data = torch.randn(parameter.shape, generator=host) * 0.04
        self.module.to(TENSORS)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)

    def step(self) -> None:
        x = self.inputs[self.steps].to(TENSORS)
        loss = torch.nn.functional.mse_loss(self.module(x), x)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.steps += 1

    def state(self) -> State:
        return [parameter.detach().cpu().clone() for parameter in self.module.parameters()]

    def restore(self, state: State) -> None:
        for parameter, value in zip(self.module.parameters(), state, strict=True):
            parameter.detach().copy_(value)

    def check(self, expected: list[State], interrupted: bool) -> None:
        """Raises Lost if a parameter has a value of no step; a failure allows one step more."""
        last = min(self.steps + 1, STEPS) if interrupted else self.steps
        allowed = expected[self.steps : last + 1]
        for number, value in enumerate(self.state()):
            if not any(torch.equal(value, state[number]) for state in allowed):
                raise Lost(f"parameter {number}: wrong numbers after {self.steps} steps")


def undisturbed() -> list[State]:
    """The network's states after each step, with torch's own kind of memory and no failures."""
    with umem.enable(budget=BUDGET, device=DEVICE):
        pass  # it must precede the first CUDA call
    net = Net()
    states = [net.state()]
    for _ in range(STEPS):
        net.step()
        states.append(net.state())
    return states


class Training:
    """Weights and optimizer state, and steps that allocate activations beyond the budget."""

    def __init__(self) -> None:
        self.cells: dict[str, Cell] = {}
        self.net = Net()
        self.side = gpu.Stream()
        for layer in range(LAYERS):
            for name, nbytes in (("weight", LARGE), ("momentum", LARGE), ("bias", SMALL)):
                self.cells[f"{name} {layer}"] = cell = Cell(nbytes, TENSORS)
                cell.fill()

    def step(self) -> None:
        """Forward, backward and optimizer, as an allocator sees them."""
        activations = [self.forward(layer) for layer in range(LAYERS)]
        for layer in reversed(range(LAYERS)):
            self.backward(layer, *activations.pop())
        self.net.step()
        gpu.current_stream().wait_stream(self.side)
        torch.cuda.empty_cache() if CUDA else core.trim()
        umem.step()

    def forward(self, layer: int) -> tuple[Cell, Cell, Cell]:
        output, mask, logged = (Cell(nbytes, TENSORS) for nbytes in (2 * LARGE, SMALL, LARGE))
        self.cells |= {"output": output, "mask": mask, "logged": logged}
        output.fill()
        mask.copy(self.cells[f"bias {layer}"])
        workspace = Cell(LARGE, TENSORS)
        workspace.copy(self.cells[f"weight {layer}"])
        # A side stream reads the workspace after its owner released it.
        self.side.wait_stream(gpu.current_stream())
        with gpu.stream(self.side):
            logged.copy(workspace)
        if CUDA:
            workspace.tensor.record_stream(self.side)
            logged.tensor.record_stream(self.side)
        return output, mask, logged

    def backward(self, layer: int, output: Cell, mask: Cell, logged: Cell) -> None:
        gradient = Cell(2 * LARGE, TENSORS)
        gradient.copy(output)
        gpu.current_stream().wait_stream(self.side)
        self.cells |= {"output": gradient, "mask": mask, "logged": logged}
        self.cells[f"momentum {layer}"].copy(self.cells[f"weight {layer}"])
        self.cells[f"weight {layer}"].fill()

    def check(self, expected: list[State], interrupted: bool) -> None:
        """Raises Lost if a tensor has a wrong value."""
        gpu.synchronize()
        self.net.check(expected, interrupted)
        for name, cell in self.cells.items():
            if wrong := cell.wrong():
                raise Lost(f"{name}: {wrong}")


class Lost(Exception):  # noqa: N818
    """A forbidden outcome."""


def plan(case: dict[str, Any]) -> None:
    """Resets all state: a case runs alone as it does among others."""
    if not CUDA:
        _core_testing.instrument()
        if case["entry"]:
            torn = case["harm"] == "tear"
            _core_testing.inject(case["entry"], case["nth"], case["error"], torn=torn)
        return
    soft.reset()
    soft.seed(SEED)
    if case["entry"]:
        fail = {"": soft.inject, "lose": soft.lose, "tear": soft.tear}[case["harm"]]
        fail(case["entry"], case["nth"], case["error"])


def end_plan() -> dict[str, int]:
    """Clears planned failures; returns the number of calls of each entry point."""
    calls = _core_testing.calls if not CUDA else soft.calls
    found = {name: calls(name) for name in entry_points()}
    if CUDA:
        soft.reset()
    else:
        _core_testing.clear_injections()
    return found


def attempt(work: Callable[[], object]) -> BaseException | None:
    """The proper error that `work` raises, without what its frames hold. Lost for any other."""
    try:
        work()
    except (RuntimeError, UmemError) as error:  # torch's errors are RuntimeErrors
        error.__traceback__ = None
        return error
    except Lost:
        raise
    except Exception as error:  # noqa: BLE001
        raise Lost(f"it raises {type(error).__name__}: {error}") from None
    return None


def must(work: Callable[[], object], what: str) -> None:
    if error := attempt(work):
        raise Lost(f"{what} fails: {first_line(error)}")


def run(case: dict[str, Any], expected: list[State]) -> dict[str, Any]:
    trainings: list[Training] = []

    def start() -> None:
        umem.enable(budget=BUDGET, device=DEVICE)
        if not CUDA:
            plan(case)  # this creates a new driver table
        trainings.append(Training())

    def train() -> None:
        start()
        for _ in range(2):
            trainings[0].step()

    if CUDA:
        plan(case)
    error = attempt(train)
    calls = end_plan()
    check_type(case, error)
    if not trainings:
        case = case | {"entry": "", "harm": ""}
        must(start, "starting again")
    must(lambda: PLANTS[case["plant"]](trainings), "the plant")
    go_on(trainings[0], expected, error is not None)
    trainings.clear()
    must(check_nothing_left, "the end")
    must(umem.disable, "umem.disable()")
    late = case["entry"] and calls[case["entry"]] < case["nth"]
    kind = "raised" if error else "late" if late else "ok"
    return {"kind": kind, "why": first_line(error), "calls": calls}


def go_on(training: Training, expected: list[State], interrupted: bool) -> None:
    """Checks the results, and those of the next step."""
    must(lambda: training.check(expected, interrupted), "reading")
    if interrupted:  # like a program that resumes from its last checkpoint
        must(lambda: training.net.restore(expected[training.net.steps]), "writing")
    must(training.step, "the next step")
    must(lambda: training.check(expected, interrupted=False), "reading again")


def check_type(case: dict[str, Any], error: BaseException | None) -> None:
    if error is None or case["entry"] != "cuMemAllocManaged" or case["error"] != 2:
        return
    if not isinstance(error, torch.OutOfMemoryError | UmemError):
        raise Lost(f"it raises {type(error).__name__} for memory: {error}")


def check_nothing_left() -> None:
    gc.collect()
    gpu.synchronize()
    if left := umem.stats().live_bytes:
        raise Lost(f"{left} bytes stay alive")
    if pins := sum(row["pins"] for row in _core_testing.blocks()):
        raise Lost(f"{pins} pins are left")


def first_line(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0]}" if error else ""


def overwrite(trainings: list[Training]) -> None:
    """Imitates an eviction that loses its bytes."""
    tensor = trainings[0].cells["weight 1"].tensor
    ctypes.memset(tensor.data_ptr() + MIB, 0, 4096)


def discard(trainings: list[Training]) -> None:
    """Declares live bytes dead to the driver."""
    tensor = trainings[0].cells["weight 0"].tensor
    stream = gpu.Stream()
    pointer, nbytes = ctypes.c_uint64(tensor.data_ptr()), ctypes.c_size_t(LARGE)
    result = soft.driver.cuMemDiscardBatchAsync(
        ctypes.byref(pointer), ctypes.byref(nbytes), ctypes.c_size_t(1), ctypes.c_uint64(0),
        ctypes.c_void_p(stream.cuda_stream))  # fmt: skip
    assert result == 0, result


def number(trainings: list[Training]) -> None:
    """A wrong number of the network."""
    next(trainings[0].net.module.parameters()).detach()[0, 0] += 1


def race(trainings: list[Training]) -> None:
    """A stream reads what another one writes, and does not wait for it."""
    cell = trainings[0].cells["weight 0"]
    cell.fill()
    with gpu.stream(gpu.Stream()):
        cell.tensor.sum()
    gpu.synchronize()


def wrong_type(_: list[Training]) -> None:
    raise KeyError("of no use to the caller")


PLANTS: dict[str, Callable[[list[Training]], object]] = {
    "": lambda _: None,
    "overwrite": overwrite,
    "discard": discard,
    "crash": lambda _: os.abort(),
    "number": number,
    "race": race,
    "hang": lambda _: time.sleep(3600),
    "leak": lambda trainings: kept.append(trainings[0].cells["weight 0"]),
    "type": wrong_type,
}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the output of libraries is not an answer
    expected = undisturbed()
    gc.collect()
    gc.freeze()  # each case collects, and need not look at all of torch
    if CUDA:
        torch.cuda.empty_cache()
    for line in sys.stdin:
        started = time.monotonic()
        try:
            outcome = run(json.loads(line), expected)
        except Lost as lost:
            outcome = {"kind": "lost", "why": str(lost)}
        outcome["races"] = soft.races() if CUDA else []
        print(json.dumps(outcome | {"seconds": time.monotonic() - started}), file=answers)


if __name__ == "__main__":
    main()
