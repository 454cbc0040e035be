"""Virtual memory management, and streams that wait for a word that a thread writes."""

from __future__ import annotations

import textwrap

import pytest
from softcuda.programs import (
    driver_program,
    reason_without_libraries,
    reason_without_torch,
    torch_program,
)

pytestmark = pytest.mark.skipif(
    reason_without_libraries() is not None, reason=str(reason_without_libraries())
)
needs_torch = pytest.mark.skipif(
    reason_without_torch() is not None, reason=str(reason_without_torch())
)

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
    return driver_program(program, SOFTCUDA_BYTES=str(16 << 20), **environ)[0]


def test_a_program_finds_the_calls_and_what_the_device_supports() -> None:
    vmm_program(
        """
        context()
        def attribute(number):
            value = c_int()
            ok(d.cuDeviceGetAttribute(byref(value), number, 0))
            return value.value
        # Virtual memory management, the same on a NUMA node of the host, and waits for words; no
        # handles for other processes, and no memory without a node.
        assert [attribute(n) for n in (102, 141, 92, 103, 145)] == [1, 1, 1, 0, 0]
        for name in ("GetAllocationGranularity", "AddressReserve", "AddressFree", "Create",
                     "Release", "Map", "Unmap", "SetAccess"):
            assert proc_address(f"cuMem{name}", 10020) != 0 == proc_address(f"cuMem{name}", 10010)
        for name in ("cuStreamWaitValue32", "cuStreamWriteValue32"):
            assert proc_address(name, 8000) != proc_address(name, 11070) != 0
        for location in (DEVICE, HOST_NUMA):
            for option in (0, 1):
                size = c_size_t()
                ok(d.cuMemGetAllocationGranularity(
                    byref(size), byref(Properties(1, 0, location)), option))
                assert size.value == 2 * MIB
        least, greatest = c_int(), c_int()
        ok(d.cuCtxGetStreamPriorityRange(byref(least), byref(greatest)))
        assert least.value > greatest.value
        page, device = pinned(4096), c_uint64()
        ok(d.cuMemHostGetDevicePointer_v2(byref(device), page, 0))
        assert device.value == page.value
        """
    )


def test_wrong_arguments_are_refused() -> None:
    vmm_program(
        """
        context()
        ptr = c_uint64()
        assert try_reserve(ptr, 3 * MIB) == try_reserve(ptr, 0) == INVALID_VALUE
        assert try_reserve(ptr, 2 * MIB, alignment=3 * MIB) == INVALID_VALUE
        ok(try_reserve(ptr, 4 * MIB, alignment=64 * MIB))
        assert ptr.value % (64 * MIB) == 0
        ok(d.cuMemAddressFree(ptr, c_size_t(4 * MIB)))
        again = c_uint64()
        ok(try_reserve(again, 4 * MIB, hint=ptr.value))
        assert again.value == ptr.value
        other = c_uint64()
        ok(try_reserve(other, 4 * MIB, hint=ptr.value))  # a hint may be taken
        assert other.value not in (0, ptr.value)

        assert try_create(3 * MIB) == try_create(0) == INVALID_VALUE
        assert try_create(2 * MIB, kind=2) == INVALID_VALUE
        assert try_create(2 * MIB, handle_types=1) == NOT_SUPPORTED
        assert try_create(2 * MIB, Location(1, 1)) == INVALID_DEVICE
        for elsewhere in (HOST, Location(3, 1), Location(4, 0), Location(0, 0)):
            assert try_create(2 * MIB, elsewhere) == INVALID_VALUE

        device, host = create(4 * MIB), create(2 * MIB, HOST_NUMA)
        assert try_map(ptr, 2 * MIB, device) == INVALID_VALUE  # not the whole
        assert try_map(ptr, 2 * MIB, device, offset=2 * MIB) == INVALID_VALUE
        assert try_map(at(ptr, 2 * MIB), 4 * MIB, device) == INVALID_VALUE  # beyond the end
        assert try_map(at(ptr, 4096), 2 * MIB, host) == INVALID_VALUE
        assert try_map(ptr, 2 * MIB, c_uint64(99)) == INVALID_VALUE
        assert try_grant(ptr, 4 * MIB, DEVICE) == unmap(ptr, 4 * MIB) == INVALID_VALUE
        ok(try_map(ptr, 4 * MIB, device))
        assert try_map(at(ptr, 2 * MIB), 2 * MIB, host) == INVALID_VALUE  # taken
        assert try_grant(ptr, 2 * MIB, DEVICE) == unmap(ptr, 2 * MIB) == INVALID_VALUE
        assert try_grant(ptr, 4 * MIB, HOST) == try_grant(ptr, 4 * MIB, HOST_NUMA) == INVALID_VALUE
        assert try_grant(ptr, 4 * MIB, DEVICE, flags=2) == INVALID_VALUE
        assert try_grant(ptr, 4 * MIB, Location(1, 1)) == INVALID_DEVICE
        assert d.cuMemFree_v2(ptr) == INVALID_VALUE
        assert d.cuMemAddressFree(ptr, c_size_t(4 * MIB)) == INVALID_VALUE  # mapped
        ok(unmap(ptr, 4 * MIB))
        assert d.cuMemAddressFree(ptr, c_size_t(2 * MIB)) == INVALID_VALUE
        ok(d.cuMemAddressFree(ptr, c_size_t(4 * MIB)))
        ok(d.cuMemRelease(device))
        assert d.cuMemRelease(device) == INVALID_VALUE
        """
    )


