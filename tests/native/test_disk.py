"""Evicted pages in a file: nothing is lost, whatever the disk does and whenever a process forks."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import _core_testing
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.driver import DEVICE, HOST, OUT_OF_MEMORY, PAGE, SUCCESS, Driver, opened
from support.system_calls import Span, call, parts_of

from umem.errors import ConfigError

READ_MOSTLY = 1
PAGES = 24
disk = _core_testing.disk


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    """Eight frames and three for pages under way."""
    disk.clear()
    with opened(8, str(tmp_path), 3) as made:
        yield made
    disk.clear()


def fill(driver: Driver, pages: int = PAGES) -> int:
    ptr = driver.alloc(pages)
    for page in range(pages):
        write(driver, ptr, page, page)
    return ptr


def write(driver: Driver, ptr: int, page: int, value: int) -> None:
    for at in (0, PAGE - 1):
        driver.calls.store(ptr + page * PAGE + at, bytes([value % 256]))


def check(driver: Driver, ptr: int, page: int, value: int) -> None:
    ends = {driver.calls.load(ptr + page * PAGE + at, 1) for at in (0, PAGE - 1)}
    assert ends == {bytes([value % 256])}, (page, value)


def moved(driver: Driver) -> tuple[int, int]:
    """Pages read and written so far."""
    now = driver.calls.telemetry()
    return now["disk_bytes_in"] // PAGE, now["disk_bytes_out"] // PAGE


def run(code: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    preamble = """
import ctypes, os, signal, sys
import _core_testing as d
PAGE = 2 << 20
d.open_soft(8 * PAGE, "a100-pcie4", disk=sys.argv[1], staging_bytes=3 * PAGE)
ptr = d.cuMemAllocManaged(24 * PAGE, 1)[1]
def fill(value):
    for page in range(24):
        for at in (0, PAGE - 1):
            d.store(ptr + page * PAGE + at, bytes([page + value]))
def whole(value):
    return all(
        d.load(ptr + page * PAGE + at, 1) == bytes([page + value])
        for page in range(24) for at in (0, PAGE - 1)
    )
fill(1)
"""
    return subprocess.run(
        [sys.executable, "-c", preamble + textwrap.dedent(code), str(tmp_path)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def ends_right(code: str, tmp_path: Path) -> None:
    """Run the code, which prints "right" as its last act."""
    done = run(code, tmp_path)
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr


@pytest.mark.parametrize("late", [0, 3000])
def test_bytes_come_back(driver: Driver, late: int) -> None:
    disk.delay(late, 1)
    ptr = fill(driver)
    for _ in range(3):
        for page in range(PAGES):
            check(driver, ptr, page, page)
    read, written = moved(driver)
    assert read >= 2 * (PAGES - 11)
    assert written >= PAGES - 11


def test_a_page_that_is_wanted_before_it_is_written_never_leaves(driver: Driver) -> None:
    ptr = fill(driver, 6)
    disk.delay(1_000_000, 0)
    driver.prefetch(ptr, 6, HOST)
    driver.prefetch(ptr + 2 * PAGE, 4, DEVICE)  # the writes of the first two have begun
    disk.clear()
    for page in range(6):
        check(driver, ptr, page, page)
    time.sleep(1.5)  # a write is counted when it ends, and takes a second
    assert max(moved(driver)) <= 2


def test_dead_pages_are_not_written(driver: Driver) -> None:
    ptr = fill(driver, 6)
    disk.delay(1_000_000, 0)
    driver.prefetch(ptr, 6, HOST)
    driver.discard(ptr, 6 * PAGE)
    time.sleep(1.5)
    assert moved(driver)[1] <= 2  # those that had begun


def test_clean_pages_leave_without_a_write(driver: Driver) -> None:
    ptr = fill(driver, 6)
    assert driver.calls.cuMemAdvise(ptr, 6 * PAGE, READ_MOSTLY, DEVICE) == SUCCESS
    others = driver.alloc(8)
    for _ in range(3):
        driver.calls.touch(others, 8 * PAGE)
        driver.prefetch(ptr, 6, HOST)
        driver.discard(others, 8 * PAGE)
        for page in range(6):
            check(driver, ptr, page, page)
    assert moved(driver)[1] <= 6 + 8  # each page of the first kind once


def test_what_is_only_read_is_written_once(driver: Driver) -> None:
    """By page faults or prefetches, without advice: weights, or data of a loader's workers."""
    ptr = fill(driver)
    for page in range(PAGES):
        check(driver, ptr, page, page)
    before = moved(driver)[1]
    for first in (0, 12):
        driver.prefetch(ptr + first * PAGE, 6, DEVICE)
        for page in range(PAGES):
            check(driver, ptr, page, page)
    assert moved(driver)[1] == before
    faults = driver.calls.telemetry()["faults"]
    write(driver, ptr, 23, 50)  # in its frame
    assert driver.calls.telemetry()["faults"] == faults  # no page was brought
    for page in range(PAGES - 1):
        check(driver, ptr, page, page)
    assert moved(driver)[1] == before + 1
    check(driver, ptr, 23, 50)


