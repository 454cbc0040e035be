"""Waits for the device, and progress meanwhile: frees, other threads, other devices.

A GPU may wait for the program: for a callback on the host (CuPy's `launch_host_func`), or for the
other device's part of a collective. Such a callback blocks a stream's work here.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.gpu
Program = Callable[..., tuple[str, str]]

# Each program ends by itself, or is stopped by the watchdog and fails.
SECONDS = 40

PREAMBLE = """
from umem.base.native import core
driver = soft.driver if soft else ctypes.CDLL("libcuda.so.1")
CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
callbacks = []
def hold_up(body, stream=None):
    "What the stream is given from now on waits for the end of `body`, which needs the GIL."
    stream = stream or torch.cuda.current_stream()
    callbacks.append(CALLBACK(lambda _: body()))
    handle = ctypes.c_void_p(stream.cuda_stream)
    assert driver.cuLaunchHostFunc(handle, callbacks[-1], None) == 0
def empty(mib, device="cuda:0"):
    return torch.empty(mib * MIB, dtype=torch.uint8, device=device)
class Thread(threading.Thread):
    "A daemon with a body, whose exception the end of the program shows."
    def __init__(self, body):
        super().__init__(daemon=True)
        self.body, self.error = body, None
        self.start()
    def run(self):
        try:
            self.body()
        except BaseException as error:
            self.error = error
    def finish(self):
        self.join(20)
        assert not self.is_alive(), "the thread hangs"
        if self.error is not None:
            raise self.error
go, inside = threading.Event(), threading.Event()
def wait_to_go():
    if not go.wait(20):
        os.write(2, b"what comes before go.set() waited for this\\n")
        os._exit(1)
"""


@pytest.fixture
def waiting(program: Program) -> Callable[..., str]:
    """Runs a program after the preamble above; its output."""

    def run(code: str, **environ: str) -> str:
        out, _ = program(PREAMBLE + textwrap.dedent(code), timeout=SECONDS, **environ)
        return out

    return run


def _two_devices() -> bool:
    return bool(os.environ.get("SOFTCUDA_LIB")) or torch.cuda.device_count() > 1


two_devices = pytest.mark.skipif(not _two_devices(), reason="needs two devices")

# The calls of thread A that must wait for device 0, and their setup.
WAITS = {
    "empty_cache": ("x = empty(8); del x", "torch.cuda.empty_cache()"),
    "allocation": (
        "side = torch.cuda.Stream(); x = empty(24); x.record_stream(side); "
        "hold_up(wait_to_go, side); del x",
        "y = empty(24); del y",
    ),
    "sleep": ("x = empty(8)", "umem.sleep().wake()"),
    "disable": ("x = empty(8)", "umem.disable()"),
    "trim of a free": (
        "pass",
        "for mib in range(2, 26, 2): x = empty(mib); del x",
    ),
}


def test_a_mapped_block_waits_for_the_work_that_used_its_addresses(
    waiting: Callable[..., str],
) -> None:
    """34 and 36 MiB have the same addresses in turn, and each has memory of its own."""
    out = waiting(
        """
        enable("128MiB", backing="mapped")
        x = empty(34)
        hold_up(wait_to_go)
        x.fill_(1)
        del x
        thread = Thread(lambda: (time.sleep(0.5), go.set()))
        y = empty(36)
        print(go.is_set())
        y.fill_(2)
        torch.cuda.synchronize()
        thread.finish()
        del y
        """
    )
    assert out == "True\n"


@two_devices
@pytest.mark.parametrize("name", WAITS)
def test_a_thread_that_waits_for_its_device_holds_up_no_other_device(
    waiting: Callable[..., str], name: str
) -> None:
    """As with a collective: device 0 continues once the other thread has launched its part."""
    before, waits = WAITS[name]
    out = waiting(
        f"""
        enable("32MiB", host_budget="8MiB" if {name!r} == "allocation" else "unlimited")
        there = empty(4, "cuda:1")
        {before}
        hold_up(wait_to_go)
        def a():
            torch.cuda.set_device(0)
            inside.set()
            {waits}
        def b():
            torch.cuda.set_device(1)
            inside.wait()
            time.sleep(0.5)
            part = empty(4, "cuda:1")
            part.fill_(1)
            there.copy_(part)
            umem.step()
            del part
            go.set()
        threads = [Thread(a), Thread(b)]
        for thread in threads:
            thread.finish()
        print("fine")
        """,
        SOFTCUDA_DEVICES="2",
    )
    assert out == "fine\n"


def test_a_free_past_the_limit_of_the_cache_waits_for_no_callback(
    waiting: Callable[..., str],
) -> None:
    """The deleter has the GIL, and the device waits for a callback in Python."""
    out = waiting(
        """
        enable("256MiB")
        empty(2)
        hold_up(wait_to_go)
        for mib in range(2, 26, 2):
            x = empty(mib)
            del x
        go.set()  # a free that waits for the device would not come here
        live, cached = umem.stats().live_bytes, umem.stats().cached_bytes
        assert live == 0 and cached <= 2 * 24 * MIB + 64 * MIB, (live, cached)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        assert umem.stats().cached_bytes == 0 and umem.stats().hook_errors == 0
        print("fine")
        """
    )
    assert out == "fine\n"


@pytest.mark.usefixtures("softcuda")
def test_an_operator_that_finds_the_host_full_waits_for_no_free(
    waiting: Callable[..., str],
) -> None:
    """The host's memory that cached ranges hold is accounted as free before it is."""
    out = waiting(
        """
        enable("16MiB", host_budget="16MiB")
        cached = [torch.ones(2 * MIB, device="cuda")]  # 8 MiB
        kept = blocks(8)  # evicts it
        assert umem.stats().host_bytes >= 8 * MIB
        del cached[:]
        hold_up(wait_to_go, torch.cuda.Stream())
        more = blocks(7)  # evicts what is kept
        go.set()
        torch.cuda.synchronize()
        assert intact(kept) and intact(more)
        assert umem.stats().hook_errors == 0
        print("fine")
        """
    )
    assert out == "fine\n"


