"""A pytest plugin that writes down at once how each test ends, so that a crash has a name.

With --rotate BYTES a thread touches that much CPU memory all the time: what a test holds is evicted
at random moments. With --cuda the software driver and its kernels are loaded where SOFTCUDA_LIB is
set, and a test after which the device does not work is the last one of its process.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import threading
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest

PAGE = 2 << 20
PAUSE = 0.001  # s between two pages: the test has most of the core


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", type=Path, required=True, help="lines are added to this file")
    parser.addoption("--rotate", type=int, default=0, help="bytes that a thread touches in turn")
    parser.addoption("--umem", action="store_true", help="umem is on: write down what it did")
    parser.addoption("--cuda", action="store_true", help="the tests are those of a GPU")


def pytest_configure(config: pytest.Config) -> None:
    driver = _driver() if config.option.cuda and os.environ.get("SOFTCUDA_LIB") else None
    config.pluginmanager.register(Recorder(config, driver))
    if config.option.rotate:
        import torch

        count = config.option.rotate // PAGE
        blocks = [torch.zeros(PAGE, dtype=torch.uint8) for _ in range(count)]
        threading.Thread(target=_rotate, args=(blocks,), daemon=True).start()


def _driver() -> Any:
    from softcuda import load

    driver = load.load()
    import torch  # noqa: F401 (compute() works on the imported torch)

    load.compute()
    return driver


def _rotate(blocks: Sequence[Any]) -> None:
    while True:
        for block in blocks:
            ctypes.memset(block.data_ptr(), 1, 1)
            time.sleep(PAUSE)


class Recorder:
    """Adds to the results, and leaves out the tests that are there."""

    def __init__(self, config: pytest.Config, driver: Any) -> None:
        results: Path = config.option.results
        lines = results.read_text().splitlines() if results.exists() else []
        self.done = {json.loads(line).get("test") for line in lines}
        self.config, self.results, self.driver, self.left = config, results, driver, 0
        self.outcome, self.error, self.seconds = "passed", "", 0.0

    def write(self, **line: object) -> None:
        with self.results.open("a") as file:
            file.write(json.dumps(line) + "\n")

    @pytest.hookimpl(trylast=True)  # of what -k leaves
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        left_out = [item for item in items if item.nodeid in self.done]
        if left_out:
            self.config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if item.nodeid not in self.done]
        self.left = len(items)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.write(broken=str(report.longrepr).strip().splitlines()[-1])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.outcome, self.error, self.seconds = "passed", "", 0.0
        self.write(start=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds += report.duration
        if report.failed and self.outcome not in ("failed", "error"):
            self.outcome = "failed" if report.when == "call" else "error"
            crash = getattr(report.longrepr, "reprcrash", None)
            said = crash.message if crash is not None else str(report.longrepr).strip()
            self.error = next(iter(said.strip().splitlines()), "")
        elif report.skipped and self.outcome == "passed":
            self.outcome = "skipped"

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.left -= 1
        races = [] if self.driver is None else self.driver.races()
        if races and self.outcome in ("passed", "skipped"):
            self.outcome, self.error = "race", races[0]
        self.write(
            test=nodeid, outcome=self.outcome, error=self.error, seconds=round(self.seconds, 2)
        )

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        result = yield
        failed = self.outcome not in ("passed", "skipped")
        if failed and self.config.option.cuda and not _works():
            item.session.shouldstop = "the device does not work after this test"
        return result

    def pytest_sessionfinish(self) -> None:
        self.write(end=_umem_did() if self.config.option.umem else {}, left=self.left)


def _works() -> bool:
    """Return True if a kernel and a copy still run; memory of a failed test is freed before."""
    import torch

    gc.collect()
    try:
        torch.cuda.empty_cache()
        return bool(torch.ones(8 * PAGE, dtype=torch.uint8, device="cuda").cpu().all())
    except RuntimeError:
        return False


def _umem_did() -> dict[str, int]:
    import umem

    stats = umem.stats()
    return {"allocs": stats.allocs, "bytes_out": stats.bytes_out}
