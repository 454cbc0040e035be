"""Storms of forks and signals, callbacks that raise, small signal stacks, orders of the exit."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("torch")

from support import program

NET = """
import hashlib
def net():
    torch.manual_seed(0)
    layers = [m for _ in range(5) for m in (torch.nn.Linear(800, 800), torch.nn.Tanh())]
    module = torch.nn.Sequential(*layers)
    return module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
def step(module, optimizer, seed):
    x = torch.randn(64, 800, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad(); module(x).square().mean().backward(); optimizer.step()
def digest(module):
    found = hashlib.sha256()
    for tensor in module.state_dict().values(): found.update(tensor.numpy().tobytes())
    return found.hexdigest()
def train(steps):
    module, optimizer = net()
    for seed in range(steps): step(module, optimizer, seed)
    return digest(module)
def plain(work):
    umem.disable()
    found = work()
    gc.collect()
    return found
def on(policy="auto"):
    umem.disable()
    umem.enable(budget="16MiB", device="soft", policy=policy)
"""


@pytest.mark.parametrize("policy", ["lru", pytest.param("auto", marks=pytest.mark.nightly)])
def test_a_storm_of_forks(policy: str) -> None:
    """Eight children at a time, some with children, concurrently with computing threads: none
    hangs.

    A child that waits for the lock of a thread that it does not have would wait forever.
    """
    code, out, err = program.run(
        """
        import faulthandler, warnings
        warnings.simplefilter("ignore")
        faulthandler.register(signal.SIGALRM, chain=True)  # where a child hangs
        tensors = blocks(12)
        stop, wrong = threading.Event(), []
        def compute(seed):
            own = torch.full((1 << 19,), float(seed))
            while not stop.is_set():
                own.add_(1).sub_(1); umem.evict(own)
                if not own.eq(float(seed)).all(): wrong.append(seed)
        threads = [threading.Thread(target=compute, args=(i,)) for i in range(3)]
        for thread in threads: thread.start()
        def child(depth):
            pid = os.fork()
            if pid: return pid
            signal.alarm(100)
            code = 1
            try:
                tensors[depth].mul_(2).div_(2)
                made = blocks(4)
                good = intact(tensors) and intact(made)
                thread = threading.Thread(target=lambda: made[0].add_(1)); thread.start()
                thread.join()
                if depth % 3 == 0: good &= os.waitpid(child(depth + 1), 0)[1] == 0
                umem.stats(); code = 0 if good else 2
            finally:
                os._exit(code)
        running, ends = set(), []
        for i in range(40):
            running.add(child(i % 8))
            tensors[i % 12].add_(1).sub_(1)
            while len(running) >= 8:
                pid, status = os.wait(); running.discard(pid); ends.append(status)
        while running:
            pid, status = os.wait(); running.discard(pid); ends.append(status)
        stop.set()
        for thread in threads: thread.join()
        print(len(ends), set(ends), wrong, intact(tensors))
        """,
        timeout=250,
        TEST_POLICY=policy,
    )
    assert (code, out) == (0, "40 {0} [] True\n"), err
    # Four threads compute in the floor of one.
    assert re.fullmatch("(umem: warning: .* repeatedly touched more memory .*\n)*", err)


# The program under signals every two milliseconds; `end` tells when there were enough.
STATES = {
    "steps that are planned": """
        want = plain(lambda: train(6))
        on()
        while not end(): good &= train(6) == want
    """,
    "sleep and wake": """
        while not end():
            umem.sleep(); umem.wake()
            good &= bool(tensors[3].eq(3.0).all())
    """,
    "budgets": """
        while not end():
            for budget in ("8MiB", "20MiB", "12MiB"):
                umem.set_budget(budget)
                for t in tensors: t.add_(1).sub_(1)
    """,
    "hints": """
        while not end():
            for t in tensors:
                umem.prefetch(t); t.add_(1).sub_(1); umem.evict(t)
            umem.set_budget("32MiB")
            with umem.pin(tensors[1]): tensors[2].add_(1).sub_(1)
            umem.set_budget("8MiB")
    """,
    "on and off": """
        own = None
        while not end():
            umem.disable()
            own = torch.full((1 << 19,), 7.0)
            on()
            made = blocks(6); good &= intact(made) and bool(own.eq(7.0).all()); del made
    """,
    "system calls": """
        import tempfile
        with tempfile.TemporaryFile(buffering=0) as file:
            while not end():
                for i, t in enumerate(tensors):
                    umem.evict(t); file.seek(0); file.write(t.numpy())
                    umem.evict(t); file.seek(0); file.readinto(t.numpy())
                    good &= bool(t.eq(float(i)).all())
    """,
    "forks": """
        import warnings; warnings.simplefilter("ignore")
        while not end():
            pid = os.fork()
            if pid == 0:
                signal.setitimer(signal.ITIMER_REAL, 0)
                os._exit(0 if intact(tensors) else 1)
            good &= os.waitpid(pid, 0)[1] == 0
    """,
    "page faults": """
        while not end():
            for i, t in enumerate(tensors): good &= float(t.numpy()[::1024].sum()) == i * 512
    """,
}


@pytest.mark.parametrize("state", STATES)
def test_a_storm_of_signals(state: str) -> None:
    """The handler computes on evicted tensors at any point of the program."""
    code, out, err = program.run(
        NET
        + """
tensors, handled, seen, good = [], torch.full((1 << 19,), 1.0), 0, True
def handler(*_):
    global seen
    seen += 1
    handled.add_(1).sub_(1)
    if seen % 8 == 0: umem.stats()
def end():
    return seen >= 250 or time.monotonic() > limit
"""
        + ("" if state in ("steps that are planned", "on and off") else "tensors = blocks(12)\n")
        + """
limit = time.monotonic() + 40
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
if True:
"""
        + STATES[state]
        + """
signal.setitimer(signal.ITIMER_REAL, 0)
pins = [row for row in _core_testing.blocks() if row["pins"]] if umem.is_enabled() else []
print(seen >= 50, good, intact(tensors), bool(handled.eq(1.0).all()), pins)
""",
        timeout=120,
        TEST_POLICY="auto",
    )
    assert (code, out, err) == (0, "True True True True []\n", "")


def test_a_storm_of_interrupts_leaves_nothing_behind() -> None:
    """A handler that raises at any point: no pin remains, and live tensors are intact."""
    code, out, err = program.run(
        NET
        + """
want = plain(lambda: train(3))
on()
class Stop(Exception): pass
raised = 0
def handler(*_):
    global raised
    raised += 1
    raise Stop
signal.signal(signal.SIGALRM, handler)
kept = blocks(6)
import itertools
for number in itertools.count():
    if raised >= 60: break
    try:  # the handler may already run in the call that sets the timer
        signal.setitimer(signal.ITIMER_REAL, 0.003 + 0.011 * (number % 7))
        if number % 3 == 0: train(3)
        elif number % 3 == 1:
            umem.sleep(); umem.wake()
        else:
            for t in kept: umem.evict(t); umem.prefetch(t)
    except Stop:
        torch.set_grad_enabled(True)  # an interrupted exit of torch's own no_grad leaves it off
    try:
        signal.setitimer(signal.ITIMER_REAL, 0)
        umem.wake()
    except Stop:
        umem.wake()
signal.setitimer(signal.ITIMER_REAL, 0)
gc.collect()
pins = [row for row in _core_testing.blocks() if row["pins"]]
print(train(3) == want, intact(kept), pins)
""",
        timeout=120,
        TEST_POLICY="auto",
    )
    assert (code, out, err) == (0, "True True []\n", "")


# A failure of a policy's function, and its message.
RAISES = {
    "ZeroDivisionError": ("1 / 0", "ZeroDivisionError; falling back to lru: division by zero"),
    "MemoryError": ("raise MemoryError", "MemoryError; falling back to lru"),
    "a foreign error": ("class Odd(Exception): pass\n        raise Odd('odd')",
                        "Odd; falling back to lru: odd"),
    "no plan": ("return 'a plan'", "falling back to lru"),
}  # fmt: skip
BROKEN = """
class Broken:
    name = "broken"
    def plan(self, trace, device, budget):
        {}
on(Broken())
"""


@pytest.mark.parametrize("how", RAISES)
def test_a_policy_that_fails_is_replaced(how: str) -> None:
    raises, words = RAISES[how]
    code, out, err = program.run(
        NET
        + "want = plain(lambda: train(5))"
        + BROKEN.format(raises)
        + "print(train(5) == want, umem.stats().evictions > 0, "
        + "[row for row in _core_testing.blocks() if row['pins']])"
    )
    assert (code, out) == (0, "True True []\n"), err
    assert err.count(words) == 1, err


def test_an_interrupt_in_a_policy_reaches_the_program_once() -> None:
    """It is a request to stop, not a failure; a program may continue regardless."""
    code, out, err = program.run(
        NET
        + "want = plain(lambda: train(5))"
        + BROKEN.format("raise KeyboardInterrupt")
        + """
interrupts = 0
module, optimizer = net()
for seed in range(5):
    try:
        step(module, optimizer, seed)
    except KeyboardInterrupt:
        interrupts += 1
pins = [row for row in _core_testing.blocks() if row["pins"]]
print(interrupts > 0, digest(module) == want, pins)
"""
    )
    assert (code, out, err) == (0, "True True []\n", "")


@pytest.mark.parametrize("wait", ["plan", "victims"])
def test_what_a_handler_raises_in_a_policy_reaches_the_program(wait: str) -> None:
    """Like time limits that use an alarm: the policy has not failed."""
    code, out, err = program.run(
        NET
        + f"""
class Slow:
    name = "slow"
    def plan(self, trace, device, budget):
        return self.wait("plan")
    def victims(self, view, need):
        return self.wait("victims") or ()
    def wait(self, where):
        if where != "{wait}": return None
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            end = time.monotonic() + 10
            while time.monotonic() < end: pass
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
class Watch:
    def alarm(self, *_): raise TimeoutError("time is up")
"""
        + """
import functools
signal.signal(signal.SIGALRM, functools.partial(Watch().alarm))
umem.disable()
module, optimizer = net()
on(Slow())
limits = 0
for seed in range(5):
    try:
        step(module, optimizer, seed)
    except TimeoutError:
        limits += 1
        if limits == 2: umem.disable()
signal.setitimer(signal.ITIMER_REAL, 0)
print(limits, umem.is_enabled())
"""
    )
    assert (code, out, err) == (0, "2 False\n", "")


PROFILERS = {
    "cProfile": "import cProfile\nprofile = cProfile.Profile(); profile.enable()",
    "torch.profiler": "profile = torch.profiler.profile(profile_memory=True, record_shapes=True)\n"
    "profile.__enter__()",
    "tracemalloc": "import tracemalloc; tracemalloc.start(8)",
    "sys.settrace": "sys.settrace(lambda *_: None); threading.settrace(lambda *_: None)",
    "faulthandler": "import faulthandler; faulthandler.enable()",
}


@pytest.mark.parametrize(
    "profiler",
    [
        name
        if name in ("torch.profiler", "sys.settrace")
        else pytest.param(name, marks=pytest.mark.nightly)
        for name in PROFILERS
    ],
)
def test_a_profiler_changes_nothing(profiler: str) -> None:
    code, out, err = program.run(
        NET
        + "want = plain(lambda: train(5))\non()\n"
        + PROFILERS[profiler]
        + """
got = train(5)
if "profile" in globals(): getattr(profile, "disable", lambda: profile.__exit__(None, None, None))()
print(got == want, umem.stats().evictions > 0, core.plan_status()["complete"] > 0)
"""
    )
    assert (code, out) == (0, "True True True\n"), err
    assert "umem" not in err


SMALL_STACKS = """
import ctypes, mmap
tensors = blocks(12)
arrays = [t.numpy() for t in tensors]
libc = ctypes.CDLL(None, use_errno=True)
class Stack(ctypes.Structure):
    _fields_ = [("sp", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
FRAME = max(2048, os.sysconf(249))  # _SC_MINSIGSTKSZ: what the kernel puts there
wrong = []
def touch():
    for i, array in enumerate(arrays):
        if float(array[::1024].sum()) != i * 512: wrong.append(i)
"""


@pytest.mark.parametrize("more", ["6144", "60000", "none"])
def test_threads_with_a_signal_stack_of_their_own(more: str) -> None:
    """As set by runtimes of Rust and Go, and faulthandler: page faults are handled there."""
    code, out, err = program.run(
        SMALL_STACKS
        + f"""
def work():
    nbytes = 0 if "{more}" == "none" else FRAME + int("{more}")
    if nbytes:
        memory = mmap.mmap(-1, 2 * 65536)
        place = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        stack = Stack(place, 0, nbytes)
        assert libc.sigaltstack(ctypes.byref(stack), None) == 0, ctypes.get_errno()
    for _ in range(10): touch()
    if nbytes:
        assert not any(memory[nbytes:]), "what lies behind the stack was written"
        libc.sigaltstack(ctypes.byref(Stack(None, 2, 0)), None)
threading.stack_size(65536)
threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(wrong, umem.stats().faults > 20)
""",
        TEST_POLICY="none",
    )
    assert (code, out, err) == (0, "[] True\n", "")


# Objects that exist when the program ends, in order of creation.
ORDERS = {
    "asleep": "tensors = blocks(12); umem.sleep()",
    "in a session": "session = umem.enable(budget='8MiB', device='soft', policy='lru')\n"
    "session.__enter__(); tensors = blocks(12)",
    "a plan at work": "on(); tensors = blocks(2); train(8); module, optimizer = net()\n"
    "for seed in range(3): step(module, optimizer, seed)",
    "disabled at exit": "import atexit; tensors = blocks(12); atexit.register(umem.disable)",
    "computes at exit": "import atexit; tensors = blocks(12)\n"
    "def check():\n    assert intact(tensors)\natexit.register(check)",
    "computes in a finalizer": "import weakref\nclass Owner: pass\nowner = Owner()\n"
    "tensors = blocks(12); weakref.finalize(owner, lambda t: t[0].add_(1), tensors)",
    "a thread that goes on": "tensors = blocks(12)\n"
    "def go_on():\n    time.sleep(0.2)\n    assert intact(tensors)\n"
    "threading.Thread(target=go_on).start()",
    "a pin": "umem.set_budget('32MiB'); tensors = blocks(3); pin = umem.pin(tensors[0])",
    "a buffer": "umem.set_budget('32MiB'); buffer = umem.Buffer(1 << 20, 'float32')",
    "an array": "array = blocks(12)[3].numpy(); umem.disable(); assert array[5] == 3.0",
    "a view of an array": "import numpy; array = blocks(12)[3].numpy()[1:9]; module = sys\n"
    "module.left_behind = array",
    "a graph of autograd": "x = blocks(3)[1].requires_grad_(); y = (x * x).exp().sum()",
    "traced": "umem.disable(); import tempfile\n"
    "umem.enable(budget='8MiB', device='soft', trace=tempfile.mkdtemp() + '/t.jsonl.gz')\n"
    "tensors = blocks(12); train(2)",
    "an error": "tensors = blocks(12)\nsys.excepthook = lambda *_: None\nraise ValueError",
}


@pytest.mark.parametrize("case", ORDERS)
def test_a_program_ends_whatever_is_left(case: str) -> None:
    code, out, err = program.run(NET + ORDERS[case])
    assert (code, out, err) == (1 if case == "an error" else 0, "", "")


@pytest.mark.parametrize("summary", [True, False])
def test_a_second_call_decides_about_the_summary(summary: bool) -> None:
    """The first one is UMEM=1, or `umem run`."""
    code, out, err = program.run(
        f"""
        umem.disable()
        umem.enable(budget="16MiB", device="soft", summary={not summary})
        umem.enable(budget="16MiB", device="soft", summary={summary})
        umem.enable(budget="16MiB", device="soft")
        umem.step()
        """
    )
    assert (code, out) == (0, "")
    assert err.startswith("umem: 1 step") if summary else err == ""


@pytest.mark.parametrize("end", ["umem.disable()", ""], ids=["ended", "on"])
def test_the_last_words_advise_what_the_session_needed(end: str) -> None:
    code, out, err = program.run(
        """
        umem.disable()
        umem.enable(budget="16MiB", device="soft", summary=True)
        for step in range(12):
            for block in [torch.ones(1 << 19 + i % 2) for i in range(20 + step)]:
                block.mul_(2)
            umem.step()
        """
        + end
    )
    assert (code, out) == (0, "")
    assert re.search("umem: change first: a budget of about .*, at which a step moves nothing", err)
