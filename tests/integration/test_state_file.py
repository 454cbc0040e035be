"""Optimizer state on a disk: bits, space, and disks that fail."""

from __future__ import annotations

import errno
import gc
import io
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import umem  # noqa: E402
from umem.base.native import core  # noqa: E402
from umem.base.scratch_file import open_unnamed  # noqa: E402
from umem.errors import ConfigError, StateError  # noqa: E402
from umem.offload.optimizer import host_update, state_file  # noqa: E402
from umem.offload.optimizer.state_file import StateFile  # noqa: E402

SIDE = 512
LAYER = SIDE * SIDE * 4


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A folder that can hold the file; the system's temporary one may be in memory."""
    for folder in (tmp_path, Path.cwd()):
        try:
            StateFile(folder).close()
        except OSError:
            continue
        return folder
    pytest.skip("no folder on a disk with O_DIRECT")


@pytest.fixture
def file(disk: Path) -> Iterator[StateFile]:
    made = StateFile(disk)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def one_layer_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_update, "CHUNK_BYTES", 2 * LAYER)


class Training:
    """Six layers under AdamW, whose updates are on the host."""

    def __init__(self, dtype: torch.dtype = torch.float32, **page: Any) -> None:
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(*(torch.nn.Linear(SIDE, SIDE) for _ in range(6))).to(dtype)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        self.paged = umem.page_optimizer(self.optimizer, update="host", **page)
        self.dtype = dtype

    def steps(self, count: int = 3) -> None:
        for number in range(count):
            torch.manual_seed(number)
            x = torch.randn(16, SIDE, dtype=self.dtype)
            self.optimizer.zero_grad()
            self.net(x).square().mean().backward()
            self.optimizer.step()

    def states(self) -> list[torch.Tensor]:
        found = self.optimizer.state_dict()["state"].values()
        return [s[name] for s in found for name in sorted(s)]

    def end(self) -> list[Any]:
        """Return the weights and states as arrays, and let all go."""
        found = [
            t.detach().float().numpy().copy() for t in (*self.net.parameters(), *self.states())
        ]
        self.paged.remove()
        del self.net, self.optimizer, self.paged
        gc.collect()
        return found


def enabled(disk: Path | str | None) -> umem.Session:
    return umem.enable(budget="24MiB", device="soft", policy="lru", disk=disk and str(disk))


def kept() -> int:
    """The number of states in the file."""
    found = state_file.current()
    assert found is not None
    return len(found._ranges)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_are_those_of_states_in_memory(
    dtype: torch.dtype, release: bool, overlap: bool, disk: Path
) -> None:
    def trained(disk: Path | None) -> list[Any]:
        page = {"release_gradients": release, "overlap": overlap}
        with enabled(disk):
            training = Training(dtype, masters=dtype == torch.bfloat16, **page)
            training.steps()
            if disk is not None:
                assert kept() == 6 * (3 if dtype == torch.bfloat16 else 2)
            return training.end()

    for a, b in zip(trained(None), trained(disk), strict=True):
        assert np.array_equal(a, b)


def test_memory_holds_three_chunks_at_a_time(disk: Path) -> None:
    with enabled(disk):
        training = Training()
        training.steps()
        found = state_file.current()
        assert found is not None
        assert sum(map(len, found._stagings)) <= 3 * 2 * (LAYER + 4096)
        training.end()


def test_the_program_reads_and_writes_states_and_saves_them(disk: Path) -> None:
    """Also while pages of the map are in the kernel's cache."""

    def trained(disk: Path | None) -> list[Any]:
        with enabled(disk):
            training = Training()
            training.steps(2)
            for state in training.optimizer.state.values():
                state["exp_avg"].mul_(0.5)
            training.steps(1)
            saved = io.BytesIO()
            torch.save(training.optimizer.state_dict(), saved)
            training.steps(1)
            training.optimizer.load_state_dict(torch.load(io.BytesIO(saved.getvalue())))
            training.steps(2)
            return training.end()

    for a, b in zip(trained(None), trained(disk), strict=True):
        assert np.array_equal(a, b)


def test_space_of_states_that_are_gone_is_used_again(disk: Path) -> None:
    with enabled(disk):
        training = Training()
        training.steps(1)
        saved = training.optimizer.state_dict()
        reserved = []
        for _ in range(4):
            training.optimizer.load_state_dict(saved)
            training.steps(1)
            found = state_file.current()
            assert found is not None
            reserved.append(found._reserved)
        del saved
        assert reserved[1:] == reserved[1:2] * 3
        training.end()


