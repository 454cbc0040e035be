"""umem.Buffer on the software device, with numpy as the other library, and without torch."""

from __future__ import annotations

import ctypes
import gc
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import umem
from umem.base.streams import stream_handle
from umem.integrations import blocks
from umem.residency import spans

MIB = 1 << 20


@pytest.fixture
def on() -> Iterator[None]:
    umem.enable(budget="16MiB", host_budget="64MiB", device="soft", policy="lru", allocator="none")
    yield
    gc.collect()
    left = umem.stats().live_bytes
    umem.disable()
    assert left == 0, f"the test left {left} bytes alive"


def filled(value: int, mib: int = 4) -> umem.Buffer:
    buffer = umem.Buffer(mib * MIB)
    np.from_dlpack(buffer).fill(value)
    return buffer


def test_more_than_the_budget_keeps_its_bytes(on: None) -> None:
    buffers = [filled(i) for i in range(10)]  # 40 MiB in 16
    stats = umem.stats()
    assert stats.live_bytes == 40 * MIB
    assert stats.peak_resident_bytes <= stats.budget_bytes == 16 * MIB
    assert stats.evictions > 0
    for i, buffer in enumerate(buffers):
        assert (np.asarray(buffer) == i).all()


def test_shape_and_type_reach_the_consumer_without_a_copy(on: None) -> None:
    buffer = umem.Buffer((3, 5), "float32")
    array = np.from_dlpack(buffer)
    assert (array.shape, array.dtype, buffer.nbytes) == ((3, 5), np.dtype("f4"), 60)
    assert array.ctypes.data == np.asarray(buffer).ctypes.data == buffer.ptr
    assert not hasattr(buffer, "__cuda_array_interface__")
    assert buffer.__dlpack_device__() == (1, 0)
    assert umem.Buffer(0).ptr == 0
    assert np.from_dlpack(umem.Buffer((0, 4))).shape == (0, 4)
    assert np.asarray(umem.Buffer((0, 4))).shape == (0, 4)


def test_the_memory_is_freed_with_its_last_owner(on: None) -> None:
    buffer = filled(7)
    view = np.from_dlpack(buffer)[::2]
    buffer.free()
    assert "freed" in repr(buffer)
    with pytest.raises(umem.StateError, match="was freed"):
        _ = buffer.ptr
    with pytest.raises(umem.StateError, match="was freed"):
        np.from_dlpack(buffer)
    buffer.free()
    others = [filled(i) for i in range(8)]
    assert (view == 7).all()
    assert umem.stats().live_bytes == 36 * MIB
    del view
    assert umem.stats().live_bytes == 32 * MIB
    del others


def test_arrays_of_a_freed_buffer_keep_its_memory(on: None) -> None:
    buffer = umem.Buffer(4 * MIB)
    array = np.asarray(buffer)
    array[:] = 7
    buffer.free()
    for use in (umem.where, np.asarray, lambda freed: freed.ptr):
        with pytest.raises(umem.StateError, match="was freed"):
            use(buffer)
    other = umem.Buffer(4 * MIB)
    np.asarray(other)[:] = 9
    assert (array == 7).all()
    del array, buffer
    assert umem.stats().live_bytes == 4 * MIB


def test_hints_keep_no_freed_buffer(on: None) -> None:
    buffer = umem.Buffer(4 * MIB)
    assert umem.prefetch(buffer)
    with umem.uses([buffer]):
        pass
    buffer.free()
    assert umem.stats().live_bytes == 0


def test_an_unused_capsule_frees_too(on: None) -> None:
    capsule = umem.Buffer(4 * MIB).__dlpack__()
    assert umem.stats().live_bytes == 4 * MIB
    del capsule
    assert umem.stats().live_bytes == 0


def test_hints_move_it(on: None) -> None:
    buffer = filled(3)
    before = umem.stats()
    assert umem.evict(buffer)
    assert umem.stats().host_bytes == before.host_bytes + 4 * MIB
    assert umem.prefetch(buffer)
    assert umem.stats().prefetches > before.prefetches
    assert umem.advise(np.asarray(buffer), "read_mostly")  # any array that spans it
    assert not umem.evict(np.zeros(4))
    for hint in (umem.prefetch, umem.evict):
        with pytest.raises(umem.ConfigError, match=r"given an int at 0; allowed: .*Buffer"):
            hint([1])
    assert (np.asarray(buffer) == 3).all()


def test_what_the_program_brought_back_unseen_is_evicted_again(on: None) -> None:
    buffer = umem.Buffer(4 * MIB)
    faults = [umem.stats().faults]
    for value in range(3):
        np.asarray(buffer)[:] = value
        faults.append(umem.stats().faults)
        umem.evict(buffer)
    assert np.diff(faults).tolist() == [0, 2, 2]  # pages that were away
    assert (np.asarray(buffer) == 2).all()


