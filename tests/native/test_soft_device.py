"""Behaviour specific to the software device: pages that leave and return, faults, virtual time,
system calls on evicted pages, forked children, injected failures.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import random
import select
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.driver import (
    DEVICE,
    FRAMES,
    GLOBAL,
    HOST,
    OUT_OF_MEMORY,
    PAGE,
    SUCCESS,
    Driver,
)
from support.system_calls import as_buffer, evicted, reading

READ_MOSTLY, UNSET_READ_MOSTLY, SET_PREFERRED, SET_ACCESSED_BY = 1, 2, 3, 5


def test_touch_faults_once_a_page(driver: Driver) -> None:
    ptr = driver.alloc(4)
    assert driver.states(ptr, 4) == ["void"] * 4
    driver.calls.touch(ptr, 4 * PAGE)
    driver.calls.touch(ptr, 4 * PAGE)
    assert driver.states(ptr, 4) == ["device"] * 4
    assert driver.calls.telemetry()["faults"] == 4
    assert driver.calls.telemetry()["fault_bytes_in"] == 0  # nothing to copy


def test_prefetched_pages_do_not_fault(driver: Driver) -> None:
    ptr = driver.alloc(4)
    driver.prefetch(ptr, 4, DEVICE)
    driver.calls.touch(ptr, 4 * PAGE)
    assert driver.calls.telemetry()["faults"] == 0


def test_frames_bound_what_is_resident(driver: Driver) -> None:
    ptr = driver.alloc(3 * FRAMES)
    driver.calls.touch(ptr, 3 * FRAMES * PAGE)
    told = driver.calls.telemetry()
    assert told["resident_bytes"] == told["peak_resident_bytes"] == FRAMES * PAGE
    assert told["pressure_bytes_out"] == 2 * FRAMES * PAGE
    assert driver.states(ptr, 3 * FRAMES).count("device") == FRAMES


def test_eviction_order_is_by_migration_not_by_access(driver: Driver) -> None:
    ptr = driver.alloc(FRAMES + 1)
    driver.calls.touch(ptr, FRAMES * PAGE)
    driver.calls.touch(ptr, PAGE)  # an access, not a migration
    driver.calls.touch(ptr + FRAMES * PAGE, PAGE)
    assert driver.states(ptr, 2) == ["host", "device"]


def test_prefetch_of_a_resident_page_refreshes_it(driver: Driver) -> None:
    ptr = driver.alloc(FRAMES + 1)
    driver.calls.touch(ptr, FRAMES * PAGE)
    driver.prefetch(ptr, 1, DEVICE)
    driver.calls.touch(ptr + FRAMES * PAGE, PAGE)
    assert driver.states(ptr, 2) == ["device", "host"]


def test_discarded_pages_go_first_and_are_not_copied(driver: Driver) -> None:
    ptr = driver.alloc(FRAMES + 2)
    driver.calls.touch(ptr, FRAMES * PAGE)
    driver.discard(ptr + 8 * PAGE, 2 * PAGE)
    driver.calls.touch(ptr + FRAMES * PAGE, 2 * PAGE)
    assert driver.calls.telemetry()["pressure_bytes_out"] == 0
    assert driver.states(ptr + 8 * PAGE, 2) == ["void", "void"]


def test_a_discarded_page_reads_as_poison(driver: Driver) -> None:
    driver.calls.set_poison(True)
    ptr = driver.alloc(1)
    driver.calls.store(ptr, b"data")
    driver.discard(ptr, PAGE)
    assert driver.states(ptr, 1) == ["discarded"]
    assert driver.calls.load(ptr, 4) == b"\xdb" * 4


def test_discard_and_prefetch_copies_nothing(driver: Driver) -> None:
    ptr = driver.alloc(4)
    driver.calls.touch(ptr, 4 * PAGE)
    driver.prefetch(ptr, 4, HOST)
    before = driver.calls.telemetry()["bytes_in"]
    result = driver.calls.cuMemDiscardAndPrefetchBatchAsync(
        [ptr], [4 * PAGE], [DEVICE], [0], 0, driver.stream
    )
    assert result == SUCCESS
    assert driver.states(ptr, 4) == ["device"] * 4
    assert driver.calls.telemetry()["bytes_in"] == before


def test_read_mostly_duplicates_and_collapses_on_write(driver: Driver) -> None:
    ptr = driver.alloc(2)
    driver.calls.store(ptr, b"weights")
    driver.prefetch(ptr, 2, HOST)
    assert driver.calls.cuMemAdvise(ptr, 2 * PAGE, READ_MOSTLY, DEVICE) == SUCCESS
    driver.prefetch(ptr, 2, DEVICE)
    assert driver.states(ptr, 2) == ["duplicate"] * 2
    out = driver.calls.telemetry()["bytes_out"]
    driver.prefetch(ptr, 1, HOST)  # it is there, and remains on the device too
    assert driver.calls.telemetry()["bytes_out"] == out
    assert driver.states(ptr, 2) == ["duplicate"] * 2
    assert driver.calls.load(ptr, 7) == b"weights"
    driver.calls.store(ptr, b"changed")
    assert driver.states(ptr, 2) == ["device", "duplicate"]
    driver.prefetch(ptr, 2, HOST)  # only changed pages must be copied
    assert driver.calls.telemetry()["bytes_out"] == out + PAGE
    assert driver.states(ptr, 2) == ["duplicate"] * 2
    assert driver.calls.load(ptr, 7) == b"changed"


@pytest.mark.parametrize(
    ("preferred", "state"), [(HOST, "host"), (DEVICE, "device"), (None, "host")]
)
def test_the_end_of_read_mostly_leaves_one_copy_without_a_transfer(
    driver: Driver, preferred: tuple[int, int] | None, state: str
) -> None:
    ptr = driver.alloc(3)
    driver.calls.store(ptr, b"first")
    driver.calls.store(ptr + PAGE, b"second")
    driver.prefetch(ptr, 3, HOST)
    assert driver.calls.cuMemAdvise(ptr, 3 * PAGE, READ_MOSTLY, DEVICE) == SUCCESS
    driver.prefetch(ptr, 2, DEVICE)
    driver.calls.store(ptr + PAGE, b"newer")  # the host's copy of this page is stale
    assert driver.states(ptr, 3) == ["duplicate", "device", "host"]
    before = driver.calls.telemetry()
    if preferred:
        assert driver.calls.cuMemAdvise(ptr, 3 * PAGE, SET_PREFERRED, preferred) == SUCCESS
    assert driver.calls.cuMemAdvise(ptr, 3 * PAGE, UNSET_READ_MOSTLY, DEVICE) == SUCCESS
    # Pages on one side only remain there.
    assert driver.states(ptr, 3) == [state, "device", "host"]
    after = driver.calls.telemetry()
    assert (after["bytes_in"], after["bytes_out"]) == (before["bytes_in"], before["bytes_out"])
    freed = before["resident_bytes"] - after["resident_bytes"]
    assert freed == (PAGE if state == "host" else 0)
    assert driver.calls.load(ptr + PAGE, 6) == b"newerd"
    assert driver.calls.load(ptr, 5) == b"first"


@pytest.mark.parametrize("advice", ["preferred-host", "accessed-by"])
def test_zero_copy_leaves_host_pages_on_the_host(driver: Driver, advice: str) -> None:
    ptr = driver.alloc(2)
    driver.calls.store(ptr, b"host")
    driver.prefetch(ptr, 2, HOST)
    if advice == "preferred-host":
        assert driver.calls.cuMemAdvise(ptr, 2 * PAGE, SET_PREFERRED, HOST) == SUCCESS
    else:
        assert driver.calls.cuMemAdvise(ptr, 2 * PAGE, SET_ACCESSED_BY, DEVICE) == SUCCESS
    moved = driver.calls.telemetry()["fault_bytes_in"]
    assert driver.calls.load(ptr, 4) == b"host"
    driver.calls.store(ptr + 4, b"ed")
    assert driver.states(ptr, 1) == ["host"]
    assert driver.calls.telemetry()["fault_bytes_in"] == moved
    driver.prefetch(ptr, 2, DEVICE)  # a prefetch migrates against the preference
    assert driver.states(ptr, 2) == ["device"] * 2
    assert driver.calls.load(ptr, 6) == b"hosted"


def test_host_backing_is_kept_until_free(driver: Driver) -> None:
    ptr = driver.alloc(4)
    driver.calls.touch(ptr, 4 * PAGE)
    driver.prefetch(ptr, 4, HOST)
    driver.prefetch(ptr, 4, DEVICE)
    assert driver.calls.telemetry()["host_bytes"] == 4 * PAGE


def test_virtual_time_follows_the_profile(driver: Driver) -> None:
    c = driver.calls
    ptr = driver.alloc(8)
    driver.prefetch(ptr, 8, HOST)
    start = c.now_us()
    driver.prefetch(ptr, 8, DEVICE)
    assert c.now_us() - start == pytest.approx(8 * PAGE / 25e3)  # a100-pcie4: 25 GB/s
    c.launch(0, 100.0)
    assert c.cuStreamSynchronize(0) == SUCCESS
    assert c.now_us() - start == pytest.approx(8 * PAGE / 25e3 + 100.0)


def test_the_two_directions_overlap_and_one_direction_queues(driver: Driver) -> None:
    c = driver.calls
    _, other = c.cuStreamCreate(1)
    a, b = driver.alloc(4), driver.alloc(4)
    driver.prefetch(a, 4, HOST)
    driver.prefetch(b, 4, DEVICE)
    start = c.now_us()
    c.cuMemPrefetchAsync(a, 4 * PAGE, DEVICE, 0, driver.stream)
    c.cuMemPrefetchAsync(b, 4 * PAGE, HOST, 0, other)
    c.cuCtxSynchronize()
    one_way = 4 * PAGE / 25e3
    assert c.now_us() - start == pytest.approx(one_way)
    c.cuMemPrefetchAsync(a, 4 * PAGE, HOST, 0, driver.stream)
    c.cuCtxSynchronize()
    start = c.now_us()
    c.cuMemPrefetchAsync(a, 4 * PAGE, DEVICE, 0, driver.stream)
    c.cuMemPrefetchAsync(b, 4 * PAGE, DEVICE, 0, other)
    c.cuCtxSynchronize()
    assert c.now_us() - start == pytest.approx(2 * one_way)


def test_a_fault_costs_its_group_and_its_transfer(driver: Driver) -> None:
    ptr = driver.alloc(1)
    driver.prefetch(ptr, 1, HOST)
    before = driver.calls.telemetry()["stall_us"]
    driver.calls.touch(ptr, PAGE)
    stalled = driver.calls.telemetry()["stall_us"] - before
    assert stalled == pytest.approx(45 + PAGE / 25e3, abs=1.0)


def test_resize_evicts_and_grows(driver: Driver) -> None:
    ptr = driver.alloc(FRAMES)
    for page in range(FRAMES):
        driver.calls.store(ptr + page * PAGE, bytes([page + 1]))
    driver.calls.resize(6 * PAGE)
    assert driver.states(ptr, FRAMES).count("device") == 6
    driver.calls.resize(2 * FRAMES * PAGE)
    for page in range(FRAMES):
        assert driver.calls.load(ptr + page * PAGE, 1) == bytes([page + 1])
    assert driver.states(ptr, FRAMES).count("device") == FRAMES


def test_every_entry_point_can_be_made_to_fail(driver: Driver) -> None:
    c = driver.calls
    c.instrument()
    ptr = driver.alloc(1)

    def alloc_and_free() -> int:
        result, made = c.cuMemAllocManaged(PAGE, GLOBAL)
        assert c.cuMemFree(made) == SUCCESS
        return int(result)

    calls = {
        "cuMemAllocManaged": alloc_and_free,
        "cuMemPrefetchAsync": lambda: c.cuMemPrefetchAsync(ptr, PAGE, DEVICE, 0, driver.stream),
        "cuMemDiscardBatchAsync": lambda: c.cuMemDiscardBatchAsync([ptr], [PAGE], 0, driver.stream),
        "cuMemGetInfo": lambda: c.cuMemGetInfo()[0],
        "cuEventCreate": lambda: c.cuEventCreate(0)[0],
        "cuStreamCreate": lambda: c.cuStreamCreate(1)[0],
        "cuStreamSynchronize": lambda: c.cuStreamSynchronize(driver.stream),
    }
    for name, call in calls.items():
        made = c.calls(name)
        c.inject(name, 2, OUT_OF_MEMORY)
        assert [call(), call(), call()] == [SUCCESS, OUT_OF_MEMORY, SUCCESS]
        assert c.calls(name) == made + 3
    names = [name for name, _version in c.entries()]
    assert len(names) == len(set(names)) >= 38


# --- system calls on evicted pages ---------------------------------------------------------------


def test_write_and_read_reach_evicted_pages(driver: Driver, tmp_path: Path) -> None:
    ptr, data = evicted(driver, 2 * FRAMES)  # twice what fits the device
    path = tmp_path / "data"
    with path.open("wb", buffering=0) as file:
        written = 0
        view = as_buffer(ptr, len(data))
        while written < len(data):
            written += file.write(view[written:])
    assert path.read_bytes() == data
    target = driver.alloc(2 * FRAMES)
    with path.open("rb", buffering=0) as file:
        got = 0
        view = as_buffer(target, len(data))
        while got < len(data):
            got += file.readinto(view[got:])
    assert driver.calls.load(target, len(data)) == data


def test_vectored_and_positioned_calls(driver: Driver, tmp_path: Path) -> None:
    ptr, data = evicted(driver, 4)
    other, _ = evicted(driver, 4)
    half = 2 * PAGE
    fd = os.open(tmp_path / "data", os.O_RDWR | os.O_CREAT)
    try:
        parts = [as_buffer(ptr + half, half), as_buffer(ptr, half)]
        assert os.writev(fd, parts) == 2 * half
        assert os.pwrite(fd, as_buffer(ptr, half), 0) == half
        os.lseek(fd, 0, os.SEEK_SET)
        into = [as_buffer(other, half), as_buffer(other + half, half)]
        assert os.readv(fd, into) == 2 * half
        driver.prefetch(ptr, 4, HOST)
        assert os.pwritev(fd, [as_buffer(ptr, half)], 2 * half) == half
        again, _ = evicted(driver, 4)
        assert os.preadv(fd, [as_buffer(again, half)], 2 * half) == half
        assert driver.calls.load(again, half) == data[:half]
    finally:
        os.close(fd)
    assert driver.calls.load(other, half) == data[:half]
    assert driver.calls.load(other + half, half) == data[:half]


def test_numpy_tofile_and_fromfile(driver: Driver, tmp_path: Path) -> None:
    np = pytest.importorskip("numpy")
    ptr, data = evicted(driver, 4)
    array = np.frombuffer(as_buffer(ptr, len(data)), dtype=np.uint8)
    array.tofile(tmp_path / "array")
    assert (tmp_path / "array").read_bytes() == data


def test_a_window_ends_with_its_call(driver: Driver, tmp_path: Path) -> None:
    ptr, data = evicted(driver, 2)
    (tmp_path / "data").write_bytes(as_buffer(ptr, len(data)))
    faults = driver.calls.telemetry()["faults"]
    driver.calls.touch(ptr, 2 * PAGE)  # back under the device's rules
    assert driver.calls.telemetry()["faults"] == faults + 2
    assert driver.states(ptr, 2) == ["device"] * 2


def test_errors_of_other_buffers_stay_errors(driver: Driver) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    reader, writer = os.pipe()
    try:
        assert libc.write(writer, ctypes.c_void_p(8), 16) == -1
        assert ctypes.get_errno() == 14  # EFAULT
    finally:
        os.close(reader)
        os.close(writer)


# --- threads, forks, signal handlers -------------------------------------------------------------


def test_threads_fault_side_by_side(driver: Driver) -> None:
    threads, pages = 4, 12
    ptr = driver.alloc(threads * pages)
    wrong: list[tuple[int, int]] = []

    def work(index: int) -> None:
        base = ptr + index * pages * PAGE
        for round_ in range(5):
            for page in range(pages):
                driver.calls.store(base + page * PAGE, bytes([index, page, round_]))
            for page in range(pages):
                if driver.calls.load(base + page * PAGE, 3) != bytes([index, page, round_]):
                    wrong.append((index, page))

    workers = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert not any(worker.is_alive() for worker in workers)
    assert wrong == []


def test_many_threads_fault_on_one_page() -> None:
    """Losers of the race for a page are not taken for threads that paging cannot serve."""
    done = run_python(
        PREAMBLE
        + """