def test_device_memory_counts_until_handle_and_mappings_are_gone() -> None:
    vmm_program(
        """
        context()
        va, alias = reserve(8 * MIB), reserve(8 * MIB)
        one, two = create(8 * MIB), create(4 * MIB)
        host = create(64 * MIB, HOST_NUMA)
        assert free_bytes() == 4 * MIB
        assert try_create(6 * MIB) == try_create(32 * MIB) == OUT_OF_MEMORY
        assert free_bytes() == 4 * MIB
        put(va, 8 * MIB, one, DEVICE)
        put(alias, 8 * MIB, one, DEVICE)
        ok(d.cuMemRelease(two))
        assert free_bytes() == 8 * MIB
        ok(d.cuMemRelease(one))
        ok(unmap(va, 8 * MIB))
        assert free_bytes() == 8 * MIB
        assert try_create(10 * MIB) == OUT_OF_MEMORY
        ok(unmap(alias, 8 * MIB))
        assert free_bytes() == 16 * MIB
        # Managed pages leave for it, and plain memory does not.
        ptr = managed(12 * MIB)
        fill(ptr, 7, 12 * MIB, None)
        whole = create(16 * MIB)
        assert d.cuMemAlloc_v2(byref(c_uint64()), c_size_t(2 * MIB)) == OUT_OF_MEMORY
        ok(d.cuMemRelease(whole))
        assert ctypes.string_at(ptr.value, 12 * MIB) == b"\\x07" * (12 * MIB)
        """
    )
    vmm_program(
        """
        context(1)
        handle = create(16 * MIB, Location(1, 1))
        assert free_bytes() == 0
        context(0)
        assert free_bytes() == 16 * MIB
        va = reserve(16 * MIB)
        put(va, 16 * MIB, handle, Location(1, 1))
        stream = new_stream()
        assert launch(va, MIB, stream) == ILLEGAL_ADDRESS  # of device 0, without access
        """,
        SOFTCUDA_DEVICES="2",
    )


def test_two_mappings_show_the_same_bytes_and_handles_keep_theirs() -> None:
    vmm_program(
        """
        context()
        va, alias = reserve(6 * MIB), reserve(4 * MIB)
        device, host = create(4 * MIB), create(2 * MIB, HOST_NUMA)
        put(va, 4 * MIB, device, DEVICE)
        put(alias, 4 * MIB, device, DEVICE)
        put(at(va, 4 * MIB), 2 * MIB, host, DEVICE, HOST_NUMA)
        out = pinned(6 * MIB)
        # New memory has undefined contents; a copy may span mappings.
        ok(d.cuMemcpy(out, va, c_size_t(6 * MIB)))
        assert ctypes.string_at(out.value, 6 * MIB) != bytes(6 * MIB)
        fill(va, 1, 6 * MIB, None)
        ok(d.cuMemcpy(out, alias, c_size_t(4 * MIB)))
        assert ctypes.string_at(out.value, 4 * MIB) == b"\\x01" * (4 * MIB)
        ok(d.cuCtxSynchronize())
        ok(unmap(va, 6 * MIB))  # two mappings at once
        assert soft.faults() == 0
        source = managed(2 * MIB)
        fill(source, 2, 2 * MIB, None)
        ok(d.cuMemcpy(at(alias, 2 * MIB), source, c_size_t(2 * MIB)))
        put(va, 4 * MIB, device, DEVICE)
        ok(d.cuMemcpy(out, va, c_size_t(4 * MIB)))
        assert ctypes.string_at(out.value, 4 * MIB) == b"\\x01" * (2 * MIB) + b"\\x02" * (2 * MIB)
        put(at(va, 4 * MIB), 2 * MIB, host, DEVICE, HOST_NUMA)
        assert ctypes.string_at(va.value + 4 * MIB, 2 * MIB) == b"\\x01" * (2 * MIB)
        assert soft.async_errors() == 0
        """
    )


