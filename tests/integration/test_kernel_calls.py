"""System calls beyond read and write, and writes that are short, vectored or memory-mapped."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import pickle
import platform
import socket
import subprocess
import sys
import threading
import zlib
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

from support.system_calls import reading  # noqa: E402

import umem  # noqa: E402

MIB = 1 << 20
BYTES = 24 * MIB


def data(seed: int = 5) -> torch.Tensor:
    return torch.randn(BYTES // 4, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def want() -> bytes:
    return bytes(data().numpy().tobytes())


@pytest.fixture
def tensor(want: bytes) -> torch.Tensor:
    del want  # made without umem, before
    umem.enable(budget="8MiB", device="soft")
    tensor = data()
    umem.evict(tensor)
    assert umem.stats().host_bytes >= BYTES
    return tensor


def raw(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.numpy()).cast("B")


def emptied(tensor: torch.Tensor) -> memoryview:
    tensor.zero_()
    umem.evict(tensor)
    return raw(tensor)


def test_positioned_and_vectored_files(tensor: torch.Tensor, want: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a"
    with path.open("wb+", buffering=0) as file:
        fd = file.fileno()
        view = raw(tensor)
        at = 0
        while at < BYTES:  # odd pieces: never page by page
            at += os.pwritev(
                fd, [view[at : at + 3_000_001], view[at + 3_000_001 : at + 5_000_000]], at
            )
        assert path.read_bytes() == want
        view = emptied(tensor)
        at = 0
        while at < BYTES:
            at += os.preadv(
                fd, [view[at : at + 2_500_003], view[at + 2_500_003 : at + 7_000_000]], at
            )
        assert raw(tensor).tobytes() == want
        umem.evict(tensor)
        os.lseek(fd, 0, os.SEEK_SET)
        at = 0
        while at < BYTES:
            at += os.writev(fd, [view[at : at + 4_194_305]])
        assert path.read_bytes() == want
        assert os.pwrite(fd, view[100:5_000_100], 0) == 5_000_000
        assert os.pread(fd, 5_000_000, 0) == want[100:5_000_100]


def test_buffered_reader_into_a_tensor(tensor: torch.Tensor, want: bytes, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(want)
    view = emptied(tensor)
    with (tmp_path / "a").open("rb") as file:
        file.read(11)
        file.seek(0)
        at = 0
        while at < BYTES:
            count = file.readinto(view[at : at + 1_000_003])
            assert count
            at += count
    assert raw(tensor).tobytes() == want


def test_numpy_reads_back_what_it_wrote(tensor: torch.Tensor, want: bytes, tmp_path: Path) -> None:
    tensor.numpy().tofile(tmp_path / "a")
    array = np.fromfile(tmp_path / "a", dtype=np.float32)
    assert array.tobytes() == want
    tensor.copy_(torch.from_numpy(array).flip(0))
    umem.evict(tensor)
    np.savez(tmp_path / "b.npz", t=tensor.numpy())
    assert np.load(tmp_path / "b.npz")["t"][::-1].tobytes() == want
    from_file = torch.from_file(str(tmp_path / "a"), size=BYTES // 4)
    assert torch.equal(from_file.flip(0), tensor)


def test_mmap_to_and_from(tensor: torch.Tensor, want: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(BYTES))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), BYTES) as mapped:
        mapped[:] = raw(tensor)
        mapped.flush()
        assert path.read_bytes() == want
        emptied(tensor)[:] = mapped[:]
    assert raw(tensor).tobytes() == want


def exchange(tensor: torch.Tensor, send: Any, receive: Any) -> bytes:
    left, right = socket.socketpair()
    with left, right:
        for end in (left, right):
            end.settimeout(60)
        thread = threading.Thread(target=send, args=(left, raw(tensor)))
        thread.start()
        got = receive(right)
        thread.join(timeout=60)
        assert not thread.is_alive()
    return bytes(got)


def test_sockets_with_timeouts(tensor: torch.Tensor, want: bytes) -> None:
    back = torch.empty_like(tensor)

    def receive(end: socket.socket) -> memoryview:
        view = emptied(back)
        at = 0
        while at < BYTES:
            at += end.recv_into(view[at:])
        return view

    assert exchange(tensor, lambda end, view: end.sendall(view), receive) == want


@pytest.mark.parametrize("call", ["sendto", "sendmsg"])
@pytest.mark.parametrize("receive", ["recvfrom_into", "recvmsg_into"])
def test_datagrams_with_addresses(
    tensor: torch.Tensor, want: bytes, call: str, receive: str
) -> None:
    """All of it, in datagrams with arbitrary boundaries in its blocks."""
    back = torch.empty_like(tensor)
    into = emptied(back)
    view = raw(tensor)
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as left,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as right,
    ):
        right.bind(("127.0.0.1", 0))
        right.settimeout(60)
        address = right.getsockname()
        for at in range(0, BYTES, 60_001):
            part, middle = view[at : at + 60_001], at + 20_000
            if call == "sendto":
                sent = left.sendto(part, address)
            else:
                sent = left.sendmsg([part[:11], part[11:]], [], 0, address)
            if receive == "recvfrom_into":
                got = right.recvfrom_into(into[at : at + 60_001])[0]
            else:
                got = right.recvmsg_into([into[at:middle], into[middle : middle + 40_001]])[0]
            assert sent == got == len(part)
    assert raw(back).tobytes() == want


def test_calls_that_are_not_wrapped_are_errors_and_not_damage(
    tensor: torch.Tensor, want: bytes
) -> None:
    """The kernel may refuse them, or take them: it must not send other bytes."""
    number = {"x86_64": 1, "aarch64": 64}[platform.machine()]
    libc = ctypes.CDLL(None, use_errno=True)
    reader, writer = os.pipe()
    try:
        address, size = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(4096)
        sent = libc.syscall(ctypes.c_long(number), ctypes.c_long(writer), address, size)
        if sent == -1:
            assert ctypes.get_errno() == errno.EFAULT
        else:
            assert os.read(reader, 4096) == want[:sent]
    finally:
        os.close(reader)
        os.close(writer)
    assert raw(tensor).tobytes() == want


def test_a_page_that_an_op_maps_from_the_host_stays_while_a_call_accesses_it(
    tensor: torch.Tensor, want: bytes
) -> None:
    """Pages that thrash are mapped from the host until the op ends; a call may not be over then."""
    array = tensor.numpy()
    page = 2 * MIB // 4
    for _ in range(6):  # over more pages than fit, repeatedly
        array[::page].sum()
    with reading(tensor.data_ptr(), BYTES) as end:
        torch.ones(8).add_(1)  # the span between two ops ends
        other = torch.ones(6 * MIB // 4).add_(1)
        end(b"filled")
    assert raw(tensor).tobytes() == b"filled" + want[6:]
    assert other.eq(2).all()


def test_pipe_to_a_child(tensor: torch.Tensor, want: bytes) -> None:
    child = "import sys, zlib; print(zlib.crc32(sys.stdin.buffer.read()))"
    done = subprocess.run(
        [sys.executable, "-c", child],
        input=raw(tensor),
        stdout=subprocess.PIPE,
        check=True,
        timeout=60,
    )
    assert int(done.stdout) == zlib.crc32(want)


def test_pickle_out_of_band(tensor: torch.Tensor, want: bytes, tmp_path: Path) -> None:
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(tensor.numpy(), protocol=5, buffer_callback=buffers.append)
    with (tmp_path / "a").open("wb") as file:
        for buffer in buffers:
            file.write(buffer.raw())
    assert (tmp_path / "a").read_bytes() == want
    again = pickle.loads(head, buffers=[bytearray((tmp_path / "a").read_bytes())])
    assert again.tobytes() == want


def test_save_while_another_thread_computes(
    tensor: torch.Tensor, want: bytes, tmp_path: Path
) -> None:
    """A page mapped for the kernel must not be lost when another thread's faults evict."""
    other = torch.arange(4 * MIB, dtype=torch.float32)
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            other.add_(1).sub_(1)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for turn in range(4):
            torch.save(tensor, tmp_path / f"{turn}.pt")
            with (tmp_path / f"{turn}.raw").open("wb", buffering=0) as file:
                view = raw(tensor)
                while view:
                    view = view[file.write(view) :]
    finally:
        stop.set()
        thread.join(timeout=60)
    assert torch.equal(other, torch.arange(4 * MIB, dtype=torch.float32))
    for turn in range(4):
        assert (tmp_path / f"{turn}.raw").read_bytes() == want
        assert torch.load(tmp_path / f"{turn}.pt").numpy().tobytes() == want
