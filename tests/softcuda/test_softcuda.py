"""The software driver itself, through ctypes: every test in its own process."""

from __future__ import annotations

import pytest
from softcuda.programs import driver_program, reason_without_libraries

pytestmark = pytest.mark.skipif(
    reason_without_libraries() is not None, reason=str(reason_without_libraries())
)


def test_every_entry_point_that_umem_calls_is_there() -> None:
    driver_program(
        """
        text = (ROOT / "src/driver/symbols.def").read_text()
        names = re.findall(r"^UMEM_SYMBOL\\((\\w+), (\\d+)", text, re.MULTILINE)
        assert len(names) > 30
        for name, version in names:
            assert proc_address(name, int(version)) != 0, name
        """
    )


def test_an_older_driver_lacks_newer_entry_points_and_those_named_missing() -> None:
    driver_program(
        """
        assert proc_address("cuMemDiscardBatchAsync", 13000) == 0
        assert proc_address("cuMemPrefetchAsync", 12080) != 0
        assert proc_address("cuMemAdvise", 12080) == 0
        version = c_int()
        ok(d.cuDriverGetVersion(byref(version)))
        assert version.value == 12080
        """,
        SOFTCUDA_VERSION="12080",
        SOFTCUDA_MISSING="cuMemAdvise",
    )


def test_an_unknown_name_is_not_found_and_said_once() -> None:
    _, err = driver_program(
        """
        assert proc_address("cuFromTheFuture", 99990) == 0
        assert proc_address("cuFromTheFuture", 99990) == 0
        """,
        SOFTCUDA_LOG="1",
    )
    assert err.count("cuFromTheFuture") == 1


def test_a_name_without_meaning_is_not_supported() -> None:
    driver_program("assert d.cuMulticastCreate() == 801")


def test_memory_oversubscribes_and_keeps_its_bytes() -> None:
    driver_program(
        """
        context()
        ranges = [managed(8 * MIB) for _ in range(4)]
        for i, ptr in enumerate(ranges):
            ok(d.cuMemsetD8Async(ptr, c_ubyte(i + 1), c_size_t(8 * MIB), None))
        assert free_bytes() == 0
        for i, ptr in enumerate(ranges):
            assert ctypes.string_at(ptr.value, 8 * MIB) == bytes([i + 1]) * (8 * MIB)
        plain = c_uint64()
        assert d.cuMemAlloc_v2(byref(plain), c_size_t(32 * MIB)) == OUT_OF_MEMORY
        ok(d.cuMemAlloc_v2(byref(plain), c_size_t(8 * MIB)))
        for ptr in ranges + [plain]:
            ok(d.cuMemFree_v2(ptr))
        assert free_bytes() == 16 * MIB
        """,
        SOFTCUDA_BYTES=str(16 << 20),
    )


def test_a_thread_without_a_context_is_refused() -> None:
    driver_program(
        """
        context()
        results = []
        def other():
            results.append(d.cuMemAllocManaged(byref(c_uint64()), c_size_t(MIB), 1))
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert results == [201], results
        """
    )


def test_two_devices_have_memory_of_their_own() -> None:
    driver_program(
        """
        count = c_int()
        context(1)
        ok(d.cuDeviceGetCount(byref(count)))
        assert count.value == 2
        ptr = c_uint64()
        ok(d.cuMemAlloc_v2(byref(ptr), c_size_t(12 * MIB)))
        assert free_bytes() == 4 * MIB
        context(0)
        assert free_bytes() == 16 * MIB
        one = managed(8 * MIB)
        prefetch(one, 8 * MIB, device=1)
        assert free_bytes() == 16 * MIB
        context(1)
        assert free_bytes() == 0, "a prefetch evicts, and never plain memory"
        """,
        SOFTCUDA_DEVICES="2",
        SOFTCUDA_BYTES=str(16 << 20),
    )