def test_pointer_attributes_tell_the_reservation_and_its_backing() -> None:
    vmm_program(
        """
        context()
        va = reserve(8 * MIB)
        def attribute(number, kind, ptr):
            value = kind()
            result = d.cuPointerGetAttribute(byref(value), number, ptr)
            return value.value if result == 0 else -result
        def look(offset):
            ptr = at(va, offset)
            assert attribute(11, c_uint64, ptr) == va.value
            assert attribute(12, c_size_t, ptr) == 8 * MIB
            # Type, managed, device, mapped.
            return [attribute(number, c_int, ptr) for number in (2, 8, 9)] + [
                attribute(13, ctypes.c_bool, ptr)]
        device, host = create(2 * MIB), create(2 * MIB, HOST_NUMA)
        unbacked = [-INVALID_VALUE] * 3 + [False]
        assert look(0) == unbacked
        put(va, 2 * MIB, device, DEVICE)
        put(at(va, 2 * MIB), 2 * MIB, host, DEVICE)
        assert look(5) == [2, 0, 0, True]
        assert look(2 * MIB) == [1, 0, 0, True]
        assert look(4 * MIB) == unbacked
        ok(unmap(va, 4 * MIB))
        assert look(0) == unbacked
        # The software libcudart takes both for device pointers.
        runtime = ctypes.CDLL(os.environ["SOFTCUDA_LIB"] + "/libcudart.so.13")
        put(va, 2 * MIB, host, DEVICE)
        out, to_host, to_device = pinned(MIB), 2, 1
        for kind, to, source in ((to_host, out, va), (to_device, va, out)):
            ok(runtime.cudaMemcpy(to, source, c_size_t(MIB), kind))
        """
    )


@pytest.mark.parametrize("seed", ["0", "1"])
def test_work_at_addresses_without_memory_or_access_loses_the_device(seed: str) -> None:
    vmm_program(
        """
        context()
        stream, va, handle = new_stream(), reserve(4 * MIB), create(2 * MIB)
        out = pinned(4 * MIB)
        # The driver looks the pointers of copies and fills up when they are called.
        assert copy(out, va, MIB, stream) == INVALID_VALUE
        assert d.cuMemsetD8Async(va, c_ubyte(1), c_size_t(MIB), stream) == INVALID_VALUE

        def illegal(call):
            results = [call(), d.cuStreamSynchronize(stream)]
            assert results in ([0, ILLEGAL_ADDRESS], [ILLEGAL_ADDRESS] * 2), results
            # All that needs the device fails from now on.
            assert d.cuMemcpy(out, out, c_size_t(1)) == unmap(va, 2 * MIB) == ILLEGAL_ADDRESS
            assert d.cuMemAlloc_v2(byref(c_uint64()), c_size_t(MIB)) == ILLEGAL_ADDRESS
            soft.reset()
            ok(d.cuStreamSynchronize(stream))
        illegal(lambda: launch(va, MIB, stream))
        ok(try_map(va, 2 * MIB, handle))
        illegal(lambda: launch(va, MIB, stream))
        illegal(lambda: copy(out, va, MIB, stream))
        ok(try_grant(va, 2 * MIB, DEVICE, flags=READ))
        illegal(lambda: launch(va, MIB, stream))
        illegal(lambda: d.cuMemsetD8Async(va, c_ubyte(1), c_size_t(MIB), stream))
        assert ran == []
        ok(launch(va, MIB, stream, written=0))
        ok(copy(out, va, MIB, stream))
        ok(try_grant(va, 2 * MIB, DEVICE))
        ok(launch(va, MIB, stream))
        ok(d.cuStreamSynchronize(stream))
        assert ran == [va.value] * 2
        assert copy(out, va, 3 * MIB, stream) == INVALID_VALUE  # beyond the mapping
        illegal(lambda: launch(va, 3 * MIB, stream))
        ok(unmap(va, 2 * MIB))
        illegal(lambda: launch(va, MIB, stream))
        assert len(soft.races()) == 1  # the last: it is unmapped
        """,
        SOFTCUDA_SEED=seed,
    )


