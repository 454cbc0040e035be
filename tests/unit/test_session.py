"""The session, in processes of its own: each has one."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import pytest
from support import forkserver

import umem
from umem.integrations.torch.version import torch_problem

PRELUDE = """
import torch, umem, warnings
warnings.simplefilter("error")
torch.set_num_threads(1)
MIB = 1 << 20
def refused(kind, call, *words):
    try:
        call()
    except kind as error:
        assert all(word in str(error) for word in words), error
        assert "\\n" not in str(error)
    else:
        raise AssertionError(f"not refused: {words}")
"""


def run(code: str, cwd: Path, **env: str) -> str:
    pytest.importorskip("torch")
    words = ["-c", PRELUDE + textwrap.dedent(code)]
    done = forkserver.run(words, {**os.environ, **env}, cwd)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_a_session_is_a_context(tmp_path: Path) -> None:
    code = """
        before = torch.full((MIB,), 1.0)
        with umem.enable(budget="64MiB", device="soft"):
            assert umem.is_enabled()
            inside = torch.full((MIB,), 2.0)
            assert umem.stats().live_bytes == 4 * MIB
            assert "64 MiB" in umem.summary()
        assert not umem.is_enabled()
        outside = torch.full((MIB,), 3.0)
        assert umem.stats().live_bytes == 4 * MIB
        assert float((before + inside + outside).sum()) == 6.0 * MIB
        umem.disable()
    """
    run(code, tmp_path)


def test_enable_again(tmp_path: Path) -> None:
    code = """
        first = umem.enable(budget="64MiB", device="soft")
        with umem.enable(budget=64 * MIB, device="soft"):
            pass
        assert umem.is_enabled()
        refused(umem.StateError, lambda: umem.enable(budget="32MiB", device="soft"),
                "budget=64 MiB", "budget=32 MiB", "umem.disable()")
        umem.set_budget("32MiB")
        umem.enable(budget="32MiB", device="soft")
        assert umem.stats().budget_bytes == 32 * MIB
        umem.set_budget(48 * MIB, host_budget="1GiB")
        assert umem.stats().host_budget_bytes == 1 << 30
        refused(umem.ConfigError, lambda: umem.set_budget("1MiB"), "below the floor of 8 MiB")
        assert umem.stats().budget_bytes == 48 * MIB
        umem.disable()
        with umem.enable(budget="16MiB", device="soft", policy="none"):
            assert umem.stats().budget_bytes == 16 * MIB
    """
    run(code, tmp_path)


def test_a_failed_enable_leaves_torch_as_it_was(tmp_path: Path) -> None:
    code = """
        refused(umem.ConfigError, lambda: umem.enable(budget="12 parsecs"), "budget=: '12 parsecs'")
        refused(umem.ConfigError, lambda: umem.enable(device="soft", policy="lur"), "mean lru?")
        refused(umem.NotSupportedError, lambda: umem.enable(device="cuda"), "allowed here: soft")
        assert not umem.is_enabled()
        torch.ones(MIB)
        assert umem.stats().allocs == 0
    """
    run(code, tmp_path)


def test_hints(tmp_path: Path) -> None:
    code = """
        foreign = torch.ones(MIB)
        for hint in (umem.prefetch, umem.evict, lambda _: umem.step()):
            refused(umem.StateError, lambda: hint(foreign), "umem.enable()")
        umem.enable(budget="64MiB", device="soft")
        held = torch.full((2 * MIB,), 5.0)
        assert not umem.prefetch(foreign) and not umem.evict(foreign)
        assert not umem.advise(foreign, "read_mostly")
        refused(umem.ConfigError, lambda: umem.advise(held, "sometimes"), "read_mostly, none")
        assert umem.evict(held[3:9])
        assert umem.stats().bytes_out == 8 * MIB
        assert umem.prefetch(held)
        assert umem.stats().bytes_in == 8 * MIB
        assert float(held.sum()) == 10.0 * MIB
        steps = umem.stats().steps
        umem.step()
        assert umem.stats().steps == steps + 1
        del held
        umem.reset_peak_stats()
        assert umem.stats().peak_live_bytes == 0
    """
    run(code, tmp_path)


def test_a_message_comes_once_if_the_program_configures_logging_later(tmp_path: Path) -> None:
    code = """
        import logging
        umem.enable(budget="64MiB", device="soft")
        logging.getLogger("umem").warning("before")
        logging.basicConfig()
        logging.getLogger("umem").warning("after")
    """
    assert run(code, tmp_path).splitlines() == ["umem: before", "WARNING:umem:after"]


def test_auto_device_without_a_gpu_says_so_once(tmp_path: Path) -> None:
    stderr = run('umem.enable(budget="64MiB"); umem.enable(budget="64MiB")', tmp_path)
    lines = [line for line in stderr.splitlines() if line.startswith("umem: no usable GPU (")]
    assert len(lines) == 1
    assert "software device" in lines[0]
    assert run('umem.enable(budget="64MiB", device="soft")', tmp_path).count("no usable GPU") == 0


@pytest.mark.parametrize(
    ("version", "word"),
    [(None, "not installed"), ("2.10.1", "older"), ("1.13.0+cu117", "older"), ("weird", "older")],
)
def test_a_torch_that_cannot_be_used(version: str | None, word: str) -> None:
    problem = torch_problem(version)
    assert problem is not None
    assert word in problem
    assert "pip install 'torch>=2.11'" in problem


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.15.0a0+git1", "3.0.0"])
def test_a_torch_that_can(version: str) -> None:
    assert torch_problem(version) is None


def test_options_are_only_those_of_the_table() -> None:
    with pytest.raises(TypeError, match="bugdet"):
        umem.enable(bugdet="1GiB")  # type: ignore[call-arg]
