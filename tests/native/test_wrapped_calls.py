"""Every system call that umem wraps, on evicted memory: the same bytes, result and error as on
plain memory, and no resident page moves.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.driver import FRAMES, HOST, PAGE, Driver
from support.system_calls import Part, Span, as_buffer, call, evicted, parts_of

KIB = 1 << 10
BAD = 8  # an unmapped address
NONBLOCK = 2  # SPLICE_F_NONBLOCK


class Header(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_bytes", ctypes.c_uint32),
        ("parts", ctypes.POINTER(Part)),
        ("part_count", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_bytes", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


class Message(ctypes.Structure):
    _fields_ = (("header", Header), ("bytes", ctypes.c_uint32))


def messages_of(lists: list[list[Span]]) -> ctypes.Array[Message]:
    messages = (Message * len(lists))()
    for message, spans in zip(messages, lists, strict=True):
        message.header.parts = parts_of(spans)
        message.header.part_count = len(spans)
    return messages


def between_processes(name: str, process: int, local: list[Span], remote: list[Span]) -> int:
    sizes = [ctypes.c_ulong(len(spans)) for spans in (local, remote)]
    return call(name, process, parts_of(local), sizes[0], parts_of(remote), sizes[1], 0)


def vmsplice(fd: int, spans: list[Span], flags: int = 0) -> int:
    return call("vmsplice", fd, parts_of(spans), ctypes.c_size_t(len(spans)), flags)


@pytest.fixture
def datagrams() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with left, right:
        for end in (left, right):
            end.settimeout(30)
        yield left, right


@pytest.fixture
def stream() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    with left, right:
        for end in (left, right):
            end.settimeout(30)
        yield left, right


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    try:
        yield reader, writer
    finally:
        os.close(reader)
        os.close(writer)


def around(ptr: int, pages: int, width: int = 3000) -> list[Span]:
    """Spans of a few KiB, each over the end of another page."""
    return [(ptr + page * PAGE - width // 2, width) for page in range(1, pages)]


def content(data: bytes, ptr: int, spans: list[Span]) -> bytes:
    return b"".join(data[at - ptr : at - ptr + size] for at, size in spans)


# --- memory of a process, by its id --------------------------------------------------------------


def thread_id() -> int:
    """A thread other than the main one; it shares the process's memory."""
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, daemon=True)
    thread.start()
    assert thread.native_id
    return thread.native_id


@pytest.mark.parametrize("of", [os.getpid, thread_id])
@pytest.mark.parametrize("name", ["process_vm_readv", "process_vm_writev"])
def test_evicted_memory_of_this_process_on_both_sides(
    driver: Driver, name: str, of: Callable[[], int]
) -> None:
    pages = 2 * FRAMES  # twice what fits the device
    source, data = evicted(driver, pages)
    target, _ = evicted(driver, pages)
    half = pages // 2 * PAGE + 5
    from_, to = [(source, len(data))], [(target, half), (target + half, len(data) - half)]
    local, remote = (to, from_) if name == "process_vm_readv" else (from_, to)
    assert between_processes(name, of(), local, remote) == len(data)
    assert driver.calls.load(target, len(data)) == data


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_the_same_addresses_of_another_process_are_not_this_ones(driver: Driver) -> None:
    ptr, _ = evicted(driver, 2)
    into = ctypes.create_string_buffer(64)
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    try:
        read = between_processes(
            "process_vm_readv", child, [(ctypes.addressof(into), 64)], [(ptr, 64)]
        )
        assert (read, ctypes.get_errno()) in [(-1, errno.EFAULT), (-1, errno.EPERM)]
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_process_that_does_not_exist_is_that_error(driver: Driver) -> None:
    ptr, _ = evicted(driver, 2)
    spans = [(ptr, 64)]
    assert between_processes("process_vm_readv", 2**22 + 1, spans, spans) == -1
    assert ctypes.get_errno() == errno.ESRCH


