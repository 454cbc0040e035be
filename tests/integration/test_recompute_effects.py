"""Recomputation runs nothing of the program that would not have run without it.

Each program has effects that a second call of `forward` would double, lose or change. Under every
mode its numbers are those of plain torch bit by bit, and its effects those of plain torch one by
one.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import hashlib
import random
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import nn  # noqa: E402
from torch.autograd import Function  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.nn.modules import module as modules  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import umem  # noqa: E402
from umem.recompute.executor import saved_hooks  # noqa: E402
from umem.recompute.executor.choose import LIVE_MODES  # noqa: E402
from umem.recompute.executor.module import optimized  # noqa: E402
from umem.recompute.optimize import report  # noqa: E402

WIDTH, BATCH, STEPS = 64, 8192, 4  # an activation has 2 MiB, the least that is dropped
Events = list[Any]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        return x + functional.gelu(self.inner(self.norm(x)))


class Net(nn.Module):
    """Three blocks; `around(i, block, x)` replaces the call of block i."""

    def __init__(self, around: Callable[[int, nn.Module, Any], Any] | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.around = around or (lambda _i, block, x: block(x))

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        for i, block in enumerate(self.blocks):
            x = self.around(i, block, x)
        return x


class Program:
    """A training that notes its effects."""

    def __init__(self, tmp_path: Path) -> None:
        self.events: Events = []
        self.tmp_path = tmp_path
        self.aside: list[Any] = []  # tensors that the loss takes from elsewhere
        self.cleanup = contextlib.ExitStack()
        self.net: Any = self.make()

    def make(self) -> Any:
        return Net(self.around)

    def around(self, _index: int, block: nn.Module, x: Any) -> Any:
        return block(x)

    def note(self, *event: Any) -> None:
        self.events.append(event)

    def loss(self, x: Any) -> Any:
        return self.net(x).square().mean()

    def backward(self, loss: Any) -> None:
        loss.backward()

    def step(self, i: int) -> None:
        x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(i))
        self.aside.clear()
        loss = self.loss(x)
        for other in self.aside:
            loss = loss + other.square().mean()
        self.backward(loss)
        self.note("loss", loss.item().hex())


class Generators(Program):
    """Random numbers of torch, Python and NumPy, global ones and the program's own."""

    def make(self) -> Any:
        random.seed(7)
        np.random.seed(7)
        self.own = random.Random(5), np.random.default_rng(5), torch.Generator().manual_seed(5)
        return super().make()

    def around(self, _index: int, block: nn.Module, x: Any) -> Any:
        python, numpy, generator = self.own
        drawn = [random.random(), np.random.rand(), python.random(), float(numpy.random())]
        self.note("drawn", *drawn)
        noise = torch.randn(WIDTH, generator=generator) + torch.rand(1)
        return functional.dropout(block(x), 0.1) * sum(drawn) + noise


class Consumed(Program):
    """An iterator, a counter, a file and a socket."""

    def make(self) -> Any:
        self.numbers = iter(range(1000))
        self.calls = 0
        self.file = self.cleanup.enter_context((self.tmp_path / "effects").open("w+"))
        self.here, self.there = map(self.cleanup.enter_context, socket.socketpair())
        return super().make()

    def around(self, _index: int, block: nn.Module, x: Any) -> Any:
        self.calls += 1
        self.file.write(f"{self.calls} ")
        self.here.send(bytes([self.calls]))
        scale = 1.0 if self.calls % 2 else 0.5
        return block(x) * scale + next(self.numbers) / 100

    def step(self, i: int) -> None:
        super().step(i)
        self.file.flush()
        self.note(Path(self.file.name).read_text(), self.there.recv(1000))


