"""Optimizer state on a disk: bits, space, and disks that fail."""

from __future__ import annotations

import copy
import errno
import gc
import io
import logging
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import umem  # noqa: E402
from umem.base.native import core  # noqa: E402
from umem.base.scratch_file import open_unnamed  # noqa: E402
from umem.base.units import MIB  # noqa: E402
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
        return self.states_of(self.optimizer)

    @staticmethod
    def states_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        found = optimizer.state_dict()["state"]
        # By parameter: overlapping updates add states in the order in which they return.
        return [found[number][name] for number in sorted(found) for name in sorted(found[number])]

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


def test_memory_holds_four_chunks_at_a_time(disk: Path) -> None:
    with enabled(disk):
        training = Training()
        training.steps()
        found = state_file.current()
        assert found is not None
        assert 0 < sum(map(len, found._stagings)) <= 4 * 2 * (LAYER + 4096)
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
            training.optimizer.load_state_dict(copy.deepcopy(saved))
            training.steps(1)
            found = state_file.current()
            assert found is not None
            reserved.append(found._reserved)
        del saved
        assert reserved[1:] == reserved[1:2] * 3
        training.end()


def test_paging_again_needs_no_more_space(disk: Path) -> None:
    with enabled(f"{disk}:30MiB"):
        training = Training()
        for give_back in (True, False, True):
            training.steps(1)
            training.paged.remove(give_back=give_back)
            gc.collect()
            training.paged = umem.page_optimizer(training.optimizer, update="host")
        training.end()


def test_a_large_file_takes_few_descriptors(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_file, "_EXTENT", 64 << 10)
    made = StateFile(disk)
    before = len(list(Path("/proc/self/fd").iterdir()))
    values = torch.arange(16 << 10, dtype=torch.float32)
    kept = [made.keep(values + i, (1,)) for i in range(64)]
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 8
    assert all(torch.equal(t, values + i) for i, t in enumerate(kept))
    made.close()