# --- several messages at a time ------------------------------------------------------------------


def test_several_messages_are_sent_and_received(
    driver: Driver, datagrams: tuple[socket.socket, socket.socket]
) -> None:
    left, right = datagrams
    source, data = evicted(driver, 6)
    target, _ = evicted(driver, 6)
    plain = ctypes.create_string_buffer(b"not managed")
    sent = [around(source, 6), [(ctypes.addressof(plain), 11)], [(source + 7, 1000)]]
    messages = messages_of(sent)
    assert call("sendmmsg", left.fileno(), messages, 3, 0) == 3
    assert [message.bytes for message in messages] == [15_000, 11, 1000]
    driver.prefetch(source, 6, HOST)
    received = messages_of([around(target, 6), [(target + 9, 2000)], [(target + 3000, 1000)]])
    assert call("recvmmsg", right.fileno(), received, 3, 0, None) == 3
    assert [message.bytes for message in received] == [15_000, 11, 1000]
    got = driver.calls.load(target, 6 * PAGE)
    assert content(got, target, around(target, 6)) == content(data, source, around(source, 6))
    assert got[9:20] == b"not managed"
    assert got[3000:4000] == data[7:1007]


def test_a_page_may_be_in_as_many_parts_as_the_system_takes(
    driver: Driver, datagrams: tuple[socket.socket, socket.socket]
) -> None:
    """64 messages of 1,024 parts, all in one page, which stays in place until the call ends."""
    left, right = datagrams
    count, parts, width = 64, 1024, 8
    source = driver.alloc(1)
    data = random.Random(8).randbytes(PAGE)
    driver.calls.store(source, data)
    spans = [(source + i * width, width) for i in range(count * parts)]
    messages = messages_of([spans[i : i + parts] for i in range(0, len(spans), parts)])
    left.setblocking(True)  # one call sends all
    sent: list[int] = []
    thread = threading.Thread(
        target=lambda: sent.append(call("sendmmsg", left.fileno(), messages, count, 0))
    )
    thread.start()
    got = [right.recv(parts * width)]
    pressed = driver.alloc(FRAMES)
    driver.calls.touch(pressed, FRAMES * PAGE)  # evicts all that may leave
    assert driver.states(source, 1) == ["device"]
    got += [right.recv(parts * width) for _ in range(count - 1)]
    thread.join(60)
    assert sent == [count]
    driver.calls.touch(pressed, FRAMES * PAGE)
    assert driver.states(source, 1) == ["host"]
    assert b"".join(got) == data[: count * parts * width]


def test_fewer_messages_than_asked_for_are_what_is_there(
    driver: Driver, datagrams: tuple[socket.socket, socket.socket]
) -> None:
    left, right = datagrams
    target, data = evicted(driver, 4)
    for text in (b"first", b"second"):
        left.send(text)
    messages = messages_of([[(target + page * PAGE, 100)] for page in range(4)])
    count = call("recvmmsg", right.fileno(), messages, 4, socket.MSG_DONTWAIT, None)
    assert count == 2
    got = driver.calls.load(target, 4 * PAGE)
    assert (got[:5], got[PAGE : PAGE + 6], got[2 * PAGE :]) == (
        b"first",
        b"second",
        data[2 * PAGE :],
    )
    assert call("recvmmsg", right.fileno(), messages, 4, socket.MSG_DONTWAIT, None) == -1
    assert ctypes.get_errno() == errno.EAGAIN


# --- one message ---------------------------------------------------------------------------------

RECEIVES: dict[str, Callable[[socket.socket, list[memoryview], int], int]] = {
    "recv_into": lambda end, views, flags: end.recv_into(views[0], 0, flags),
    "recvfrom_into": lambda end, views, flags: end.recvfrom_into(views[0], 0, flags)[0],
    "recvmsg_into": lambda end, views, flags: end.recvmsg_into(views, 0, flags)[0],
}
SENDS: dict[str, Callable[[socket.socket, memoryview, tuple[str, int]], int]] = {
    "send": lambda end, view, _address: end.send(view),
    "sendto": lambda end, view, address: end.sendto(view, address),
    "sendmsg": lambda end, view, address: end.sendmsg([view], [], 0, address),
}


