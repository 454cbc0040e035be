"""CuPy, cuda.core and Buffers beside torch: one budget, one ledger, odd orders of freeing.

CuPy links NVIDIA's libcudart statically, which refuses the software driver: there its allocator,
its memory objects and its arrays work, and what needs the runtime (streams, copies, kernels, pools,
DLPack) does not. Programs that need it are skipped there; in the others two questions that umem
asks of CuPy's runtime are answered in its place.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable

import pytest

pytest.importorskip("torch")

pytestmark = pytest.mark.gpu
Program = Callable[..., tuple[str, str]]


def _needs(*names: str) -> pytest.MarkDecorator:
    # Not find_spec("cuda.core"): it would import `cuda`, and fail where that is absent.
    missing = [name for name in names if importlib.util.find_spec(name.split(".")[0]) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


needs_cupy = _needs("cupy")
needs_cuda_core = _needs("cuda.core")
needs_numba = _needs("numba_cuda")
real_gpu = pytest.mark.skipif(
    bool(os.environ.get("SOFTCUDA_LIB")),
    reason="CuPy's and Numba's own CUDA runtimes refuse the software driver",
)

TOOLS = """
    from umem.integrations import blocks as held
    from umem.native import core
    def raises(kind, words, act):
        try:
            act()
        except kind as error:
            assert words in str(error), error
        else:
            raise AssertionError(f"no {kind.__name__}")
"""
CUPY = (
    TOOLS
    + """
    import cupy
    current = type("Stream", (), {"ptr": 0})()
    if soft is not None:
        cupy.cuda.runtime.getDevice = lambda: 0
        cupy.cuda.get_current_stream = lambda: current
"""
)
CORE = (
    TOOLS
    + """
    import cuda.core
    dev = cuda.core.Device(0)
    dev.set_current()
    s = dev.create_stream()
"""
)


def test_a_buffer_is_torchs_without_a_copy(program: Program) -> None:
    program(
        TOOLS
        + """
    enable()
    buffer = umem.Buffer((4, MIB), "float32")  # 16 MiB of 32
    tensor = torch.from_dlpack(buffer)
    assert (tensor.device.type, tensor.shape, tensor.dtype) == ("cuda", (4, MIB), torch.float32)
    assert tensor.data_ptr() == buffer.ptr == torch.as_tensor(buffer, device="cuda").data_ptr()
    tensor.fill_(7.0)
    others = blocks(12)  # 24 MiB beside it
    assert umem.stats().evictions > 0 and umem.stats().live_bytes == 40 * MIB
    assert held.holders() == {"Buffer": (1, 16 * MIB)}
    assert umem.evict(buffer) and umem.prefetch(tensor)
    buffer.free()
    assert intact(others) and bool(tensor.cpu().eq(7.0).all())
    del tensor
    torch.cuda.synchronize()
    assert umem.stats().live_bytes == 24 * MIB and held.holders() == {}
    """
    )


def test_buffers_need_no_torch_and_torch_keeps_its_allocator(program: Program) -> None:
    program(
        TOOLS
        + """
    session = enable(allocator="none")
    assert torch.cuda.get_allocator_backend() == "native" and session.attached.kind == "none"
    plain = torch.full((MIB,), 1.0, device="cuda")
    buffers = [umem.Buffer(4 * MIB) for _ in range(12)]  # 48 MiB in 32
    for i, buffer in enumerate(buffers):
        torch.from_dlpack(buffer).fill_(i)
    assert all(bool(torch.from_dlpack(b).cpu().eq(i).all()) for i, b in enumerate(buffers))
    assert not core.owns(plain.data_ptr()) and umem.stats().evictions > 0
    raises(umem.StateError, "asked for allocator=auto", lambda: umem.enable(budget="32MiB",
           device="cuda"))
    umem.disable()
    assert all(bool(torch.from_dlpack(b).cpu().eq(i).all()) for i, b in enumerate(buffers))
    """
    )


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_memory_follows_streams(program: Program, seed: int) -> None:
    """A buffer that was handed over is written after, and reused after, both streams' work."""
    program(
        TOOLS
        + """
    enable()
    if soft is not None:
        soft.seed(SEED)
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    for round in range(12):
        # Work that is pending on `first` reads the memory that the buffer gets.
        old = umem.Buffer(4 * MIB, stream=first)
        with torch.cuda.stream(first):
            source = torch.from_dlpack(old)
            source.fill_(round)
            kept = source.clone()
        address = old.ptr
        del source
        old.free()
        new = umem.Buffer(4 * MIB, stream=first)
        assert new.ptr == address
        with torch.cuda.stream(second):
            there = torch.from_dlpack(new)
            there.fill_(100)  # after `kept` was made
            copy = there.clone()
        del there
        new.free()
        again = umem.Buffer(4 * MIB, stream=first)
        with torch.cuda.stream(first):
            torch.from_dlpack(again).fill_(200)  # after `copy` was made
        torch.cuda.synchronize()
        assert bool(kept.cpu().eq(round).all()) and bool(copy.cpu().eq(100).all()), round
        del again, kept, copy
    """.replace("SEED", str(seed))
    )


