"""Streams that wait for a word, which a thread writes; and the swaps that need them."""

from __future__ import annotations

import textwrap

import pytest
from softcuda.programs import reason_without_libraries, reason_without_torch, torch_program
from softcuda.vmm_programs import CALLS, vmm_program

pytestmark = pytest.mark.skipif(
    reason_without_libraries() is not None, reason=str(reason_without_libraries())
)
needs_torch = pytest.mark.skipif(
    reason_without_torch() is not None, reason=str(reason_without_torch())
)


@pytest.mark.parametrize("seed", ["0", "1", "2"])
def test_work_behind_a_word_waits_for_it_in_real_time(seed: str) -> None:
    vmm_program(
        """
        context()
        lane, other, flag, event = new_stream(), new_stream(), word(), new_event()
        ptr, busy = pinned(4096), managed(MIB)
        ctypes.memset(ptr.value, 0, 4096)
        def first():
            return ctypes.string_at(ptr.value, 1)[0]
        waits = [
            lambda: d.cuStreamSynchronize(lane), lambda: d.cuStreamSynchronize(other),
            lambda: d.cuEventSynchronize(event), lambda: d.cuCtxSynchronize(),
            lambda: d.cuMemFree_v2(managed(MIB)),
        ]
        for turn, finished in enumerate(waits, start=1):
            ok(wait_value(lane, flag, turn))
            fill(ptr, turn, 4096, lane)
            ok(d.cuEventRecord(event, lane))
            ok(d.cuStreamWaitEvent(other, event, 0))
            fill(ptr, turn + 100, 16, other)
            for _ in range(20):
                assert d.cuStreamQuery(lane) == d.cuEventQuery(event) == NOT_READY
                assert d.cuStreamQuery(other) == NOT_READY
            assert first() == (0 if turn == 1 else turn + 99)
            done = []
            def work():
                context()
                # The driver serves this thread while the other one waits.
                mine, at_end = new_stream(), new_event()
                for _ in range(5):
                    fill(busy, turn, MIB, mine)
                    ok(d.cuEventRecord(at_end, mine))
                    ok(d.cuEventSynchronize(at_end))
                    time.sleep(0.002)
                done.append(True)
                write(flag, turn)
            thread = threading.Thread(target=work)
            thread.start()
            ok(finished())
            assert done == [True]
            ok(d.cuStreamSynchronize(other))
            assert first() == turn + 100
            thread.join()
        assert soft.races() == []
        """,
        SOFTCUDA_SEED=seed,
    )


@pytest.mark.parametrize("seed", ["0", "3"])
def test_words_compare_as_cyclic_counters_or_for_equality(seed: str) -> None:
    vmm_program(
        """
        context()
        flag, other = word(), word()
        def passes(value, flags=0):
            stream = new_stream()
            ok(wait_value(stream, flag, value, flags))
            for _ in range(20):
                ready = d.cuStreamQuery(stream)
            if ready == NOT_READY:
                before = c_uint32.from_address(flag.value).value
                write(flag, value)
                ok(d.cuStreamSynchronize(stream))
                write(flag, before)
            return ready == 0
        write(flag, 5)
        assert [passes(value) for value in (4, 5, 6)] == [True, True, False]
        assert [passes(value, 1) for value in (4, 5, 6)] == [False, True, False]
        write(flag, 2)
        assert [passes(value) for value in (0xFFFFFFFF, 3, 0x80000003)] == [True, False, True]

        stream = new_stream()
        for flags in (2, 3, 1 << 30):
            assert wait_value(stream, flag, 1, flags) == NOT_SUPPORTED
        assert wait_value(stream, at(flag, 2), 1) == INVALID_VALUE
        assert wait_value(stream, c_uint64(id(flag) & ~3), 1) == INVALID_VALUE
        assert wait_value(stream, reserve(2 * MIB), 1) == INVALID_VALUE
        graph = c_void_p()
        for call in (d.cuStreamWaitValue32, d.cuStreamWriteValue32):
            ok(d.cuStreamBeginCapture_v2(stream, 0))
            assert call(stream, flag, c_uint32(1), 0) == 900
            assert d.cuStreamEndCapture(stream, byref(graph)) == 901

        # From stream to stream, with the order of their work.
        ptr, written = managed(MIB), new_stream()
        for turn in range(1, 11):
            ok(wait_value(stream, other, turn))
            fill(ptr, 100, MIB, stream)
            fill(ptr, turn, MIB, written)
            ok(d.cuStreamWriteValue32_v2(written, other, c_uint32(turn), 0))
            ok(d.cuStreamSynchronize(stream))
            assert ctypes.string_at(ptr.value, 1)[0] == 100
            assert c_uint32.from_address(other.value).value == turn
        assert soft.races() == []
        """,
        SOFTCUDA_SEED=seed,
    )


