"""Streams, events and graphs of the software driver: the order of their work."""

from __future__ import annotations

import pytest
from softcuda.programs import driver_program, reason_without_libraries

pytestmark = pytest.mark.skipif(
    reason_without_libraries() is not None, reason=str(reason_without_libraries())
)


def test_enqueued_work_waits_under_a_seed_and_not_without() -> None:
    code = """
        context()
        stream, ptr = new_stream(), managed(2 * MIB)
        late = 0
        for value in range(1, 41):
            fill(ptr, value, 2 * MIB, stream)
            late += ctypes.string_at(ptr.value, 1)[0] != value
            ok(d.cuStreamSynchronize(stream))
            assert ctypes.string_at(ptr.value, 1)[0] == value
            assert soft.pending() == 0
        print(late)
        """
    assert int(driver_program(code)[0]) == 0
    assert 10 < int(driver_program(code, SOFTCUDA_SEED="3")[0]) < 40


def test_a_missing_event_wait_is_seen_and_a_present_one_never() -> None:
    # The copy on b reads what the fill on a writes.
    code = """
        context()
        a, b, event = new_stream(), new_stream(), new_event()
        source, target = managed(MIB), managed(MIB)
        wrong = 0
        for value in range(1, 101):
            fill(source, value, MIB, a)
            ok(d.cuEventRecord(event, a))
            if WAIT:
                ok(d.cuStreamWaitEvent(b, event, 0))
            ok(d.cuMemcpyAsync(target, source, c_size_t(MIB), b))
            ok(d.cuCtxSynchronize())
            wrong += ctypes.string_at(target.value, 1)[0] != value
        assert bool(soft.races()) != WAIT
        print(wrong)
        """
    for seed in "123":
        waited, _ = driver_program(code.replace("WAIT", "True"), SOFTCUDA_SEED=seed)
        forgot, _ = driver_program(code.replace("WAIT", "False"), SOFTCUDA_SEED=seed)
        assert int(waited) == 0
        assert int(forgot) > 20


def test_the_order_depends_on_the_seed_alone() -> None:
    code = """
        context()
        streams, ptr = [new_stream() for _ in range(4)], managed(MIB)
        order = []
        for _ in range(20):
            for i, stream in enumerate(streams):
                fill(ptr, i, MIB, stream)
            ok(d.cuCtxSynchronize())
            order.append(ctypes.string_at(ptr.value, 1)[0])
        assert soft.races()
        print(order)
        """
    first, again, other = (driver_program(code, SOFTCUDA_SEED=seed)[0] for seed in "778")
    assert first == again
    assert first != other


def test_the_legacy_stream_waits_for_blocking_streams_only() -> None:
    driver_program(
        """
        context()
        blocking, free = new_stream(0), new_stream(1)
        one, two = managed(MIB), managed(MIB)
        loose = 0
        for value in range(1, 41):
            fill(one, value, MIB, blocking)
            fill(two, value, MIB, free)
            ok(d.cuStreamSynchronize(None))
            assert ctypes.string_at(one.value, 1)[0] == value
            loose += ctypes.string_at(two.value, 1)[0] != value
            ok(d.cuCtxSynchronize())
        assert loose > 0
        """,
        SOFTCUDA_SEED="5",
    )


def test_polling_ends() -> None:
    driver_program(
        """
        context()
        stream, event, ptr = new_stream(), new_event(), managed(MIB)
        pending = 0
        for value in range(20):
            fill(ptr, value, MIB, stream)
            ok(d.cuEventRecord(event, stream))
            while (result := d.cuEventQuery(event)) == NOT_READY:
                pending += 1
            ok(result)
        assert pending > 0
        """,
        SOFTCUDA_SEED="9",
    )


def test_pageable_memory_is_read_and_written_before_the_copy_returns() -> None:
    driver_program(
        """
        context()
        stream, ptr = new_stream(), managed(MIB)
        for value in range(1, 21):
            host = ctypes.create_string_buffer(bytes([value]) * MIB, MIB)
            ok(d.cuMemcpyHtoDAsync_v2(ptr, host, c_size_t(MIB), stream))
            ctypes.memset(host, 0, MIB)
            ok(d.cuMemcpyDtoHAsync_v2(host, ptr, c_size_t(MIB), stream))
            assert host.raw == bytes([value]) * MIB
        """,
        SOFTCUDA_SEED="4",
    )


@pytest.mark.parametrize("seed", ["0", "6"])
def test_host_functions_run_in_stream_order_on_a_thread_of_their_own(seed: str) -> None:
    driver_program(
        """
        context()
        stream, ptr, seen = new_stream(), managed(MIB), []
        FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
        def look(_):
            seen.append((ctypes.string_at(ptr.value, 1)[0], threading.get_native_id()))
        function = FUNCTION(look)
        for value in (1, 2, 3):
            fill(ptr, value, MIB, stream)
            ok(d.cuLaunchHostFunc(stream, function, None))
        ok(d.cuStreamSynchronize(stream))
        assert [value for value, _ in seen] == [1, 2, 3], seen
        assert threading.get_native_id() not in [thread for _, thread in seen]
        """,
        SOFTCUDA_SEED=seed,
    )


def test_calls_that_are_illegal_in_a_capture_fail_and_spoil_it() -> None:
    driver_program(
        """
        context()
        stream, event, ptr, graph = new_stream(), new_event(), managed(2 * MIB), c_void_p()
        ok(d.cuEventRecord(event, stream))
        for illegal in (
            lambda: d.cuMemAllocManaged(byref(c_uint64()), c_size_t(MIB), 1),
            lambda: d.cuEventQuery(event),
            lambda: d.cuStreamSynchronize(stream),
            lambda: discard(ptr, 2 * MIB, stream),
            lambda: d.cuCtxSynchronize(),
        ):
            ok(d.cuStreamBeginCapture_v2(stream, 0))
            assert illegal() == 900
            assert d.cuStreamEndCapture(stream, byref(graph)) == 901
        """
    )


