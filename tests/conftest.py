"""Markers, options and profiles of all tests, and a record of what each of them takes.

Every test has exactly one of the markers cpu and gpu; cpu is given where none is.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

CI = "umem"  # the usual hypothesis profile
# Another one, and the marker of tests that run with it only.
NIGHTLY = "nightly"
# Examples of a property, as a share of those that its test asks for. CI's are the same in every
# run: more of them would find nothing that the last run did not.
EXAMPLES = {CI: 0.5, NIGHTLY: 3}
# A file of tests runs in one process: with the longest first, none is left for a single one to end.
# Needs --no-loadscope-reorder: xdist puts files of few tests last, and the longest are among these.
FIRST = (
    "test_sanitizers.py", "test_numbers.py", "test_fault_sweep.py", "test_varying_steps.py",
    "test_demo.py", "test_compiled.py", "test_helper_threads.py", "test_distributed_examples.py",
    "test_lifecycle.py", "test_pages.py", "test_torch_build.py", "test_bench.py",
    "test_bench_programs.py",
)  # fmt: skip
# No test has a limit of time: machines are busy, and the first example may import or compile. A
# merge request meets the same examples in every run, and other profiles look for new ones: whoever
# changed something else is not the one to find them.
for _profile in (CI, "random", NIGHTLY):
    hypothesis.settings.register_profile(_profile, deadline=None, derandomize=_profile == CI)
hypothesis.settings.load_profile(CI)
# Seconds by test, for tools/affected_tests.py; survives in pytest's cache.
DURATIONS = "umem/durations"
_durations: dict[str, float] = {}
MANY_MODULES = 100  # a test imported torch._dynamo or a library as large


def pytest_configure() -> None:
    if importlib.util.find_spec("_core_testing") is None:
        raise pytest.UsageError("_core_testing is missing; build it: python tools/build_testing.py")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _durations[report.nodeid] = _durations.get(report.nodeid, 0.0) + report.duration


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown() -> None:
    # pytest keeps a failed test's traceback for debuggers, which are done now: the tensors in its
    # frames would be alive in every later test.
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            delattr(sys, name)


def pytest_sessionfinish(session: pytest.Session) -> None:
    cache = getattr(session.config, "cache", None)
    if cache is not None and _durations and not hasattr(session.config, "workerinput"):
        cache.set(DURATIONS, cache.get(DURATIONS, {}) | _durations)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _multiply_examples(items, EXAMPLES.get(config.getoption("--hypothesis-profile") or CI, 1))
    items.sort(key=lambda item: item.path.name not in FIRST)
    for item in items:
        gpu, cpu = (item.get_closest_marker(name) for name in ("gpu", "cpu"))
        if gpu and cpu:
            raise pytest.UsageError(f"{item.nodeid} is marked both cpu and gpu")
        if gpu is None and cpu is None:
            item.add_marker(pytest.mark.cpu)
        if item.get_closest_marker(NIGHTLY) and not _is_nightly(config):
            item.add_marker(pytest.mark.skip(reason="takes longer than CI may: make nightly"))
        if gpu is not None and (reason := _why_no_gpu()) is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


def _is_nightly(config: pytest.Config) -> bool:
    return bool(config.getoption("--hypothesis-profile") == NIGHTLY)


@pytest.fixture(scope="session")
def nightly(pytestconfig: pytest.Config) -> bool:
    """True if tests may take longer."""
    return _is_nightly(pytestconfig)


def _multiply_examples(items: list[pytest.Item], share: float) -> None:
    # A profile is only the default: it does not reach tests with settings of their own. The name
    # is the one that hypothesis's plugin for pytest sets on items too. The cases of a parametrized
    # test share one function, and its methods' objects are new at each access.
    functions = {
        getattr(test, "__func__", test)
        for item in items
        if hypothesis.is_hypothesis_test(test := getattr(item, "obj", None))
    }
    function: Any
    for function in functions:
        asked = function._hypothesis_internal_use_settings
        examples = max(round(share * asked.max_examples), 1)
        function._hypothesis_internal_use_settings = hypothesis.settings(
            asked, max_examples=examples
        )


@functools.cache  # and not before a test needs it: a started driver does not survive a fork
def _why_no_gpu() -> str | None:
    # The software driver (tests/softcuda) counts as a GPU, and is not started to find out.
    if folder := os.environ.get("SOFTCUDA_LIB"):
        there = (Path(folder) / "libcuda.so.1").is_file()
        return None if there else f"there is no libcuda.so.1 in SOFTCUDA_LIB={folder}"
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no NVIDIA driver (libcuda.so.1) on this machine, and SOFTCUDA_LIB is not set"
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return "the NVIDIA driver does not start"
    return None if count.value else "no CUDA device"


@pytest.fixture(autouse=True, scope="module")
def _closed_devices() -> None:
    """No file of tests starts with a device that the one before left open.

    A device stays while a tensor on it lives, and garbage in a cycle lives for as long as it likes.
    Live objects are frozen: the collections before each test need not look at all of torch.
    Garbage that was frozen while it was alive is found if it keeps a device open.
    """
    gc.collect()
    if core := sys.modules.get("umem._core"):
        core.stop()
        if core.opened_devices():
            gc.unfreeze()
            gc.collect()
            core.stop()
    gc.freeze()


@pytest.fixture(autouse=True)
def _frozen_imports() -> Iterator[None]:
    """No collection of the next tests looks at what this one has imported."""
    before = len(sys.modules)
    yield
    if len(sys.modules) > before + MANY_MODULES:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def _no_options_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of whoever runs the tests decides nothing in them."""
    for name in [name for name in os.environ if name.lstrip("_").split("_")[0] == "UMEM"]:
        monkeypatch.delenv(name)