import threading
page, threads, rounds = 2 << 20, 96, 40
start, end = threading.Barrier(threads + 1), threading.Barrier(threads + 1)
def work():
    for _ in range(rounds):
        start.wait(); ctypes.memset(ptr, 1, 1); end.wait()
threading.stack_size(256 << 10)
workers = [threading.Thread(target=work) for _ in range(threads)]
[w.start() for w in workers]
for _ in range(rounds):
    d.touch(ptr + 16 * page, 16 * page)
    start.wait(); end.wait()
[w.join() for w in workers]
print("ok")
"""
    )
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_its_own_copy(driver: Driver) -> None:
    pages = 2 * FRAMES
    ptr = driver.alloc(pages)
    for page in range(pages):
        driver.calls.store(ptr + page * PAGE, b"parent%02d" % page)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        good = all(
            driver.calls.load(ptr + page * PAGE, 8) == b"parent%02d" % page for page in range(pages)
        )
        for page in range(pages):
            driver.calls.store(ptr + page * PAGE, b"child%02d!" % page)
        good &= all(
            driver.calls.load(ptr + page * PAGE, 8) == b"child%02d!" % page for page in range(pages)
        )
        os.write(writer, b"y" if good else b"n")
        os._exit(0)
    for page in range(pages):  # while the child works
        driver.calls.store(ptr + page * PAGE + 64, b"later")
    os.waitpid(child, 0)
    assert os.read(reader, 1) == b"y"
    os.close(reader)
    os.close(writer)
    for page in range(pages):
        assert driver.calls.load(ptr + page * PAGE, 8) == b"parent%02d" % page
        assert driver.calls.load(ptr + page * PAGE + 64, 5) == b"later"


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )


PREAMBLE = """
import ctypes, os, signal, sys
import _core_testing as d
from umem import _core
d.open_soft(16 * (2 << 20), "a100-pcie4")
ptr = d.cuMemAllocManaged(64 << 20, 1)[1]
d.touch(ptr, 64 << 20)
"""


def test_faulthandler_enabled_afterwards_keeps_paging() -> None:
    done = run_python(
        PREAMBLE + "import faulthandler; faulthandler.enable(); d.touch(ptr, 64 << 20); print('ok')"
    )
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


@pytest.mark.parametrize("enable", ["", "import faulthandler; faulthandler.enable()\n"])
def test_a_real_segmentation_fault_still_ends_the_process(enable: str) -> None:
    done = run_python(PREAMBLE + enable + "ctypes.string_at(16)")
    assert done.returncode == -11
    assert ("Segmentation fault" in done.stderr) == bool(enable)


def test_use_of_freed_managed_memory_is_a_segmentation_fault() -> None:
    done = run_python(PREAMBLE + "d.cuMemFree(ptr); d.touch(ptr, 64 << 20)")
    assert done.returncode == -11


def test_a_python_handler_for_sigsegv_does_not_take_faults_away() -> None:
    done = run_python(
        PREAMBLE
        + "old = signal.signal(signal.SIGSEGV, lambda *a: print('seen'))\n"
        + "d.touch(ptr, 64 << 20); os.kill(os.getpid(), signal.SIGSEGV); print('ok')"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "seen\nok\n"


def test_a_handler_set_by_ctypes_does_not_take_faults_away() -> None:
    done = run_python(
        PREAMBLE
        + "libc = ctypes.CDLL('libc.so.6'); libc.signal(11, None); d.touch(ptr, 64 << 20)\n"
        + "print('ok', flush=True); ctypes.string_at(16)"
    )
    assert (done.returncode, done.stdout) == (-11, "ok\n"), done.stderr


@pytest.mark.parametrize("name", ["sysv_signal", "__sysv_signal"])
def test_a_handler_for_one_signal_is_called_once(name: str) -> None:
    """Such a handler may return, or raise the signal again, and relies on the default action."""
    done = run_python(
        PREAMBLE
        + f"""
handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda _: os.write(1, b"seen\\n") and None)
ctypes.CDLL("libc.so.6").{name}(11, handler)
d.touch(ptr, 64 << 20)
ctypes.string_at(16)
"""
    )
    assert (done.returncode, done.stdout) == (-11, "seen\n"), done.stderr


def test_threads_that_block_all_signals_have_page_faults() -> None:
    """As the threads of ZeroMQ."""
    done = run_python(
        PREAMBLE
        + """
import threading
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
d.touch(ptr, 64 << 20)
thread = threading.Thread(target=d.touch, args=(ptr, 64 << 20))
thread.start()
thread.join()
print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))
"""
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_a_child_may_set_a_handler_while_another_thread_installs_umems() -> None:
    done = run_python(
        """
import faulthandler, os, signal, threading
from umem import _core
options = _core.Options()
options.device, options.policy = "soft", "lru"
options.budget_bytes = options.floor_bytes = 64 << 20
_core.start(options)
stop = False
def step():  # each puts umem's handler back, if another one took its place
    while not stop:
        _core.step()
thread = threading.Thread(target=step)
thread.start()
for _ in range(300):
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        faulthandler.enable()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if status:
        break
stop = True
thread.join()
print(status)
"""
    )
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


def test_signals_that_touch_managed_memory_do_not_deadlock() -> None:
    done = run_python(
        PREAMBLE
        + """