class ModuleHooks(Program):
    """Hooks of modules of all kinds, which note, keep features and look at values."""

    def make(self) -> Any:
        net = super().make()

        def seen(name: str) -> Callable[..., None]:
            return lambda module, *_: self.note(name, type(module).__name__)

        def feature(_module: nn.Module, _given: Any, out: Any) -> None:
            assert torch.isfinite(out).all()
            self.note("norm", float(out.detach().norm()).hex(), type(out).__name__)
            self.aside.append(out)

        for block in net.blocks:
            block.register_forward_pre_hook(seen("before"))
            block.register_forward_hook(feature)
            block.register_full_backward_pre_hook(seen("before backward"))
            block.register_full_backward_hook(seen("after backward"))
        for register, name in (
            (modules.register_module_forward_pre_hook, "any before"),
            (modules.register_module_forward_hook, "any after"),
            (modules.register_module_full_backward_hook, "any after backward"),
        ):
            self.cleanup.callback(register(seen(name)).remove)
        return net


class TensorHooks(Program):
    """Hooks of tensors, of nodes and of accumulation, and hooks of saved tensors within."""

    def make(self) -> Any:
        net = super().make()
        for parameter in net.parameters():
            parameter.register_hook(lambda grad: self.note("grad", grad.shape))
            parameter.register_post_accumulate_grad_hook(lambda p: self.note("sum", p.shape))
        return net

    def around(self, index: int, block: nn.Module, x: Any) -> Any:
        def pack(tensor: Any) -> Any:
            self.note("pack", tensor.shape)
            return tensor

        def unpack(tensor: Any) -> Any:
            self.note("unpack", tensor.shape)
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
        with hooks if index == 1 else contextlib.nullcontext():
            out = block(x)
        out.register_hook(lambda grad: self.note("out", float(grad.norm()).hex()))
        out.grad_fn.register_prehook(lambda _: self.note("node before"))
        out.grad_fn.register_hook(lambda *_: self.note("node after"))
        out.retain_grad()
        return out


class CountedFunctions(TorchFunctionMode):
    def __init__(self, calls: Counter[str]) -> None:
        super().__init__()
        self.calls = calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), named: Any = None) -> Any:
        self.calls[getattr(func, "__name__", str(func))] += 1
        return func(*args, **(named or {}))


class Modes(Program):
    """Modes of torch functions and of dispatch that count the calls of the forward pass."""

    def loss(self, x: Any) -> Any:
        calls: Counter[str] = Counter()

        class Ops(TorchDispatchMode):
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), named: Any = None
            ) -> Any:
                calls[str(func)] += 1
                return func(*args, **(named or {}))

        with CountedFunctions(calls), Ops():
            out = self.net(x)
        self.note(sorted(calls.items()))
        return out.square().mean()

    def backward(self, loss: Any) -> None:
        calls: Counter[str] = Counter()
        with CountedFunctions(calls):
            loss.backward()
        self.note(sorted(calls.items()))


class Scaled(Function):
    """A function with a backward of its own, which notes its calls."""

    @staticmethod
    def forward(ctx: Any, x: Any, program: Program) -> Any:
        ctx.save_for_backward(x)
        ctx.program = program
        program.note("function")
        return x.tanh() * 0.5

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (x,) = ctx.saved_tensors
        ctx.program.note("its backward", float(grad.norm()).hex())
        return grad * 0.5 * (1 - x.tanh() ** 2), None


class Functions(Program):
    def around(self, _index: int, block: nn.Module, x: Any) -> Any:
        return Scaled.apply(block(x), self)


class Buffers(Program):
    """Batch norm's statistics, and a buffer that forward changes."""

    def make(self) -> Any:
        net = super().make()
        net.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(3))
        net.register_buffer("seen", torch.zeros(()))
        return net

    def around(self, index: int, block: nn.Module, x: Any) -> Any:
        self.net.seen += 1
        return self.net.norms[index](block(x)) * (1 + 0.1 * self.net.seen)


class Checkpoints(Program):
    """Checkpoints that run a block again in backward, in both ways."""

    def around(self, index: int, block: nn.Module, x: Any) -> Any:
        def run(x: Any) -> Any:
            self.note("run", index)
            return functional.dropout(block(x), 0.1)

        return checkpoint(run, x, use_reentrant=index != 1)