def test_memory_may_die_in_a_host_function(waiting: Callable[..., str]) -> None:
    """Python's collector may run there, where CUDA refuses all calls."""
    out = waiting(
        """
        enable("64MiB")
        side = torch.cuda.Stream()
        held = [empty(8), empty(4), torch.ones(64, device="cuda")]
        held[0].record_stream(side)
        umem.advise(held[1], "read_mostly")
        hold_up(held.clear)
        torch.cuda.synchronize()
        assert not held and torch.cuda.memory_allocated() == 0
        for _ in range(3):
            y = torch.full((2 * MIB,), 3.0, device="cuda")
            assert bool(y.cpu().eq(3).all())
        del y
        core.trim()
        assert umem.stats().live_bytes == umem.stats().cached_bytes == 0, umem.stats()
        assert umem.stats().hook_errors == 0, umem.warnings()
        print("fine")
        """
    )
    assert out == "fine\n"


def test_frees_while_another_thread_waits_for_the_device(waiting: Callable[..., str]) -> None:
    out = waiting(
        """
        enable()
        x, kept, y = empty(8), empty(2), empty(4)
        del x
        hold_up(wait_to_go)
        def a():
            inside.set()
            torch.cuda.empty_cache()
        thread = Thread(a)
        inside.wait()
        time.sleep(0.5)
        del y
        assert torch.cuda.memory_allocated() == 2 * MIB
        assert umem.stats().live_bytes == 2 * MIB and umem.stats().frees == 2
        assert thread.is_alive()  # a call that waited for it would never end
        go.set()
        thread.finish()
        assert torch.cuda.memory_allocated() == 2 * MIB
        print("fine")
        """
    )
    assert out == "fine\n"


def test_the_death_of_read_mostly_memory_waits_for_nothing(waiting: Callable[..., str]) -> None:
    """The advice ends before the memory is handed out again, and not in the deleter."""
    out = waiting(
        """
        enable()
        x = empty(4)
        x.fill_(7)
        umem.advise(x, "read_mostly")
        torch.cuda.synchronize()
        advised = soft.calls("cuMemAdvise") if soft else 0
        address = x.data_ptr()
        hold_up(wait_to_go)
        del x  # would not end if it waited for the device
        assert not soft or soft.calls("cuMemAdvise") == advised, "advice in a deleter"
        go.set()
        y = empty(4)
        assert not soft or soft.calls("cuMemAdvise") > advised
        assert y.data_ptr() == address
        y.fill_(3)
        assert bool(y.cpu().eq(3).all())
        assert umem.stats().hook_errors == 0
        print("fine")
        """
    )
    assert out == "fine\n"


def test_memory_that_the_driver_refused_to_free_is_asked_for_again(
    waiting: Callable[..., str],
) -> None:
    out = waiting(
        """
        if soft is None:
            print("fine")
            sys.exit()
        enable()
        x = empty(8)
        del x
        soft.inject("cuMemFree", 1, 999)
        try:
            core.trim()
        except umem.errors.DriverError as error:
            assert "cuMemFree" in str(error), error
        # Else the thread was refused before the wait, which then asked again.
        assert umem.stats().hook_errors == 1
        core.trim()
        assert umem.stats().cached_bytes == 0 and umem.stats().hook_errors == 1
        print("fine")
        """
    )
    assert out == "fine\n"


def test_the_guard_counts_memory_until_it_is_free(waiting: Callable[..., str]) -> None:
    """An allocation beyond the limit waits for what is on its way back to the driver."""
    out = waiting(
        """
        enable("512MiB", guard=True)
        free, _ = torch.cuda.mem_get_info()
        x = empty(free // MIB - 16)
        del x
        ended = []
        def body():
            time.sleep(1)
            ended.append(True)
        hold_up(body)
        y = empty(64)
        assert ended
        del y
        print("fine")
        """
    )
    assert out == "fine\n"


def test_a_capture_keeps_memory_from_being_freed(waiting: Callable[..., str]) -> None:
    out = waiting(
        """
        enable("256MiB")
        static = torch.zeros(1024, device="cuda")
        graph = torch.cuda.CUDAGraph()
        hold_up(lambda: time.sleep(0.3), torch.cuda.Stream())
        for mib in range(2, 26, 2):  # the thread that frees is busy, or about to be
            x = empty(mib)
            del x
        with torch.cuda.graph(graph):  # which empties the cache
            static.add_(1)
            x = empty(4, "cuda:0")
            del x
            calls = soft.calls("cuMemFree") if soft else 0
            core.trim()
            time.sleep(0.2)
            assert not soft or soft.calls("cuMemFree") == calls, "a free during a capture"
        graph.replay()
        torch.cuda.synchronize()
        core.trim()  # `static` keeps its segment
        assert umem.stats().cached_bytes < 2 * MIB and umem.stats().hook_errors == 0
        print("fine")
        """
    )
    assert out == "fine\n"