@pytest.mark.parametrize("send", SENDS)
@pytest.mark.parametrize("receive", RECEIVES)
def test_datagrams_over_the_network_stack(driver: Driver, send: str, receive: str) -> None:
    source, data = evicted(driver, 2)
    target, _ = evicted(driver, 2)
    at, size = PAGE - 10_000, 20_000  # over the end of a page
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as left,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as right,
    ):
        right.bind(("127.0.0.1", 0))
        right.settimeout(30)
        if send == "send":
            left.connect(right.getsockname())
        view = as_buffer(source + at, size)
        assert SENDS[send](left, view, right.getsockname()) == size
        into = [as_buffer(target + at, size)]
        assert RECEIVES[receive](right, into, socket.MSG_PEEK) == size
        driver.prefetch(target, 2, HOST)
        assert driver.calls.load(target + at, size) == data[at : at + size]
        driver.calls.store(target + at, bytes(size))
        driver.prefetch(target, 2, HOST)
        assert RECEIVES[receive](right, into, 0) == size  # peeking consumed nothing
        assert driver.calls.load(target + at, size) == data[at : at + size]


@pytest.mark.parametrize("send", ["send", "sendmsg"])
@pytest.mark.parametrize("receive", RECEIVES)
def test_a_stream_that_does_not_block_loses_and_repeats_nothing(
    driver: Driver, stream: tuple[socket.socket, socket.socket], send: str, receive: str
) -> None:
    left, right = stream
    pages = FRAMES + 4
    source, data = evicted(driver, pages)
    target, _ = evicted(driver, pages)
    left.setblocking(False)
    right.setblocking(False)
    sent = got = 0
    while got < len(data):
        try:
            view = as_buffer(source + sent, len(data) - sent)
            sent += (
                left.sendmsg([view[:100_001], view[100_001:]])
                if send == "sendmsg"
                else left.send(view)
            )
        except BlockingIOError:
            into = as_buffer(target + got, min(len(data) - got, 3 * PAGE))
            got += RECEIVES[receive](right, [into[:70_001], into[70_001:]], 0)
        if sent == len(data):
            into = as_buffer(target + got, len(data) - got)
            got += RECEIVES[receive](right, [into], 0)
    assert driver.calls.load(target, len(data)) == data


def test_descriptors_travel_beside_evicted_memory(
    driver: Driver, stream: tuple[socket.socket, socket.socket], pipe: tuple[int, int]
) -> None:
    left, right = stream
    source, data = evicted(driver, 1)
    target, _ = evicted(driver, 1)
    reader, writer = pipe
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [writer]))]
    assert left.sendmsg([as_buffer(source, 500)], rights) == 500
    space = socket.CMSG_SPACE(4)
    size, ancillary, flags, _ = right.recvmsg_into([as_buffer(target, 500)], space)
    assert (size, flags & socket.MSG_CTRUNC) == (500, 0)
    ((level, kind, payload),) = ancillary
    assert (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
    (received,) = array.array("i", payload)
    os.write(received, b"by another number")
    os.close(received)
    assert os.read(reader, 100) == b"by another number"
    assert driver.calls.load(target, 500) == data[:500]


@pytest.mark.parametrize("name", ["recv", "recvfrom", "recvmsg", "recvmmsg", "readv"])
def test_a_signal_ends_a_call_that_waits_and_nothing_is_lost(
    driver: Driver, datagrams: tuple[socket.socket, socket.socket], name: str
) -> None:
    left, right = datagrams
    right.setblocking(True)
    target, data = evicted(driver, 2)
    span = (target + PAGE - 2, 4)
    messages = messages_of([[span]])
    arguments: dict[str, tuple[object, ...]] = {
        "recv": (ctypes.c_void_p(span[0]), ctypes.c_size_t(4), 0),
        "recvfrom": (ctypes.c_void_p(span[0]), ctypes.c_size_t(4), 0, None, None),
        "recvmsg": (ctypes.byref(messages[0].header), 0),
        "recvmmsg": (messages, 1, 0, None),
        "readv": (parts_of([span]), 1),
    }
    previous = signal.signal(signal.SIGALRM, lambda *_: None)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)  # again, if it arrived before the call
        assert call(name, right.fileno(), *arguments[name]) == -1
        error = ctypes.get_errno()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert error == errno.EINTR
    assert driver.states(target, 2) == ["host"] * 2
    left.send(b"sent")
    assert call(name, right.fileno(), *arguments[name]) == (1 if name == "recvmmsg" else 4)
    assert driver.calls.load(*span) == b"sent"
    assert driver.calls.load(target, PAGE - 2) == data[: PAGE - 2]