def test_relaxed_mode_allows_allocation_in_a_capture() -> None:
    driver_program(
        """
        context()
        stream, graph, mode = new_stream(), c_void_p(), c_int(2)
        ok(d.cuStreamBeginCapture_v2(stream, 0))
        ok(d.cuThreadExchangeStreamCaptureMode(byref(mode)))
        assert mode.value == 0
        managed(MIB)
        ok(d.cuThreadExchangeStreamCaptureMode(byref(mode)))
        ok(d.cuStreamEndCapture(stream, byref(graph)))
        """
    )


def test_a_graph_runs_when_launched_and_each_time() -> None:
    driver_program(
        """
        context()
        a, b, event = new_stream(), new_stream(), new_event()
        graph, executable = c_void_p(), c_void_p()
        one, two = managed(MIB), managed(MIB)
        ok(d.cuStreamBeginCapture_v2(a, 0))
        fill(one, 5, MIB, a)
        ok(d.cuEventRecord(event, a))
        ok(d.cuStreamWaitEvent(b, event, 0))
        ok(d.cuMemcpyAsync(two, one, c_size_t(MIB), b))
        ok(d.cuEventRecord(event, b))
        ok(d.cuStreamWaitEvent(a, event, 0))
        ok(d.cuStreamEndCapture(a, byref(graph)))
        ok(d.cuGraphInstantiateWithFlags(byref(executable), graph, c_uint64(0)))
        assert ctypes.string_at(two.value, 1)[0] != 5
        for _ in range(2):
            fill(two, 9, MIB, a)
            ok(d.cuGraphLaunch(executable, a))
            ok(d.cuStreamSynchronize(a))
            assert ctypes.string_at(two.value, 1)[0] == 5
        """
    )


def test_a_forked_child_cannot_use_the_driver_and_leaves_the_parent_alone() -> None:
    driver_program(
        """
        context()
        ptr, stream = managed(MIB), new_stream()
        fill(ptr, 7, MIB, stream)
        child = os.fork()
        if child == 0:
            os._exit(d.cuMemAllocManaged(byref(c_uint64()), c_size_t(MIB), 1))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        ok(d.cuStreamSynchronize(stream))
        assert ctypes.string_at(ptr.value, 1)[0] == 7
        """
    )


@pytest.mark.parametrize("seed", ["0", "12"])
def test_threads_with_streams_of_their_own_do_not_disturb_each_other(seed: str) -> None:
    driver_program(
        """
        context()
        FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
        function, wrong = FUNCTION(lambda _: None), []
        def work(number):
            context()
            a, b, event = new_stream(), new_stream(), new_event()
            source, target = managed(MIB), managed(MIB)
            for i in range(30):
                value = (number * 30 + i) % 250 + 1
                fill(source, value, MIB, a)
                ok(d.cuLaunchHostFunc(a, function, None))
                ok(d.cuEventRecord(event, a))
                ok(d.cuStreamWaitEvent(b, event, 0))
                ok(d.cuMemcpyAsync(target, source, c_size_t(MIB), b))
                ok(d.cuStreamSynchronize(b))
                if ctypes.string_at(target.value, MIB) != bytes([value]) * MIB:
                    wrong.append((number, i))
            ok(d.cuMemFree_v2(source))
        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == [], wrong
        """,
        SOFTCUDA_SEED=seed,
        SOFTCUDA_BYTES=str(16 << 20),
    )


BLOCKED = """
        context()
        a, b, first, second = new_stream(), new_stream(), managed(2 * MIB), managed(2 * MIB)
        go = threading.Event()
        function = ctypes.CFUNCTYPE(None, c_void_p)(lambda _: go.wait() and None)
        ok(d.cuLaunchHostFunc(a, function, None))
        def to(ptr, device, stream):
            return d.cuMemPrefetchAsync_v2(
                ptr, c_size_t(2 * MIB), Location(1 if device else 2, 0), 0, stream)
"""


def test_one_worker_takes_hints_in_the_order_of_their_calls() -> None:
    code = (
        BLOCKED
        + """
        ok(to(first, True, a))
        ok(to(second, True, b))
        done = any(d.cuStreamQuery(b) == 0 for _ in range(50))
        go.set()
        ok(d.cuCtxSynchronize())
        print(done, soft.pending())
        """
    )
    for seed in "12":
        assert driver_program(code, SOFTCUDA_SEED=seed, SOFTCUDA_HINTS="worker")[0] == "False 0\n"
        assert driver_program(code, SOFTCUDA_SEED=seed, SOFTCUDA_HINTS="streams")[0] == "True 0\n"
    assert driver_program(code, SOFTCUDA_SEED="1")[0] == "False 0\n"
    assert driver_program(code, SOFTCUDA_SEED="2")[0] == "True 0\n"


def test_a_prefetch_to_the_host_blocks_its_caller_on_an_idle_stream() -> None:
    code = (
        BLOCKED
        + """
        ok(to(first, False, b))
        idle = soft.pending()  # the host function's own, and what was left
        ok(to(second, False, a))
        ok(to(second, True, b))
        print(idle, soft.pending())
        go.set()
        ok(d.cuCtxSynchronize())
        """
    )
    for seed in "13579":
        assert driver_program(code, SOFTCUDA_SEED=seed)[0] == "1 3\n"