def test_streams_of_memory_stay_until_umem_goes_off(program: Program) -> None:
    program(
        TOOLS
        + """
    import weakref
    enable()
    streams = [torch.cuda.Stream() for _ in range(2)]
    class Owned:  # a stream that is destroyed with its last reference
        def __init__(self, stream): self.stream = stream
        def __cuda_stream__(self): return (0, self.stream.cuda_stream)
    owned = [Owned(stream) for stream in streams]
    first, second = map(weakref.ref, owned)
    buffer = umem.Buffer(4 * MIB, stream=owned[0])
    buffer.record_stream(owned[1])
    del owned
    gc.collect()
    assert first() and second()
    buffer.free()
    gc.collect()
    assert first() and second(), "the cache has blocks of theirs"
    umem.disable()
    assert not first() and not second()
    """
    )


def test_what_a_buffer_refuses(program: Program) -> None:
    program(
        TOOLS
        + """
    raises(umem.StateError, "umem.enable()", lambda: umem.Buffer(4))
    enable()
    count = torch.cuda.device_count()
    raises(umem.ConfigError, f"0 to {count - 1}", lambda: umem.Buffer(4, device=count))
    raises(umem.ConfigError, "allowed", lambda: umem.Buffer(4, device=-1))
    raises(umem.NotSupportedError, "per-thread", lambda: umem.Buffer(4, stream=2))
    raises(TypeError, "no CUDA stream", lambda: umem.Buffer(4, stream="0"))
    raises(umem.OutOfMemoryError, "asked for 1024.00 GiB", lambda: umem.Buffer(1 << 40))
    buffer = umem.Buffer(4)
    raises(BufferError, "ambiguous", lambda: buffer.__dlpack__(stream=0))
    raises(BufferError, "per-thread", lambda: buffer.__dlpack__(stream=2))
    assert not hasattr(buffer, "__array_interface__")
    assert buffer.__cuda_array_interface__["stream"] == 1
    """
    )


def test_a_capturing_stream_gets_no_memory(program: Program) -> None:
    program(
        TOOLS
        + """
    enable()
    before, x = umem.Buffer(4 * MIB), torch.full((MIB,), 1.0, device="cuda")
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=side):
        raises(umem.StateError, "before the capture", lambda: umem.Buffer(4, stream=side))
        raises(umem.StateError, "hand the memory over before",
               lambda: before.record_stream(side))
        y = x.clone()
    graph.replay()
    torch.cuda.synchronize()
    assert umem.Buffer(4, stream=side).ptr
    """
    )


def test_torch_refuses_managed_memory_and_takes_it_exported(program: Program) -> None:
    """What CuPy says of umem's memory, by an exporter that says the same."""
    program(
        TOOLS
        + """
    from umem.integrations import dlpack
    enable()
    class Array:  # CuPy's: managed memory, and a device object
        def __init__(self): self.buffer = umem.Buffer((2, 3), "float32")
        device = type("Device", (), {"id": 0})()
        def __dlpack_device__(self): return (dlpack.MANAGED, 0)
        def __dlpack__(self, stream=None, max_version=None):
            return dlpack.place_on(self.buffer.__dlpack__(stream=stream), dlpack.MANAGED, 0)
    array = Array()
    try:
        torch.from_dlpack(array)
    except (BufferError, RuntimeError, ValueError) as error:
        pass
    else:
        raise AssertionError("torch takes managed memory now: umem.export is not needed any more")
    tensor = torch.from_dlpack(umem.export(array))
    assert tensor.data_ptr() == array.buffer.ptr and tensor.shape == (2, 3)
    del array
    assert umem.stats().live_bytes > 0
    del tensor
    assert umem.stats().live_bytes == 0
    """
    )