# --- pipes that keep pages -----------------------------------------------------------------------


def test_a_pipe_gets_what_the_memory_was_at_the_call(driver: Driver, pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    source, data = evicted(driver, 4)
    spans = around(source, 4)
    assert vmsplice(writer, spans) == 9000
    driver.calls.store(source, bytes(len(data)))
    other = driver.alloc(2 * FRAMES)
    driver.calls.touch(other, 2 * FRAMES * PAGE)
    driver.calls.store(other, b"other" * 1000)
    assert os.read(reader, 20_000) == content(data, source, spans)


def test_a_pipe_that_is_full_takes_what_fits(driver: Driver, pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    source, data = evicted(driver, 2)
    taken = vmsplice(writer, [(source, len(data))])
    assert 0 < taken < len(data)
    assert vmsplice(writer, [(source, 100)], NONBLOCK) == -1
    assert ctypes.get_errno() == errno.EAGAIN
    assert os.read(reader, taken) == data[:taken]
    results: list[int] = []

    def send() -> None:
        at = 0
        while at < len(data) and min(results, default=1) > 0:
            results.append(vmsplice(writer, [(source + at, len(data) - at)]))
            at += results[-1]

    sender = threading.Thread(target=send)
    sender.start()
    got = bytearray()
    while len(got) < len(data):
        got += os.read(reader, 100_001)
    sender.join(60)
    assert bytes(got) == data
    assert sum(results) == len(data)


def test_a_named_pipe_gets_a_copy_too(driver: Driver, tmp_path: Path) -> None:
    source, data = evicted(driver, 2)
    os.mkfifo(tmp_path / "pipe")
    fd = os.open(tmp_path / "pipe", os.O_RDWR)
    try:
        taken = vmsplice(fd, [(source, 0), (source + PAGE - 10, PAGE)], NONBLOCK)
        assert taken >= 4096
        ctypes.memset(source, 0, len(data))
        assert os.read(fd, taken) == data[PAGE - 10 : PAGE - 10 + taken]
        os.set_blocking(fd, False)
        with contextlib.suppress(BlockingIOError):
            while os.write(fd, b"full" * 1024):
                pass
        assert vmsplice(fd, [(source, 100)], NONBLOCK) == -1
        assert ctypes.get_errno() == errno.EAGAIN
    finally:
        os.close(fd)


def test_a_pipe_is_spliced_into_evicted_memory(driver: Driver, pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    target, _ = evicted(driver, 2)
    os.write(writer, b"from the pipe")
    assert vmsplice(reader, [(target + PAGE - 5, 5), (target + PAGE, 100)]) == 13
    assert driver.calls.load(target + PAGE - 5, 13) == b"from the pipe"


def test_what_is_no_pipe_is_refused_as_it_was(driver: Driver, tmp_path: Path) -> None:
    source, _ = evicted(driver, 1)
    with (tmp_path / "file").open("wb") as file:
        assert vmsplice(file.fileno(), [(source, 100)]) == -1
    assert ctypes.get_errno() == errno.EBADF
    assert (tmp_path / "file").read_bytes() == b""


# --- files ---------------------------------------------------------------------------------------


def test_streams_of_the_c_library_without_their_lock(driver: Driver, tmp_path: Path) -> None:
    libc = ctypes.CDLL(None)
    libc.fopen.restype = ctypes.c_void_p
    source, data = evicted(driver, 3)
    target, _ = evicted(driver, 3)
    size = ctypes.c_size_t
    for name, mode, ptr in (("fwrite", b"w", source), ("fread", b"r", target)):
        file = ctypes.c_void_p(libc.fopen(os.fsencode(tmp_path / "file"), mode))
        assert call(
            name + "_unlocked", ctypes.c_void_p(ptr), size(1), size(len(data)), file
        ) == len(data)
        assert libc.fclose(file) == 0
    assert (tmp_path / "file").read_bytes() == data
    assert driver.calls.load(target, len(data)) == data


def test_vectored_files_with_flags(driver: Driver, tmp_path: Path) -> None:
    pages = FRAMES + 4  # more than fits the device
    source, data = evicted(driver, pages)
    target, _ = evicted(driver, pages)
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    cut = 5 * PAGE + 3
    size = len(data)
    try:
        assert (
            os.pwritev(
                fd, [as_buffer(source, cut), as_buffer(source + cut, size - cut)], 0, os.RWF_DSYNC
            )
            == size
        )
        assert (tmp_path / "file").read_bytes() == data
        assert (
            os.preadv(
                fd, [as_buffer(target, cut), as_buffer(target + cut, size - cut)], 0, os.RWF_HIPRI
            )
            == size
        )
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        pytest.skip("this file system knows no such flags")
    finally:
        os.close(fd)
    assert driver.calls.load(target, size) == data


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["writev", "readv", "sendmsg", "recvmsg", "sendmmsg", "recvmmsg", "process_vm_readv"]
)
def test_a_part_that_is_no_memory_is_what_it_is_beside_plain_memory(
    driver: Driver, tmp_path: Path, name: str
) -> None:
    """How many bytes such a call takes is its own business, but the same with evicted pages."""
    plain = (ctypes.c_char * (8 * KIB))()
    managed, _ = evicted(driver, 2)
    results = []
    for base in (ctypes.addressof(plain), managed + PAGE - 4 * KIB):
        left, right = socket.socketpair()
        path = tmp_path / "file"
        path.write_bytes(b"x" * 16 * KIB)
        with left, right, path.open("rb+", buffering=0) as file:
            left.send(b"y" * 16 * KIB)
            ctypes.memset(base, 7, 8 * KIB)
            if base != ctypes.addressof(plain):
                driver.prefetch(managed, 2, HOST)
            spans = [(base, 8 * KIB), (BAD, 100)]
            messages = messages_of([spans])
            arguments: dict[str, tuple[object, ...]] = {
                "writev": (file.fileno(), parts_of(spans), 2),
                "readv": (file.fileno(), parts_of(spans), 2),
                "sendmsg": (right.fileno(), ctypes.byref(messages[0].header), 0),
                "recvmsg": (right.fileno(), ctypes.byref(messages[0].header), 0),
                "sendmmsg": (right.fileno(), messages, 1, 0),
                "recvmmsg": (right.fileno(), messages, 1, 0, None),
            }
            if name == "process_vm_readv":
                own = (ctypes.c_char * (9 * KIB))()
                to = [(ctypes.addressof(own), 9 * KIB)]
                done = between_processes(name, os.getpid(), to, spans)
            else:
                done = call(name, *arguments[name])
            error = ctypes.get_errno()
            right.setblocking(False)
            left.setblocking(False)
            rest = [_drain(right), _drain(left)]
            results.append((done, error, path.read_bytes(), rest, ctypes.string_at(base, 8 * KIB)))
    assert results[0] == results[1]


def _drain(end: socket.socket) -> bytes:
    got = b""
    while True:
        try:
            more = end.recv(64 * KIB)
        except BlockingIOError:
            return got
        if not more:
            return got
        got += more


def test_errors_of_the_call_are_not_changed_by_its_window(driver: Driver) -> None:
    ptr, data = evicted(driver, 1)
    span = (ptr, 100)
    messages = messages_of([[span]])
    header = ctypes.byref(messages[0].header)
    size = ctypes.c_size_t(100)
    calls: list[tuple[object, ...]] = [
        ("recvfrom", -1, ctypes.c_void_p(ptr), size, 0, None, None),
        ("sendto", -1, ctypes.c_void_p(ptr), size, 0, None, 0),
        ("recvmsg", -1, header, 0),
        ("sendmsg", -1, header, 0),
        ("recvmmsg", -1, messages, 1, 0, None),
        ("sendmmsg", -1, messages, 1, 0),
        ("writev", -1, parts_of([span]), 1),
        ("vmsplice", -1, parts_of([span]), ctypes.c_size_t(1), 0),
    ]
    for name, *arguments in calls:
        assert call(str(name), *arguments) == -1
        assert ctypes.get_errno() == errno.EBADF, name
    assert driver.states(ptr, 1) == ["host"]  # no window is left open
    assert driver.calls.load(ptr, len(data)) == data


def test_no_message_at_all_is_an_error(
    driver: Driver, stream: tuple[socket.socket, socket.socket]
) -> None:
    del driver
    left, right = stream
    right.send(b"data")
    for name in ("sendmsg", "recvmsg"):
        assert call(name, left.fileno(), None, 0) == -1
        assert ctypes.get_errno() == errno.EFAULT
    for name, rest in (("sendmmsg", ()), ("recvmmsg", (None,))):
        assert call(name, left.fileno(), None, 1, 0, *rest) == -1
        assert ctypes.get_errno() == errno.EFAULT


# --- resident pages stay on the device -----------------------------------------------------------


@pytest.mark.parametrize("pages", [FRAMES // 4, FRAMES - 2, FRAMES])
def test_vectored_calls_move_nothing_that_is_on_the_device(
    driver: Driver, tmp_path: Path, pages: int
) -> None:
    ptr = driver.alloc(pages)
    data = random.Random(1).randbytes(pages * PAGE)
    driver.calls.store(ptr, data)
    cut = pages // 2 * PAGE + 100
    views = [as_buffer(ptr, cut), as_buffer(ptr + cut, len(data) - cut)]
    own = ctypes.create_string_buffer(len(data))
    plain, spans = [(ctypes.addressof(own), len(data))], [(ptr, cut), (ptr + cut, len(data) - cut)]
    before = driver.calls.telemetry()
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    try:
        for _ in range(3):
            assert os.pwrite(fd, as_buffer(ptr, len(data)), 0) == len(data)
            os.lseek(fd, 0, os.SEEK_SET)
            assert os.writev(fd, views) == len(data)
            assert os.pwritev(fd, views, 0) == len(data)
            os.lseek(fd, 0, os.SEEK_SET)
            assert os.readv(fd, views) == len(data)
            assert os.preadv(fd, views, 0) == len(data)
            for name in ("process_vm_readv", "process_vm_writev"):
                assert between_processes(name, os.getpid(), plain, spans) == len(data)
                assert between_processes(name, os.getpid(), spans, plain) == len(data)
    finally:
        os.close(fd)
    after = driver.calls.telemetry()
    assert driver.states(ptr, pages) == ["device"] * pages
    for figure in ("faults", "bytes_in", "bytes_out", "fault_bytes_in", "pressure_bytes_out"):
        assert after[figure] == before[figure], figure
    assert driver.calls.load(ptr, len(data)) == data


@pytest.mark.parametrize("send", ["sendto", "sendmsg", "sendmmsg"])
def test_messages_move_nothing_that_is_on_the_device(
    driver: Driver, datagrams: tuple[socket.socket, socket.socket], send: str
) -> None:
    left, right = datagrams
    ptr = driver.alloc(FRAMES)
    driver.calls.touch(ptr, FRAMES * PAGE)
    before = driver.calls.telemetry()
    spans = around(ptr, FRAMES)
    views = [as_buffer(*span) for span in spans]
    for _ in range(3):
        if send == "sendto":
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
                other.bind(("127.0.0.1", 0))
                other.sendto(views[0], other.getsockname())
                assert other.recvfrom_into(views[1])[0] == 3000
        elif send == "sendmsg":
            assert left.sendmsg(views) == 45_000
            assert right.recvmsg_into(views)[0] == 45_000
        else:
            messages = messages_of([spans[:8], spans[8:]])
            assert call("sendmmsg", left.fileno(), messages, 2, 0) == 2
            assert call("recvmmsg", right.fileno(), messages, 2, 0, None) == 2
    after = driver.calls.telemetry()
    assert driver.states(ptr, FRAMES) == ["device"] * FRAMES
    for figure in ("faults", "bytes_in", "bytes_out", "fault_bytes_in", "pressure_bytes_out"):
        assert after[figure] == before[figure], figure


def test_what_is_evicted_stays_on_the_host(driver: Driver, tmp_path: Path) -> None:
    pages = FRAMES + 4
    ptr, data = evicted(driver, pages)
    other = driver.alloc(FRAMES)
    driver.calls.touch(other, FRAMES * PAGE)
    before = driver.calls.telemetry()
    with (tmp_path / "file").open("wb", buffering=0) as file:
        assert os.writev(
            file.fileno(), [as_buffer(ptr, PAGE), as_buffer(ptr + PAGE, len(data) - PAGE)]
        ) == len(data)
    after = driver.calls.telemetry()
    assert (tmp_path / "file").read_bytes() == data
    assert driver.states(ptr, pages) == ["host"] * pages
    for figure in ("faults", "bytes_in", "bytes_out", "fault_bytes_in", "pressure_bytes_out"):
        assert after[figure] == before[figure], figure


def test_threads_exchange_messages_while_others_evict(driver: Driver) -> None:
    """Windows of several messages open and close concurrently with faults and each other."""
    pages = 4
    stop = threading.Event()
    pressed = driver.alloc(FRAMES)
    memory = [driver.alloc(pages) for _ in range(4)]
    wrong: list[tuple[int, int]] = []

    def press() -> None:
        while not stop.is_set():
            driver.calls.touch(pressed, FRAMES * PAGE)

    def exchange(index: int) -> None:
        source, target = memory[2 * index], memory[2 * index + 1]
        left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        with left, right:
            for turn in range(60):
                text = bytes([turn, index]) * 1500
                for at, size in around(source, pages):
                    ctypes.memmove(at, text, size)
                call(
                    "sendmmsg",
                    left.fileno(),
                    messages_of([[s] for s in around(source, pages)]),
                    3,
                    0,
                )
                call(
                    "recvmmsg",
                    right.fileno(),
                    messages_of([[s] for s in around(target, pages)]),
                    3,
                    0,
                    None,
                )
                for at, size in around(target, pages):
                    if ctypes.string_at(at, size) != text:
                        wrong.append((index, turn))

    pressing = threading.Thread(target=press)
    threads = [threading.Thread(target=exchange, args=(i,)) for i in range(2)]
    for thread in (pressing, *threads):
        thread.start()
    for thread in threads:
        thread.join(120)
    stop.set()
    pressing.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