class Reentrant(Program):
    """All of it in reentrant checkpoints, for years what transformers did."""

    def around(self, _index: int, block: nn.Module, x: Any) -> Any:
        return checkpoint(block, x, use_reentrant=True)


class Transforms(Program):
    """torch.func inside of forward, and a functional call of a part."""

    def around(self, index: int, block: nn.Module, x: Any) -> Any:
        if index == 0:
            return torch.func.functional_call(block, dict(block.named_parameters()), (x,))
        if index == 1:
            slope = torch.func.grad(lambda scale: (x.detach() * scale).sin().mean())(torch.ones(()))
            return block(x) * slope
        return torch.func.vmap(block, chunk_size=1024)(x)


class Compiled(Program):
    """A part that is compiled runs compiled, and is compiled as often as without umem."""

    def make(self) -> Any:
        torch._dynamo.reset()

        def backend(graph: Any, _examples: Any) -> Any:
            self.note("compiled")

            def run(*tensors: Any) -> Any:
                self.note("compiled code")
                return graph(*tensors)

            return run

        self.cleanup.callback(torch._dynamo.reset)
        self.part = torch.compile(lambda x: functional.gelu(x).sin() * 2, backend=backend)
        return super().make()

    def around(self, _index: int, block: nn.Module, x: Any) -> Any:
        return self.part(block(x))


class OddError(Exception):
    """The program's own."""


class Raises(Program):
    """Exceptions in forward and in backward, which the program handles."""

    def around(self, index: int, block: nn.Module, x: Any) -> Any:
        self.count = getattr(self, "count", 0) + 1
        if index == 2 and self.count in (3, 9, 15):
            raise OddError
        out = block(x)
        if index == 1 and self.count in (5, 11):

            def stop(_grad: Any) -> None:
                raise OddError

            out.register_hook(stop)
        return out

    def step(self, i: int) -> None:
        for part in range(2):
            try:
                super().step(2 * i + part)
            except OddError:
                self.note("odd", self.count)


class Twice(Program):
    """Two forward passes before a backward pass, and a second backward pass of one graph."""

    def loss(self, x: Any) -> Any:
        return self.net(x).square().mean() + self.net(x.flip(0)).sin().mean()

    def backward(self, loss: Any) -> None:
        loss.backward(retain_graph=True)
        loss.backward()


class SecondOrder(Program):
    """A gradient penalty, whose backward pass goes through the backward pass."""

    def loss(self, x: Any) -> Any:
        x.requires_grad_()
        loss = super().loss(x)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + slope.square().sum()


class Nested(Program):
    """Forward calls its own model, evaluates it, and takes a gradient."""

    def around(self, index: int, block: nn.Module, x: Any) -> Any:
        if index == 1 and not getattr(self, "inside", False):
            self.inside = True
            with torch.no_grad():
                self.note(float(self.net(x[:8]).norm()).hex())
            probe = x.detach()[:8].requires_grad_()
            (slope,) = torch.autograd.grad(self.net(probe).sum(), probe)
            self.note(float(slope.norm()).hex())
            self.inside = False
        return block(x)


class Forgotten(Program):
    """Forward passes that no backward pass follows, and results in an object of the program's."""

    def loss(self, x: Any) -> Any:
        self.net(x)
        return super().loss(x)


class Result:
    def __init__(self, out: Any) -> None:
        self.out = out


class Wrapped(Program):
    def make(self) -> Any:
        net = super().make()
        plain = net.forward
        net.forward = lambda x: Result(plain(x))
        return net

    def loss(self, x: Any) -> Any:
        return self.net(x).out.square().mean()


class Branches(Program):
    """Data decide what runs."""

    def around(self, index: int, block: nn.Module, x: Any) -> Any:
        if float(x.detach().mean()) > 0:
            self.note("positive", index)
            x = x.sin()
        return block(x[x[:, 0] > -0.5])


