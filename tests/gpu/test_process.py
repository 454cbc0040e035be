"""The lifetime of a process under umem: forks, exits, umem turned on twice."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("torch")

from softcuda.load import Softcuda

pytestmark = pytest.mark.gpu
Program = Callable[..., tuple[str, str]]

FORK = """
    warnings.simplefilter("ignore", DeprecationWarning)  # of fork, in a process with threads
    enable()
    tensors, host = blocks(24), torch.arange(8)
    torch.cuda.synchronize()
    child = os.fork()
    if child == 0:
"""
AFTER = """
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert intact(tensors)
    live = umem.stats().live_bytes
    assert live == 24 * 2 * MIB, live
    more = blocks(8)
    assert intact(tensors) and intact(more)
    print("fine")
"""


@pytest.mark.parametrize(
    "child",
    [
        pytest.param("os._exit(7)", id="leaves at once"),
        pytest.param("tensors.clear(); gc.collect(); os._exit(7)", id="frees"),
        pytest.param("del tensors[0]; sys.exit(7)", id="frees and exits as Python does"),
        pytest.param("assert (host + 1).sum() == 36; os._exit(7)", id="computes on the host"),
        pytest.param(
            "try: torch.empty(MIB, device='cuda')\n        except RuntimeError: os._exit(7)",
            id="asks for memory",
        ),
        pytest.param("umem.stats(); umem.summary(); umem.disable(); os._exit(7)", id="disables"),
    ],
)
def test_a_forked_child_leaves_the_parent_alone(program: Program, child: str) -> None:
    out, err = program(FORK + "        " + child + AFTER)
    assert (out, err) == ("fine\n", "")


NOT_STARTED = """
    warnings.simplefilter("ignore", DeprecationWarning)
    assert soft is None or soft.calls("cuInit") == 0
    child = os.fork()
    if child == 0:
        assert intact(blocks(24))
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert intact(blocks(24))
    print("fine")