def test_unmapping_does_not_wait_and_races_with_unfinished_work() -> None:
    code = """
        context()
        stream, event, va, handle = new_stream(), new_event(), reserve(2 * MIB), create(2 * MIB)
        def mapped():
            put(va, 2 * MIB, handle, DEVICE)
        mapped()
        fill(va, 1, MIB, stream)
        ok(unmap(va, 2 * MIB))
        [race] = soft.races()
        assert "cuMemsetD8Async writes" in race and "cuMemUnmap frees it on the host" in race, race
        d.cuCtxSynchronize()
        soft.reset()
        mapped()
        for finished in (lambda: d.cuStreamSynchronize(stream), lambda: d.cuCtxSynchronize(),
                         lambda: d.cuEventSynchronize(event)):
            fill(va, 1, MIB, stream)
            ok(d.cuEventRecord(event, stream))
            ok(finished())
            ok(unmap(va, 2 * MIB))
            mapped()
        assert soft.races() == []
        # Without a wait, the device is lost when the work runs, if that is later.
        lost = 0
        for _ in range(40):
            ok(launch(va, MIB, stream, written=0))
            ok(unmap(va, 2 * MIB))
            lost += d.cuCtxSynchronize() == ILLEGAL_ADDRESS
            soft.reset()
            mapped()
        assert len(soft.races()) == 1
        print(lost)
        """
    assert int(vmm_program(code)) == 0
    assert 10 < int(vmm_program(code, SOFTCUDA_SEED="2")) < 40


@pytest.mark.parametrize("seed", ["0", "1", "2"])
def test_work_behind_a_word_waits_for_it_in_real_time(seed: str) -> None:
    vmm_program(
        """
        context()
        lane, other, flag, event = new_stream(), new_stream(), word(), new_event()
        ptr, busy = pinned(4096), managed(MIB)
        ctypes.memset(ptr.value, 0, 4096)
        def first():
            return ctypes.string_at(ptr.value, 1)[0]
        waits = [
            lambda: d.cuStreamSynchronize(lane), lambda: d.cuStreamSynchronize(other),
            lambda: d.cuEventSynchronize(event), lambda: d.cuCtxSynchronize(),
            lambda: d.cuMemFree_v2(managed(MIB)),
        ]
        for turn, finished in enumerate(waits, start=1):
            ok(wait_value(lane, flag, turn))
            fill(ptr, turn, 4096, lane)
            ok(d.cuEventRecord(event, lane))
            ok(d.cuStreamWaitEvent(other, event, 0))
            fill(ptr, turn + 100, 16, other)
            for _ in range(20):
                assert d.cuStreamQuery(lane) == d.cuEventQuery(event) == NOT_READY
                assert d.cuStreamQuery(other) == NOT_READY
            assert first() == (0 if turn == 1 else turn + 99)
            done = []
            def work():
                context()
                # The driver serves this thread while the other one waits.
                mine, at_end = new_stream(), new_event()
                for _ in range(5):
                    fill(busy, turn, MIB, mine)
                    ok(d.cuEventRecord(at_end, mine))
                    ok(d.cuEventSynchronize(at_end))
                    time.sleep(0.002)
                done.append(True)
                write(flag, turn)
            thread = threading.Thread(target=work)
            thread.start()
            ok(finished())
            assert done == [True]
            ok(d.cuStreamSynchronize(other))
            assert first() == turn + 100
            thread.join()
        assert soft.races() == []
        """,
        SOFTCUDA_SEED=seed,
    )