class Lazy(Program):
    """Parameters that the first call makes, and a table that it fills."""

    def make(self) -> Any:
        net = super().make()
        net.lazy = nn.LazyLinear(WIDTH)
        self.table: dict[str, Any] = {}
        return net

    def around(self, _index: int, block: nn.Module, x: Any) -> Any:
        if "scale" not in self.table:
            self.table["scale"] = torch.full((WIDTH,), 0.5)
            self.note("filled")
        return self.net.lazy(block(x) * self.table["scale"])


class Replicated(Program):
    """DistributedDataParallel, whose hooks exchange gradients in backward."""

    def make(self) -> Any:
        store = torch.distributed.FileStore(str(self.tmp_path / "store"), 1)
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        self.cleanup.callback(torch.distributed.destroy_process_group)
        net = nn.parallel.DistributedDataParallel(super().make())

        def exchange(_state, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations
            self.note("bucket", bucket.index(), float(bucket.buffer().norm()).hex())
            done: Any = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        net.register_comm_hook(None, exchange)
        return net


PROGRAMS = [Generators, Consumed, ModuleHooks, TensorHooks, Modes, Functions, Buffers, Checkpoints,
            Reentrant, Transforms, Compiled, Raises, Twice, SecondOrder, Nested, Forgotten, Wrapped,
            Branches, Lazy, Replicated]  # fmt: skip


class Ran(NamedTuple):
    """The effects of a training, digests of all states after each step, and what was dropped."""

    events: Events
    states: list[str]
    dropped: int


def run(kind: type[Program], folder: Path, mode: str | None = None) -> Ran:
    """Train, with the model optimized in a mode if there is one."""
    torch.manual_seed(3)
    random.seed(1)
    np.random.seed(1)
    folder.mkdir()
    made = kind(folder)
    states, dropped = [], 0
    with made.cleanup:
        if mode is not None:
            umem.optimize(made.net, mode=mode, budget="50%")
        torch.manual_seed(3)
        for i in range(STEPS):
            made.net.zero_grad()
            made.step(i)
            if optimized(made.net) is not None:
                dropped = max(dropped, report(made.net).dropped)
            with torch.no_grad():
                for parameter in made.net.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.01 * parameter.grad
            state = [*made.net.parameters(), *made.net.buffers(), torch.get_rng_state()]
            states += [hashlib.sha1(each.detach().numpy().tobytes()).hexdigest() for each in state]
    events = made.events
    vars(made).clear()  # hooks refer to it, which the collector does not see
    return Ran(events, [*states, random.random().hex(), float(np.random.rand()).hex()], dropped)


def agree(found: Ran, expected: Ran) -> None:
    for a, b in zip(found.events, expected.events, strict=True):
        assert a == b
    assert found.states == expected.states


@pytest.mark.filterwarnings("default")  # torch's own, while it compiles
@pytest.mark.parametrize("kind", PROGRAMS)
def test_effects_are_those_of_the_plain_program(
    kind: type[Program], tmp_path: Path, nightly: bool
) -> None:
    expected = run(kind, tmp_path / "plain")
    for mode in LIVE_MODES if nightly else ("auto", "memory"):
        found = run(kind, tmp_path / mode, mode)
        agree(found, expected)
        assert found.dropped or kind in (Reentrant, Branches)
    with umem.enable(budget="24MiB", device="soft", recompute="auto"):
        agree(run(kind, tmp_path / "on"), expected)


FORMULAS: dict[str, Callable[[Any], Any]] = {
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "median": lambda x: x.median(),
    "nanmedian": lambda x: x.nanmedian(),
    "prod": lambda x: x.sigmoid().prod(-1),
    "amax": lambda x: x.amax(-1),
    "cumprod": lambda x: x[:16].sigmoid().cumprod(-1),
    "norm": lambda x: x.norm(dim=-1),
    "sort": lambda x: x.sort(-1).values[:, 0],
    "logsumexp": lambda x: x.logsumexp(-1),
    "std": lambda x: x.std(-1),
    "index_put": lambda x: x.index_put((torch.arange(8),), torch.zeros(())),
}


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("scale", [-1.0, float("inf")])
def test_autograd_has_the_formulas_of_plain_torch(name: str, scale: float) -> None:
    """Under a dispatch mode it has others for some; inf is what a gradient scaler can give."""
    found = []
    for mode in (None, "memory"):
        torch.manual_seed(2)
        net = Net(lambda i, block, x: FORMULAS[name](block(x)) if i == 2 else block(x))
        if mode is not None:
            umem.optimize(net, mode=mode)
        bits = []
        for i in range(3):
            net.zero_grad()
            out = net(torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(i)))
            out.backward(torch.full_like(out, scale))
            bits.append([p.grad.numpy().tobytes() for p in net.parameters() if p.grad is not None])
        found.append(bits)
    assert found[0] == found[1]