hits = 0
def handler(*_):
    global hits
    hits += 1
    d.touch(ptr + (hits % 32) * (2 << 20), 1)
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
for _ in range(100):
    d.touch(ptr, 64 << 20)
signal.setitimer(signal.ITIMER_REAL, 0)
print("ok" if hits > 0 else "no signal came")
"""
    )
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


def test_faults_during_exit_are_served() -> None:
    done = run_python(
        PREAMBLE
        + """
libc = ctypes.CDLL(None)
late = ctypes.CFUNCTYPE(None)(lambda: None)
import atexit
atexit.register(lambda: d.touch(ptr, 64 << 20))
class Last:
    def __del__(self, touch=d.touch, at=ptr): touch(at, 64 << 20)
sys.last = Last()
"""
    )
    assert done.returncode == 0, done.stderr


def test_executing_managed_memory_ends_the_process() -> None:
    done = run_python(PREAMBLE + "ctypes.CFUNCTYPE(None)(ptr)()")
    assert done.returncode == -11


def test_steps_and_imports_do_not_wait_for_each_other() -> None:
    done = run_python(
        PREAMBLE
        + """
import threading, time, _ctypes, pathlib
library = next(p for p in pathlib.Path(_ctypes.__file__).parent.glob("*.so"))
o = _core.Options(); stop = time.time() + 4
def load():
    while time.time() < stop:
        handle = _ctypes.dlopen(str(library), 0x102); _ctypes.dlclose(handle)