class Writes:
    """Writes that are slow, and of which one fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: int | None = None) -> None:
        self._real = os.pwritev
        self._left = fails
        self.wait = 0.05
        monkeypatch.setattr(os, "pwritev", self._write)

    def _write(self, *args: Any) -> int:
        time.sleep(self.wait)
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                self._left = None
                raise OSError(errno.EIO, "no luck")
        return self._real(*args)


@pytest.mark.parametrize("fails", [None, 3, 10])
def test_a_step_that_overlaps_writes_reads_what_they_write(
    fails: int | None, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(disk: Path | None) -> list[Any]:
        with enabled(disk):
            training = Training(overlap=True)
            training.steps(2)
            training.states()
            with monkeypatch.context() as patch:
                Writes(patch, fails)
                training.steps(3)
            training.steps(1)
            return training.end()

    for a, b in zip(trained(None), trained(disk), strict=True):
        assert np.array_equal(a, b)


def test_copies_of_the_optimizer_have_states_that_are_being_written(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with enabled(disk):
        training = Training(overlap=True)
        training.steps(1)
        with monkeypatch.context() as patch:
            Writes(patch)
            training.steps(1)
            for parameter in training.net.parameters():
                parameter.sum()  # has arrived
            copied = copy.deepcopy(training.optimizer)
        for a, b in zip(training.states(), Training.states_of(copied), strict=True):
            assert torch.equal(a, b)
        del copied
        training.end()


def test_a_write_that_is_not_awaited_is_not_forgotten(
    file: StateFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = [file.keep(torch.zeros(LAYER // 4), (1,)) for _ in range(2)]
    may = [threading.Event(), threading.Event()]
    real, offsets = os.pwritev, [file._ranges[t.data_ptr()].offset for t in kept]

    def when_it_may(fd: int, blocks: Any, at: int) -> int:
        may[offsets.index(at)].wait()
        return real(fd, blocks, at)

    monkeypatch.setattr(os, "pwritev", when_it_may)
    with file.lend(kept[:1]):
        pass
    settling = threading.Thread(target=file.settle)
    settling.start()
    while file._writer._work_queue.qsize() == 0:
        time.sleep(0.001)
    with (lent := file.lend(kept[1:])):
        lent.of(kept[1]).add_(1)
    may[0].set()
    settling.join()
    again = file.lend(kept[1:])
    may[1].set()
    with again:
        again.of(kept[1]).add_(1)
    file.settle()
    assert float(kept[1][0]) == 2


def test_a_loan_that_is_not_used_holds_up_no_other(file: StateFile) -> None:
    """More loans than buffers: the reads of the last ones wait for the first to be given back."""
    states = [file.keep(torch.full((SIDE, SIDE), float(i)), (SIDE, 1)) for i in range(8)]
    loans = [file.lend([state]) for state in states]
    for loan in loans[5:]:
        loan.end(write=False)
    for i, loan in enumerate(loans[:5]):
        with loan:
            loan.of(states[i]).add_(1)
    file.settle()
    assert [float(state[0, 0]) for state in states] == [1, 2, 3, 4, 5, 5, 6, 7]


def test_the_programs_tensors_stay_what_they_are(file: StateFile) -> None:
    """A view that is taken in an update has the state's bytes after it, too."""
    tensor = file.keep(torch.zeros(LAYER // 4), (1,))
    with (lent := file.lend([tensor])):
        view = tensor.view(2, -1)
        lent.of(tensor).add_(1)
    with file.lend([file.keep(torch.full((LAYER // 4,), 7.0), (1,))]):
        pass
    file.settle()
    assert bool((view == 1).all())
    view.add_(1)
    with (lent := file.lend([tensor])):
        assert bool((lent.of(tensor) == 2).all())


def test_masters_are_there_after_their_first_step(disk: Path) -> None:
    with enabled(disk):
        training = Training(torch.bfloat16, masters=True)
        training.steps(1)
        assert kept() == 6 * 3
        training.end()


def test_interrupts_leave_memory_for_later_steps(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with enabled(disk):
        training = Training()
        training.steps(1)
        for _ in range(6):
            with monkeypatch.context() as patch:
                patch.setattr(host_update, "_once", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    training.steps(1)
        training.steps(2)
        training.end()


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


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
    with (lent := file.lend([tensor])):
        lent.of(tensor).add_(1)
    file.settle()
    assert torch.equal(tensor, values + 1)


def test_an_error_in_an_update_writes_nothing(file: StateFile) -> None:
    values = torch.randn(SIDE, SIDE).t()
    tensor = file.keep(values, values.stride())
    lent = file.lend([tensor])
    lent.__enter__()
    lent.of(tensor).add_(1)
    lent.__exit__(RuntimeError, RuntimeError(), None)
    file.settle()
    assert tensor.stride() == values.stride()
    assert torch.equal(tensor, values)


def test_smaller_states_take_the_place_of_larger_ones(disk: Path) -> None:
    file = StateFile(disk, limit=4 * MIB)
    large = [file.keep(torch.zeros(MIB // 2), (1,)) for _ in range(2)]  # of 2 MiB
    assert all(map(file.holds, large))
    del large
    assert file.room() == 4 * MIB
    small = [file.keep(torch.full((MIB // 4,), float(i)), (1,)) for i in range(4)]
    assert all(map(file.holds, small))
    assert file.room() == 0
    assert [t.unique().tolist() for t in small] == [[0.0], [1.0], [2.0], [3.0]]
    del small
    file.close()


def test_the_file_serves_after_its_folder_was_deleted(disk: Path) -> None:
    folder = disk / "short-lived"
    folder.mkdir()
    file = StateFile(folder, limit=4 * MIB)
    folder.rmdir()
    assert file.room() == 4 * MIB
    kept = file.keep(torch.ones(MIB // 2), (1,))
    assert file.holds(kept)
    assert file.room() == 2 * MIB
    del kept
    file.close()


def test_states_that_could_be_written_nowhere_are_an_error(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fails, and there is no memory instead."""

    def fails(*_: object) -> None:
        raise MemoryError("of the test")

    with enabled(disk):
        training = Training()
        training.steps(2)
        with monkeypatch.context() as patch:
            Writes(patch, 3)
            patch.setattr(state_file, "copy_of", fails)
            training.steps(1)
        with pytest.raises(StateError, match="could be written nowhere: of the test"):
            training.steps(1)
        training.paged.remove()
        del training
        gc.collect()


def test_what_needs_more_than_the_limit_or_is_no_disk_is_refused(disk: Path) -> None:
    words = r"states take about 12.02 MiB.*space for 11 MiB"
    with enabled(f"{disk}:11MiB"), pytest.raises(ConfigError, match=words):
        Training()
    with pytest.raises(OSError, match="in this machine's memory"):
        open_unnamed(Path("/dev/shm"))


@pytest.mark.parametrize("child", ["", "full", "off"])
def test_a_forked_child_leaves_the_parents_states(child: str, disk: Path) -> None:
    """Also with a disk of its own that is full, and with umem off since before the fork."""
    from support import program

    code, out, err = program.run(
        """
        from umem.offload.optimizer.state_file import StateFile
        umem.disable()
        umem.enable(budget="24MiB", device="soft", policy="lru", disk=DISK)
        net = torch.nn.Linear(512, 512)
        optimizer = torch.optim.AdamW(net.parameters())
        paged = umem.page_optimizer(optimizer, update="host")
        def step():
            net(torch.ones(4, 512)).sum().backward()
            optimizer.step()
        step()
        states = [optimizer.state[net.weight][name] for name in ("exp_avg", "exp_avg_sq")]
        before = [state.clone() for state in states]
        if OFF:
            umem.disable()
        pid = os.fork()
        if pid == 0:
            if FULL:
                StateFile._take = lambda *_: exec('raise OSError(28, "full")')
            step()
            os._exit(int(torch.equal(optimizer.state[net.weight]["exp_avg"], before[0])))
        print(os.waitpid(pid, 0)[1], all(map(torch.equal, states, before)))
        """.replace("DISK", repr(str(disk)))
        .replace("OFF", str(child == "off"))
        .replace("FULL", str(child == "full"))
    )
    assert (code, out) == (0, "0 True\n"), err


def test_states_are_outside_of_umems_memory(file: StateFile) -> None:
    with enabled(None):
        tensor = file.keep(torch.zeros(SIDE, SIDE), (SIDE, 1))
        assert not core.owns(tensor.data_ptr())


@pytest.mark.nightly
def test_the_bench_runs(disk: Path) -> None:
    bench = Path(__file__).resolve().parents[2] / "bench" / "disk_states.py"
    command = [sys.executable, str(bench), "--smoke", "--disk", str(disk)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "| disk / max(memory, reads and writes) |" in done.stdout, done.stderr


def test_a_state_that_is_in_the_file_already_is_copied_as_it_is_now(file: StateFile) -> None:
    values = torch.randn(SIDE, SIDE)
    first = file.keep(values, values.stride())
    with (lent := file.lend([first])):
        lent.of(first).add_(1)
    second = file.keep(first, first.stride())  # the write may be under way
    assert file.holds(second)
    assert second.data_ptr() != first.data_ptr()
    assert torch.equal(second, values + 1)


def test_states_beyond_the_limit_stay_in_memory_as_is_told_once(
    disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = StateFile(disk, 2 * LAYER)
    with caplog.at_level(logging.WARNING, "umem"):
        states = [file.keep(torch.full((SIDE, SIDE), float(i)), (SIDE, 1)) for i in range(4)]
    assert [file.holds(state) for state in states] == [True, True, False, False]
    assert [float(state.min()) for state in states] == [0, 1, 2, 3]
    assert caplog.text.count("the limit of 2 MiB is reached; the others stay in memory") == 1
    assert not file.takes(states[3])
    del states[0]
    gc.collect()
    assert file.takes(states[2])  # in the space of the first
    file.close()


def test_an_interrupt_while_a_state_moves_gives_its_space_back(
    file: StateFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    values = torch.randn(SIDE, SIDE)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", interrupted)
        with pytest.raises(KeyboardInterrupt):
            file.keep(values, (SIDE, 1))
    assert file.works
    assert torch.equal(file.keep(values, (SIDE, 1)), values)
    assert file._reserved == LAYER


def test_a_disk_that_fails_again_is_told_once(
    file: StateFile, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*_: object) -> int:
        raise OSError(errno.EIO, "no luck")

    states = [file.keep(torch.full((SIDE, SIDE), float(i)), (SIDE, 1)) for i in range(3)]
    monkeypatch.setattr(os, "pwritev", failing)
    with caplog.at_level(logging.WARNING, "umem"):
        for state in states:
            with (lent := file.lend([state])):
                lent.of(state).add_(1)
        file.settle()
    assert [float(state.min()) for state in states] == [1, 2, 3]
    assert caplog.text.count("states that cannot be written are in memory instead") == 1
    assert not file.works


def test_a_read_at_the_end_of_a_file_that_was_cut_is_an_error(
    file: StateFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = file.keep(torch.ones(SIDE, SIDE), (SIDE, 1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", lambda *_: 0)  # nothing is left
        words = f"0 of {LAYER} bytes were transferred"
        with pytest.raises(OSError, match=words), file.lend([state]):
            pytest.fail("the states are not there")
    with (lent := file.lend([state])):
        lent.of(state).add_(1)
    file.settle()
    assert float(state.min()) == 2


def test_a_loan_that_is_ended_again_is_given_back_once(file: StateFile) -> None:
    states = [file.keep(torch.full((SIDE, SIDE), float(i)), (SIDE, 1)) for i in range(2)]
    loan = file.lend(states[:1])
    with loan:
        loan.of(states[0]).add_(5)
    loan.end(write=False)  # a handler of errors may do so
    file.settle()
    assert float(states[0].min()) == 5
    assert file._loans._value == state_file._LOANS


def test_a_loan_without_memory_for_its_states_holds_up_no_other(
    file: StateFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(*_: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    state = file.keep(torch.ones(SIDE, SIDE), (SIDE, 1))
    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", none_left)
        for _ in range(2 * state_file._LOANS):
            with pytest.raises(OSError, match="Cannot allocate"), file.lend([state]):
                pytest.fail("the states are not there")
    with (lent := file.lend([state])):
        lent.of(state).add_(1)
    file.settle()
    assert float(state.min()) == 2
