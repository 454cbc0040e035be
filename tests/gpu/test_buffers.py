"""umem.Buffer together with torch: one budget, one residency table, the order of streams."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.frameworks import TOOLS, needs, real_gpu

pytest.importorskip("torch")

pytestmark = pytest.mark.gpu
Program = Callable[..., tuple[str, str]]


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
    del tensor, buffer  # the latter is the base of what as_tensor made
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
    raises(umem.StateError, "allocator=auto was requested", lambda: umem.enable(budget="32MiB",
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
    buffer = umem.Buffer(4 * MIB)
    buffer.__dlpack__(stream=streams[0].cuda_stream)  # by its number alone
    del buffer
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
    import numpy
    raises(umem.StateError, "umem.enable()", lambda: umem.Buffer(4))
    enable()
    count = torch.cuda.device_count()
    raises(umem.ConfigError, f"0 to {count - 1}", lambda: umem.Buffer(4, device=count))
    raises(umem.ConfigError, "allowed", lambda: umem.Buffer(4, device=-1))
    raises(umem.ConfigError, "allowed: up to", lambda: umem.Buffer(1 << 62, "float64"))
    raises(umem.NotSupportedError, "per-thread", lambda: umem.Buffer(4, stream=2))
    raises(TypeError, "is not a CUDA stream", lambda: umem.Buffer(4, stream="0"))
    raises(umem.OutOfMemoryError, "asked for 1024.00 GiB", lambda: umem.Buffer(1 << 40))
    assert umem.Buffer(numpy.prod((2, 2))).shape == (4,)  # the sizes of numpy's programs
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
        raises(BufferError, "hand the memory over before",
               lambda: before.__dlpack__(stream=side.cuda_stream))
        y = x.clone()
    graph.replay()
    torch.cuda.synchronize()
    assert umem.Buffer(4, stream=side).ptr
    """
    )


def test_torch_refuses_managed_memory_and_takes_it_exported(program: Program) -> None:
    """CuPy's description of umem's memory, from an exporter that returns the same."""
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


@needs("numba_cuda")
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
    for i, a in enumerate(arrays):
        put[a.size // 256, 256](a, float(i))
    assert all((a.copy_to_host() == i).all() for i, a in enumerate(arrays))
    assert umem.stats().evictions > 0
    """
    )