def fails_at(
    monkeypatch: pytest.MonkeyPatch, call: str, number: int, code: int = errno.EIO
) -> None:
    """The call with this number, from 0, of `os.preadv` or `os.pwritev` fails."""
    real, calls = getattr(os, call), iter(range(10**6))

    def maybe(*args: Any) -> int:
        if next(calls) == number:
            raise OSError(code, "no luck")
        return int(real(*args))

    monkeypatch.setattr(os, call, maybe)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_states_that_cannot_be_written_stay_in_memory(
    code: int, disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with enabled(None):
        training = Training()
        for steps in (2, 1, 1):
            training.steps(steps)
        expected = training.end()
    with enabled(disk):
        training = Training()
        training.steps(2)
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "umem"):
            fails_at(patch, "pwritev", 5, code)
            training.steps(1)
        assert kept() == 11
        training.steps(1)
        assert caplog.text.count("that cannot be written are in memory instead") == 1
        for a, b in zip(expected, training.end(), strict=True):
            assert np.array_equal(a, b)


def test_first_states_stay_in_memory_on_a_full_disk(
    disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with enabled(disk):
        training = Training()
        fails_at(monkeypatch, "pwritev", 3, errno.ENOSPC)
        with caplog.at_level(logging.WARNING, "umem"):
            training.steps(2)
        assert kept() == 3
        assert caplog.text.count("they stay in memory, and no more are moved there") == 1
        training.end()


def test_states_that_cannot_be_read_are_those_of_before_the_step(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with enabled(disk):
        training = Training()
        training.steps(2)
        before = [t.clone() for t in training.states()]
        with monkeypatch.context() as patch:
            fails_at(patch, "preadv", 0)
            with pytest.raises(StateError, match=r"of 12 parameters failed: .*read of 1048576 byt"):
                training.steps(1)
        after = training.states()
        changed = [not torch.equal(a, b) for a, b in zip(before, after, strict=True)]
        assert 0 < sum(changed) < len(changed)
        training.steps(1)
        training.end()


def test_short_transfers_go_on(file: StateFile, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(100_003)
    tensor = file.keep(values, values.stride())
    for call in ("preadv", "pwritev"):
        real = getattr(os, call)
        monkeypatch.setattr(
            os, call, lambda fd, blocks, at, real=real: real(fd, [blocks[0][:4096]], at)
        )
    with file.lend([tensor]):
        tensor.add_(1)
    file.settle()
    assert torch.equal(tensor, values + 1)


def test_an_error_in_an_update_writes_nothing(file: StateFile) -> None:
    values = torch.randn(SIDE, SIDE).t()
    tensor = file.keep(values, values.stride())
    lent = file.lend([tensor])
    lent.__enter__()
    tensor.add_(1)
    lent.__exit__(RuntimeError, RuntimeError(), None)
    file.settle()
    assert tensor.stride() == values.stride()
    assert torch.equal(tensor, values)


def test_what_needs_more_than_the_limit_or_is_no_disk_is_refused(disk: Path) -> None:
    words = r"states take about 12.02 MiB.*space for 11 MiB"
    with enabled(f"{disk}:11MiB"), pytest.raises(ConfigError, match=words):
        Training()
    with pytest.raises(OSError, match="in this machine's memory"):
        open_unnamed(Path("/dev/shm"))


def test_a_forked_child_leaves_the_parents_states(disk: Path) -> None:
    from support import program

    code, out, err = program.run(
        """
        umem.disable()
        umem.enable(budget="24MiB", device="soft", policy="lru", disk=DISK)
        net = torch.nn.Linear(512, 512)
        optimizer = torch.optim.AdamW(net.parameters())
        paged = umem.page_optimizer(optimizer, update="host")
        def step():
            net(torch.ones(4, 512)).sum().backward()
            optimizer.step()
        step()
        state = optimizer.state[net.weight]["exp_avg"]
        before = state.clone()
        pid = os.fork()
        if pid == 0:
            step()
            os._exit(int(torch.equal(optimizer.state[net.weight]["exp_avg"], before)))
        print(os.waitpid(pid, 0)[1], torch.equal(state, before))
        """.replace("DISK", repr(str(disk)))
    )
    assert (code, out, err) == (0, "0 True\n", "")


def test_states_are_outside_of_umems_memory(file: StateFile) -> None:
    with enabled(None):
        tensor = file.keep(torch.zeros(SIDE, SIDE), (SIDE, 1))
        assert not core.owns(tensor.data_ptr())
