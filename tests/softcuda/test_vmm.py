"""Virtual memory management of the software driver."""

from __future__ import annotations

import pytest
from softcuda.programs import reason_without_libraries
from softcuda.vmm_programs import vmm_program

pytestmark = pytest.mark.skipif(
    reason_without_libraries() is not None, reason=str(reason_without_libraries())
)


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
        for elsewhere in (HOST, Location(3, 2), Location(4, 0), Location(0, 0)):
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