"""


@pytest.mark.parametrize("allocator", ["subclass", "pluggable"])
def test_a_child_can_use_cuda_until_the_first_allocation(program: Program, allocator: str) -> None:
    code = f"\n    enable(allocator={allocator!r})" + NOT_STARTED
    out, _ = program(code, fresh=True, SOFTCUDA_NVML="1")
    assert out == "fine\n"


def test_umem_in_the_import_of_torch_does_not_start_cuda(program: Program) -> None:
    options = {"UMEM": "1", "UMEM_BUDGET": "32MiB", "UMEM_DEVICE": "cuda"}
    out, _ = program(NOT_STARTED, fresh=True, SOFTCUDA_NVML="1", **options)
    assert out == "fine\n"


@pytest.mark.parametrize("allocator", ["subclass", "pluggable"])
def test_devices_may_be_chosen_until_the_first_call(program: Program, allocator: str) -> None:
    out, _ = program(
        f"""
        enable(allocator={allocator!r})
        os.environ["CUDA_VISIBLE_DEVICES"] = "0"
        assert intact(blocks(24))
        print(torch.cuda.device_count())
        """,
        fresh=True,
        SOFTCUDA_NVML="1",
        SOFTCUDA_DEVICES="2",
    )
    assert out == "1\n"


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_data_loader_workers(program: Program) -> None:
    out, _ = program(
        """
        warnings.simplefilter("ignore", DeprecationWarning)
        enable()
        tensors = blocks(24)
        loader = torch.utils.data.DataLoader(
            range(32), batch_size=4, num_workers=2, pin_memory=True,
            multiprocessing_context="fork", persistent_workers=True)
        for _ in range(2):
            batches = [batch.cuda(non_blocking=True) for batch in loader]
            assert sorted(int(v) for b in batches for v in b.cpu()) == list(range(32))
        assert intact(tensors)
        print("fine")
        """
    )
    assert out == "fine\n"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        pytest.param("tensors = blocks(24)", 0, id="module global"),
        pytest.param(
            "class Node: pass\na = Node(); a.self = a; a.tensors = blocks(24); del a",
            0,
            id="reference cycle",
        ),
        pytest.param("tensors = blocks(24); sys.exit(3)", 3, id="sys.exit"),
        pytest.param("tensors = blocks(24); os._exit(5)", 5, id="os._exit"),
        pytest.param("tensors = blocks(24); umem.disable()", 0, id="after disable"),
        pytest.param("local = threading.local(); local.tensors = blocks(24)", 0, id="thread"),
        pytest.param(
            "tensors = blocks(24); side = torch.cuda.Stream()\n"
            "with torch.cuda.stream(side): copy = tensors[0].clone()\n"
            "copy.record_stream(torch.cuda.current_stream()); del tensors",
            0,
            id="work pending",
        ),
    ],
)
@pytest.mark.parametrize("seed", ["0", "3"])
def test_exit_with_live_tensors(program: Program, body: str, code: int, seed: str) -> None:
    out, err = program("enable()\n" + body, expected=code, SOFTCUDA_SEED=seed)
    assert (out, err) == ("", "")


def test_enable_twice(program: Program) -> None:
    out, _ = program(
        """
        first = enable()
        again = enable()
        x = torch.full((MIB,), 2.0, device="cuda")
        with again:
            pass
        assert umem.is_enabled(), "the second session turned the first one's umem off"
        try:
            enable("48MiB")
        except umem.errors.StateError as error:
            assert "umem.disable()" in str(error), error
        else:
            raise AssertionError("other options were taken")
        with first:
            pass
        assert not umem.is_enabled()
        assert bool(x.cpu().eq(2.0).all())
        del x
        enable("48MiB")
        print(torch.full((4,), 3.0, device="cuda").cpu().tolist())
        assert umem.stats().budget_bytes == 48 * MIB
        """
    )
    assert out == "[3.0, 3.0, 3.0, 3.0]\n"


def test_on_and_off_again_many_times(program: Program) -> None:
    program(
        """
        kept = []
        for i in range(6):
            with enable():
                kept.append(torch.full((MIB,), float(i), device="cuda"))
                gone = blocks(20)
                del gone
            kept.append(torch.full((MIB,), float(i), device="cuda"))  # torch's own allocator
        assert all(bool(t.cpu().eq(float(i // 2)).all()) for i, t in enumerate(kept))
        """
    )


def test_an_interrupt_in_the_middle_of_eviction(program: Program) -> None:
    out, _ = program(
        """
        import _thread, signal
        # A shell's background jobs ignore it, and so do their children.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        enable()
        tensors, interrupts, begun = blocks(24), 0, [{i} for i in range(24)]
        while interrupts < 5:
            timer = threading.Timer(0.05, _thread.interrupt_main)
            try:
                timer.start()
                while True:
                    for i, t in enumerate(tensors):
                        value = 100 * (interrupts + 1) + i
                        begun[i].add(value)
                        t.fill_(float(value))
                        begun[i] = {value}
            except KeyboardInterrupt:
                interrupts += 1
            timer.join()
        import _core_testing
        assert not [row for row in _core_testing.blocks() if row["pins"]]
        for i, t in enumerate(tensors):
            (value,) = t.cpu().unique().tolist()
            assert value in begun[i], (i, value, begun[i])
        print(len(tensors))
        """
    )
    assert out == "24\n"


def test_plain_memory_waits_for_other_streams_before_it_is_out(
    program: Program, softcuda: Softcuda
) -> None:
    out, err = program(
        """
        enable("16MiB")
        side = torch.cuda.Stream()
        first = torch.full((3 * MIB,), 1.0, device="cuda")  # 12 of 16 MiB
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            copy = first[: MIB // 4].clone()
        first.record_stream(side)
        del first  # still in use on the side stream
        second = torch.full((3 * MIB,), 2.0, device="cuda")
        torch.cuda.synchronize()
        assert second.cpu().eq(2.0).all() and copy.cpu().eq(1.0).all()
        try:
            torch.empty(3 * MIB, device="cuda")
        except torch.OutOfMemoryError as error:
            assert "memory is not managed here" in str(error), error
        else:
            raise AssertionError("more than the budget")
        print("ok", umem.stats().evictions)
        """,
        SOFTCUDA_NO_CMA="0",
        SOFTCUDA_SEED="3",
    )
    assert out == "ok 0\n"
    assert "plain device memory is used" in err