def step():
    while time.time() < stop: _core.step()
d.cuMemFree(ptr); d.close()
o.budget_bytes = 64 << 20; o.policy = "lru"; _core.start(o)
threads = [threading.Thread(target=f) for f in (load, step)]
[t.start() for t in threads]; [t.join() for t in threads]
print("ok")
"""
    )
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


@pytest.mark.parametrize("call", ["recv", "recvfrom", "recvmsg", "read"])
def test_a_datagram_is_not_lost(driver: Driver, call: str) -> None:
    ptr, _ = evicted(driver, 1)
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    into = as_buffer(ptr, 5)
    with left, right:
        right.settimeout(10)
        left.send(b"hello")
        if call == "recv":
            assert right.recv_into(into) == 5
        elif call == "recvfrom":
            assert right.recvfrom_into(into)[0] == 5
        elif call == "recvmsg":
            assert right.recvmsg_into([into])[0] == 5
        else:
            with open(right.fileno(), "rb", buffering=0, closefd=False) as file:
                assert file.readinto(into) == 5
    assert driver.calls.load(ptr, 5) == b"hello"


@pytest.mark.parametrize("call", ["sendto", "sendmsg"])
def test_an_evicted_datagram_is_sent(driver: Driver, call: str, tmp_path: Path) -> None:
    ptr, data = evicted(driver, 1)
    address = str(tmp_path / "socket")
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as left,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as right,
    ):
        right.bind(address)
        if call == "sendto":
            assert left.sendto(as_buffer(ptr, 1000), address) == 1000
        else:
            assert left.sendmsg([as_buffer(ptr, 1000)], [], 0, address) == 1000
        assert right.recv(2000) == data[:1000]


# --- pages do not move while a system call accesses them ---------------------------------


def test_what_a_call_accesses_is_not_evicted(driver: Driver) -> None:
    ptr = driver.alloc(FRAMES)
    driver.calls.touch(ptr, FRAMES * PAGE)
    moved = driver.calls.telemetry()
    with reading(ptr, 2 * PAGE) as end:
        assert driver.states(ptr, 2) == ["device"] * 2
        after = driver.calls.telemetry()
        assert (after["bytes_out"], after["bytes_in"]) == (moved["bytes_out"], moved["bytes_in"])
        other = driver.alloc(2 * FRAMES)
        driver.calls.touch(other, 2 * FRAMES * PAGE)
        driver.prefetch(ptr, 4, HOST)
        driver.discard(ptr, PAGE)
        assert driver.states(ptr, 4) == ["device"] * 2 + ["host"] * 2
        end(b"filled")
    assert driver.calls.load(ptr, 6) == b"filled"


def test_a_page_that_is_sent_to_the_host_during_a_call_goes_afterwards(driver: Driver) -> None:
    ptr = driver.alloc(3)
    driver.calls.touch(ptr, 3 * PAGE)
    with reading(ptr, 3 * PAGE) as end:
        driver.prefetch(ptr, 3, HOST)
        driver.prefetch(ptr + 2 * PAGE, 1, DEVICE)  # the last word counts
        assert driver.states(ptr, 3) == ["device"] * 3
        end(b"filled")
    assert driver.states(ptr, 3) == ["host", "host", "device"]
    assert driver.calls.load(ptr, 6) == b"filled"


def test_calls_leave_half_of_the_frames_to_others(driver: Driver) -> None:
    ptr = driver.alloc(FRAMES)
    data = random.Random(3).randbytes(FRAMES * PAGE)
    driver.calls.store(ptr, data)
    before = driver.calls.telemetry()
    with reading(ptr, FRAMES * PAGE) as end:
        assert driver.states(ptr, FRAMES) == ["device"] * FRAMES  # while no one else works
        other = driver.alloc(FRAMES)
        for _ in range(3):  # half of the frames: each page arrives once, and remains
            driver.calls.touch(other, FRAMES // 2 * PAGE)
        after = driver.calls.telemetry()
        assert after["faults"] == before["faults"] + FRAMES // 2
        assert after["pressure_bytes_out"] == before["pressure_bytes_out"] + FRAMES // 2 * PAGE
        assert driver.states(ptr, FRAMES).count("device") == FRAMES // 2
        driver.calls.touch(other, FRAMES * PAGE)  # they take no more of it
        assert driver.states(ptr, FRAMES).count("device") == FRAMES // 2
        assert driver.calls.load(ptr, len(data)) == data
        end(b"filled")
    assert driver.calls.load(ptr, len(data)) == b"filled" + data[6:]
    driver.calls.touch(ptr, FRAMES * PAGE)  # all frames can be had again
    assert driver.states(ptr, FRAMES) == ["device"] * FRAMES


def test_a_smaller_budget_during_a_call_takes_the_pages_of_the_call(driver: Driver) -> None:
    ptr = driver.alloc(FRAMES)
    data = random.Random(3).randbytes(FRAMES * PAGE)
    driver.calls.store(ptr, data)
    with reading(ptr, FRAMES * PAGE) as end:
        driver.calls.resize(4 * PAGE)
        assert driver.states(ptr, FRAMES).count("device") <= 4
        driver.calls.touch(driver.alloc(8), 8 * PAGE)
        end(b"filled")
    assert driver.calls.load(ptr, len(data)) == b"filled" + data[6:]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_forked_during_a_call_that_lost_frames_has_its_own_copy(driver: Driver) -> None:
    ptr = driver.alloc(FRAMES)
    data = random.Random(3).randbytes(FRAMES * PAGE)
    driver.calls.store(ptr, data)
    other = driver.alloc(4)
    with reading(ptr, FRAMES * PAGE) as end:
        driver.calls.touch(other, 4 * PAGE)
        child = os.fork()
        if child == 0:
            good = driver.calls.load(ptr, len(data)) == data
            driver.calls.store(ptr, b"child!" * (FRAMES * PAGE // 6))
            os._exit(0 if good else 1)
        assert os.waitpid(child, 0)[1] == 0
        end(b"filled")
    assert driver.calls.load(ptr, len(data)) == b"filled" + data[6:]


def test_a_call_reads_a_duplicated_page_that_loses_its_frame(driver: Driver) -> None:
    ptr = driver.alloc(FRAMES)
    data = random.Random(3).randbytes(FRAMES * PAGE)
    driver.calls.store(ptr, data)
    driver.prefetch(ptr, FRAMES, HOST)
    assert driver.calls.cuMemAdvise(ptr, FRAMES * PAGE, READ_MOSTLY, DEVICE) == SUCCESS
    driver.prefetch(ptr, FRAMES, DEVICE)
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb", buffering=0) as pipe, os.fdopen(writer, "wb", buffering=0):
        thread = threading.Thread(target=os.writev, args=(writer, [as_buffer(ptr, len(data))]))
        thread.start()
        while not select.select([pipe], [], [], 1)[0]:
            pass
        out = driver.calls.telemetry()["pressure_bytes_out"]
        driver.calls.touch(driver.alloc(4), 4 * PAGE)
        assert driver.calls.telemetry()["pressure_bytes_out"] == out  # the host has the bytes
        assert driver.states(ptr, FRAMES).count("host") == 4
        driver.calls.store(ptr + len(data) - 4, b"last")  # the call has not started
        got = bytearray()
        while len(got) < len(data):
            got += pipe.read(PAGE)
        thread.join(60)
    assert bytes(got) == data[:-4] + b"last"
    assert driver.calls.load(ptr, len(data)) == data[:-4] + b"last"


def test_a_call_into_a_page_that_another_only_reads(driver: Driver) -> None:
    ptr = driver.alloc(1)
    driver.calls.store(ptr, b"weights")
    driver.prefetch(ptr, 1, HOST)
    assert driver.calls.cuMemAdvise(ptr, PAGE, READ_MOSTLY, DEVICE) == SUCCESS
    driver.prefetch(ptr, 1, DEVICE)
    reader, writer = os.pipe()
    with (
        os.fdopen(reader, "rb", buffering=0) as source,
        os.fdopen(writer, "wb", buffering=0) as target,
    ):
        assert target.write(as_buffer(ptr, 7)) == 7
        assert driver.states(ptr, 1) == ["duplicate"]  # a copy on the host is still valid
        assert source.readinto(as_buffer(ptr + 7, 7)) == 7
    assert driver.states(ptr, 1) == ["device"]
    assert driver.calls.load(ptr, 14) == b"weights" * 2


def test_freed_during_a_call(driver: Driver) -> None:
    result, ptr = driver.calls.cuMemAllocManaged(FRAMES * PAGE, GLOBAL)
    assert result == SUCCESS
    driver.calls.touch(ptr, 2 * PAGE)
    with reading(ptr + 4 * PAGE, 1) as end:
        assert driver.calls.cuMemFree(ptr) == SUCCESS
        other = driver.alloc(2 * FRAMES)
        driver.calls.touch(other, 2 * FRAMES * PAGE)
        with contextlib.suppress(AssertionError):
            end(b"x")  # to freed memory: as in any program, its result is undefined


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_holds_nothing_for_its_parents_calls(driver: Driver) -> None:
    ptr = driver.alloc(FRAMES)
    driver.calls.touch(ptr, FRAMES * PAGE)
    with reading(ptr, 2 * PAGE) as end:
        driver.prefetch(ptr, 1, HOST)
        child = os.fork()
        if child == 0:
            good = driver.states(ptr, 2) == ["host", "device"]
            driver.prefetch(ptr, 2, HOST)
            good &= driver.states(ptr, 2) == ["host"] * 2
            os._exit(0 if good else 1)
        assert os.waitpid(child, 0)[1] == 0
        end(b"filled")
    assert driver.calls.load(ptr, 6) == b"filled"


@pytest.mark.parametrize("direct", [False, True])
def test_files_beside_evictions(driver: Driver, tmp_path: Path, direct: bool) -> None:
    """Another thread takes the frames repeatedly, while files are read and written."""
    pages, files = 4, 6
    ptr, other = driver.alloc(pages), driver.alloc(FRAMES)
    flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0)
    try:
        fds = [os.open(tmp_path / str(i), flags) for i in range(files)]
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        pytest.skip("this file system has no O_DIRECT")
    stop = threading.Event()

    def press() -> None:
        while not stop.is_set():
            driver.calls.cuMemPrefetchAsync(ptr, pages * PAGE, HOST, 0, driver.stream)
            driver.calls.touch(other, FRAMES * PAGE)
            driver.calls.cuMemPrefetchAsync(other, FRAMES * PAGE, HOST, 0, driver.stream)

    for i, fd in enumerate(fds):
        os.pwrite(fd, mmap_of(bytes([i]) * (pages * PAGE)), 0)
    view = as_buffer(ptr, pages * PAGE)
    wrong = []
    thread = threading.Thread(target=press)
    thread.start()
    try:
        for turn in range(12):
            i = turn % files
            view[:] = bytes([0x80 + turn]) * len(view)
            assert os.preadv(fds[i], [view[: 2 * PAGE]], 0) == 2 * PAGE
            with open(fds[i], "rb", buffering=0, closefd=False) as file:
                file.seek(2 * PAGE)
                assert file.readinto(view[2 * PAGE :]) == 2 * PAGE
            wrong += [(turn, "read", k) for k in range(pages) if set_of(view, k) != {i}]
            view[:] = bytes([turn]) * len(view)
            assert os.pwrite(fds[i], view, 0) == len(view)
            if (tmp_path / str(i)).read_bytes() != bytes([turn]) * len(view):
                wrong.append((turn, "write", 0))
            os.pwrite(fds[i], mmap_of(bytes([i]) * (pages * PAGE)), 0)
    finally:
        stop.set()
        thread.join(60)
        for fd in fds:
            os.close(fd)
    assert wrong == []


def mmap_of(data: bytes) -> mmap.mmap:
    """A copy with the alignment that direct I/O requires."""
    copy = mmap.mmap(-1, len(data))
    copy.write(data)
    return copy


def set_of(view: memoryview, page: int) -> set[int]:
    """The values of a page's bytes."""
    return set(bytes(view[page * PAGE : (page + 1) * PAGE]))