def test_more_and_fewer_frames(driver: Driver) -> None:
    ptr = fill(driver)
    for frames in (4, 20, 6, 16, 4):
        driver.calls.resize(frames * PAGE)
        for page in range(PAGES):
            check(driver, ptr, page, page)


def test_more_frames_than_a_limit_allows_change_nothing(tmp_path: Path) -> None:
    code = """
    import resource
    def writable():
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) << 10 for line in status if line[:7] == "VmData:")
    before = writable()
    resource.setrlimit(resource.RLIMIT_DATA, (before + 64 * PAGE, resource.RLIM_INFINITY))
    try:
        d.resize(128 * PAGE)
    except MemoryError as error:
        assert "RLIMIT_DATA" in str(error), error
    else:
        raise AssertionError("it grew")
    assert writable() - before < PAGE
    assert whole(1)
    d.resize(16 * PAGE)
    assert whole(1)
    print("right")
    """
    ends_right(code, tmp_path)


@pytest.mark.parametrize("kind", ["EIO", "short"])
def test_a_write_that_fails_once_is_made_elsewhere(
    driver: Driver, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    for nth in (1, 4, 9):  # on two threads, of which one may make all calls but its second try
        disk.fail("write", nth, kind, once=True)
    ptr = fill(driver)
    for page in range(PAGES):
        check(driver, ptr, page, page)
    assert capfd.readouterr().err == ""


def test_a_write_that_was_made_elsewhere_is_no_reason_afterwards(
    driver: Driver, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    disk.fail("write", 1, "EIO", once=True)
    ptr = fill(driver)
    result, device_memory = driver.calls.cuMemAlloc(8 * PAGE)  # in all frames, for good
    assert result == SUCCESS
    with (tmp_path / "copy").open("wb", buffering=0) as file, pytest.raises(OSError, match="alloc"):
        file.write((ctypes.c_char * 4096).from_address(ptr))
    assert "no frame can be taken from another page" in capfd.readouterr().err
    driver.calls.cuMemFree(device_memory)
    check(driver, ptr, 0, 0)


def test_a_read_that_nobody_waits_for_is_no_reason_afterwards(
    driver: Driver, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ptr = fill(driver)
    driver.prefetch(ptr, PAGES, HOST)
    disk.fail("read", 1, "EIO")
    driver.prefetch(ptr, 1, DEVICE)
    time.sleep(0.1)  # it fails meanwhile
    driver.discard(ptr, PAGE)
    result, device_memory = driver.calls.cuMemAlloc(8 * PAGE)  # all frames
    assert result == SUCCESS
    with (tmp_path / "copy").open("wb", buffering=0) as file, pytest.raises(OSError, match="alloc"):
        file.write((ctypes.c_char * 4096).from_address(ptr + PAGE))
    assert "no frame can be taken from another page" in capfd.readouterr().err
    driver.calls.cuMemFree(device_memory)
    check(driver, ptr, 1, 1)


def test_a_call_that_ends_on_a_full_disk_says_so(
    driver: Driver, capfd: pytest.CaptureFixture[str]
) -> None:
    ptr = fill(driver)
    reader, writer = socket.socketpair()
    data = (ctypes.c_char * (6 * PAGE)).from_address(ptr)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(reader.recvmsg_into, [data])
        for _ in range(1000):
            time.sleep(0.01)
            if driver.states(ptr + 5 * PAGE, 1) == ["device"]:  # the last one: all are held
                break
        assert "host" in driver.states(ptr, 6)  # others need more than two frames
        for nth in range(1, 400):
            disk.fail("write", nth, "EIO")
        writer.send(b"x")
        assert call.result()[0] == 1
    reader.close()
    writer.close()
    assert capfd.readouterr().err.count("umem: warning: writing the file in") == 1
    refused = driver.calls.cuMemPrefetchAsync(ptr + 6 * PAGE, 18 * PAGE, HOST, 0, driver.stream)
    assert refused == OUT_OF_MEMORY
    driver.calls.resize(64 * PAGE)
    assert driver.calls.load(ptr, 2) == b"x" + bytes(1)
    for page in range(1, PAGES):
        check(driver, ptr, page, page)


@pytest.mark.parametrize("kind", ["EIO", "ENOSPC"])
def test_a_disk_that_takes_no_more_loses_nothing(
    driver: Driver, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    ptr = fill(driver, 10)
    driver.prefetch(ptr, 4, HOST)
    for page in range(4):
        check(driver, ptr, page, page)
    for nth in range(1, 200):
        disk.fail("write", nth, kind)
    result = SUCCESS
    for _ in range(200):  # the first are taken and fail later
        time.sleep(0.01)
        driver.calls.store(ptr, bytes([0]))
        result = driver.calls.cuMemPrefetchAsync(ptr, 8 * PAGE, HOST, 0, driver.stream)
        if result == OUT_OF_MEMORY:
            break
    assert result == OUT_OF_MEMORY
    err = capfd.readouterr().err
    assert err.count("umem: warning: writing the file in") == 1
    assert "Nothing is lost" in err
    driver.calls.resize(12 * PAGE)  # nothing can leave to make room for what was written before
    for page in range(10):
        check(driver, ptr, page, page)


def clean_beside(driver: Driver, pages: int) -> tuple[int, int]:
    """Pages that are clean, on the disk and read by copies, and others that only frames have."""
    clean, other = fill(driver), driver.alloc(pages)
    driver.calls.cuMemAdvise(clean, PAGES * PAGE, READ_MOSTLY, DEVICE)
    for page in range(PAGES):
        check(driver, clean, page, page)
    for page in range(pages):
        write(driver, other, page, 100 + page)
    time.sleep(0.2)  # nothing is under way
    return clean, other


@pytest.mark.parametrize(("way", "pages"), [("evicted", 3), ("evicted", 6), ("copied", 3)])
def test_clean_pages_come_and_go_beside_what_cannot_be_written(
    driver: Driver, way: str, pages: int
) -> None:
    clean, other = clean_beside(driver, pages)
    for nth in range(1, 200 if way == "evicted" else 5):
        disk.fail("write", nth, "EIO")
    if way == "copied":
        driver.calls.cuMemAdvise(other, pages * PAGE, READ_MOSTLY, DEVICE)
    driver.calls.cuMemPrefetchAsync(other, pages * PAGE, HOST, 0, driver.stream)
    time.sleep(0.2)
    for _ in range(2):
        for page in range(PAGES):
            check(driver, clean, page, page)
    for page in range(pages):
        check(driver, other, page, 100 + page)


def break_disk(driver: Driver) -> int:
    """Ten pages, with a disk that has refused some of them."""
    ptr = fill(driver, 10)
    for nth in range(1, 400):
        disk.fail("write", nth, "EIO")
    for _ in range(200):
        result = driver.calls.cuMemPrefetchAsync(ptr, 8 * PAGE, HOST, 0, driver.stream)
        if result == OUT_OF_MEMORY:
            return ptr
        time.sleep(0.01)
        for page in range(8):
            write(driver, ptr, page, page)
    raise AssertionError("the disk goes on")


def test_a_broken_disk_refuses_and_does_not_hang(driver: Driver) -> None:
    ptr = break_disk(driver)
    other = driver.alloc(30)
    refused = driver.calls.cuMemPrefetchAsync(other, 30 * PAGE, DEVICE, 0, driver.stream)
    assert refused == OUT_OF_MEMORY
    if os.fork() == 0:
        os._exit(0)
    assert os.wait()[1] == 0
    driver.calls.resize(64 * PAGE)
    for page in range(10):
        check(driver, ptr, page, page)


def test_a_system_call_on_a_page_that_has_no_room_is_refused(
    driver: Driver, tmp_path: Path
) -> None:
    ptr, others = fill(driver, 8), driver.alloc(30)
    driver.prefetch(ptr, 8, HOST)
    deadline = time.monotonic() + 60
    while moved(driver)[1] < 8 and time.monotonic() < deadline:
        time.sleep(0.01)  # until they are on the disk, and no frame holds them
    for nth in range(1, 400):
        disk.fail("write", nth, "EIO")
    for page in range(30):
        at = others + page * PAGE
        if driver.calls.cuMemPrefetchAsync(at, PAGE, DEVICE, 0, driver.stream) == OUT_OF_MEMORY:
            break
        write(driver, others, page, 100 + page)
    else:
        pytest.fail("pages leave that cannot be written")
    with (tmp_path / "copy").open("wb", buffering=0) as file:
        for page in range(8):
            start = (ctypes.c_char * 4096).from_address(ptr + page * PAGE)
            with pytest.raises(OSError, match="Cannot allocate memory"):
                file.write(start)
    assert (tmp_path / "copy").stat().st_size == 0
    driver.calls.resize(64 * PAGE)
    for page in range(8):
        check(driver, ptr, page, page)


def test_a_system_call_takes_a_page_whose_read_waits_for_a_frame(tmp_path: Path) -> None:
    with opened(4, str(tmp_path), 2) as driver:
        ptr = fill(driver, 8)
        disk.delay(1_000_000, 0)
        driver.prefetch(ptr, 4, DEVICE)  # in the frames of the others, once these are written
        for page in range(7, 3, -1):  # which keep them
            check(driver, ptr, page, page)
        disk.clear()
        for page in range(4):
            with (tmp_path / "copy").open("wb", buffering=0) as file:
                assert file.write((ctypes.c_char * 4096).from_address(ptr + page * PAGE)) == 4096
            assert (tmp_path / "copy").read_bytes()[0] == page


def test_a_copy_that_could_not_be_written_may_be_written_to(driver: Driver) -> None:
    ptr = fill(driver, 4)
    assert driver.calls.cuMemAdvise(ptr, 4 * PAGE, READ_MOSTLY, DEVICE) == SUCCESS
    for nth in range(1, 400):
        disk.fail("write", nth, "EIO")
    for _ in range(2):  # copies, since the device may keep them; some are refused
        driver.calls.cuMemPrefetchAsync(ptr, 4 * PAGE, HOST, 0, driver.stream)
        time.sleep(0.1)
    driver.calls.cuMemAdvise(ptr, 4 * PAGE, READ_MOSTLY + 1, DEVICE)
    for page in range(4):
        check(driver, ptr, page, page)
        write(driver, ptr, page, page + 9)
        check(driver, ptr, page, page + 9)


def test_a_full_disk_is_noticed_at_the_allocation(driver: Driver, tmp_path: Path) -> None:
    ptr = fill(driver, 10)
    open_files = [*Path("/proc/self/fd").iterdir()]
    (file,) = [it for it in open_files if str(it.resolve()).startswith(str(tmp_path))]
    blocks = file.stat().st_blocks
    for nth in (1, 2):  # with some room for later, and without
        disk.fail("reserve", nth, "ENOSPC")
    assert driver.calls.cuMemAllocManaged(100 * PAGE, 1) == (OUT_OF_MEMORY, 0)
    assert file.stat().st_blocks == blocks  # the rest is for others
    for page in range(10):
        check(driver, ptr, page, page)


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("kind", ["EIO", "flip"])
def test_a_read_that_fails_is_tried_again(driver: Driver, kind: str, times: int) -> None:
    ptr = fill(driver)
    for nth in range(1, times + 1):
        disk.fail("read", nth, kind)
    for page in range(PAGES):
        check(driver, ptr, page, page)


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        ("read", "EIO", "input/output error"),
        ("read", "flip", "these are not the bytes that were written"),
        ("write", "torn", "these are not the bytes that were written"),
    ],
)
def test_what_cannot_be_read_ends_the_process_with_a_reason(
    call: str, kind: str, words: str, tmp_path: Path
) -> None:
    code = f"""
    for nth in range(1, 1000):
        d.disk.fail({call!r}, nth, {kind!r})
    fill(2)
    whole(2)
    """
    done = run(code, tmp_path)
    assert done.returncode == -signal.SIGSEGV
    assert f"reading the file in '{tmp_path}' at offset" in done.stderr
    assert words in done.stderr


def test_a_forked_child_and_its_parent_write_apart(tmp_path: Path) -> None:
    code = """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(reader, 1)  # the parent has written all pages again
        right = whole(1)
        fill(3)
        right = right and whole(3)
        grandchild = os.fork()
        if grandchild == 0:
            os._exit(0 if whole(3) else 1)
        right = right and os.waitpid(grandchild, 0)[1] == 0
        os._exit(0 if right else 1)
    for value in (2, 3, 4):
        fill(value)
        assert whole(value)
    os.write(writer, b"x")
    assert os.waitpid(child, 0)[1] == 0
    size = d.telemetry()["disk_file_bytes"]
    for value in range(5, 15):  # old versions make room
        fill(value)
    assert whole(14)
    assert d.telemetry()["disk_file_bytes"] == size <= 2 * 64 * PAGE
    print("right")
    """
    ends_right(code, tmp_path)


def test_a_limit_of_data_counts_the_frames_alone(tmp_path: Path) -> None:
    """Batch systems set it; what is on the disk is no memory."""
    code = """
    import pathlib, resource
    data = int(pathlib.Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, [data + 64 * PAGE] * 2)
    for value in (1, 2):  # the second time, at addresses that were freed
        code, other = d.cuMemAllocManaged(200 * PAGE, 1)
        assert code == 0, code
        d.cuMemPrefetchAsync(other, 2 * PAGE, (2, 0), 0, 0)  # to the host, before any write
        for page in range(200):
            d.load(other + page * PAGE, 1)  # anything
            d.store(other + page * PAGE, bytes([page]))
        assert all(d.load(other + page * PAGE, 1) == bytes([page]) for page in range(200))
        assert d.cuMemFree(other) == 0
    print("right")
    """
    done = run(code, tmp_path)
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr


def test_a_child_that_only_reads_writes_nothing(tmp_path: Path) -> None:
    """As a loader's worker does with the dataset of its parent."""
    code = """
    fill(1)
    assert whole(1)
    if os.fork() == 0:
        before = d.telemetry()["disk_bytes_out"]
        for _ in range(3):
            assert whole(1)
        os._exit((d.telemetry()["disk_bytes_out"] - before) // PAGE)
    print(os.waitstatus_to_exitcode(os.wait()[1]))
    """
    done = run(code, tmp_path)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


def test_a_child_may_fork_while_its_reads_wait(tmp_path: Path) -> None:
    code = """
    child = os.fork()
    if child == 0:
        assert d.cuMemPrefetchAsync(ptr, 2 * PAGE, (1, 0), 0, 0) == 0
        grandchild = os.fork()
        if grandchild == 0:
            os._exit(0 if whole(1) else 1)
        os._exit(0 if os.waitpid(grandchild, 0)[1] == 0 and whole(1) else 1)
    assert os.waitpid(child, 0)[1] == 0
    print("right")
    """
    ends_right(code, tmp_path)


def test_a_disk_that_is_full_while_a_child_lives_takes_more_afterwards(tmp_path: Path) -> None:
    code = """
    other = d.cuMemAllocManaged(64 * PAGE, 1)[1]
    for page in range(64):  # no spare places are left
        d.store(other + page * PAGE, b"o")
    assert whole(1)
    for page in range(16, 24):  # those in frames, which could leave without a write
        d.store(ptr + page * PAGE, d.load(ptr + page * PAGE, 1))
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(reader, 1)
        os._exit(0 if whole(1) else 1)
    for nth in range(1, 400):
        d.disk.fail("reserve", nth, "ENOSPC")
    for page in range(2):  # the frames for pages under way have them
        d.store(ptr + page * PAGE, bytes([9]))
    os.write(writer, b"x")
    assert os.waitpid(child, 0)[1] == 0
    for value in range(2, 8):
        fill(value)
        assert whole(value)
    print("right")
    """
    done = run(code, tmp_path)
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr
    assert done.stderr.count("children that the program forked may read what it has") == 1


def test_short_children_beside_a_long_one_leave_no_slots_behind(tmp_path: Path) -> None:
    code = """
    reader, writer = os.pipe()
    long = os.fork()
    if long == 0:
        os.read(reader, 1)
        os._exit(0 if whole(1) else 1)
    for value in range(2, 14):
        fill(value)
        child = os.fork()
        if child == 0:
            os._exit(0 if whole(value) else 1)
        fill(value + 20)
        assert os.waitpid(child, 0)[1] == 0
    size = d.telemetry()["disk_file_bytes"]
    assert size <= (64 + 24 + 3 * 24) * PAGE, size // PAGE
    os.write(writer, b"x")
    assert os.waitpid(long, 0)[1] == 0
    assert len(os.listdir("/proc/self/fd")) < 20
    print("right")
    """
    ends_right(code, tmp_path)


def test_forks_while_pages_move(tmp_path: Path) -> None:
    code = """
    d.disk.delay(2000, 7)
    for value in range(2, 12):
        fill(value)
        child = os.fork()
        if child == 0:
            os._exit(0 if whole(value) else 1)
        fill(value + 50)
        assert os.waitpid(child, 0)[1] == 0
    print("right")
    """
    ends_right(code, tmp_path)


def test_a_fork_blocks_signals_while_it_has_the_lock() -> None:
    """A handler that touched an evicted page would wait for its own thread."""
    code = """
    import ctypes, os, signal
    import _core_testing as d
    during = []
    mask = lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [])
    prepare = ctypes.CFUNCTYPE(None)(lambda: during.append(signal.SIGALRM in mask()))
    ctypes.CDLL(None).__register_atfork(prepare, None, None, None)  # runs after umem's
    d.open_soft(8 << 21, "a100-pcie4")
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    child = os.fork()
    assert (during, mask()) == ([True], {signal.SIGUSR1})
    if child == 0:
        os._exit(7)
    assert os.waitpid(child, 0)[1] == 7 << 8
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=120)


def test_nothing_is_left_of_a_process_that_is_killed(tmp_path: Path) -> None:
    code = """
    files = [os.stat(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
             if os.path.exists(f"/proc/self/fd/{fd}")]
    large = [file for file in files if file.st_size >= 24 * PAGE]
    assert [file.st_nlink for file in large] == [0]  # the kernel frees it with its last descriptor
    assert large[0].st_mode & 0o777 == 0o600
    assert os.listdir(sys.argv[1]) == []
    os.kill(os.getpid(), signal.SIGKILL)
    """
    done = run(code, tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not [*tmp_path.iterdir()]


def test_memory_is_bounded_by_the_frames(tmp_path: Path) -> None:
    code = """
    def resident():
        return int(open("/proc/self/statm").read().split()[1]) * 4096
    before = resident()
    for value in range(5):
        fill(value)
        assert whole(value)
    print((resident() - before) // PAGE)
    """
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 3  # `fill` had used the eight frames and some of the three


@pytest.mark.parametrize("late", [0, 2000])
def test_system_calls_on_pages_in_every_state(driver: Driver, late: int, tmp_path: Path) -> None:
    disk.delay(late, 3)
    ptr = fill(driver)
    as_buffer = (ctypes.c_char * (6 * PAGE)).from_address
    path = tmp_path / "copy"
    for first in (0, 9, 18):
        with path.open("wb", buffering=0) as file:
            assert file.write(as_buffer(ptr + first * PAGE)) == 6 * PAGE
        data = path.read_bytes()
        assert [data[i * PAGE] for i in range(6)] == [*range(first, first + 6)]
        driver.prefetch(ptr + first * PAGE, 6, HOST)
        with path.open("rb", buffering=0) as file:
            assert file.readinto(as_buffer(ptr + ((first + 3) % 18) * PAGE)) == 6 * PAGE
        for i in range(6):
            check(driver, ptr, (first + 3) % 18 + i, first + i)
        for i in range(6):
            write(driver, ptr, (first + 3) % 18 + i, (first + 3) % 18 + i)
        path.unlink()
    for page in range(PAGES):
        check(driver, ptr, page, page)


def of_file(name: str, fd: int, span: Span) -> int:
    """Call it for the file from its start; ends it for a function of streams."""
    ptr, size = ctypes.c_void_p(span[0]), ctypes.c_size_t(span[1])
    if name.startswith("f"):
        libc = ctypes.CDLL(None)
        libc.fdopen.restype = ctypes.c_void_p
        file = ctypes.c_void_p(libc.fdopen(os.dup(fd), b"r+b"))
        done = call(name, ptr, ctypes.c_size_t(1), size, file)
        assert libc.fclose(file) == 0
        return done
    at = [ctypes.c_long(0)] if name.startswith("p") else []
    if "v" not in name:
        return call(name, fd, ptr, size, *at)
    cut = PAGE + 1  # no part is a multiple of what is taken at once
    parts = parts_of([(span[0], cut), (span[0] + cut, span[1] - cut)])
    return call(name, fd, parts, 2, *at, *([0] if name.endswith("2") else []))


def status(name: str) -> int:
    """A row of /proc/self/status, in bytes."""
    (row,) = re.findall(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    return int(row) << 10


@contextlib.contextmanager
def little_memory(most: int) -> Iterator[None]:
    """At no time within it does the process have so many pages more than before."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    before = status("VmRSS")
    yield
    assert status("VmHWM") - before <= most * PAGE


@pytest.mark.parametrize(
    ("out", "back"),
    [
        ("write", "read"),
        ("pwrite", "pread"),
        ("writev", "readv"),
        ("pwritev", "preadv"),
        ("pwritev2", "preadv2"),
        ("fwrite", "fread"),
        ("fwrite_unlocked", "fread_unlocked"),
    ],
)
def test_a_long_call_on_a_file_needs_little_memory_beside_the_frames(
    driver: Driver, tmp_path: Path, out: str, back: str
) -> None:
    """A checkpoint of a tensor that is larger than the budget."""
    ptr = fill(driver)
    path, size = tmp_path / "copy", 20 * PAGE
    path.touch()
    for name in (out, back):
        fd = os.open(path, os.O_RDWR)
        with little_memory(6):  # four at once
            assert of_file(name, fd, (ptr + PAGE, size)) == size
        os.close(fd)
        if name == out:
            data = path.read_bytes()
            assert len(data) == size
            assert [data[i * PAGE] for i in range(20)] == [*range(1, 21)]
            for page in range(PAGES):
                write(driver, ptr, page, 99)
    for page in range(PAGES):
        check(driver, ptr, page, page if 1 <= page < 21 else 99)
    path.write_bytes(data[: size - 100])  # it ends earlier
    fd = os.open(path, os.O_RDWR)
    assert of_file(back, fd, (ptr + PAGE, size)) == size - 100
    os.close(fd)


def test_a_datagram_reaches_all_its_buffers(driver: Driver) -> None:
    """They are longer than a window, it is not."""
    ptr = fill(driver)
    head = (ctypes.c_char * 16)()
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with left, right:
        left.send(bytes(range(256)) * 4)
        parts = parts_of([(ctypes.addressof(head), 16), (ptr, 10 * PAGE)])
        assert call("readv", right.fileno(), parts, 2) == 1024
    assert head.raw == bytes(range(16))
    assert driver.calls.load(ptr, 1008) == (bytes(range(256)) * 4)[16:]


def test_a_call_takes_no_more_than_the_kernel_would(driver: Driver) -> None:
    """Programs may keep what it returns in 32 bits."""
    ptr = fill(driver, 4)
    with Path(os.devnull).open("wb", buffering=0) as file:
        parts = [(ctypes.c_char * (4 * PAGE)).from_address(ptr)] * 300
        assert os.writev(file.fileno(), parts) == 0x7FFFF000


def test_a_long_call_on_a_socket_needs_little_memory_beside_the_frames(driver: Driver) -> None:
    ptr, size = fill(driver), ctypes.c_size_t(12 * PAGE)
    left, right = socket.socketpair()
    with left, right, ThreadPoolExecutor(1) as pool, little_memory(10):  # both have four at once
        sent = pool.submit(call, "send", left.fileno(), ctypes.c_void_p(ptr), size, 0)
        to = ctypes.c_void_p(ptr + 12 * PAGE)
        assert call("recv", right.fileno(), to, size, socket.MSG_WAITALL) == size.value
        assert sent.result() == size.value
        for page in range(PAGES):
            check(driver, ptr, page, page % 12)
        # A call that does not wait takes what there is room for, or returns what there is.
        some = call("send", left.fileno(), ctypes.c_void_p(ptr), size, socket.MSG_DONTWAIT)
        assert 0 < some < size.value
        assert call("recv", right.fileno(), to, size, 0) == some


@pytest.mark.parametrize(
    ("folder", "reason"),
    [("/dev/shm", "tmpfs"), ("/no/such/folder", "No such file"), (__file__, "Not a directory")],
)
def test_a_folder_that_cannot_hold_it_is_refused(folder: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason), opened(8, folder, 3):
        pass


READ_FAULTS = ("EIO", "short", "flip")
SKEW = 4095  # bytes before the first page of a source


def source_value(page: int) -> int:
    return 255 - page


def source_of(folder: Path) -> str:
    """A file with the contents of `PAGES` pages, from byte `SKEW` on."""
    path = folder / "source"
    if not path.exists():
        with path.open("wb") as file:
            for page in range(PAGES):
                for at in (0, PAGE - 1):
                    file.seek(SKEW + page * PAGE + at)
                    file.write(bytes([source_value(page)]))
    return str(path)


def test_pages_of_a_source_are_read_again_and_never_written(driver: Driver, tmp_path: Path) -> None:
    ptr = driver.alloc(PAGES)
    disk.fail("read", 3, "EIO")
    for skipped in (0, 1):
        path = source_of(tmp_path)
        count = PAGES - skipped
        driver.calls.place_in_file(ptr, count * PAGE, path, SKEW + skipped * PAGE)
        assert driver.states(ptr, count) == ["host"] * count
        for _ in range(2):
            for page in range(count):
                check(driver, ptr, page, source_value(page + skipped))
    read, written = moved(driver)
    assert read >= 2 * (2 * PAGES - 11)
    assert written == 0


def test_a_source_that_cannot_be_read_changes_nothing(driver: Driver, tmp_path: Path) -> None:
    ptr = fill(driver)
    path = source_of(tmp_path)
    for wrong, offset, reason in (
        (str(tmp_path / "none"), 0, "No such file"),
        (path, 2 * SKEW, "ends before the tensor"),
        ("/proc/self/stat", 0, "O_DIRECT|regular|ends"),
    ):
        with pytest.raises(ConfigError, match=reason):
            driver.calls.place_in_file(ptr, PAGES * PAGE, wrong, offset)
    for page in range(PAGES):
        check(driver, ptr, page, page)
    descriptors = len([*Path("/proc/self/fd").iterdir()])
    for _ in range(5):
        driver.calls.place_in_file(ptr, PAGE, path, SKEW)
        write(driver, ptr, 0, 7)
        driver.prefetch(ptr, 1, HOST)
        check(driver, ptr, 0, 7)
    assert len([*Path("/proc/self/fd").iterdir()]) <= descriptors + 1


@pytest.mark.parametrize("late", [0, 20_000])
def test_a_source_stays_open_while_its_pages_are_placed_again(
    driver: Driver, late: int, tmp_path: Path
) -> None:
    ptr = driver.alloc(2)
    path = source_of(tmp_path)
    for _ in range(20):
        driver.calls.place_in_file(ptr + PAGE, PAGE, path, SKEW)
        write(driver, ptr, 0, 7)
        write(driver, ptr, 1, 7)  # what remains of the source is its place in the table
        disk.delay(late, 0)
        driver.prefetch(ptr, 2, HOST)
        driver.calls.place_in_file(ptr, PAGE, path, SKEW)
        disk.clear()
        check(driver, ptr, 0, source_value(0))
        check(driver, ptr, 1, 7)


def test_a_file_that_changes_while_it_is_read_is_not_believed(tmp_path: Path) -> None:
    code = """
    import subprocess, time
    path = sys.argv[1] + "/source"
    open(path, "wb").write(bytes([5]) * (24 * PAGE))
    d.place_in_file(ptr, 24 * PAGE, path, 0)
    d.disk.delay(1_000_000, 0)
    subprocess.Popen(["sh", "-c", f"sleep 0.2; printf x | dd of={path} conv=notrunc"])
    d.load(ptr, 1)  # the read begins before the change, and ends after it
    print("believed")
    """
    done = run(code, tmp_path)
    assert done.returncode == -signal.SIGSEGV, done.stdout
    assert "source' at offset 0: it was changed after it was loaded" in done.stderr


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["write", "read", "out", "in", "discard", "clean", "unclean", "resize", "place"]
        ),
        st.integers(0, PAGES - 1),
        st.integers(1, 6),
    ),
    max_size=40,
)


@given(steps=STEPS, late=st.sampled_from([0, 500]), seed=st.integers(0, 100), failing=st.booleans())
def test_any_program_keeps_its_bytes(
    steps: list[tuple[str, int, int]], late: int, seed: int, failing: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    disk.clear()
    disk.delay(late, seed)
    if failing:
        for nth in range(seed % 5 + 1, 400, 7):
            disk.fail("write", nth, ("EIO", "short")[nth % 2], once=True)
            # A file that is not umem's has no checksums.
            kinds = ("EIO", "short") if any(step[0] == "place" for step in steps) else READ_FAULTS
            disk.fail("read", nth, kinds[nth % len(kinds)], once=True)
    path = source_of(tmp_path_factory.getbasetemp())
    with opened(8, str(tmp_path_factory.getbasetemp()), 3) as driver:
        ptr = driver.alloc(PAGES)
        want: dict[int, int] = {}
        for number, (verb, page, count) in enumerate(steps):
            pages = range(page, min(page + count, PAGES))
            at = ptr + page * PAGE
            if verb == "write":
                for each in pages:
                    want[each] = number
                    write(driver, ptr, each, number)
            elif verb == "read":
                for each in pages:
                    if each in want:
                        check(driver, ptr, each, want[each])
            elif verb in ("out", "in"):
                driver.prefetch(at, len(pages), HOST if verb == "out" else DEVICE)
            elif verb == "discard":
                driver.discard(at, len(pages) * PAGE)
                for each in pages:
                    want.pop(each, None)
            elif verb == "place":
                driver.calls.place_in_file(at, len(pages) * PAGE, path, SKEW + page * PAGE)
                want.update({each: source_value(each) for each in pages})
            elif verb == "resize":
                driver.calls.resize((4 + count * 2) * PAGE)
            else:
                advice = READ_MOSTLY if verb == "clean" else READ_MOSTLY + 1
                assert driver.calls.cuMemAdvise(at, len(pages) * PAGE, advice, DEVICE) == SUCCESS
        for each, value in want.items():
            check(driver, ptr, each, value)
    disk.clear()
