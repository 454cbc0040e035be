"""The documented semantics of the driver calls that umem relies on.

Written against the driver table alone, so that the suite can run over a real driver too;
observations that need the software device (page states, fault counts) are in test_soft_device.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.driver import (
    DEVICE,
    FRAMES,
    GLOBAL,
    HOST,
    HOST_ATTACH,
    INVALID_HANDLE,
    INVALID_VALUE,
    NOT_READY,
    OUT_OF_MEMORY,
    PAGE,
    SUCCESS,
    Driver,
    opened,
)

READ_MOSTLY, PREFERRED, ACCESSED_BY, LAST_PREFETCH = 1, 2, 3, 4


@pytest.fixture(params=["memory", "disk"])
def driver(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Driver]:
    """The software device, whose host store is memory or a file."""
    disk = str(tmp_path) if request.param == "disk" else ""
    with opened(disk=disk, staging=3) as made:
        yield made


def test_device_is_described(driver: Driver) -> None:
    c = driver.calls
    assert c.cuInit(0) == SUCCESS
    assert c.cuInit(1) == INVALID_VALUE
    assert c.cuDriverGetVersion()[1] >= 13000
    assert c.cuDeviceGetCount() == (SUCCESS, 1)
    assert c.cuDeviceGet(0) == (SUCCESS, 0)
    assert c.cuDeviceGet(7)[0] == 101
    assert c.cuDeviceGetName(0)[1] != ""
    assert c.cuDeviceTotalMem(0) == (SUCCESS, FRAMES * PAGE)
    concurrent_managed_access = 89
    assert c.cuDeviceGetAttribute(concurrent_managed_access, 0) == (SUCCESS, 1)


@pytest.mark.parametrize(("nbytes", "flags"), [(0, GLOBAL), (PAGE, 0), (PAGE, 3)])
def test_managed_allocation_refuses_bad_arguments(driver: Driver, nbytes: int, flags: int) -> None:
    assert driver.calls.cuMemAllocManaged(nbytes, flags)[0] == INVALID_VALUE


def test_managed_memory_may_exceed_the_device(driver: Driver) -> None:
    ptr = driver.alloc(4 * FRAMES)
    for page in range(4 * FRAMES):
        driver.calls.store(ptr + page * PAGE, bytes([page]))
    for page in range(4 * FRAMES):
        assert driver.calls.load(ptr + page * PAGE, 1) == bytes([page])


def test_attach_host_is_accepted(driver: Driver) -> None:
    result, ptr = driver.calls.cuMemAllocManaged(PAGE, HOST_ATTACH)
    assert result == SUCCESS
    assert driver.calls.cuMemFree(ptr) == SUCCESS


def test_free_of_what_is_not_an_allocation(driver: Driver) -> None:
    ptr = driver.alloc(2)
    assert driver.calls.cuMemFree(ptr + PAGE) == INVALID_VALUE
    assert driver.calls.cuMemFree(0) == SUCCESS


def test_data_survives_a_round_trip(driver: Driver) -> None:
    ptr = driver.alloc(3)
    for page in range(3):
        driver.calls.store(ptr + page * PAGE + 77, b"page%d" % page)
    driver.prefetch(ptr, 3, HOST)
    driver.prefetch(ptr, 3, DEVICE)
    driver.prefetch(ptr, 3, HOST)
    for page in range(3):
        assert driver.calls.load(ptr + page * PAGE + 77, 5) == b"page%d" % page


@pytest.mark.parametrize("call", ["prefetch", "advise", "attribute"])
def test_zero_bytes_and_foreign_pointers_are_refused(driver: Driver, call: str) -> None:
    ptr = driver.alloc(1)
    c = driver.calls

    def run(address: int, nbytes: int) -> int:
        if call == "prefetch":
            return int(c.cuMemPrefetchAsync(address, nbytes, DEVICE, 0, driver.stream))
        if call == "advise":
            return int(c.cuMemAdvise(address, nbytes, 1, DEVICE))
        return int(c.cuMemRangeGetAttribute(READ_MOSTLY, address, nbytes, 1)[0])

    assert run(ptr, PAGE) == SUCCESS
    assert run(ptr, 0) == INVALID_VALUE
    assert run(ptr, 2 * PAGE) == INVALID_VALUE
    assert run(0x1000, PAGE) == INVALID_VALUE


def test_prefetch_refuses_bad_location_flags_stream(driver: Driver) -> None:
    ptr = driver.alloc(1)
    c = driver.calls
    assert c.cuMemPrefetchAsync(ptr, PAGE, (0, 0), 0, driver.stream) == INVALID_VALUE
    assert c.cuMemPrefetchAsync(ptr, PAGE, (1, 5), 0, driver.stream) == INVALID_VALUE
    assert c.cuMemPrefetchAsync(ptr, PAGE, DEVICE, 1, driver.stream) == INVALID_VALUE
    assert c.cuMemPrefetchAsync(ptr, PAGE, DEVICE, 0, 0xDEAD) == INVALID_HANDLE
    assert c.cuMemPrefetchAsync(ptr, PAGE, DEVICE, 0, 0) == SUCCESS  # single: NULL is fine


@pytest.mark.parametrize("null_stream", [0, 1])
def test_batches_refuse_the_legacy_null_stream(driver: Driver, null_stream: int) -> None:
    ptr = driver.alloc(1)
    c = driver.calls
    assert c.cuMemPrefetchBatchAsync([ptr], [PAGE], [DEVICE], [0], 0, null_stream) != SUCCESS
    assert c.cuMemDiscardBatchAsync([ptr], [PAGE], 0, null_stream) != SUCCESS
    assert (
        c.cuMemDiscardAndPrefetchBatchAsync([ptr], [PAGE], [DEVICE], [0], 0, null_stream) != SUCCESS
    )


@pytest.mark.parametrize("first_of", [[1], [0, 0], [0, 2], [1, 0], []])
def test_batches_check_their_location_index(driver: Driver, first_of: list[int]) -> None:
    ptr = driver.alloc(2)
    locations = [DEVICE, HOST][: len(first_of)]
    result = driver.calls.cuMemPrefetchBatchAsync(
        [ptr, ptr + PAGE], [PAGE, PAGE], locations, first_of, 0, driver.stream
    )
    assert result == INVALID_VALUE


def test_a_batch_is_checked_before_anything_moves(driver: Driver) -> None:
    ptr = driver.alloc(1)
    driver.prefetch(ptr, 1, HOST)
    before = driver.free_frames()
    result = driver.calls.cuMemPrefetchBatchAsync(
        [ptr, 0x1000], [PAGE, PAGE], [DEVICE], [0], 0, driver.stream
    )
    assert result == INVALID_VALUE
    assert driver.free_frames() == before


def test_batch_moves_each_range_to_its_location(driver: Driver) -> None:
    a, b, c = (driver.alloc(1) for _ in range(3))
    for ptr, text in ((a, b"a"), (b, b"b"), (c, b"c")):
        driver.calls.store(ptr, text)
    assert driver.free_frames() == FRAMES - 3
    result = driver.calls.cuMemPrefetchBatchAsync(
        [a, b, c], [PAGE] * 3, [DEVICE, HOST], [0, 1], 0, driver.stream
    )
    assert result == SUCCESS
    assert driver.free_frames() == FRAMES - 1
    assert [driver.calls.load(p, 1) for p in (a, b, c)] == [b"a", b"b", b"c"]


def test_discard_spares_what_it_does_not_wholly_cover(driver: Driver) -> None:
    ptr = driver.alloc(3)
    for page in range(3):
        driver.calls.store(ptr + page * PAGE, b"keep")
    driver.discard(ptr + 8, 3 * PAGE - 16)  # whole: only the middle page
    driver.prefetch(ptr, 3, HOST)
    assert driver.calls.load(ptr, 4) == b"keep"
    assert driver.calls.load(ptr + 2 * PAGE, 4) == b"keep"


def test_write_after_discard_and_prefetch_is_kept(driver: Driver) -> None:
    ptr = driver.alloc(2)
    driver.calls.store(ptr, b"old")
    result = driver.calls.cuMemDiscardAndPrefetchBatchAsync(
        [ptr], [2 * PAGE], [DEVICE], [0], 0, driver.stream
    )
    assert result == SUCCESS
    driver.calls.store(ptr, b"new")
    driver.prefetch(ptr, 2, HOST)
    assert driver.calls.load(ptr, 3) == b"new"


def test_write_after_discard_undoes_it(driver: Driver) -> None:
    ptr = driver.alloc(1)
    driver.calls.store(ptr, b"old")
    driver.discard(ptr, PAGE)
    driver.calls.store(ptr, b"new")
    driver.prefetch(ptr, 1, HOST)
    assert driver.calls.load(ptr, 3) == b"new"


def test_advice_is_reported(driver: Driver) -> None:
    ptr = driver.alloc(2)
    c = driver.calls

    def get(attribute: int, nbytes: int = 2 * PAGE) -> int:
        result, values = c.cuMemRangeGetAttribute(attribute, ptr, nbytes, 1)
        assert result == SUCCESS
        return int(values[0])

    assert (get(READ_MOSTLY), get(PREFERRED), get(ACCESSED_BY), get(LAST_PREFETCH)) == (
        0,
        -2,
        -2,
        -2,
    )
    assert c.cuMemAdvise(ptr, 2 * PAGE, 1, DEVICE) == SUCCESS
    assert get(READ_MOSTLY) == 1
    assert c.cuMemAdvise(ptr, PAGE, 2, DEVICE) == SUCCESS
    assert get(READ_MOSTLY) == 0  # not all of the range
    assert c.cuMemAdvise(ptr, PAGE, 3, HOST) == SUCCESS
    assert get(PREFERRED, PAGE) == -1
    assert get(PREFERRED) == -2  # the pages differ
    assert c.cuMemAdvise(ptr, 2 * PAGE, 5, DEVICE) == SUCCESS
    assert get(ACCESSED_BY) == 0
    assert c.cuMemAdvise(ptr, 2 * PAGE, 6, DEVICE) == SUCCESS
    assert get(ACCESSED_BY) == -2
    assert c.cuMemAdvise(ptr, PAGE, 5, (3, 0)) == INVALID_VALUE  # HOST_NUMA
    driver.prefetch(ptr, 2, DEVICE)
    assert get(LAST_PREFETCH) == 0
    assert c.cuMemRangeGetAttributes([LAST_PREFETCH, READ_MOSTLY], ptr, PAGE) == (
        SUCCESS,
        [0, 0],
    )


def test_pointer_attributes(driver: Driver) -> None:
    ptr = driver.alloc(3)
    c = driver.calls
    memory_type, is_managed, start, size = 2, 8, 11, 12
    assert c.cuPointerGetAttribute(memory_type, ptr + 5) == (SUCCESS, 2)
    assert c.cuPointerGetAttribute(is_managed, ptr)[1] & 1 == 1
    assert c.cuPointerGetAttribute(start, ptr + PAGE) == (SUCCESS, ptr)
    assert c.cuPointerGetAttribute(size, ptr + PAGE) == (SUCCESS, 3 * PAGE)
    assert c.cuPointerGetAttribute(is_managed, 0x1000)[0] == INVALID_VALUE


def test_plain_device_memory_evicts_managed_and_is_never_evicted(driver: Driver) -> None:
    managed = driver.alloc(FRAMES)
    for page in range(FRAMES):
        driver.calls.store(managed + page * PAGE, bytes([page]))
    result, plain = driver.calls.cuMemAlloc((FRAMES - 4) * PAGE)
    assert result == SUCCESS
    assert driver.calls.cuMemAlloc(8 * PAGE)[0] == OUT_OF_MEMORY
    for page in range(FRAMES):
        assert driver.calls.load(managed + page * PAGE, 1) == bytes([page])
    assert driver.calls.cuMemFree(plain) == SUCCESS


def test_events_order_streams(driver: Driver) -> None:
    c = driver.calls
    _, other = c.cuStreamCreate(1)
    _, event = c.cuEventCreate(0)
    ptr = driver.alloc(4)
    driver.prefetch(ptr, 4, HOST)
    assert c.cuMemPrefetchAsync(ptr, 4 * PAGE, DEVICE, 0, driver.stream) == SUCCESS
    assert c.cuEventRecord(event, driver.stream) == SUCCESS
    assert c.cuStreamWaitEvent(other, event, 0) == SUCCESS
    assert c.cuStreamQuery(other) == NOT_READY
    assert c.cuEventQuery(event) == NOT_READY
    assert c.cuStreamSynchronize(other) == SUCCESS
    assert c.cuEventQuery(event) == SUCCESS
    assert c.cuStreamQuery(driver.stream) == SUCCESS
    assert c.cuEventDestroy(event) == SUCCESS
    assert c.cuEventQuery(event) == INVALID_HANDLE
    assert c.cuStreamDestroy(other) == SUCCESS
    assert c.cuStreamSynchronize(other) == INVALID_HANDLE


def test_polling_an_event_comes_to_an_end(driver: Driver) -> None:
    c = driver.calls
    _, event = c.cuEventCreate(0)
    ptr = driver.alloc(1)
    driver.prefetch(ptr, 1, HOST)
    assert c.cuMemPrefetchAsync(ptr, PAGE, DEVICE, 0, driver.stream) == SUCCESS
    assert c.cuEventRecord(event, driver.stream) == SUCCESS
    polls = 0
    while c.cuEventQuery(event) == NOT_READY:
        polls += 1
        assert polls < 10_000_000
    assert polls > 0


def test_elapsed_time_needs_timed_completed_events(driver: Driver) -> None:
    c = driver.calls
    _, start = c.cuEventCreate(0)
    _, end = c.cuEventCreate(0)
    _, untimed = c.cuEventCreate(2)
    ptr = driver.alloc(4)
    driver.prefetch(ptr, 4, HOST)
    c.cuEventRecord(start, driver.stream)
    c.cuMemPrefetchAsync(ptr, 4 * PAGE, DEVICE, 0, driver.stream)
    c.cuEventRecord(end, driver.stream)
    c.cuEventRecord(untimed, driver.stream)
    assert c.cuEventElapsedTime(start, end)[0] == NOT_READY
    assert c.cuEventSynchronize(end) == SUCCESS
    result, ms = c.cuEventElapsedTime(start, end)
    assert result == SUCCESS
    assert ms > 0
    assert c.cuEventElapsedTime(start, untimed)[0] == INVALID_HANDLE


def test_nothing_is_capturing(driver: Driver) -> None:
    assert driver.calls.cuStreamIsCapturing(driver.stream) == (SUCCESS, 0)
