"""cuda.core in umem's memory, together with torch and umem.Buffer, freed in any order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.frameworks import CORE, needs

pytest.importorskip("torch")

pytestmark = [pytest.mark.gpu, needs("cuda.core")]
Program = Callable[..., tuple[str, str]]


def test_cuda_core_gets_managed_buffers(program: Program) -> None:
    program(
        CORE
        + """
    enable()
    dev.memory_resource = umem.cuda_core.MemoryResource(dev)
    buffers = [dev.allocate(4 * MIB, stream=s) for _ in range(12)]  # 48 MiB in 32
    assert all(isinstance(b, cuda.core.ManagedBuffer) for b in buffers)
    assert all(core.owns(int(b.handle)) and b.is_managed and b.device_id == 0 for b in buffers)
    for i, b in enumerate(buffers):
        b.fill(i, stream=s)
    s.sync()
    tensors = blocks(2)
    assert umem.stats().live_bytes == 52 * MIB and umem.stats().evictions > 0
    assert held.holders() == {"cuda.core": (12, 48 * MIB)}
    assert "cuda.core" in umem.summary()
    there = [torch.from_dlpack(umem.export(b)) for b in buffers]
    assert all(bool(t.cpu().eq(i).all()) for i, t in enumerate(there)) and intact(tensors)
    assert umem.evict(buffers[0]) and umem.prefetch(buffers[0])
    buffers[1].close()
    del buffers, there, b
    gc.collect()
    s.sync()
    assert held.holders() == {} and umem.stats().live_bytes == 4 * MIB
    """
    )


def test_both_forms_of_cuda_cores_allocate(program: Program) -> None:
    program(
        CORE
        + """
    enable()
    mr = umem.cuda_core.MemoryResource()
    for buffer in (mr.allocate(MIB, stream=s), mr.allocate(MIB, s), mr.allocate(MIB)):
        assert core.owns(int(buffer.handle)) and buffer.size == MIB
        buffer.close()
    empty = mr.allocate(0, stream=s)
    assert empty.size == 0
    empty.close()
    assert umem.stats().live_bytes == 0
    """
    )


def test_cuda_core_views_buffers_of_umem(program: Program) -> None:
    program(
        CORE
        + """
    from cuda.core.utils import StridedMemoryView
    enable()
    buffer = umem.Buffer((2, 3), "int32", stream=s)
    for view in (StridedMemoryView.from_dlpack(buffer, stream_ptr=int(s.handle)),
                 StridedMemoryView.from_cuda_array_interface(buffer, stream_ptr=int(s.handle))):
        assert (view.ptr, view.shape, view.device_id) == (buffer.ptr, (2, 3), 0)
        assert view.is_device_accessible
    """
    )


def test_what_cuda_core_is_refused(program: Program) -> None:
    program(
        CORE
        + """
    mr = umem.cuda_core.MemoryResource()
    raises(umem.StateError, "needs umem to be on", lambda: mr.allocate(4, stream=s))
    enable()
    missing = umem.cuda_core.MemoryResource(torch.cuda.device_count())
    raises(umem.ConfigError, "allowed: 0 to", lambda: missing.allocate(4, stream=s))
    raises(umem.OutOfMemoryError, "asked for 1024.00 GiB", lambda: mr.allocate(1 << 40, stream=s))
    raises(umem.NotSupportedError, "per-thread",
           lambda: mr.allocate(4, stream=cuda.core.PER_THREAD_DEFAULT_STREAM))
    foreign = torch.empty(MIB, device="cuda")
    raises(umem.StateError, "was not allocated by this memory resource",
           lambda: mr.deallocate(foreign.data_ptr(), MIB, stream=s))
    raises(umem.StateError, "was not allocated by this memory resource",
           lambda: mr.deallocate(0x1000, 4, stream=s))
    buffer = mr.allocate(4 * MIB, stream=s)
    address = int(buffer.handle)
    raises(umem.NotSupportedError, "per-thread",
           lambda: mr.deallocate(address, 4 * MIB, stream=cuda.core.PER_THREAD_DEFAULT_STREAM))
    assert umem.stats().live_bytes == 8 * MIB  # it stays allocated
    buffer.close()
    buffer.close()
    raises(umem.StateError, "is freed already", lambda: mr.deallocate(address, 4, stream=s))
    assert core.owns(foreign.data_ptr()) and umem.stats().live_bytes == 4 * MIB
    """
    )


def test_odd_orders_of_freeing(program: Program) -> None:
    program(
        CORE
        + """
    enable()
    mr = umem.cuda_core.MemoryResource()
    # The stream goes first, then umem, then the resource, then the memory.
    other = dev.create_stream()
    buffer, raw = mr.allocate(4 * MIB, stream=other), umem.Buffer(4 * MIB, stream=other)
    buffer.fill(3, stream=other)
    tensor, bytes_ = torch.from_dlpack(umem.export(buffer)), torch.from_dlpack(raw)
    torch.cuda.synchronize()
    del other, raw
    gc.collect()
    filler = blocks(14)  # the rest has to leave, after the work of a stream that was let go
    assert umem.stats().evictions > 0
    umem.disable()
    raises(umem.StateError, "needs umem to be on", lambda: mr.allocate(4, stream=s))
    del mr, buffer
    gc.collect()
    assert bool(tensor.cpu().eq(3).all()) and intact(filler)
    del tensor, bytes_
    gc.collect()
    assert held.holders() == {}
    del filler
    torch.cuda.synchronize()
    assert umem.stats().live_bytes == 0
    enable()  # on again, with nothing left of before
    assert umem.Buffer(4).ptr
    """
    )


def test_memory_that_outlives_the_interpreter(program: Program) -> None:
    out, err = program(
        CORE
        + """
    enable()
    mr = umem.cuda_core.MemoryResource()
    class Late:
        def __init__(self, *what): self.what = what
    late = Late(mr.allocate(4 * MIB, stream=s), umem.Buffer(4 * MIB),
                torch.from_dlpack(umem.Buffer(4 * MIB)),
                torch.from_dlpack(umem.export(mr.allocate(4 * MIB, stream=s))))
    late.me = late
    capsule = umem.Buffer(4 * MIB).__dlpack__()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(capsule))
    print("end")
    """
    )
    assert (out, err) == ("end\n", "")