@pytest.mark.parametrize("seed", ["0", "3"])
def test_words_compare_as_cyclic_counters_or_for_equality(seed: str) -> None:
    vmm_program(
        """
        context()
        flag, other = word(), word()
        def passes(value, flags=0):
            stream = new_stream()
            ok(wait_value(stream, flag, value, flags))
            for _ in range(20):
                ready = d.cuStreamQuery(stream)
            if ready == NOT_READY:
                before = c_uint32.from_address(flag.value).value
                write(flag, value)
                ok(d.cuStreamSynchronize(stream))
                write(flag, before)
            return ready == 0
        write(flag, 5)
        assert [passes(value) for value in (4, 5, 6)] == [True, True, False]
        assert [passes(value, 1) for value in (4, 5, 6)] == [False, True, False]
        write(flag, 2)
        assert [passes(value) for value in (0xFFFFFFFF, 3, 0x80000003)] == [True, False, True]

        stream = new_stream()
        for flags in (2, 3, 1 << 30):
            assert wait_value(stream, flag, 1, flags) == NOT_SUPPORTED
        assert wait_value(stream, at(flag, 2), 1) == INVALID_VALUE
        assert wait_value(stream, c_uint64(id(flag) & ~3), 1) == INVALID_VALUE
        assert wait_value(stream, reserve(2 * MIB), 1) == INVALID_VALUE
        graph = c_void_p()
        for call in (d.cuStreamWaitValue32, d.cuStreamWriteValue32):
            ok(d.cuStreamBeginCapture_v2(stream, 0))
            assert call(stream, flag, c_uint32(1), 0) == 900
            assert d.cuStreamEndCapture(stream, byref(graph)) == 901

        # From stream to stream, with the order of their work.
        ptr, written = managed(MIB), new_stream()
        for turn in range(1, 11):
            ok(wait_value(stream, other, turn))
            fill(ptr, 100, MIB, stream)
            fill(ptr, turn, MIB, written)
            ok(d.cuStreamWriteValue32_v2(written, other, c_uint32(turn), 0))
            ok(d.cuStreamSynchronize(stream))
            assert ctypes.string_at(ptr.value, 1)[0] == 100
            assert c_uint32.from_address(other.value).value == turn
        assert soft.races() == []
        """,
        SOFTCUDA_SEED=seed,
    )


@pytest.mark.parametrize("seed", ["0", "1", "2"])
def test_a_seen_word_orders_what_the_program_knew_before_later_work(seed: str) -> None:
    vmm_program(
        """
        context()
        lane, other, after, flag, event = (
            new_stream(), new_stream(), new_stream(), word(), new_event())
        ptr = managed(MIB)
        def behind(turn, streams):
            # Work that is enqueued before the program has waited, directly behind the word or by
            # an event.
            ok(wait_value(lane, flag, turn))
            fill(ptr, 1, MIB, lane)
            if streams > 1:
                ok(d.cuEventRecord(event, lane))
                ok(d.cuStreamWaitEvent(after, event, 0))
                fill(ptr, 2, MIB, after)
        turn = 0
        for streams in (1, 2):
            turn += 1
            fill(ptr, 9, MIB, other)
            behind(turn, streams)
            ok(d.cuStreamSynchronize(other))
            write(flag, turn)
            ok(d.cuCtxSynchronize())
            assert soft.races() == []
        # Nobody waited for the other stream's work.
        turn += 1
        fill(ptr, 9, MIB, other)
        behind(turn, 2)
        write(flag, turn)
        ok(d.cuStreamSynchronize(after))
        races = soft.races()
        assert len(races) in (1, 2) and all("nothing orders them" in race for race in races), races
        ok(d.cuCtxSynchronize())
        # The program waits for the stream behind the word: it knows that work afterwards.
        turn += 1
        behind(turn, 2)
        write(flag, turn)
        ok(d.cuStreamSynchronize(after))
        fill(ptr, 9, MIB, other)
        assert soft.races() == []
        """,
        SOFTCUDA_SEED=seed,
    )


