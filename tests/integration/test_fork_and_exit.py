"""Forks, exits, interrupts: no hang, no lost byte, no word on stderr."""

from __future__ import annotations

import signal
import time

import pytest
from support import program

pytest.importorskip("torch")


def test_fork_twice_with_live_tensors() -> None:
    code, out, err = program.run(
        """
        import warnings
        warnings.simplefilter("ignore")
        tensors = blocks(12)
        def child(depth):
            pid = os.fork()
            if pid == 0:
                good = intact(tensors)
                tensors[depth].fill_(-1.0)
                loss = torch.nn.Linear(512, 512)(torch.randn(64, 512)).square().mean()
                loss.backward()
                tensors[depth].fill_(float(depth))
                good &= intact(tensors)
                if depth < 2:
                    good &= child(depth + 1)  # which expects them intact
                os._exit(0 if good and intact(tensors) else 1)
            return os.waitpid(pid, 0)[1] == 0
        print(child(0), intact(tensors))
        """
    )
    assert (code, out, err) == (0, "True True\n", "")


def test_a_child_can_compute_whatever_the_parents_threads_were_at() -> None:
    """The parent forks while other threads run their first ops, for which torch takes a lock."""
    code, out, err = program.run(
        """
        import warnings
        warnings.simplefilter("ignore")
        def op():
            torch.ones(4).add_(1)
        def run(function):
            thread = threading.Thread(target=function)
            thread.start(); thread.join()
        def keep_starting():
            while True: run(op)
        # A kernel's first call in a process initializes a static of torch's, whose guard no child
        # could release: that is torch's own, with and without umem.
        op()
        for _ in range(3): threading.Thread(target=keep_starting, daemon=True).start()
        def hangs():
            pid = os.fork()
            if pid == 0:
                run(op)
                os._exit(0)
            end = time.monotonic() + 15
            while os.waitpid(pid, os.WNOHANG) == (0, 0):
                if time.monotonic() > end:
                    os.kill(pid, signal.SIGKILL); os.waitpid(pid, 0)
                    return True
                time.sleep(0.001)
            return False
        print(any(hangs() for _ in range(60)), umem.stats().hook_errors, flush=True)
        os._exit(0)
        """
    )
    assert (code, out, err) == (0, "False 0\n", "")


def test_an_operation_ends_in_a_child_whatever_the_parents_threads_were_at() -> None:
    """Pages that thrash are counted where an op ends and no other is at work."""
    code, out, err = program.run(
        """
        import warnings
        warnings.simplefilter("ignore")
        tensors = blocks(5)
        parts = [tensor.data_ptr() for tensor in tensors]
        begun, done = threading.Event(), threading.Event()
        def works_on():
            token = core.op_begin(parts[:1], "", "forward", "other")
            begun.set(); done.wait()
            core.op_end(token, "")
        thread = threading.Thread(target=works_on); thread.start(); begun.wait()
        def thrashed():
            token = core.op_begin(parts, "", "forward", "strided")
            for part in parts * 20: _core_testing.touch(part, 2 * MIB)
            core.op_end(token, "")
            return umem.stats().zero_copy_bytes > 0
        pid = os.fork()
        if pid == 0:
            os._exit(0 if thrashed() else 1)
        ended = os.waitpid(pid, 0)[1]
        print(ended, thrashed())
        done.set(); thread.join()
        """
    )
    assert (code, out) == (0, "0 False\n"), err


def test_a_child_may_call_umem_whatever_the_parents_threads_call() -> None:
    code, out, err = program.run(
        """
        ended = threading.Event()

        def changes() -> None:
            while not ended.is_set():
                umem.set_budget("8MiB")
                umem.set_budget("9MiB")

        thread = threading.Thread(target=changes)
        thread.start()
        statuses = []
        for _ in range(40):
            if (child := os.fork()) == 0:
                signal.alarm(20)
                umem.set_budget("8MiB")
                os._exit(0)
            statuses.append(os.waitpid(child, 0)[1])
        ended.set()
        thread.join()
        print(set(statuses))
        """
    )
    assert (code, out) == (0, "{0}\n"), err


def test_spawned_children_enable_for_themselves() -> None:
    code, out, err = program.run(
        """
        done = __import__("subprocess").run([sys.executable, "-c", '''
        import torch; torch.set_num_threads(1)
        import umem
        with umem.enable(budget="8MiB", device="soft"):
            print(torch.full((1 << 22,), 2.0).sum().item())
        '''.replace("\\n        ", "\\n")], check=True, capture_output=True, text=True)
        print(done.stdout, end="")
        """
    )
    assert (code, out, err) == (0, "8388608.0\n", "")


