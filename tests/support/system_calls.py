"""System calls on managed memory, given its address."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import platform
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from support.driver import HOST, PAGE, Driver

Span = tuple[int, int]  # address, bytes


def as_buffer(ptr: int, nbytes: int) -> memoryview:
    """Managed memory as Python sees a tensor's: a buffer that faults when touched."""
    return memoryview((ctypes.c_char * nbytes).from_address(ptr)).cast("B")


_seeds = itertools.count()


def evicted(driver: Driver, pages: int) -> tuple[int, bytes]:
    ptr = driver.alloc(pages)
    data = random.Random(next(_seeds)).randbytes(pages * PAGE)  # no two blocks are alike
    driver.calls.store(ptr, data)
    driver.prefetch(ptr, pages, HOST)
    return ptr, data


READ = {"x86_64": 0, "aarch64": 63}[platform.machine()]  # its number


@contextlib.contextmanager
def reading(ptr: int, nbytes: int) -> Iterator[Callable[[bytes], None]]:
    """Within it a thread is in read(2) of that memory; ends it with the bytes that it is given."""
    reader, writer = os.pipe()
    result: list[int | None] = []

    def read() -> None:
        with contextlib.suppress(OSError):
            result.append(file.readinto(as_buffer(ptr, nbytes)))

    with os.fdopen(reader, "rb", buffering=0) as file, os.fdopen(writer, "wb", buffering=0) as pipe:
        thread = threading.Thread(target=read)
        thread.start()
        task = Path(f"/proc/self/task/{thread.native_id}/syscall")
        while not task.read_text().startswith(f"{READ} "):
            time.sleep(0.001)

        def end(data: bytes) -> None:
            pipe.write(data)
            thread.join(30)
            assert result == [len(data)]

        yield end


class Part(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("bytes", ctypes.c_size_t))


def parts_of(spans: list[Span]) -> ctypes.Array[Part]:
    return (Part * len(spans))(*(Part(*span) for span in spans))


def call(name: str, *arguments: object) -> int:
    """Return the result of the C library's function, looked up by name."""
    function = ctypes.CDLL(None, use_errno=True)[name]
    function.restype = ctypes.c_ssize_t if "mmsg" not in name else ctypes.c_int
    ctypes.set_errno(0)
    return int(function(*arguments))
