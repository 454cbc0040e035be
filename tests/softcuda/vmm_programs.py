"""The shared part of the programs on virtual memory management."""

from __future__ import annotations

import textwrap

from softcuda.programs import driver_program

# The calls, without errors unless they are tried. Follows DRIVER or TORCH.
CALLS = """
import ctypes, threading, time
from ctypes import byref, c_int, c_size_t, c_ubyte, c_uint32, c_uint64, c_void_p
d, MIB = soft.driver, 1 << 20
INVALID_VALUE, OUT_OF_MEMORY, INVALID_DEVICE, NOT_READY, ILLEGAL_ADDRESS = 1, 2, 101, 600, 700
NOT_SUPPORTED = 801

class Location(ctypes.Structure):
    _fields_ = [("type", c_int), ("id", c_int)]

class Properties(ctypes.Structure):
    _fields_ = [("type", c_int), ("handle_types", c_int), ("location", Location),
                ("metadata", c_void_p), ("compression", c_ubyte), ("rdma", c_ubyte),
                ("usage", ctypes.c_ushort), ("reserved", c_ubyte * 4)]

class Grant(ctypes.Structure):
    _fields_ = [("location", Location), ("flags", c_int)]

DEVICE, HOST, HOST_NUMA, READ, READ_WRITE = Location(1, 0), Location(2, 0), Location(3, 0), 1, 3

def ok(result):
    assert result == 0, result

def try_reserve(ptr, size, alignment=0, hint=0):
    return d.cuMemAddressReserve(
        byref(ptr), c_size_t(size), c_size_t(alignment), c_uint64(hint), c_uint64(0))

def reserve(size):
    ptr = c_uint64()
    ok(try_reserve(ptr, size))
    return ptr

def try_create(size, location=DEVICE, kind=1, handle_types=0, handle=None):
    handle = c_uint64() if handle is None else handle
    return d.cuMemCreate(byref(handle), c_size_t(size),
                         byref(Properties(kind, handle_types, location)), c_uint64(0))

def create(size, location=DEVICE):
    handle = c_uint64()
    ok(try_create(size, location, handle=handle))
    return handle

def try_map(ptr, size, handle, offset=0):
    return d.cuMemMap(ptr, c_size_t(size), c_size_t(offset), handle, c_uint64(0))

def try_grant(ptr, size, *locations, flags=READ_WRITE):
    grants = (Grant * len(locations))(*[Grant(each, flags) for each in locations])
    return d.cuMemSetAccess(ptr, c_size_t(size), grants, c_size_t(len(locations)))

def put(ptr, size, handle, *locations):
    ok(try_map(ptr, size, handle))
    ok(try_grant(ptr, size, *locations))

def unmap(ptr, size):
    return d.cuMemUnmap(ptr, c_size_t(size))

def pinned(size):
    ptr = c_void_p()
    ok(d.cuMemHostAlloc(byref(ptr), c_size_t(size), 0))
    return c_uint64(ptr.value)

def word():
    ptr = pinned(4096)
    ctypes.memset(ptr.value, 0, 4096)
    return ptr

def write(ptr, value):
    c_uint32.from_address(ptr.value).value = value

def wait_value(stream, ptr, value, flags=0):
    return d.cuStreamWaitValue32(stream, ptr, c_uint32(value), flags)

def copy(to, source, size, stream):
    return d.cuMemcpyAsync(to, source, c_size_t(size), stream)

def at(ptr, offset):
    return c_uint64(ptr.value + offset)

class Swapper:
    # The steps of a swap to the host, by a thread of its own. `stream` is for its copies.
    def __init__(self, va, size, device, context, stream, event):
        self.va, self.size, self.device, self.context = va, size, device, context
        self.stream, self.event = stream, event
        self.host, self.alias = create(size, HOST_NUMA), reserve(size)
        put(self.alias, size, self.host, DEVICE, HOST_NUMA)

    def out(self, used, flag, value):
        def work():
            self.context()
            ok(d.cuStreamWaitEvent(self.stream, used, 0))
            ok(copy(self.alias, self.va, self.size, self.stream))
            ok(d.cuEventRecord(self.event, self.stream))
            ok(d.cuEventSynchronize(self.event))
            ok(unmap(self.va, self.size))
            put(self.va, self.size, self.host, DEVICE)
            write(flag, value)
        thread = threading.Thread(target=work)
        thread.start()
        return thread

    def back(self, stream):
        ok(d.cuStreamSynchronize(stream))
        ok(unmap(self.va, self.size))
        put(self.va, self.size, self.device, DEVICE)
        ok(copy(self.va, self.alias, self.size, stream))
"""

# A kernel, as the software libcudart launches it. It only notes that it ran.
KERNEL = """
class Range(ctypes.Structure):
    _fields_ = [("begin", c_void_p), ("bytes", c_size_t), ("written", c_int)]

class Kernel(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("ranges", ctypes.POINTER(Range)), ("count", c_size_t)]

JOB = ctypes.CFUNCTYPE(None, c_void_p)
kept, ran = [], []

def launch(ptr, size, stream, written=1):
    range_ = Range(ptr.value, size, written)
    run = JOB(lambda _: ran.append(ptr.value))
    drop = JOB(lambda _: None)
    kept.append((run, drop))
    return d.softcuda_enqueue(stream, byref(Kernel(b"kernel", ctypes.pointer(range_), 1)),
                              run, drop, None, 0)
"""


def vmm_program(code: str, **environ: str) -> str:
    program = CALLS + KERNEL + textwrap.dedent(code)
    return driver_program(program, 0, SOFTCUDA_BYTES=str(16 << 20), **environ)[0]