def test_planned_failures_hit_the_nth_call_only() -> None:
    driver_program(
        """
        context()
        def alloc():
            return d.cuMemAllocManaged(byref(c_uint64()), c_size_t(MIB), 1)
        assert [alloc() for _ in range(4)] == [0, 0, OUT_OF_MEMORY, 0]
        assert soft.calls("cuMemAllocManaged") == 4
        soft.inject("cuMemAllocManaged", 2, 700)
        assert [alloc() for _ in range(3)] == [0, 700, 0]
        soft.inject("cuMemAllocManaged", 1, 700)
        soft.reset()
        assert alloc() == 0
        assert soft.calls("cuMemAllocManaged") == 1
        """,
        SOFTCUDA_FAIL="cuMemAllocManaged:3:2",
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SOFTCUDA_FAIL", "cuMemAlloc:0:2"),
        ("SOFTCUDA_FAIL", "cuMemAlloc:1"),
        ("SOFTCUDA_DEVICES", "3"),
        ("SOFTCUDA_BYTES", "1"),
        ("SOFTCUDA_SEED", "x"),
    ],
)
def test_a_bad_setting_ends_the_program(name: str, value: str) -> None:
    _, err = driver_program("context()", expected=2, **{name: value})
    assert name in err


def test_batch_calls_keep_the_documented_rules() -> None:
    driver_program(
        """
        context()
        ptr = managed(4 * MIB)
        stream = new_stream()
        assert discard(ptr, 4 * MIB, None) == INVALID_VALUE, "legacy stream"
        assert discard(ptr, 0, stream) == INVALID_VALUE
        assert discard(ptr, 8 * MIB, stream) == INVALID_VALUE, "beyond the allocation"
        assert discard(ptr, 4 * MIB, stream) == 0
        """
    )


def test_a_skipped_call_does_nothing_and_says_that_it_succeeded() -> None:
    driver_program(
        """
        context()
        ptr = managed(MIB)
        fill(ptr, 1, MIB, None)
        soft.skip("cuMemsetD8Async")
        for value in (2, 3):
            fill(ptr, value, MIB, None)
            assert ctypes.string_at(ptr.value, 1)[0] == 1
        soft.reset()
        fill(ptr, 3, MIB, None)
        assert ctypes.string_at(ptr.value, 1)[0] == 3
        """
    )


def test_a_lost_device_answers_questions_only_until_it_is_reset() -> None:
    driver_program(
        """
        context()
        ptr, current, count = managed(MIB), c_void_p(), c_int()
        soft.lose("cuMemGetInfo", 1, 719)
        assert d.cuMemGetInfo_v2(byref(c_size_t()), byref(c_size_t())) == 719
        assert d.cuMemsetD8Async(ptr, c_ubyte(1), c_size_t(1), None) == 719
        assert d.cuStreamSynchronize(None) == d.cuMemFree_v2(ptr) == 719
        ok(d.cuDeviceGetCount(byref(count)))
        ok(d.cuCtxGetCurrent(byref(current)))
        soft.reset()
        ok(d.cuMemFree_v2(ptr))
        """
    )


def test_a_torn_batch_has_its_first_half_carried_out() -> None:
    driver_program(
        """
        context()
        ptr, side = managed(4 * MIB), new_stream()
        fill(ptr, 7, 4 * MIB, side)
        ptrs = (c_uint64 * 2)(ptr.value, ptr.value + 2 * MIB)
        sizes = (c_size_t * 2)(2 * MIB, 2 * MIB)
        soft.tear("cuMemDiscardBatchAsync", 1, 2)
        assert d.cuMemDiscardBatchAsync(ptrs, sizes, c_size_t(2), c_uint64(0), side) == 2
        ok(d.cuStreamSynchronize(side))
        assert ctypes.string_at(ptr.value, 1) != b"\\7", "what was discarded is still there"
        assert ctypes.string_at(ptr.value + 2 * MIB, 1) == b"\\7"
        try:
            soft.tear("cuMemFree", 1, 2)
        except ValueError:
            pass
        else:
            raise AssertionError("no batch")
        """
    )


def test_calls_that_the_runtime_makes_of_the_driver_are_not_the_programs() -> None:
    driver_program(
        """
        runtime = ctypes.CDLL("libcudart.so.13")
        ptr = c_void_p()
        ok(runtime.cudaMalloc(byref(ptr), c_size_t(MIB)))
        assert [soft.calls(name) for name in ("cudaMalloc", "cuMemAlloc", "cuInit")] == [1, 0, 0]
        soft.inject("cuMemAlloc", 1, 2)
        ok(runtime.cudaMalloc(byref(ptr), c_size_t(MIB)))
        assert d.cuMemAlloc_v2(byref(c_uint64()), c_size_t(MIB)) == OUT_OF_MEMORY
        """
    )


def test_a_program_that_ends_by_terminate_says_where() -> None:
    code = 'ctypes.CDLL("libstdc++.so.6")._ZSt9terminatev()'
    _, err = driver_program(code, expected=-6)
    assert "libffi" in err
    assert err.endswith("terminate called without an active exception\n")