@pytest.mark.parametrize("form", ["buffer", "array", "dlpack", "cuda", "view"])
def test_every_hint_takes_arrays_and_buffers(on: None, form: str) -> None:
    buffer = filled(3)
    array = np.asarray(buffer)
    # Like CuPy's and Numba's arrays on a GPU.
    interface = {**buffer.__array_interface__, "strides": None}
    target: Any = {
        "buffer": buffer,
        "array": array,
        "dlpack": np.from_dlpack(buffer),
        "cuda": types.SimpleNamespace(__cuda_array_interface__=interface),
        "view": array[MIB : 3 * MIB],
    }[form]
    nbytes = (2 if form == "view" else 4) * MIB
    assert umem.evict(target)
    assert umem.where(target).evicted_bytes == nbytes
    assert umem.prefetch([target])
    (row,) = umem.tensors({"it": target})
    assert (row.name, row.held, row.bytes, row.resident_bytes) == ("it", True, nbytes, nbytes)
    with umem.pin(target), umem.exclude(target):
        assert umem.stats().pinned_bytes == 4 * MIB  # whole units
        assert (umem.where(buffer).pins, umem.where(buffer).excluded) == (1, True)
        with pytest.raises(umem.StateError, match="pinned"):
            umem.evict(buffer)
        held = [filled(i) for i in range(4)]  # with it more than the budget
        assert umem.where(buffer).resident_bytes == 4 * MIB
    del held
    umem.pin(target)
    assert umem.unpin(target)
    assert umem.keep(target)
    assert umem.advise(target, "read_mostly")
    assert (array == 3).all()


def test_a_pin_beyond_the_budget_names_arrays(on: None) -> None:
    buffers = [filled(i) for i in range(3)]
    umem.pin({"weights": buffers[0]})
    with pytest.raises(umem.OutOfMemoryError, match=r"largest: 4\.0 MiB weights"):
        umem.pin(buffers[1:])
    assert umem.pin(np.asarray(buffers[1])[:10])
    with pytest.raises(umem.OutOfMemoryError, match=r"weights, 10 bytes uint8\[10\]"):
        umem.pin(buffers[2])


def test_a_buffers_bytes_are_discarded_and_foreign_ones_are_not(on: None) -> None:
    buffer, foreign = filled(5), np.ones(4 * MIB, "u1")
    assert umem.discard(buffer) == 4 * MIB
    assert umem.where(buffer).discarded_bytes == 4 * MIB
    np.asarray(buffer).fill(6)
    pointer = types.SimpleNamespace(__cuda_array_interface__=foreign.__array_interface__)
    for target in (foreign, pointer, foreign[:0], umem.Buffer(0)):
        for hint in (umem.prefetch, umem.evict, umem.pin, umem.unpin, umem.keep, umem.exclude,
                     umem.discard):  # fmt: skip
            assert not hint(target)
        assert not umem.where(target).held
    assert (np.asarray(buffer) == 6).all()
    assert (foreign == 1).all()
    buffer.free()
    with pytest.raises(umem.StateError, match="was freed"):
        umem.evict(buffer)


def test_the_summary_names_it(on: None) -> None:
    kept = [umem.Buffer(4 * MIB), umem.Buffer(2 * MIB)]
    assert blocks.holders() == {"Buffer": (2, 6 * MIB)}
    assert re.search(r"^  Buffer +6 MiB  2 blocks$", umem.summary(), re.MULTILINE)
    del kept
    assert blocks.holders() == {}
    assert "Buffer" not in umem.summary()


def test_without_room_the_error_says_so(on: None) -> None:
    with pytest.raises(umem.OutOfMemoryError, match=r"asked for 1024\.00 GiB"):
        umem.Buffer(1 << 40)
    assert blocks.holders() == {}


def test_it_outlives_umem(on: None) -> None:
    buffer = filled(9)
    view = np.from_dlpack(buffer)
    umem.disable()
    with pytest.raises(umem.StateError, match=r"call umem\.enable"):
        umem.Buffer(1)
    assert (view == 9).all()
    del buffer, view
    assert umem.stats().live_bytes == 0


@pytest.mark.parametrize(
    ("arguments", "named", "words"),
    [
        ((-1,), {}, "a size >= 0"),
        (("4",), {}, "a size >= 0"),
        (((2, 1.5),), {}, "a size >= 0"),
        ((True,), {}, "a size >= 0"),
        ((4, "object"), {}, "types of numbers"),
        ((4, "float33"), {}, "types of numbers"),
        ((4, [("a", "i4")]), {}, "types of numbers"),
        ((4,), {"device": 1}, "allowed: 0, the only"),
        ((4,), {"device": -1}, "allowed: 0, the only"),
        ((4,), {"stream": 4096}, "no streams"),
    ],
)
def test_bad_requests(on: None, arguments: Any, named: Any, words: str) -> None:
    with pytest.raises(umem.ConfigError, match=words):
        umem.Buffer(*arguments, **named)


@pytest.mark.parametrize(
    "asked", [{"copy": True}, {"dl_device": (2, 0)}], ids=["copy", "other device"]
)
def test_what_dlpack_cannot_do_is_a_buffer_error(on: None, asked: Any) -> None:
    with pytest.raises(BufferError):
        umem.Buffer(4).__dlpack__(**asked)