def test_a_word_written_before_the_unmapping_is_a_race() -> None:
    vmm_program(
        """
        context()
        lane, flag, va, handle = new_stream(), word(), reserve(2 * MIB), create(2 * MIB)
        put(va, 2 * MIB, handle, DEVICE)
        for turn, early in enumerate((False, True), start=1):
            ok(wait_value(lane, flag, turn))
            ok(launch(va, MIB, lane))
            if early:
                write(flag, turn)
            ok(unmap(va, 2 * MIB))
            put(va, 2 * MIB, handle, DEVICE)
            write(flag, turn)
            d.cuCtxSynchronize()
            assert len(soft.races()) == early
        """
    )


@pytest.mark.parametrize("seed", ["0", "1", "2", "3", "4", "5"])
def test_a_swap_to_the_host_by_a_worker_keeps_bytes_and_order(seed: str) -> None:
    vmm_program(
        """
        context()
        N = 4 * MIB
        va, device, flag, out = reserve(N), create(N), word(), managed(N)
        put(va, N, device, DEVICE)
        assert free_bytes() == 12 * MIB
        lane, used = new_stream(), new_event()
        swapper = Swapper(va, N, device, context, new_stream(), new_event())
        for turn in range(1, 9):
            fill(va, turn, N, lane)
            ok(d.cuEventRecord(used, lane))
            ok(wait_value(lane, flag, turn))
            ok(launch(va, N, lane))
            # Enqueued before the swap begins; it runs on the host's memory.
            fill(va, turn + 100, 2 * MIB, lane)
            ok(copy(out, va, N, lane))
            assert d.cuStreamQuery(lane) == NOT_READY
            thread = swapper.out(used, flag, turn)
            ok(d.cuStreamSynchronize(lane))
            thread.join()
            expected = bytes([turn + 100]) * (2 * MIB) + bytes([turn]) * (2 * MIB)
            assert ctypes.string_at(out.value, N) == expected
            assert ctypes.string_at(swapper.alias.value, N) == expected
            swapper.back(lane)
            fill(va, turn + 200, MIB, lane)
            ok(d.cuStreamSynchronize(lane))
        assert soft.races() == []
        assert soft.pending() == soft.async_errors() == 0
        """,
        SOFTCUDA_SEED=seed,
    )


@needs_torch
@pytest.mark.parametrize("seed", ["0", "3"])
def test_kernels_compute_on_mapped_memory_while_a_worker_swaps_it(seed: str) -> None:
    code = """
        load.compute()
        torch.zeros(1, device="cuda")
        handle, N = c_void_p(), 2 * MIB
        ok(d.cuDevicePrimaryCtxRetain(byref(handle), 0))
        def context():
            ok(d.cuCtxSetCurrent(handle))
        va, device, flag = reserve(N), create(N), word()
        put(va, N, device, DEVICE)
        class Array:
            __cuda_array_interface__ = {
                "shape": (N // 4,), "typestr": "<f4", "data": (va.value, False), "version": 3}
        x = torch.as_tensor(Array(), device="cuda")
        assert x.data_ptr() == va.value
        copies, lane = torch.cuda.Stream(), torch.cuda.Stream()
        used, copied = torch.cuda.Event(), torch.cuda.Event()
        copied.record()
        used.record()
        swapper = Swapper(va, N, device, context, c_void_p(copies.cuda_stream),
                          c_void_p(copied.cuda_event))
        raw = c_void_p(lane.cuda_stream)
        with torch.cuda.stream(lane):
            for turn in range(1, 6):
                x.fill_(turn)
                used.record()
                ok(wait_value(raw, flag, turn))
                x.mul_(2)
                y = x + 1
                thread = swapper.out(c_void_p(used.cuda_event), flag, turn)
                # Its shape depends on the values: the call waits.
                assert x.nonzero().numel() == N // 4
                assert y.cpu().eq(2 * turn + 1).all() and x.cpu().eq(2 * turn).all()
                thread.join()
                x.add_(1)
                swapper.back(raw)
                assert x.cpu().eq(2 * turn + 1).all()
        assert soft.races() == [] and soft.faults() == 0
        ok(unmap(va, N))
        try:
            (x + 1).cpu()
        except RuntimeError as error:
            # From the launch itself without a seed.
            assert "illegal" in str(error) or "error 700" in str(error), error
        else:
            raise AssertionError("the address has no memory")
        soft.races()
        os._exit(0)  # the device is lost
        """
    program = CALLS + textwrap.dedent(code)
    torch_program(program, SOFTCUDA_SEED=seed, OMP_NUM_THREADS="1")
