"""UVM's frames: through ctypes, every test in its own process."""

from __future__ import annotations

import pytest
from softcuda.programs import driver_program, reason_without_libraries

pytestmark = pytest.mark.skipif(
    reason_without_libraries() is not None, reason=str(reason_without_libraries())
)
SMALL = str(16 << 20)

TO_HOST = """
context()
def to_host(ptr, size):
    ok(d.cuMemPrefetchAsync_v2(ptr, c_size_t(size), Location(2, 0), 0, None))
def plain(size):
    ptr = c_uint64()
    return d.cuMemAlloc_v2(byref(ptr), c_size_t(size)), ptr
"""


def test_what_leaves_keeps_its_frames_until_it_is_freed() -> None:
    driver_program(
        TO_HOST
        + """
ptr = managed(8 * MIB)
fill(ptr, 7, 8 * MIB, None)
to_host(ptr, 8 * MIB)
assert free_bytes() == 8 * MIB
prefetch(ptr, 8 * MIB, 0)
assert free_bytes() == 8 * MIB
assert ctypes.string_at(ptr.value, 8 * MIB) == bytes([7]) * (8 * MIB)
to_host(ptr, 8 * MIB)
ok(d.cuMemFree_v2(ptr))
assert free_bytes() == 16 * MIB
""",
        SOFTCUDA_BYTES=SMALL,
    )


def test_frames_return_at_once_where_the_switch_says_so() -> None:
    driver_program(
        TO_HOST
        + """
ptr = managed(8 * MIB)
fill(ptr, 7, 8 * MIB, None)
to_host(ptr, 8 * MIB)
assert free_bytes() == 16 * MIB
""",
        SOFTCUDA_BYTES=SMALL,
        SOFTCUDA_FRAMES="returned",
    )


def test_others_get_unused_frames_before_any_byte_leaves() -> None:
    driver_program(
        TO_HOST
        + """
away, here = managed(8 * MIB), managed(8 * MIB)
fill(away, 1, 8 * MIB, None)
fill(here, 2, 8 * MIB, None)
to_host(away, 8 * MIB)
assert free_bytes() == 0
error, other = plain(8 * MIB)
assert error == 0
before = soft.faults()
assert ctypes.string_at(here.value, 8 * MIB) == bytes([2]) * (8 * MIB)
assert soft.faults() == before, "nothing had to leave"
ok(d.cuMemFree_v2(other))
assert free_bytes() == 8 * MIB, "they are free from then on"
assert ctypes.string_at(away.value, 8 * MIB) == bytes([1]) * (8 * MIB)
""",
        SOFTCUDA_BYTES=SMALL,
    )


def test_unused_frames_go_before_discarded_ones() -> None:
    driver_program(
        TO_HOST
        + """
away, dead = managed(8 * MIB), managed(8 * MIB)
stream = new_stream()
fill(dead, 2, 8 * MIB, None)
fill(away, 1, 8 * MIB, None)
to_host(away, 8 * MIB)
ok(d.cuStreamSynchronize(None))
assert discard(dead, 8 * MIB, stream) == 0
error, other = plain(8 * MIB)
assert error == 0
poison = ctypes.string_at(dead.value, 1)[0]
assert poison == 0xDB, "its frames are still there"
""",
        SOFTCUDA_BYTES=SMALL,
    )


def test_the_machine_gives_frames_in_batches() -> None:
    driver_program(
        """
context()
ptr = managed(2 * MIB)
fill(ptr, 1, 2 * MIB, None)
assert free_bytes() == 56 * MIB
more = managed(6 * MIB)
fill(more, 1, 6 * MIB, None)
assert free_bytes() == 56 * MIB
last = managed(2 * MIB)
fill(last, 1, 2 * MIB, None)
assert free_bytes() == 48 * MIB
for each in (ptr, more, last):
    ok(d.cuMemFree_v2(each))
assert free_bytes() == 64 * MIB
""",
        SOFTCUDA_BYTES=str(64 << 20),
        SOFTCUDA_BATCH="4",
    )


def test_the_end_of_read_mostly_leaves_pages_read_only() -> None:
    driver_program(
        TO_HOST
        + """
def advise(advice, place):
    ok(d.cuMemAdvise_v2(ptr, c_size_t(4 * MIB), advice, place))
device, host = Location(1, 0), Location(2, 0)
ptr = managed(4 * MIB)
fill(ptr, 1, 4 * MIB, None)
def end():
    advise(3, device)
    advise(2, device)
    advise(4, device)
for prefetched, faults in ((False, 2), (True, 0)):
    advise(1, device)
    to_host(ptr, 4 * MIB)
    end()
    if prefetched:
        prefetch(ptr, 4 * MIB, 0)
    before = soft.faults()
    assert ctypes.string_at(ptr.value, 1)[0] == 1
    assert soft.faults() == before, "reads do not fault"
    fill(ptr, 1, 4 * MIB, None)
    assert soft.faults() - before == faults, (prefetched, soft.faults() - before)
""",
        SOFTCUDA_BYTES=SMALL,
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [("SOFTCUDA_FRAMES", "lost"), ("SOFTCUDA_BATCH", "0"), ("SOFTCUDA_BATCH", "65")],
)
def test_a_bad_setting_ends_the_program(name: str, value: str) -> None:
    _, err = driver_program("context()", 2, **{name: value})
    assert name in err