def test_cuda_libraries_are_refused_on_the_software_device(on: None) -> None:
    with pytest.raises(umem.NotSupportedError, match="UMEM_DEVICE=cuda"):
        umem.cupy.malloc(4)
    with pytest.raises(umem.StateError, match="was requested"):
        umem.cupy.enable(budget="16MiB")
    with pytest.raises(umem.NotSupportedError, match="software device"):
        umem.cupy.enable()
    assert umem.is_enabled()


def test_umem_is_as_it_was_where_cupy_cannot_have_it() -> None:
    with pytest.raises(umem.NotSupportedError, match="software device"):
        umem.cupy.enable(budget="16MiB", device="soft")
    assert not umem.is_enabled()


def test_recomputing_is_not_for_programs_without_torch() -> None:
    with pytest.raises(umem.ConfigError, match=r"recompute=.*allowed: off"):
        umem.enable(budget="16MiB", device="soft", allocator="none", recompute="auto")
    assert not umem.is_enabled()


class Protocol:
    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, 4096)


@pytest.mark.parametrize(
    ("stream", "handle"),
    [
        (None, 0),
        (1, 0),
        (4096, 4096),
        (Protocol(), 4096),
        (types.SimpleNamespace(cuda_stream=4096), 4096),
        (types.SimpleNamespace(ptr=4096), 4096),
        (types.SimpleNamespace(handle=ctypes.c_void_p(4096)), 4096),
        (types.SimpleNamespace(handle=ctypes.c_void_p(0)), 0),
        (types.SimpleNamespace(stream=Protocol()), 4096),
    ],
)
def test_streams_of_all_frameworks(stream: object, handle: int) -> None:
    assert stream_handle(stream) == handle


@pytest.mark.parametrize("stream", ["4096", 1.5, True, -1, object()])
def test_what_is_no_stream(stream: object) -> None:
    with pytest.raises(TypeError, match="is not a CUDA stream"):
        stream_handle(stream)


def test_the_per_thread_default_stream_is_refused() -> None:
    with pytest.raises(umem.NotSupportedError, match="per-thread"):
        stream_handle(2)


@given(
    shape=st.lists(st.integers(0, 4), max_size=3),
    slices=st.lists(st.sampled_from([1, -1, 2, -2]), min_size=3, max_size=3),
    dtype=st.sampled_from(["u1", "f4", "c16"]),
)
@settings(max_examples=60)
def test_extents_are_those_of_numpy(shape: list[int], slices: list[int], dtype: str) -> None:
    array = np.zeros(shape, dtype)[tuple(slice(None, None, s) for s in slices[: len(shape)])]
    first, last = np.lib.array_utils.byte_bounds(array)
    [part] = spans.parts(array, "test")
    ptr, nbytes = part.span
    assert nbytes == last - first if array.size else nbytes == 0
    assert ptr == first or not array.size


def run(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", "import json, sys\nimport numpy as np, umem\n" + code, *arguments],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


ON = "umem.enable(budget='16MiB', device='soft', allocator='none', policy='{}')\n"


def test_torch_is_not_needed(tmp_path: Path) -> None:
    out = run(
        """
sys.modules["torch"] = None
umem.enable(budget="16MiB", device="soft", allocator="none", trace=sys.argv[1])
for step in range(5):
    kept = [umem.Buffer(4 << 20) for _ in range(6)]
    for i, buffer in enumerate(kept):
        np.from_dlpack(buffer).fill(i)
    assert all((np.from_dlpack(b) == i).all() for i, b in enumerate(kept))
    umem.step()
umem.set_budget("20MiB")
print(umem.stats().steps, umem.stats().evictions > 0, umem.summary().count("torch keeps"))
umem.disable()
print(json.loads(open(sys.argv[1]).readline())["source"])
""",
        str(tmp_path / "trace.jsonl"),
    )
    assert out.splitlines() == ["5 True 1", "a program without torch"]


@pytest.mark.parametrize("off_first", [False, True])
def test_a_consumer_outlives_the_interpreter(off_first: bool) -> None:
    out = run(
        ON.format("lru")
        + """
import ctypes
class Late:
    def __init__(self, buffer): self.view = np.from_dlpack(buffer)
    def __del__(self, total=np.add.reduce): total(self.view[:4])
late = Late(umem.Buffer(4 << 20))
circle = [umem.Buffer(1 << 20)]; circle.append(circle)
# Never freed: the capsule's reference is the process's.
capsule = umem.Buffer(4 << 20).__dlpack__()
ctypes.pythonapi.Py_IncRef(ctypes.py_object(capsule))
"""
        + ("umem.disable()\n" if off_first else "")
        + "print('end')"
    )
    assert out == "end\n"


def test_the_pages_example_runs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "frameworks.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(import numpy.*?)```", page, re.DOTALL)
    assert run(code) == ""


def test_threads_share_one_budget(on: None) -> None:
    import threading

    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            rng = np.random.default_rng(seed)
            for _ in range(40):
                value = int(rng.integers(256))
                kept = filled(value, int(rng.integers(1, 4)))
                assert (np.asarray(kept) == value).all()
        except Exception as error:  # noqa: BLE001 - shown below
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert blocks.holders() == {}