@needs_cuda_core
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


@needs_cuda_core
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


@needs_cuda_core
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


@needs_cuda_core
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
    raises(umem.StateError, "was not allocated by this resource",
           lambda: mr.deallocate(foreign.data_ptr(), MIB, stream=s))
    raises(umem.StateError, "was not allocated by this resource",
           lambda: mr.deallocate(0x1000, 4, stream=s))
    buffer = mr.allocate(4 * MIB, stream=s)
    address = int(buffer.handle)
    buffer.close()
    buffer.close()
    raises(umem.StateError, "was freed before", lambda: mr.deallocate(address, 4, stream=s))
    assert core.owns(foreign.data_ptr()) and umem.stats().live_bytes == 4 * MIB
    """
    )


@needs_cuda_core
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
    filler = blocks(12)  # the rest has to leave, after the work of a stream that was let go
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


@needs_cuda_core
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


@needs_cupy
def test_cupy_allocates_from_umem(program: Program) -> None:
    program(
        CUPY
        + """
    enable()
    before = cupy.cuda.get_allocator()
    umem.cupy.enable()
    umem.cupy.enable()
    assert cupy.cuda.get_allocator() is umem.cupy.malloc
    arrays = [cupy.empty((MIB,), "f4") for _ in range(12)]  # 48 MiB in 32
    assert all(core.owns(a.data.ptr) and a.data.device_id == 0 for a in arrays)
    assert cupy.empty(0).size == 0
    tensors = blocks(2)
    assert umem.stats().live_bytes == 52 * MIB and umem.stats().evictions > 0
    assert held.holders() == {"cupy": (12, 48 * MIB)} and "cupy" in umem.summary()
    view = arrays[3].reshape(1024, 1024)[5:, ::2]
    address = arrays[3].data.ptr
    del arrays
    gc.collect()
    assert held.holders() == {"cupy": (1, 4 * MIB)} and core.owns(address)
    del view
    gc.collect()
    assert held.holders() == {} and umem.stats().live_bytes == 4 * MIB and intact(tensors)
    umem.disable()
    assert cupy.cuda.get_allocator() is not umem.cupy.malloc
    raises(umem.StateError, "needs umem to be on", lambda: umem.cupy.malloc(4))
    """
    )


@needs_cupy
def test_cupy_turns_umem_on_without_torch(program: Program) -> None:
    program(
        CUPY
        + """
    umem.cupy.enable(budget="16MiB", policy="lru")
    assert torch.cuda.get_allocator_backend() == "native"
    a = [cupy.empty((MIB,), "f4") for _ in range(8)]
    assert umem.stats().evictions > 0 and umem.stats().budget_bytes == 16 * MIB
    umem.cupy.enable(budget="16MiB", policy="lru")
    raises(umem.StateError, "budget=", lambda: umem.cupy.enable(budget="24MiB", policy="lru"))
    umem.cupy.disable()
    umem.cupy.disable()
    assert umem.is_enabled() and cupy.cuda.get_allocator() is not umem.cupy.malloc
    umem.cupy.enable()
    other = lambda n: umem.cupy.malloc(n)
    cupy.cuda.set_allocator(other)
    umem.disable()
    assert cupy.cuda.get_allocator() is other  # what the program put there stays
    """
    )


@needs_cupy
def test_cupys_out_of_memory_is_cupys_and_umems(program: Program) -> None:
    program(
        CUPY
        + """
    enable()
    umem.cupy.enable()
    runtime = cupy.cuda.runtime
    for kind in (runtime.CUDARuntimeError, umem.OutOfMemoryError, MemoryError):
        raises(kind, "asked for 1024.00 GiB", lambda: cupy.cuda.alloc(1 << 40))
    try:
        cupy.cuda.alloc(1 << 40)
    except runtime.CUDARuntimeError as error:
        assert error.status == 2  # cudaErrorMemoryAllocation
    assert held.holders() == {}
    """
    )


@needs_cupy
def test_what_cupy_is_refused(program: Program) -> None:
    program(
        CUPY
        + """
    raises(umem.StateError, "needs umem to be on", lambda: umem.cupy.malloc(4))
    enable()
    with cupy.cuda.using_allocator(None):
        raises(umem.StateError, "using_allocator", umem.cupy.enable)
    umem.cupy.enable()
    with cupy.cuda.using_allocator(None):
        raises(umem.StateError, "using_allocator", umem.disable)
        assert umem.is_enabled()
    umem.disable()
    if soft is not None:
        enable()
        current.ptr = 2
        raises(umem.NotSupportedError, "per-thread", lambda: umem.cupy.malloc(4))
        cupy.cuda.runtime.getDevice = lambda: 7
        current.ptr = 0
        raises(umem.ConfigError, "allowed: 0 to", lambda: umem.cupy.malloc(4))
    """
    )


@needs_cupy
@real_gpu
def test_cupy_and_torch_by_dlpack_both_ways(program: Program) -> None:
    program(
        CUPY
        + """
    enable()
    umem.cupy.enable()
    arrays = [cupy.full((MIB,), i, "f4") for i in range(12)]  # 48 MiB in 32
    tensors = [torch.from_dlpack(umem.export(a)) for a in arrays]
    assert [t.data_ptr() for t in tensors] == [a.data.ptr for a in arrays]
    del arrays
    assert intact(tensors) and umem.stats().evictions > 0
    back = [cupy.from_dlpack(t) for t in tensors]
    del tensors
    assert all(float(a.sum()) == i * MIB for i, a in enumerate(back))
    assert umem.evict(back[0]) and float(back[0].sum()) == 0.0
    """
    )


@needs_cupy
@real_gpu
def test_cupys_pool_over_umem_and_its_streams(program: Program) -> None:
    program(
        CUPY
        + """
    enable()
    pool = cupy.cuda.MemoryPool(umem.cupy.malloc)
    with cupy.cuda.using_allocator(pool.malloc):
        a = cupy.full((MIB,), 1, "f4")
        assert core.owns(a.data.ptr)
        address = a.data.ptr
        del a
        assert held.holders()["cupy"][1] >= 4 * MIB  # in the pool's cache
        raises(Exception, "memory", lambda: cupy.empty(1 << 40, "u1"))  # it gave its cache back
        assert pool.total_bytes() == 0
    umem.cupy.enable()
    for _ in range(50):
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            x = cupy.full((MIB,), 2, "f4")
            y = x * 3
            del x
        del stream
        assert float(y.sum()) == 6.0 * MIB
    """
    )


@needs_cupy
@real_gpu
def test_a_capturing_stream_of_cupy_gets_no_memory(program: Program) -> None:
    program(
        CUPY
        + """
    enable()
    umem.cupy.enable()
    x = cupy.full((MIB,), 2, "f4")
    with cupy.cuda.Stream(non_blocking=True) as stream:
        out = cupy.empty_like(x)
        cupy.multiply(x, 3, out=out)
        stream.begin_capture()
        raises(umem.StateError, "before the capture", lambda: x * 3)
        cupy.multiply(x, 3, out=out)
        graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
    assert float(out.sum()) == 6.0 * MIB
    """
    )


@needs_numba
@real_gpu
def test_numba_computes_on_buffers(program: Program) -> None:
    program(
        TOOLS
        + """
    from numba import cuda
    enable()
    buffers = [umem.Buffer(MIB, "float32") for _ in range(12)]  # 48 MiB in 32
    @cuda.jit
    def put(x, value):
        i = cuda.grid(1)
        if i < x.size:
            x[i] = value
    arrays = [cuda.as_cuda_array(b) for b in buffers]
        put[a.size // 256, 256](a, float(i))
    assert all((a.copy_to_host() == i).all() for i, a in enumerate(arrays))
    assert umem.stats().evictions > 0
    """
    )