@pytest.mark.parametrize("seed", ["0", "1", "2"])
def test_a_seen_word_orders_what_the_program_knew_before_later_work(seed: str) -> None:
    vmm_program(
        """
        context()
        lane, other, after, flag, event = (
            new_stream(), new_stream(), new_stream(), word(), new_event())
        ptr = managed(MIB)
        def behind(turn, streams):
            # Work that is enqueued before the program has waited, directly behind the word or by
            # an event.
            ok(wait_value(lane, flag, turn))
            fill(ptr, 1, MIB, lane)
            if streams > 1:
                ok(d.cuEventRecord(event, lane))
                ok(d.cuStreamWaitEvent(after, event, 0))
                fill(ptr, 2, MIB, after)
        turn = 0
        for streams in (1, 2):
            turn += 1
            fill(ptr, 9, MIB, other)
            behind(turn, streams)
            ok(d.cuStreamSynchronize(other))
            write(flag, turn)
            ok(d.cuCtxSynchronize())
            assert soft.races() == []
        # The program has not waited for the other stream's work.
        turn += 1
        fill(ptr, 9, MIB, other)
        behind(turn, 2)
        write(flag, turn)
        ok(d.cuStreamSynchronize(after))
        races = soft.races()
        assert len(races) in (1, 2) and all("nothing orders them" in race for race in races), races
        ok(d.cuCtxSynchronize())
        # The program waits for the stream behind the word: it knows that work afterwards.
        turn += 1
        behind(turn, 2)
        write(flag, turn)
        ok(d.cuStreamSynchronize(after))
        fill(ptr, 9, MIB, other)
        assert soft.races() == []
        """,
        SOFTCUDA_SEED=seed,
    )


def test_a_word_written_before_the_unmapping_is_a_race() -> None:
    vmm_program(
        """
        context()
        lane, flag, va, handle = new_stream(), word(), reserve(2 * MIB), create(2 * MIB)
        put(va, 2 * MIB, handle, DEVICE)
        ok(wait_value(lane, flag, 1))
        ok(launch(va, MIB, lane))
        ok(unmap(va, 2 * MIB))
        put(va, 2 * MIB, handle, DEVICE)
        write(flag, 1)
        ok(d.cuCtxSynchronize())
        assert soft.races() == []
        ok(wait_value(lane, flag, 2))
        ok(launch(va, MIB, lane))
        write(flag, 2)
        ok(unmap(va, 2 * MIB))
        assert d.cuCtxSynchronize() in (0, ILLEGAL_ADDRESS)
        assert len(soft.races()) == 1
        """
    )


@pytest.mark.parametrize("seed", ["0", "1", "2", "3", "4", "5"])
def test_a_swap_to_the_host_by_a_worker_keeps_bytes_and_order(seed: str) -> None:
    vmm_program(
        """
        context()
        N = 4 * MIB
        va, device, flag, out = reserve(N), create(N), word(), managed(N)
        put(va, N, device, DEVICE)
        assert free_bytes() == 12 * MIB
        lane, used = new_stream(), new_event()
        swapper = Swapper(va, N, device, context, new_stream(), new_event())
        for turn in range(1, 9):
            fill(va, turn, N, lane)
            ok(d.cuEventRecord(used, lane))
            ok(wait_value(lane, flag, turn))
            ok(launch(va, N, lane))
            # Enqueued before the swap begins; it runs on the host's memory.
            fill(va, turn + 100, 2 * MIB, lane)
            ok(copy(out, va, N, lane))
            assert d.cuStreamQuery(lane) == NOT_READY
            thread = swapper.out(used, flag, turn)
            ok(d.cuStreamSynchronize(lane))
            thread.join()
            expected = bytes([turn + 100]) * (2 * MIB) + bytes([turn]) * (2 * MIB)
            assert ctypes.string_at(out.value, N) == expected
            assert ctypes.string_at(swapper.alias.value, N) == expected
            swapper.back(lane)
            fill(va, turn + 200, MIB, lane)
            ok(d.cuStreamSynchronize(lane))
        assert soft.races() == []
        assert soft.pending() == soft.async_errors() == 0
        """,
        SOFTCUDA_SEED=seed,
    )


@needs_torch
@pytest.mark.parametrize("seed", ["0", "3"])
def test_kernels_compute_on_mapped_memory_while_a_worker_swaps_it(seed: str) -> None:
    code = """
        load.compute()
        torch.set_num_threads(1)
        torch.zeros(1, device="cuda")
        handle, N = c_void_p(), 2 * MIB
        ok(d.cuDevicePrimaryCtxRetain(byref(handle), 0))
        def context():
            ok(d.cuCtxSetCurrent(handle))
        va, device, flag = reserve(N), create(N), word()
        put(va, N, device, DEVICE)
        class Array:
            __cuda_array_interface__ = {
                "shape": (N // 4,), "typestr": "<f4", "data": (va.value, False), "version": 3}
        x = torch.as_tensor(Array(), device="cuda")
        assert x.data_ptr() == va.value
        copies, lane = torch.cuda.Stream(), torch.cuda.Stream()
        used, copied = torch.cuda.Event(), torch.cuda.Event()
        copied.record()
        used.record()
        swapper = Swapper(va, N, device, context, c_void_p(copies.cuda_stream),
                          c_void_p(copied.cuda_event))
        raw = c_void_p(lane.cuda_stream)
        with torch.cuda.stream(lane):
            for turn in range(1, 6):
                x.fill_(turn)
                used.record()
                ok(wait_value(raw, flag, turn))
                x.mul_(2)
                y = x + 1
                thread = swapper.out(c_void_p(used.cuda_event), flag, turn)
                # Its shape depends on the values: the call waits.
                assert x.nonzero().numel() == N // 4
                assert y.cpu().eq(2 * turn + 1).all() and x.cpu().eq(2 * turn).all()
                thread.join()
                x.add_(1)
                swapper.back(raw)
                assert x.cpu().eq(2 * turn + 1).all()
        assert soft.races() == [] and soft.faults() == 0
        ok(unmap(va, N))
        try:
            (x + 1).cpu()
        except RuntimeError as error:
            # From the launch itself without a seed.
            assert "illegal" in str(error) or "error 700" in str(error), error
        else:
            raise AssertionError("the address has no memory")
        soft.races()
        os._exit(0)  # the device is lost
        """
    program = CALLS + textwrap.dedent(code)
    torch_program(program, SOFTCUDA_SEED=seed)
