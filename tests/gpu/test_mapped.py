"""backing=mapped: memory that leaves the device by copies, at addresses that stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("torch")

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("softcuda")]
Program = Callable[..., tuple[str, str]]
HELPERS = """
load.compute()
def used():
    free, total = torch.cuda.mem_get_info()
    return (total - free) // MIB
def start(budget="16MiB", **options):
    return enable(budget, backing="mapped", **options)
def refuse_a_prefetch():
    for nth in range(1, 5):  # on the device and on the host, and both again
        soft.inject("cuMemSetAccess", nth, 2)
"""


ON_THE_HOST = "is used in the host's memory"


def run(program: Program, code: str, warns: str = "", **environ: str) -> list[str]:
    """The words that the code prints; on standard error it leaves at most what contains `warns`."""
    environ = {"SOFTCUDA_BYTES": str(64 << 20), **environ}
    indented = "\n".join(" " * 8 + line for line in HELPERS.splitlines())
    out, err = program(indented + code, **environ)
    assert bool(err) == bool(warns), err
    assert warns in err, err
    return out.split()


def test_evicted_memory_is_free_for_others_and_comes_back(program: Program) -> None:
    words = run(
        program,
        """
        with start():
            tensors = blocks(16)
            torch.cuda.synchronize()
            print(used() <= 16, umem.stats().bytes_out >= 16 * MIB, intact(tensors))
            print(umem.stats().hook_errors, soft.faults())
            del tensors
        torch.cuda.empty_cache()
        print(used())
        """,
    )
    assert words == ["True", "True", "True", "0", "0", "0"]


def test_an_operator_above_the_budget_uses_the_host(program: Program) -> None:
    words = run(
        program,
        """
        with start():
            a, b = (torch.full((2 * MIB,), v, device="cuda") for v in (1.0, 2.0))
            c = a + b  # 24 MiB
            print(bool(c.cpu().eq(3.0).all()), umem.stats().zero_copy_bytes > 0)
            print(umem.stats().hook_errors)
            del a, b, c
        """,
        warns=ON_THE_HOST,
    )
    assert words == ["True", "True", "0"]


def test_a_custom_operator_finds_its_tensors(program: Program) -> None:
    """torch 2.14 and later call its kernel past the observer."""
    words = run(
        program,
        """
        import ctypes
        driver = ctypes.CDLL("libcuda.so.1")
        @torch.library.custom_op("umem_test::copied", mutates_args=("target",))
        def copied(source: torch.Tensor, target: torch.Tensor) -> None:
            places = (ctypes.c_uint64(each.data_ptr()) for each in (target, source))
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            print(driver.cuMemcpyDtoDAsync_v2(*places, ctypes.c_size_t(source.nbytes), stream))
        with start(policy="lru"):
            source, target = blocks(2)
            umem.evict([source, target])
            torch.cuda.synchronize()
            copied(source, target)
            torch.cuda.synchronize()
            print(bool(target.cpu().eq(source.cpu()).all()), umem.stats().hook_errors)
            del source, target
        """,
    )
    assert words == ["0", "True", "0"]


def test_disable_leaves_all_tensors_usable(program: Program) -> None:
    words = run(
        program,
        """
        session = start()
        tensors = blocks(12)
        umem.disable()
        print(intact(tensors), [float((t + 1)[0]) for t in tensors] == list(range(1, 13)))
        """,
    )
    assert words == ["True", "True"]


def test_blocks_of_other_sizes_take_the_addresses(program: Program) -> None:
    words = run(
        program,
        """
        with start():
            for mib in (10, 6, 4, 12, 2, 8) * 3:
                kept = [torch.full((mib * MIB // 4,), float(i), device="cuda") for i in range(4)]
                print(intact(kept))
                del kept
            print(umem.stats().hook_errors)
        """,
    )
    assert words == ["True"] * 18 + ["0"]


@pytest.mark.parametrize(
    ("call", "nth"),
    [("cuMemCreate", 5), ("cuMemCreate", 12), ("cuMemMap", 9), ("cuMemcpyAsync", 2)],
)
def test_a_refused_call_loses_no_bytes(program: Program, call: str, nth: int) -> None:
    """The bytes stay where they are usable, or the call is made again."""
    words = run(
        program,
        f"""
        with start():
            first = blocks(6)
            torch.cuda.synchronize()
            before = soft.calls("{call}")
            soft.inject("{call}", {nth}, 2)
            tensors = first + [torch.full((MIB // 2,), i + 6.0, device="cuda") for i in range(6)]
            print(intact(tensors), intact(tensors), soft.calls("{call}") - before >= {nth})
            del first, tensors
        """,
    )
    assert words == ["True", "True", "True"]


def test_sleeping_memory_leaves_the_device(program: Program) -> None:
    words = run(
        program,
        """
        with start("32MiB"):
            tensors = blocks(8)
            umem.sleep()
            print(used(), intact(tensors))
            umem.sleep()
            umem.wake()
            print(intact(tensors), used())
            del tensors
        """,
    )
    assert words[1:3] == ["True", "True"]
    assert int(words[0]) <= 2
    assert int(words[3]) >= 16


def test_what_it_cannot_serve_is_refused_by_name(program: Program) -> None:
    words = run(
        program,
        """
        with start(policy="none"):
            x = torch.ones(MIB, device="cuda")
            for refused in (lambda: umem.evict(x), umem.sleep):
                try:
                    refused()
                except umem.NotSupportedError as error:
                    print("policy" in str(error))
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph):
                    x + 1
            except RuntimeError as error:
                print("backing=managed" in str(error))
            print(bool((x + 1).cpu().eq(2).all()))  # the stream captures nothing
            del x, graph
        """,
    )
    assert words == ["True"] * 4


def test_a_driver_without_the_calls_is_named(program: Program) -> None:
    words = run(
        program,
        """
        start()
        try:
            torch.ones(MIB, device="cuda")
        except Exception as error:
            print("backing=mapped" in str(error))
        """,
        SOFTCUDA_MISSING="cuMemCreate",
    )
    assert words == ["True"]


def test_a_smaller_block_takes_the_addresses_of_one_that_was_away(program: Program) -> None:
    words = run(
        program,
        """
        with start("32MiB"):
            x = torch.ones(10 * MIB, device="cuda")[: 5 * MIB]  # 40 MiB, used on the host
            del x
            parts = [torch.full((19 * MIB // 8,), v, device="cuda") for v in (1.0, 2.0)]
            y = torch.cat(parts * 2)  # 38 MiB
            print(float(y[0]), float(y[-1]), umem.stats().hook_errors)
            del parts, y
        """,
        warns=ON_THE_HOST,
        SOFTCUDA_BYTES=str(128 << 20),
    )
    assert words == ["1.0", "2.0", "0"]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_lower_budget_waits_for_what_was_launched_while_umem_was_off(
    program: Program, seed: int
) -> None:
    words = run(
        program,
        f"""
        start("32MiB")
        tensors = blocks(12)
        umem.disable()
        torch.cuda.synchronize()
        soft.seed({seed})
        for tensor in tensors:
            tensor.add_(1)
        start("8MiB")
        print(all(bool(t.cpu().eq(i + 1.0).all()) for i, t in enumerate(tensors)), soft.races())
        """,
    )
    assert words == ["True", "[]"]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_disable_waits_for_what_uses_memory_on_the_host(program: Program, seed: int) -> None:
    words = run(
        program,
        f"""
        start()
        a = torch.ones(2 * MIB, device="cuda")
        b = torch.ones(2 * MIB, device="cuda")
        torch.cuda.synchronize()
        soft.seed({seed})
        c = a + b  # 24 MiB
        umem.disable()
        d = c * 2  # umem does not see it
        umem.enable(budget="16MiB", device="cuda", backing="mapped")
        others = blocks(8)
        print(bool(c.cpu().eq(2).all()), bool(d.cpu().eq(4).all()), intact(others), soft.races())
        """,
        warns=ON_THE_HOST,
        SOFTCUDA_BYTES=str(128 << 20),
    )
    assert words == ["True", "True", "True", "[]"]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_what_is_used_on_the_host_comes_in_after_that_use(program: Program, seed: int) -> None:
    words = run(
        program,
        f"""
        with start():
            a = torch.ones(2 * MIB, device="cuda")
            b = torch.ones(2 * MIB, device="cuda")
            torch.cuda.synchronize()
            soft.seed({seed})
            c = a + b  # 24 MiB: some of them are used on the host
            umem.set_budget("32MiB")  # so nothing that also waits for the kernel makes room
            umem.prefetch([a, b, c])
            print(bool(c.cpu().eq(2).all()), soft.races(), umem.stats().bytes_in >= 8 * MIB)
        """,
        warns=ON_THE_HOST,
    )
    assert words == ["True", "[]", "True"]


def test_small_results_have_memory_when_nothing_else_fits(program: Program) -> None:
    words = run(
        program,
        """
        start(policy="none")
        a, b = torch.ones(MIB, device="cuda"), torch.ones(MIB, device="cuda")
        umem.disable()
        with start("8MiB", policy="lru"):
            print(float(torch.dot(a, b)) == MIB)
            umem.sleep()
            print(float(torch.dot(a, b)) == MIB, umem.stats().hook_errors)
            del a, b
        """,
        warns=ON_THE_HOST,
    )
    assert words == ["True", "True", "0"]


def test_an_error_of_the_device_ends_the_program_and_does_not_hang(program: Program) -> None:
    words = run(
        program,
        """
        with start():
            tensors = blocks(12)
            soft.lose("cuEventQuery", 2, 700)
            try:
                print(intact(tensors))
                torch.cuda.synchronize()
            except Exception as error:
                print("told", "illegal" in str(error) or "700" in str(error), flush=True)
            os._exit(0)
        """,
    )
    assert words[-2:] == ["told", "True"]


def test_discarded_memory_comes_back_without_a_copy(program: Program) -> None:
    words = run(
        program,
        """
        with start("32MiB"):
            tensor = torch.zeros(2 * MIB, device="cuda")
            torch.cuda.synchronize()
            umem.sleep(["input"], keep="discard")
            umem.wake()
            torch.cuda.synchronize()
            print(umem.where(tensor).resident_bytes // MIB, umem.stats().bytes_in)
            umem.sleep()
            umem.wake()
            torch.cuda.synchronize()
            print(umem.stats().bytes_in // MIB)
        """,
    )
    assert words == ["8", "0", "8"]


def test_the_policy_none_leaves_no_memory_of_freed_blocks_on_the_device(program: Program) -> None:
    words = run(
        program,
        """
        with start("256MiB", policy="none"):
            for mib in (10, 14, 18, 22):
                torch.ones(mib * MIB // 4, device="cuda")
            tensor = torch.ones(26 * MIB // 4, device="cuda")
            torch.cuda.synchronize()
            print(umem.stats().hook_errors, used() <= 26, bool(tensor.eq(1).all()))
            del tensor
        """,
    )
    assert words == ["0", "True", "True"]


def test_memory_that_is_mapped_nowhere_is_out_of_memory(program: Program) -> None:
    """The device is full, and the driver refuses to map the host's memory at the second try."""
    words = run(
        program,
        """
        with start():
            torch.cuda.synchronize()
            driver, full = ctypes.CDLL(None), ctypes.c_uint64()
            assert driver.cuMemAlloc_v2(ctypes.byref(full), ctypes.c_size_t(62 * MIB)) == 0
            soft.inject("cuMemSetAccess", 3, 2)  # after the host's own address, and the first try
            try:
                torch.full((MIB,), 1.0, device="cuda")
            except torch.OutOfMemoryError:
                print("out of memory")
            soft.reset()
            assert driver.cuMemFree_v2(full) == 0
            print(intact(blocks(2)), soft.races())
        """,
        warns="out of memory: a block of",
    )
    assert " ".join(words) == "out of memory True []"


def test_what_cannot_be_brought_in_ahead_is_brought_when_it_is_used(program: Program) -> None:
    words = run(
        program,
        """
        with start():
            tensors = blocks(2)
            torch.cuda.synchronize()
            umem.evict(tensors)
            torch.cuda.synchronize()
            refuse_a_prefetch()
            umem.prefetch(tensors[0])
            torch.cuda.synchronize()
            print(float((tensors[0] + 1)[0]), intact(tensors), soft.races())
            refuse_a_prefetch()
            umem.evict(tensors)
            umem.prefetch(tensors[1])
        print(intact(tensors), soft.races())
        """,
    )
    assert words == ["1.0", "True", "[]", "True", "[]"]


def test_addresses_of_what_could_not_be_brought_in_serve_the_next_block(program: Program) -> None:
    words = run(
        program,
        """
        with start():
            tensors = blocks(2)
            torch.cuda.synchronize()
            umem.evict(tensors)
            torch.cuda.synchronize()
            refuse_a_prefetch()
            umem.prefetch(tensors[0])
            torch.cuda.synchronize()
            address = tensors.pop(0).data_ptr()
            kept = tensors[0] + 1  # umem learns of the failure while the block is dead
            print(kept.data_ptr() == address, bool(kept.eq(2).all()), soft.races())
        """,
    )
    assert words == ["True", "True", "[]"]


def test_device_memory_that_the_driver_does_not_take_back_at_first_is_not_lost(
    program: Program,
) -> None:
    words = run(
        program,
        """
        with start():
            tensors = blocks(4)
            torch.cuda.synchronize()
            for nth in range(1, 5):
                soft.inject("cuMemRelease", nth, 1)
            umem.evict(tensors)
            torch.cuda.synchronize()
            print(intact(tensors))
            del tensors
        torch.cuda.empty_cache()
        soft.reset()
        print(used())
        """,
    )
    assert words == ["True", "0"]


@pytest.mark.parametrize("mib", [12, 20])  # within the budget, and above it
def test_memory_for_neither_place_is_out_of_memory(program: Program, mib: int) -> None:
    words = run(
        program,
        f"""
        with start():
            tensors = blocks(4)
            torch.cuda.synchronize()
            try:
                for nth in range(1, 600):  # also on each node of NUMA
                    soft.inject("cuMemCreate", nth, 2)
                torch.empty({mib} * MIB, dtype=torch.uint8, device="cuda")
            except torch.OutOfMemoryError:
                print("out of memory")
            soft.reset()
            print(intact(tensors))
            del tensors
        """,
        warns="out of memory: a block of",
    )
    assert " ".join(words) == "out of memory True"


def test_a_pool_is_refused(program: Program) -> None:
    words = run(
        program,
        """
        try:
            start(allocator="pool")
        except umem.ConfigError as error:
            print("pool" in str(error))
        """,
    )
    assert words == ["True"]


def test_what_an_inner_op_leaves_may_leave_when_the_outer_one_has_ended(program: Program) -> None:
    """The places of a pooling's maxima are named again in the backward pass only."""
    words = run(
        program,
        """
        def away(tensor):
            (row,) = umem.tensors([tensor])
            return row.evicted_bytes == row.bytes
        with start("32MiB", policy="lru"):
            x = torch.arange(2 * MIB, dtype=torch.float32, device="cuda").view(4, 64, 64, 128)
            x.requires_grad_()
            y = torch.nn.functional.max_pool2d(x * 1.0, 3, 2, 1)
            places = y.grad_fn._saved_result1
            others = blocks(16)
            print(places.nbytes // MIB, away(places), away(y))
            y.sum().backward()
            print(int(x.grad.sum()) == y.numel(), umem.stats().hook_errors)
            del x, y, places, others
        """,
    )
    assert words == ["4", "True", "True", "True", "0"]


def test_evicted_bytes_go_to_another_numa_node_when_the_nearest_is_full(program: Program) -> None:
    words = run(
        program,
        """
        with start():
            tensors = blocks(16)  # 32 MiB
            print(intact(tensors), umem.stats().hook_errors)
        """,
        SOFTCUDA_NEAR_BYTES=str(4 << 20),
    )
    assert words == ["True", "0"]


@pytest.mark.parametrize("hint", ["umem.prefetch", "kept = umem.pin"])
def test_hints_bring_in_what_was_evicted(program: Program, hint: str) -> None:
    words = run(
        program,
        f"""
        with start("32MiB"):
            tensors = blocks(4)
            torch.cuda.synchronize()
            umem.evict(tensors)
            print(umem.stats().resident_bytes)
            {hint}(tensors)
            print(umem.stats().resident_bytes // MIB, umem.stats().bytes_in // MIB, intact(tensors))
            buffer = umem.Buffer(4 << 20)  # no operator names it
            umem.evict(buffer)
            print(umem.stats().resident_bytes // MIB)
            {hint}(buffer)
            print(umem.stats().resident_bytes // MIB)
        """,
    )
    assert words == ["0", "8", "8", "True", "8", "12"]


def test_what_no_operator_has_named_comes_back_after_a_sleep(program: Program) -> None:
    words = run(
        program,
        """
        with start():
            buffer = umem.Buffer(4 << 20)
            handle = umem.sleep()
            print(umem.stats().resident_bytes)
            handle.wake()
            print(umem.stats().resident_bytes // MIB)
        """,
    )
    assert words == ["0", "4"]


def test_hints_bring_what_fits_beside_what_does_not(program: Program) -> None:
    words = run(
        program,
        """
        with start():
            large = torch.empty(20 * MIB, dtype=torch.uint8, device="cuda")
            small = torch.ones(MIB, device="cuda")
            umem.evict([large, small])
            try:
                umem.prefetch([large, small])
            except umem.errors.OutOfMemoryError:
                print("out of memory", umem.stats().resident_bytes // MIB)
        """,
        warns="larger than the budget",
    )
    assert words == ["out", "of", "memory", "4"]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_kernel_on_a_stream_that_nothing_names_waits_for_its_memory(
    program: Program, seed: int
) -> None:
    """Neither torch nor a buffer of cuda.core names the stream of the launch."""
    words = run(
        program,
        f"""
        import ctypes
        driver = ctypes.CDLL("libcuda.so.1")
        class Buffer:  # as cuda.core describes its own
            def __init__(self, tensor):
                self.handle, self.size, self.device_id = tensor.data_ptr(), tensor.nbytes, 0
        with start(policy="lru"):
            source, target = blocks(2)
            side = torch.cuda.Stream()
            umem.evict([source, target])
            torch.cuda.synchronize()
            soft.seed({seed})
            with umem.uses(Buffer(source), writes=Buffer(target), stream=side):
                places = (ctypes.c_uint64(each.data_ptr()) for each in (target, source))
                stream = ctypes.c_void_p(side.cuda_stream)
                print(driver.cuMemcpyDtoDAsync_v2(*places, ctypes.c_size_t(source.nbytes), stream))
            torch.cuda.synchronize()
            soft.reset()
            print(bool(target.cpu().eq(source.cpu()).all()), soft.races())
            del source, target
        """,
    )
    assert words == ["0", "True", "[]"]