class OfHandlerError(Exception):
    """As of a signal handler that limits a step's time."""


@functools.cache
def without_signals(code: CodeType) -> set[int]:
    """Return where lines begin that no signal handler interrupts, though a tracer does.

    They are `try`, and the end of a `with`, which calls `__exit__` with three times None.
    """
    words = [*dis.get_instructions(code)]
    return {
        word.offset
        for i, word in enumerate(words)
        if word.opname in ("NOP", "SETUP_FINALLY")
        or (
            (word.opname, word.argval) == ("LOAD_CONST", None)
            and {each.opname for each in words[i + 1 : i + 3]} in ({"LOAD_CONST"}, {"DUP_TOP"})
        )
    }


# Python cannot raise out of a destructor or a weak reference's callback.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_exception_of_a_signal_handler_goes_on_and_leaves_nothing(nightly: bool) -> None:
    ours = str(Path(umem.__file__).parent / "recompute")
    torch.manual_seed(2)
    net, x = Net(), torch.randn(BATCH, WIDTH)
    count = limit = 0

    def line(frame: FrameType, event: str, _arg: object) -> Any:
        nonlocal count
        if event == "line" and frame.f_lasti not in without_signals(frame.f_code):
            count += 1
            if count == limit:
                raise OfHandlerError
        return line

    def called(frame: FrameType, _event: str, _arg: object) -> Any:
        return line if frame.f_code.co_filename.startswith(ours) else None

    def step() -> int:
        nonlocal count
        count = 0
        umem.optimize(net, mode="memory")
        before = sys.gettrace()  # of coverage or a debugger
        sys.settrace(called)
        try:
            for _ in range(2):  # the second pass drops and rebuilds
                net(x).square().mean().backward()
        finally:
            sys.settrace(before)
            umem.deoptimize(net)
        return count

    def raises() -> bool:
        try:
            step()
        except OfHandlerError:
            return True
        finally:
            assert torch._C._len_torch_dispatch_stack() == 0
            assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        return False

    lines = step()
    raised = 0
    for limit in range(1, lines + 1, 1 if nightly else lines // 50):  # noqa: B007
        # A thread takes along whatever interrupted cleanup leaves to it, such as a level of vmap.
        with ThreadPoolExecutor(1) as thread:
            raised += thread.submit(raises).result()
    assert saved_hooks._active == set()
    assert raised > 33


def test_parameters_may_be_swapped_between_steps() -> None:
    net, x = Net(), torch.randn(BATCH, WIDTH)
    umem.optimize(net, mode="memory")
    net(x).sum().backward()
    net.zero_grad()
    other = Net()
    for mine, new in zip(net.parameters(), other.parameters(), strict=True):
        torch.utils.swap_tensors(mine, new)


# --- random programs


class Stages(Program):
    """A program of random stages; `drawn` are their names."""

    drawn: tuple[str, ...] = ()

    def make(self) -> Any:
        self.calls = 0
        self.numbers = iter(range(10_000))
        self.generator = torch.Generator().manual_seed(5)
        net = nn.Module()
        net.first = nn.Linear(WIDTH, WIDTH)
        net.parts = nn.ModuleList(Block() for _ in self.drawn)
        net.register_buffer("seen", torch.zeros(()))
        net.forward = self.forward
        return net

    def forward(self, x: Any) -> Any:
        x = self.net.first(x)
        for name, part in zip(self.drawn, self.net.parts, strict=True):
            self.calls += 1
            x = STAGES[name](self, part, x)
        return x

    def count(self, x: Any) -> Any:
        self.net.seen += 1
        return x * (1 + self.net.seen / 10)

    def feature(self, x: Any) -> Any:
        self.aside.append(x)
        x.register_hook(lambda grad: self.note(float(grad.norm()).hex()))
        return x.clone()

    def skip(self, x: Any) -> Any:
        if self.calls % 7 == 0:
            raise OddError
        return x

    def look(self, part: nn.Module, x: Any) -> Any:
        with torch.no_grad():
            self.note(float(part(x[:4]).norm()).hex())
        return x

    def slope(self, part: nn.Module, x: Any) -> Any:
        probe = x.detach()[:4].requires_grad_()
        return x + torch.autograd.grad(part(probe).sum(), probe)[0].mean()

    def step(self, i: int) -> None:
        try:
            super().step(i)
        except OddError:
            self.note("odd", i)


STAGES: dict[str, Callable[[Any, nn.Module, Any], Any]] = {
    "block": lambda _, part, x: part(x),
    "twice": lambda _, part, x: part(part(x)),
    "checkpoint": lambda _, part, x: checkpoint(part, x, use_reentrant=False),
    "reentrant": lambda _, part, x: checkpoint(part, x, use_reentrant=True),
    "dropout": lambda _, part, x: functional.dropout(part(x), 0.2),
    "python": lambda _, part, x: part(x) * random.random(),
    "numpy": lambda _, part, x: part(x) + np.random.rand(),
    "generator": lambda p, part, x: part(x) + torch.rand(WIDTH, generator=p.generator),
    "iterator": lambda p, part, x: part(x) + next(p.numbers) / 100,
    "in place": lambda _, part, x: part(x).add_(1).relu_() * 0.5,
    "count": lambda p, part, x: p.count(part(x)),
    "feature": lambda p, part, x: p.feature(part(x)),
    "skip": lambda p, part, x: p.skip(part(x)),
    "look": lambda p, part, x: p.look(part, x),
    "slope": lambda p, part, x: p.slope(part, x),
    "function": lambda p, part, x: Scaled.apply(part(x), p),
    "frozen": lambda _, part, x: part(x).detach() + x,
    "branch": lambda _, part, x: x * 2 if float(x.detach().mean()) > 0 else part(x),
    "rows": lambda _, part, x: part(x[x[:, 0] > -1.5]),
    "views": lambda _, part, x: torch.cat([part(half) for half in x.chunk(2)]).t().contiguous().t(),
    "vmap": lambda _, part, x: torch.func.vmap(part)(x),
}


def compare(drawn: list[str], mode: str, folder: Path, *, on: bool) -> None:
    """Run the program plainly and in the mode, as an option of umem or with umem off."""
    kind = type("Stages", (Stages,), {"drawn": tuple(drawn)})
    expected = run(kind, folder / "plain")
    if on:
        with umem.enable(budget="24MiB", device="soft", recompute=mode):
            agree(run(kind, folder / "on"), expected)
    else:
        agree(run(kind, folder / "off", mode), expected)


PROGRAM = st.lists(st.sampled_from(sorted(STAGES)), min_size=1, max_size=5)


@pytest.mark.filterwarnings("default")
@settings(max_examples=100)
@given(PROGRAM, st.sampled_from(LIVE_MODES), st.sampled_from([False, False, False, True]))
def test_random_programs_are_those_of_plain_torch(drawn: list[str], mode: str, on: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        compare(drawn, mode, Path(folder), on=on)


@pytest.mark.nightly
@pytest.mark.filterwarnings("default")
@settings(max_examples=670)  # three times as many at night
@given(PROGRAM)
def test_many_random_programs_in_every_mode(drawn: list[str]) -> None:
    for mode in LIVE_MODES:
        with tempfile.TemporaryDirectory() as folder:
            compare(drawn, mode, Path(folder), on=len(drawn) % 2 == 0)