EXITS = {
    "module global": ("tensors = blocks(12)", 0),
    "reference cycle": (
        "class Node: pass\na = Node(); a.self = a; a.tensors = blocks(12); del a",
        0,
    ),
    "sys.exit in a step": (
        "tensors = blocks(12)\n"
        "class Stop(torch.autograd.Function):\n"
        "    forward = staticmethod(lambda ctx, x: x * 2)\n"
        "    @staticmethod\n"
        "    def backward(ctx, g): sys.exit(3)\n"
        "Stop.apply(tensors[0].requires_grad_()).sum().backward()",
        3,
    ),
    "os._exit": ("tensors = blocks(12); os._exit(5)", 5),
    "after disable": ("tensors = blocks(12); umem.disable(); assert intact(tensors)", 0),
    "tensor held by a thread local": (
        "local = threading.local(); local.tensors = blocks(12)",
        0,
    ),
}


@pytest.mark.parametrize("case", EXITS)
def test_exit_with_live_tensors(case: str) -> None:
    body, expected = EXITS[case]
    code, out, err = program.run(body)
    assert (code, out, err) == (expected, "", "")


@pytest.mark.parametrize("policy", ["none", "lru"])
def test_interrupt_in_the_middle_of_eviction(policy: str) -> None:
    process = program.start(
        """
        tensors = blocks(12)
        interrupts = 0
        # Ignored where the tests run as a background job of a shell.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        print("ready", flush=True)
        while interrupts < 5:
            try:
                while True:
                    for t in tensors: t.add_(1).sub_(1)
            except KeyboardInterrupt:
                interrupts += 1
                pinned = [row for row in _core_testing.blocks() if row["pins"]]
                print("again" if not pinned else pinned, flush=True)
        for i, t in enumerate(tensors): t.sub_(t - i)
        print(intact(tensors), len(set(map(id, tensors))))
        """,
        TEST_POLICY=policy,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    for delay in (0.05, 0.11, 0.03, 0.2, 0.07):
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "again\n"
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "True 12\n", "")


def test_a_signal_handler_may_compute() -> None:
    code, out, err = program.run(
        """
        tensors = blocks(12)
        seen = 0
        def handler(*_):
            global seen
            seen += 1
            tensors[seen % 12].add_(1).sub_(1)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
        for _ in range(20):
            for t in tensors: t.add_(1).sub_(1)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(seen > 3, intact(tensors))
        """
    )
    assert (code, out, err) == (0, "True True\n", "")


def test_faulthandler_afterwards() -> None:
    code, out, err = program.run(
        """
        import faulthandler
        tensors = blocks(12)
        faulthandler.enable()
        for t in tensors: t.add_(1).sub_(1)
        faulthandler.disable(); faulthandler.enable(); umem.step()
        print(intact(tensors))
        """,
        TEST_POLICY="none",
    )
    assert (code, out, err) == (0, "True\n", "")


def test_a_handler_that_takes_the_place_of_umems_is_noticed() -> None:
    code, out, err = program.run(
        """
        import ctypes, platform
        tensors = blocks(12)
        number = {"x86_64": 13, "aarch64": 134}[platform.machine()]
        for _ in range(3):
            # As no wrapper of libc's sees it: the default action.
            assert ctypes.CDLL(None).syscall(number, 11, (ctypes.c_long * 4)(), None, 8) == 0
            umem.step()
            for t in tensors: t.add_(1).sub_(1)
        print(intact(tensors))
        """,
        TEST_POLICY="none",
    )
    assert (code, out) == (0, "True\n"), err
    assert err.count("another SIGSEGV handler took the place") == 1


def test_the_limit_that_refuses_memory_is_named() -> None:
    code, out, err = program.run(
        """
        import resource
        umem.set_budget("8MiB")
        tensors = blocks(12)
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (256 << 20, hard))
        try:
            torch.empty(4 * MIB)
        except torch.OutOfMemoryError as error:
            text = str(error)
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
        print("RLIMIT_DATA (ulimit -d) is 256 MiB" in text, intact(tensors))
        """
    )
    assert (code, out) == (0, "True True\n")
    assert "was refused" in err
    assert err.count("RLIMIT_DATA (ulimit -d) is 256 MiB") == err.count("\n") == 1


def test_the_interpreter_ends_while_daemons_call_umem() -> None:
    """A thread that asks for Python's lock too late waits; unwinding it would end the process.

    No operator runs in these threads: torch's own wait for the lock still ends a process.
    """
    code = """
        tensors = blocks(6)
        def calls(tensor):
            while True: umem.stats(); umem.evict(tensor); umem.prefetch(tensor)
        for tensor in tensors[:4]:
            threading.Thread(target=calls, args=(tensor,), daemon=True).start()
        time.sleep(0.05)
    """
    ends = [program.run(code) for _ in range(8)]
    assert [code for code, _, _ in ends] == [0] * 8, ends