# --- limits of the process -----------------------------------------------------------------------


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("\n")


def test_mappings_are_bounded_by_what_is_resident(driver: Driver) -> None:
    before = mappings()
    result, ptr = driver.calls.cuMemAllocManaged(600 * PAGE, GLOBAL)
    assert result == SUCCESS
    for page in random.Random(3).sample(range(600), 300):
        driver.calls.touch(ptr + page * PAGE, PAGE)
    assert mappings() < before + 8 * FRAMES
    assert driver.calls.cuMemFree(ptr) == SUCCESS
    assert mappings() < before + 4 * FRAMES


def test_discarded_host_pages_take_no_memory(driver: Driver) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    pages = 2 * FRAMES
    ptr, _ = evicted(driver, pages)
    before = resident()
    driver.discard(ptr, pages * PAGE)
    assert resident() < before - (pages - 4) * PAGE
    assert driver.calls.telemetry()["host_bytes"] == pages * PAGE


@pytest.mark.parametrize("limit", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_a_limit_that_is_reached_is_named_and_harms_nothing(limit: str) -> None:
    done = run_python(
        PREAMBLE
        + f"""
import resource
for page in range(32): d.store(ptr + page * (2 << 20), b"page%02d" % page)
_, hard = resource.getrlimit(resource.{limit})
resource.setrlimit(resource.{limit}, (16 << 20, hard))
refused = [d.cuMemPrefetchAsync(ptr + page * (2 << 20), 2 << 20, (1, 0), 0, 0) for page in range(8)]
resource.setrlimit(resource.{limit}, (hard, hard))
print(set(refused), all(d.load(ptr + page * (2 << 20), 6) == b"page%02d" % page
                        for page in range(32)), flush=True)
resource.setrlimit(resource.{limit}, (16 << 20, hard))
d.touch(ptr, 64 << 20)
"""
    )
    assert (done.returncode, done.stdout) == (-11, "{304} True\n"), done.stderr
    assert done.stderr.startswith("umem: a managed page cannot be mapped: " + limit), done.stderr


@pytest.mark.parametrize(("limit", "least"), [("RLIMIT_AS", 250), ("RLIMIT_DATA", 900)])
def test_a_limit_of_the_process_leaves_what_it_can(limit: str, least: int) -> None:
    """Batch systems set such limits before the program starts."""
    done = run_python(
        f"""
import pathlib, resource
import _core_testing as d
pages = [int(word) for word in pathlib.Path("/proc/self/statm").read_text().split()]
used = {{"RLIMIT_AS": pages[0], "RLIMIT_DATA": pages[5]}}["{limit}"] * resource.getpagesize()
resource.setrlimit(resource.{limit}, [used + (1000 << 20)] * 2)
d.open_soft(16 * (2 << 20), "a100-pcie4")
blocks = []
while (made := d.cuMemAllocManaged(10 << 20, 1))[0] == 0: blocks.append(made[1])
for i, ptr in enumerate(blocks): d.store(ptr, b"%08d" % i)
print(made[0], 10 * len(blocks) >= {least},
      all(d.load(ptr, 8) == b"%08d" % i for i, ptr in enumerate(blocks)))
"""
    )
    assert (done.returncode, done.stdout) == (0, "304 True True\n"), done.stderr


def test_a_budget_beyond_a_limit_is_refused() -> None:
    done = run_python(
        """
import pathlib, resource
import _core_testing as d
d.open_soft(16 * (2 << 20), "a100-pcie4")
ptr = d.cuMemAllocManaged(256 << 20, 1)[1]
pages = [int(word) for word in pathlib.Path("/proc/self/statm").read_text().split()]
resource.setrlimit(resource.RLIMIT_DATA, [pages[5] * resource.getpagesize() + (64 << 20)] * 2)
try:
    d.resize(128 << 20)
except MemoryError as error:
    print("RLIMIT_DATA (ulimit -d)" in str(error))
for at in range(0, 256 << 20, 2 << 20): d.store(ptr + at, b"%08d" % (at >> 20))
print(all(d.load(ptr + at, 8) == b"%08d" % (at >> 20) for at in range(0, 256 << 20, 2 << 20)))
"""
    )
    assert (done.returncode, done.stdout) == (0, "True\nTrue\n"), done.stderr


def test_without_descriptors_the_reason_is_not_guessed() -> None:
    done = run_python(
        """
import pathlib, resource
import _core_testing as d, umem.errors
d.open_soft(16 * (2 << 20), "a100-pcie4")
ptr = d.cuMemAllocManaged(256 << 20, 1)[1]
pages = [int(word) for word in pathlib.Path("/proc/self/statm").read_text().split()]
resource.setrlimit(resource.RLIMIT_DATA, [pages[5] * resource.getpagesize() + (64 << 20)] * 2)
resource.setrlimit(resource.RLIMIT_NOFILE, (3, 1024))
try:
    d.resize(128 << 20)
except MemoryError as error:
    print(str(error).endswith("/proc, which says why, cannot be read"))
"""
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_the_end_of_all_mappings_is_named() -> None:
    if int(Path("/proc/sys/vm/max_map_count").read_text()) > 300_000:
        pytest.skip("vm.max_map_count is too high to be reached in a test")
    done = run_python(
        PREAMBLE
        + """
mmap = ctypes.CDLL(None).mmap
mmap.restype = ctypes.c_void_p
mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
n = 0  # of two kinds in turns, which do not merge
while mmap(None, 4096, n % 2, 0x22, -1, 0) != 2**64 - 1: n += 1
print(d.cuMemPrefetchAsync(ptr, 2 << 20, (1, 0), 0, 0), flush=True)
d.touch(ptr, 64 << 20)
"""
    )
    assert (done.returncode, done.stdout) == (-11, "304\n"), done.stderr
    assert "mappings, and vm.max_map_count is" in done.stderr


# --- any sequence keeps the bytes ----------------------------------------------------------------

ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["store", "load", "host", "device", "dup", "undup", "prefer", "unprefer", "write"]
        ),
        st.integers(0, 23),
        st.integers(1, 6),
        st.integers(0, 255),
    ),
    max_size=60,
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=ACTIONS)
def test_no_sequence_of_calls_changes_live_bytes(
    driver: Driver, tmp_path: Path, actions: list[tuple[str, int, int, int]]
) -> None:
    pages = 24
    c = driver.calls
    ptr = driver.alloc(pages)
    model = [0] * pages
    for page in range(pages):
        c.store(ptr + page * PAGE, b"\0")
    for action, first, count, value in actions:
        count = min(count, pages - first)
        at, nbytes = ptr + first * PAGE, count * PAGE
        if action == "store":
            for page in range(first, first + count):
                c.store(ptr + page * PAGE, bytes([value]))
                model[page] = value
        elif action == "load":
            for page in range(first, first + count):
                assert c.load(ptr + page * PAGE, 1) == bytes([model[page]])
        elif action in ("host", "device"):
            driver.prefetch(at, count, HOST if action == "host" else DEVICE)
        elif action == "write":
            with (tmp_path / "out").open("wb", buffering=0) as file:
                assert file.write(as_buffer(at, 1)) == 1
            assert (tmp_path / "out").read_bytes() == bytes([model[first]])
        else:
            advice = {"dup": 1, "undup": 2, "prefer": 3, "unprefer": 4}[action]
            assert c.cuMemAdvise(at, nbytes, advice, HOST) == SUCCESS
        assert c.telemetry()["resident_bytes"] <= FRAMES * PAGE
    assert [c.load(ptr + page * PAGE, 1)[0] for page in range(pages)] == model
    assert c.cuMemFree(ptr) == SUCCESS
