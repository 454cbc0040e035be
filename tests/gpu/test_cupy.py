"""CuPy in umem's memory, together with torch.

CuPy links NVIDIA's libcudart statically, which refuses the software driver: there its allocator,
its memory objects and its arrays work, and features of the runtime (streams, copies, kernels,
pools, DLPack) do not. Programs that need it are skipped there; in the others umem's two queries of
CuPy's runtime are answered by the test.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.frameworks import CUPY, needs, real_gpu

pytest.importorskip("torch")

pytestmark = [pytest.mark.gpu, needs("cupy")]
Program = Callable[..., tuple[str, str]]


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


def test_every_hint_takes_arrays_of_cupy(program: Program) -> None:
    program(
        CUPY
        + """
    enable()
    umem.cupy.enable()
    a, b = cupy.empty((MIB,), "f4"), cupy.empty((MIB,), "f4")
    if soft is not None:  # where CuPy's runtime refuses to say the array's stream
        view = lambda x: type("Array", (), {"__cuda_array_interface__": {
            "shape": x.shape, "typestr": "<f4", "data": (x.data.ptr, False), "stream": 1}})()
    else:
        view = lambda x: x
    for x in (view(a), [view(a)], {"a": view(a)}):
        assert umem.evict(x) and umem.tensors(x)[0].evicted_bytes == 4 * MIB
        assert umem.prefetch(x) and umem.tensors(x)[0].resident_bytes == 4 * MIB
    with umem.pin(view(a)), umem.exclude(view(b)):
        assert umem.where(view(a)).pins == 1 and umem.where(view(b)).excluded
        assert umem.stats().pinned_bytes == 4 * MIB
        raises(umem.StateError, "pinned", lambda: umem.evict(view(a)))
        held = blocks(8)
        assert umem.where(view(a)).resident_bytes == 4 * MIB
        with umem.sleep():
            assert umem.where(view(a)).evicted_bytes == 4 * MIB
        assert umem.where(view(a)).resident_bytes == 4 * MIB
    assert umem.discard(view(b)) == 4 * MIB
    assert umem.where(view(b)).discarded_bytes == 4 * MIB
    assert intact(held)
    """
    )


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
        import pickle
        sent = pickle.loads(pickle.dumps(error))  # a worker process does so
        assert type(sent) is type(error) and str(sent) == str(error)
    assert held.holders() == {}
    """
    )


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
