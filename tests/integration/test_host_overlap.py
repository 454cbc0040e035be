"""Parameters that return from the host while the program continues, and master copies there."""

from __future__ import annotations

import copy
import ctypes
import functools
import gc
import io
import os
import pickle
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import _core_testing  # noqa: E402

import umem  # noqa: E402
from umem.base.native import core  # noqa: E402
from umem.errors import ConfigError, StateError  # noqa: E402
from umem.offload.optimizer import arrivals, host_update, parts  # noqa: E402

SIDE = 1024
LAYER = 2 * SIDE * SIDE * 4  # bytes of a layer's weight and its gradient


@pytest.fixture(autouse=True)
def chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer in each; and no test before has compiled anything."""
    monkeypatch.setattr(host_update, "CHUNK_BYTES", LAYER)
    monkeypatch.setattr(arrivals, "_compiled", False)
    torch._dynamo.utils.counters.clear()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Keep the thread from updating until the event is set."""
    go, real = threading.Event(), parts.update

    def update(*args: Any) -> None:
        assert go.wait(60)
        real(*args)

    monkeypatch.setattr(host_update, "update", update)
    yield go
    go.set()


def net(dtype: torch.dtype = torch.float32) -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(SIDE, SIDE, bias=False) for _ in range(4)]
    return torch.nn.Sequential(*layers).to(dtype)


def backward(model: torch.nn.Module, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    dtype = next(model.parameters()).dtype
    loss: torch.Tensor = model(torch.randn(8, SIDE).to(dtype)).float().square().mean()
    loss.backward()
    return loss.detach()


def begun(held: threading.Event, make: Callable[[Any], Any] | None = None) -> tuple[Any, Any, Any]:
    """A model, its optimizer and the handle, with a step whose updates are in flight."""
    model = net()
    optimizer = (make or (lambda p: torch.optim.SGD(p, lr=1.0)))(model.parameters())
    paged = umem.page_optimizer(optimizer, update="host", overlap=True)
    backward(model)
    optimizer.step()
    threading.Timer(0.1, held.set).start()
    return model, optimizer, paged


def stepped() -> tuple[Any, Any, Any, list[torch.Tensor]]:
    """A model, its optimizer and the handle after a step, and the expected weights."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    paged = umem.page_optimizer(optimizer, update="host", overlap=True)
    backward(model)
    wanted = [w.detach() - w.grad for w in model.parameters()]
    optimizer.step()
    return model, optimizer, paged, wanted


def train(page: Callable[[Any], Any], steps: int = 5, **adam: Any) -> list[torch.Tensor]:
    """Each step's loss, and the weights at the end."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True, **adam)
    paged = page(optimizer)
    losses = []
    for step in range(steps):
        losses.append(backward(model, step))
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    if paged:
        paged.remove()
    return [t.detach().clone() for t in (*losses, *model.parameters())]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


@pytest.mark.parametrize(
    ("share", "release", "policy", "observer"),
    [
        (1.0, False, "lru", "native"),
        (0.5, False, "auto", "native"),
        (0.5, True, "lru", "native"),
        (1.0, True, "auto", "native"),
    ],
)
def test_bits_are_those_of_the_plain_step(
    share: float, release: bool, policy: str, observer: str
) -> None:
    plain = train(lambda _: None)
    with umem.enable(budget="12MiB", device="soft", policy=policy, observer=observer):
        got = train(
            lambda o: umem.page_optimizer(
                o, update="host", overlap=True, share=share, release_gradients=release
            )
        )
        assert same(plain, got)
        del got


def test_step_returns_before_the_updates_and_an_operator_waits_for_its_parameter(
    held: threading.Event,
) -> None:
    with umem.enable(budget="96MiB", device="soft", policy="lru"):
        model = net()
        weights = list(model.parameters())
        before = [w.detach().clone() for w in weights]
        optimizer = torch.optim.AdamW(weights, lr=1e-2, fused=True)
        paged = umem.page_optimizer(optimizer, update="host", overlap=True)
        backward(model)
        optimizer.step()  # no update has run
        threading.Timer(0.2, held.set).start()
        assert not torch.equal(weights[0], before[0])  # the operator has waited
        assert held.is_set()
        assert not torch.equal(weights[3].detach(), before[3])
        paged.remove()
        del model, weights, before, optimizer, paged
        gc.collect()


READS: dict[str, Callable[[Any], Any]] = {
    "operator": lambda w: w + 0,
    "view": lambda w: w.detach().numpy().copy(),
    "item": lambda w: w[0, 0].item(),
    "out of the graph": lambda w: w.data.clone(),
    "in place": lambda w: w.data.mul_(2),
    "list": lambda w: torch._foreach_norm([w.detach()]),
    "inference": lambda w: torch.inference_mode()(lambda: w.sum())(),
    "gradient of a function": lambda w: torch.func.grad(lambda x: x.square().sum())(w.detach()),
    "vmap": lambda w: torch.func.vmap(lambda x: x * 2)(w),
    "saved": lambda w: torch.save({"w": w.detach()}, io.BytesIO()),
    "another thread": lambda w: _on_thread(lambda: w.sum()),
}


def _on_thread(call: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("how", READS)
def test_whatever_operator_comes_first_waits(how: str, held: threading.Event) -> None:
    with umem.enable(budget="96MiB", device="soft", policy="lru"):
        model = net()
        weight = model[0].weight
        before = weight.detach().clone()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        paged = umem.page_optimizer(optimizer, update="host", overlap=True)
        backward(model)
        gradient = weight.grad.clone()
        optimizer.step()
        threading.Timer(0.1, held.set).start()
        READS[how](weight)
        raw = torch.frombuffer(bytearray(weight.data.numpy().tobytes()), dtype=torch.float32)
        wanted = (before - gradient) * (2 if how == "in place" else 1)
        assert torch.equal(raw.view(SIDE, SIDE), wanted)
        paged.remove()
        del model, weight, before, optimizer, paged, gradient, raw, wanted
        gc.collect()


def test_a_mode_of_the_program_sees_nothing_of_the_return() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import FlopCounterMode

    class Names(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with umem.enable(budget="96MiB", device="soft", policy="lru"):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        paged = umem.page_optimizer(optimizer, update="host", overlap=True)
        backward(model)
        optimizer.step()
        with Names() as names, FlopCounterMode(display=False):
            model(torch.ones(1, SIDE))
        assert not any("copy" in name for name in names.seen)
        paged.remove()
        del model, optimizer, paged
        gc.collect()


def test_what_the_program_gives_a_parameter_meanwhile_wins(held: threading.Event) -> None:
    with umem.enable(budget="96MiB", device="soft", policy="lru"):
        model, optimizer, paged = begun(held)
        model[1].weight.data = torch.full((SIDE, SIDE), 7.0)
        model.load_state_dict({**model.state_dict(), "2.weight": torch.full((SIDE, SIDE), 8.0)})
        backward(model)
        assert torch.all(model[1].weight == 7.0)
        assert torch.all(model[2].weight == 8.0)
        paged.remove()
        del model, optimizer, paged
        gc.collect()


def test_parameters_that_change_places_meanwhile_have_their_own_values() -> None:
    """`swap_tensors` runs no operator that would wait for them."""

    def run(paged: bool) -> list[Any]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        handle = umem.page_optimizer(optimizer, update="host", overlap=True) if paged else None
        for i in range(3):
            backward(model, i)
            optimizer.step()
            optimizer.zero_grad()
            torch.utils.swap_tensors(model[0].weight, model[2].weight)
        if handle is not None:
            handle.remove()
        return [p.detach().clone() for p in model.parameters()]

    plain = run(False)
    with umem.enable(budget="96MiB", device="soft", policy="lru"):
        found = run(True)
        assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
        del found


def test_an_update_that_fails_is_told_by_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def update(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls <= 4:
            raise RuntimeError("no luck")
        parts.update(*args)

    monkeypatch.setattr(host_update, "update", update)
    with umem.enable(budget="96MiB", device="soft", policy="lru"):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        paged = umem.page_optimizer(optimizer, update="host", overlap=True)
        backward(model)
        optimizer.step()
        backward(model)
        with pytest.raises(StateError, match="4 of 4 parameters failed: no luck"):
            optimizer.step()
        backward(model)
        optimizer.step()
        paged.remove()
        del model, optimizer, paged
        gc.collect()


def test_checkpoints_and_the_end_have_all(held: threading.Event) -> None:
    with umem.enable(budget="96MiB", device="soft", policy="lru"):
        model, optimizer, paged = begun(held, lambda p: torch.optim.Adam(p, lr=1e-2, fused=True))
        saved = copy.deepcopy(optimizer.state_dict())
        assert [int(s["step"]) for s in saved["state"].values()] == [1] * 4
        backward(model)
        optimizer.step()
        optimizer.load_state_dict(saved)  # from before: the update in flight is over
        assert {int(s["step"]) for s in optimizer.state.values()} == {1}
        paged.remove()
        del model, optimizer, paged, saved
        gc.collect()


@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
def test_a_copy_of_the_optimizer_has_the_new_states(how: str, held: threading.Event) -> None:
    with umem.enable(budget="96MiB", device="soft", policy="lru"):
        model, optimizer, paged = begun(held, lambda p: torch.optim.Adam(p, lr=1e-2, fused=True))
        copied = (
            pickle.loads(pickle.dumps(optimizer)) if how == "pickle" else copy.deepcopy(optimizer)
        )
        assert [int(s["step"]) for s in copied.state.values()] == [1] * 4
        paged.remove()
        del model, optimizer, paged, copied
        gc.collect()


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_learning_rate_that_changes_in_place_counts_from_the_next_step(
    shape: tuple[int, ...], held: threading.Event
) -> None:
    with umem.enable(budget="96MiB", device="soft", policy="lru"):
        model = net()
        rate = torch.ones(shape)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, fused=True)
        paged = umem.page_optimizer(optimizer, update="host", overlap=True)
        backward(model)
        wanted = [w.detach() - w.grad for w in model.parameters()]
        optimizer.step()
        rate.mul_(0.5)
        held.set()
        assert same(wanted, list(model.parameters()))
        paged.remove()
        del model, optimizer, paged, wanted, rate
        gc.collect()


def test_betas_that_change_in_place_count_from_the_next_step(held: threading.Event) -> None:
    def trained(page: Callable[[Any], Any]) -> list[torch.Tensor]:
        model = net()
        betas = torch.tensor(0.9), torch.tensor(0.999)
        optimizer = torch.optim.Adam(model.parameters(), betas=betas, fused=True)
        paged = page(optimizer)
        for step in range(2):
            backward(model, step)
            optimizer.step()
            betas[0].fill_(0.5)
            held.set()
        if paged is not None:
            paged.remove()
        return [
            *(w.detach().clone() for w in model.parameters()),
            *(state["exp_avg"].clone() for state in optimizer.state.values()),
        ]

    plain = trained(lambda _: None)
    held.clear()
    with umem.enable(budget="96MiB", device="soft", policy="lru"):
        got = trained(lambda o: umem.page_optimizer(o, update="host", overlap=True))
        assert same(plain, got)
        del got
        gc.collect()


def raw(model: torch.nn.Module) -> list[bytes]:
    """The memory of the weights, without an operator."""
    return [ctypes.string_at(w.data_ptr(), w.nbytes) for w in model.parameters()]


def test_all_arrive_before_umem_is_off_and_before_a_fork(held: threading.Event) -> None:
    with umem.enable(budget="96MiB", device="soft", policy="lru"):
        model = net()
        before = raw(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        paged = umem.page_optimizer(optimizer, update="host", overlap=True)
        backward(model)
        optimizer.step()
        assert raw(model) == before
        threading.Timer(0.1, held.set).start()
        child = os.fork()
        if child == 0:
            os._exit(sum(a == b for a, b in zip(raw(model), before, strict=True)))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        backward(model)
        held.clear()
        before = raw(model)
        optimizer.step()
        assert raw(model) == before
        threading.Timer(0.1, held.set).start()
    assert not any(a == b for a, b in zip(raw(model), before, strict=True))
    paged.remove()
    del model, optimizer, paged
    gc.collect()


@pytest.mark.parametrize("chunk", [LAYER, LAYER // 4])  # a layer takes more than the latter
def test_no_more_waits_than_the_buffers_hold(
    held: threading.Event, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(host_update, "CHUNK_BYTES", chunk)
    held.set()
    options: dict[str, Any] = {"budget": "96MiB", "device": "soft", "policy": "lru"}
    for buffers, waiting in (("512MiB", 4), ("24MiB", 3), ("1MiB", 2)):
        with umem.enable(**options, optimizer_buffers=buffers):
            model = net()
            before = raw(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            paged = umem.page_optimizer(optimizer, update="host", overlap=True)
            backward(model)
            optimizer.step()
            assert sum(a == b for a, b in zip(raw(model), before, strict=True)) == waiting
            paged.remove()
            del model, optimizer, paged
            gc.collect()


@pytest.mark.parametrize("removed", [True, False])
def test_the_threads_of_updates_are_an_option(
    removed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, seen, left = parts.update, [], []

    def update(*args: Any) -> None:
        seen.append(torch.get_num_threads())
        real(*args)

    monkeypatch.setattr(host_update, "update", update)
    for threads in (1, 3, 2):
        options: dict[str, Any] = {"budget": "96MiB", "device": "soft", "policy": "lru"}
        with umem.enable(**options, optimizer_threads=threads):
            model = net()
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            paged = umem.page_optimizer(optimizer, update="host")
            backward(model)
            optimizer.step()
            assert torch.get_num_threads() == 1  # for the tests here
            assert _on_thread(torch.get_num_threads) == 1
            if removed:
                paged.remove()
            else:
                left.append((optimizer, paged))
            del model, optimizer, paged
            gc.collect()
    assert [seen[i] for i in (0, 4, 8)] == [1, 3, 2]
    for _, paged in left:
        paged.remove()
    left.clear()
    gc.collect()


def test_compiled_code_is_waited_for_in_the_step() -> None:
    """It reads parameters without operators, in every call after the first too."""
    plain_model = net()
    plain = torch.optim.SGD(plain_model.parameters(), lr=1.0)
    for seed in range(4):
        backward(plain_model, seed)
        plain.step()
        plain.zero_grad()
    with umem.enable(budget="96MiB", device="soft", policy="lru"):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        paged = umem.page_optimizer(optimizer, update="host", overlap=True)
        compiled = torch.compile(model, backend="aot_eager")
        for seed in range(4):
            backward(compiled if seed else model, seed)
            optimizer.step()
            if seed:
                assert not _core_testing.awaits()
            optimizer.zero_grad()
        assert same(list(plain_model.parameters()), list(model.parameters()))
        paged.remove()
        del model, optimizer, paged, compiled
        gc.collect()
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"overlap": True}, "allowed: with update='host' or 'auto'"),
        ({"masters": True, "update": "device"}, "allowed: with update='host' or 'auto'"),
    ],
)
def test_they_need_updates_on_the_host(options: dict[str, Any], text: str) -> None:
    with umem.enable(budget="96MiB", device="soft", policy="lru"):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)
        with pytest.raises(ConfigError, match=text):
            umem.page_optimizer(optimizer, **options)


@pytest.mark.parametrize("observer", ["off", "python"])
def test_overlap_needs_an_observer_of_all_threads(observer: str) -> None:
    with umem.enable(budget="96MiB", device="soft", policy="lru", observer=observer):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)
        with pytest.raises(ConfigError, match="not every operator is seen"):
            umem.page_optimizer(optimizer, update="host", overlap=True)


@functools.cache
def with_masters(maker: str, change: bool) -> list[torch.Tensor]:
    """The weights in bfloat16 of six steps with masters in float32, by hand."""
    model = net(torch.bfloat16)
    masters = [torch.nn.Parameter(w.detach().float()) for w in model.parameters()]
    optimizer = MAKERS[maker](masters)
    for step in range(6):
        backward(model, step)
        for weight, master in zip(model.parameters(), masters, strict=True):
            assert weight.grad is not None
            master.grad = weight.grad.float()
        optimizer.step()
        for weight, master in zip(model.parameters(), masters, strict=True):
            weight.data.copy_(master.detach())
            weight.grad = None
        if change and step == 1:
            model[0].weight.data[0] = 0.25
            masters[0].data[0] = 0.25
    return [w.detach().clone() for w in model.parameters()]


MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-3, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, fused=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3, foreach=False),
}


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.nightly), True])
@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize("name", MAKERS)
def test_masters_are_those_of_a_training_by_hand(name: str, release: bool, overlap: bool) -> None:
    """Across a checkpoint, and a change by the program."""
    plain = with_masters(name, change=True)
    assert not same(plain, with_masters(name, change=False))
    page: dict[str, Any] = {
        "masters": True,
        "overlap": overlap,
        "release_gradients": release,
    }
    with umem.enable(budget="12MiB", device="soft", policy="lru"):
        model = net(torch.bfloat16)
        optimizer = MAKERS[name](model.parameters())
        paged = umem.page_optimizer(optimizer, update="host", **page)
        for step in range(6):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                model[0].weight.data[0] = 0.25
            if step == 3:  # into another program, through a file
                file = io.BytesIO()
                torch.save([model.state_dict(), optimizer.state_dict()], file)
                file.seek(0)
                loaded = torch.load(file)
                paged.remove()
                model = net(torch.bfloat16)
                optimizer = MAKERS[name](model.parameters())
                paged = umem.page_optimizer(optimizer, update="host", **page)
                model.load_state_dict(loaded[0])
                optimizer.load_state_dict(loaded[1])
        assert same(plain, [w.detach() for w in model.parameters()])
        large = [t for s in optimizer.state.values() for t in s.values() if t.numel() > 1]
        assert {t.dtype for t in large} == {torch.float32}
        assert not any(core.owns(t.data_ptr()) for t in large)
        paged.remove()
        large = [t for s in optimizer.state.values() for t in s.values() if t.numel() > 1]
        assert {t.dtype for t in large} <= {torch.bfloat16}
        backward(model)
        if isinstance(
            optimizer, torch.optim.SGD
        ):  # its fused kernel reads past half-precision ends
            optimizer.param_groups[0]["fused"] = False  # pytorch/pytorch#191763
        optimizer.step()  # the plain one continues
        del model, optimizer, paged, large, loaded
        gc.collect()


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_tracing_records_nothing_of_the_return(held: threading.Event) -> None:
    with umem.enable(budget="96MiB", device="soft", policy="lru"):
        model, optimizer, paged = begun(held)
        before = raw(model)
        traced = torch.jit.trace(model, torch.ones(1, SIDE), check_trace=False)
        assert raw(model) != before
        assert "copy_" not in str(traced.inlined_graph)
        paged.remove()
        del model, optimizer, paged, traced
        gc.collect()


def test_nested_transforms_wait_too(held: threading.Event) -> None:
    with umem.enable(budget="96MiB", device="soft", policy="lru"):
        model, optimizer, paged = begun(held)
        before = raw(model)[0]

        def scaled(x: Any, model: torch.nn.Module = model) -> Any:
            return (model[0].weight[0, 0] * x).sum()

        torch.func.grad(torch.func.grad(scaled))(torch.ones(()))
        assert raw(model)[0] != before
        backward(model)
        optimizer.step()  # no error was kept
        paged.remove()
        del model, optimizer, paged
        gc.collect()


def test_compiled_code_is_known_after_a_reset(held: threading.Event) -> None:
    held.set()
    with umem.enable(budget="96MiB", device="soft", policy="lru"):
        model, optimizer, paged = begun(held)
        torch._dynamo.reset()
        backward(model)
        optimizer.step()
        compiled = torch.compile(model, backend="aot_eager")
        compiled(torch.ones(1, SIDE))
        assert not _core_testing.awaits()
        backward(model)
        optimizer.step()
        assert not _core_testing.awaits()
        paged.remove()
        del model, optimizer, paged, compiled
        gc.collect()
    torch._dynamo.reset()


def test_without_an_observer_the_step_waits(held: threading.Event) -> None:
    umem.enable(budget="96MiB", device="soft", policy="lru")
    model, optimizer, paged = begun(held)
    umem.disable()
    with umem.enable(budget="96MiB", device="soft", policy="lru", observer="off"):
        backward(model)
        before = raw(model)
        optimizer.step()
        assert not any(a == b for a, b in zip(raw(model), before, strict=True))
        paged.remove()
        del model, optimizer, paged
        gc.collect()


def test_what_fails_on_the_way_back_is_told_by_the_next_step(
    held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    with umem.enable(budget="96MiB", device="soft", policy="lru"):
        model, optimizer, paged = begun(held)
        before = raw(model)
        real = host_update.HostUpdate._copy_back
        failed: list[int] = []

        def fails_once(self: Any, *args: Any) -> None:
            if not failed:
                failed.append(1)
                raise RuntimeError("no room")
            real(self, *args)

        monkeypatch.setattr(host_update.HostUpdate, "_copy_back", fails_once)
        backward(model)  # the second operator on the parameter tries again
        assert raw(model) != before
        with pytest.raises(StateError, match="back to the device failed: no room"):
            optimizer.step()
        paged.remove()
        del model, optimizer, paged
        gc.collect()


def test_operators_wait_as_long_as_an_update_is_in_flight(
    held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if a checkpoint could not write it back."""
    with umem.enable(budget="96MiB", device="soft", policy="lru"):
        model, optimizer, paged, wanted = stepped()
        held.set()

        def fails(*_: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(host_update.HostUpdate, "_copy_back", fails)
            with pytest.raises(KeyboardInterrupt):
                optimizer.state_dict()
        assert same(wanted, [w + 0 for w in model.parameters()])
        paged.remove()
        del model, optimizer, paged, wanted
        gc.collect()


@pytest.fixture
def collects_there(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The collector runs on the thread that updates, before each update."""

    def update(*args: Any) -> None:
        time.sleep(0.05)  # the operator is there
        gc.collect()
        parts.update(*args)

    monkeypatch.setattr(host_update, "update", update)
    gc.disable()
    yield
    gc.enable()


class Uses:
    """Uses a weight when it is collected."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight, self.cycle = weight, self

    def __del__(self) -> None:
        self.weight.sum()


@pytest.mark.usefixtures("collects_there")
def test_the_thread_that_updates_waits_for_no_parameter() -> None:
    """The collector may run the program's operators there."""
    with umem.enable(budget="96MiB", device="soft", policy="lru"):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        paged = umem.page_optimizer(optimizer, update="host", overlap=True)
        backward(model)
        wanted = [w.detach() - w.grad for w in model.parameters()]
        Uses(model[0].weight)
        optimizer.step()
        assert same(wanted, list(model.parameters()))
        paged.remove()
        del model, optimizer, paged, wanted
        gc.collect()


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupted_submission_updates_once(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """States and weights are of the same step."""

    monkeypatch.setattr(host_update, "CHUNK_BYTES", 4 * LAYER)  # else it ends amid a step

    def trained(interrupted: bool) -> list[torch.Tensor]:
        model = net()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        paged = umem.page_optimizer(optimizer, update="host")
        for step in range(4):
            backward(model, step)
            with monkeypatch.context() as patch:
                if step == 2 and interrupted:
                    patch.setattr(host_update, "_give_to_thread", interrupt_once(when))
                    with pytest.raises(KeyboardInterrupt):
                        optimizer.step()
                else:
                    optimizer.step()
        states = [optimizer.state_dict()["state"][i]["step"] for i in range(2)]
        paged.remove()
        return [t.detach().clone() for t in (*model.parameters(), *states)]

    with umem.enable(budget="96MiB", device="soft", policy="lru"):
        assert same(trained(True), trained(False))
        gc.collect()


def interrupt_once(when: str) -> Callable[[Any], None]:
    real, calls = host_update._give_to_thread, iter(range(10**6))

    def given(chunk: Any) -> None:
        first = next(calls) == 0
        if not first or when == "after":
            real(chunk)
        if first:
            raise KeyboardInterrupt

    return given


@pytest.mark.parametrize("how", ["save", "pickle"])
def test_a_saved_model_has_the_new_weights(how: str, held: threading.Event) -> None:
    with umem.enable(budget="96MiB", device="soft", policy="lru"):
        model, optimizer, paged = begun(held)
        before = raw(model)[0]
        file = io.BytesIO()
        torch.save(list(model.parameters()), file) if how == "save" else pickle.dump(model, file)
        assert before not in file.getvalue()
        paged.remove()
        del model, optimizer, paged
        gc.collect()


def test_a_model_that_is_dropped_is_freed(held: threading.Event) -> None:
    with umem.enable(budget="96MiB", device="soft", policy="lru"):
        model, optimizer, paged = begun(held)
        alive = weakref.ref(model[0].weight)
        del model, optimizer, paged
        gc.collect()
        for _ in range(600):  # updates in flight end on another thread
            if alive() is None and not _core_testing.awaits():
                break
            time.sleep(0.01)
        assert alive() is None
        assert not _core_testing.awaits()


@pytest.mark.usefixtures("collects_there")
def test_an_optimizer_may_be_collected_on_the_thread_that_updates() -> None:
    """While an operator waits for that thread."""
    with umem.enable(budget="96MiB", device="soft", policy="lru"):
        model, optimizer, paged, wanted = stepped()
        cycle: list[Any] = [optimizer]
        cycle.append(cycle)
        del optimizer, paged, cycle
        assert same(wanted, list(model.parameters()))
        del model, wanted
        gc.collect()


def test_an_interrupt_lets_the_parameter_arrive_first(
    held: threading.Event, request: pytest.FixtureRequest
) -> None:
    # A process that a shell starts in the background ignores it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    with umem.enable(budget="96MiB", device="soft", policy="lru"):
        model, optimizer, paged, wanted = stepped()

        def interrupt() -> None:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)  # still waiting
            held.set()

        timer = threading.Timer(0.1, interrupt)

        def wait(part: torch.nn.Linear) -> None:
            timer.start()
            part.weight.sum()

        with pytest.raises(KeyboardInterrupt):
            wait(model[0])
        timer.join()
        assert same(wanted, list(model.parameters()))
        backward(model)
        optimizer.step()  # no error was kept
        paged.remove()
        del model, optimizer, paged, wanted
        gc.collect()


def of_one_storage(optimizers: int, page: Callable[[Any], Any]) -> list[torch.Tensor]:
    """Losses and weights of parameters, some of which are parts of one storage."""
    torch.manual_seed(0)
    rest = torch.randn(3, SIDE, SIDE) / SIDE**0.5
    first = torch.nn.Parameter(torch.randn(SIDE, SIDE) / SIDE**0.5)
    weights = [first, *(torch.nn.Parameter(weight) for weight in rest)]
    groups = [weights] if optimizers == 1 else [weights[1:2], [weights[0], *weights[2:]]]
    made = [torch.optim.SGD(group, lr=1.0, momentum=0.9) for group in groups]
    handles = [page(optimizer) for optimizer in made]
    losses = []
    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(8, SIDE)
        for weight in weights:
            x = x @ weight
        loss = x.square().mean()
        loss.backward()
        losses.append(loss.detach())
        for optimizer in made:
            optimizer.step()
            optimizer.zero_grad()
    for handle in handles:
        if handle:
            handle.remove()
    return [t.detach().clone() for t in (*losses, *weights)]


@pytest.mark.parametrize("optimizers", [1, 2])
def test_parts_of_one_storage_are_each_waited_for(
    optimizers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as the weights of an LSTM on a GPU: in several chunks, and of several optimizers."""
    real = parts.update

    def update(*args: Any) -> None:
        time.sleep(0.05)
        real(*args)

    monkeypatch.setattr(host_update, "update", update)
    monkeypatch.setattr(host_update, "CHUNK_BYTES", 2 * LAYER)
    plain = of_one_storage(optimizers, lambda _: None)
    with umem.enable(budget="96MiB", device="soft", policy="lru"):
        got = of_one_storage(
            optimizers, lambda o: umem.page_optimizer(o, update="host", overlap=True)
        )
        assert same(plain, got)
        del got


def test_a_graph_of_old_weights_is_refused(held: threading.Event) -> None:
    """As after a plain step."""
    with umem.enable(budget="96MiB", device="soft", policy="lru"):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, foreach=False)
        paged = umem.page_optimizer(optimizer, update="host", overlap=True)
        loss = model(torch.ones(1, SIDE)).sum()
        loss.backward(retain_graph=True)
        optimizer.step()
        held.set()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        paged.remove()
        del model, optimizer, paged, loss
        gc.collect()


@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
def test_a_copy_of_an_optimizer_with_masters_is_a_plain_one(how: str) -> None:
    with umem.enable(budget="96MiB", device="soft", policy="lru"):
        model = net(torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        paged = umem.page_optimizer(optimizer, update="host", masters=True)
        backward(model)
        optimizer.step()
        both = model, optimizer
        other, copied = pickle.loads(pickle.dumps(both)) if how == "pickle" else copy.deepcopy(both)
        backward(other)
        copied.step()
        for parameter, state in copied.state.items():
            assert state["exp_avg"].dtype == parameter.dtype
            assert "master" not in state
        assert all("master" in state for state in optimizer.state.values())
        backward(model)
        optimizer.step()
        paged.remove()
        assert "__getstate__" not in vars(optimizer)
        del model, optimizer, paged, both, other, copied, parameter, state
        gc.collect()


def averages_and_masters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    names = ("exp_avg", "master")
    return [state[name].clone() for state in optimizer.state.values() for name in names]


def test_masters_are_loaded_as_hooks_of_a_later_time_adapt_them() -> None:
    def loaded(late: bool) -> list[torch.Tensor]:
        model = net(torch.bfloat16)
        optimizer = torch.optim.Adam(model.parameters(), foreach=False)

        def swapped(_: Any, saved: dict[str, Any]) -> dict[str, Any]:
            first, second = saved["state"][0], saved["state"][1]
            return {**saved, "state": {**saved["state"], 0: second, 1: first}}

        if not late:
            optimizer.register_load_state_dict_pre_hook(swapped)
        paged = umem.page_optimizer(optimizer, update="host", masters=True)
        if late:
            optimizer.register_load_state_dict_pre_hook(swapped)
        backward(model)
        optimizer.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        found = averages_and_masters(optimizer)
        paged.remove()
        return found

    with umem.enable(budget="96MiB", device="soft", policy="lru"):
        early = loaded(late=False)
        assert not torch.equal(early[0], early[2])
        assert same(early, loaded(late=True))
        del early
        gc.collect()


def test_masters_of_a_checkpoint_are_the_choice_of_auto() -> None:
    """A step on the device would round them to the parameter's type."""

    def trained(update: str, saved: Any) -> list[torch.Tensor]:
        model = net(torch.bfloat16)
        model.load_state_dict(saved[0])
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        paged = umem.page_optimizer(optimizer, update=update, masters=True)
        optimizer.load_state_dict(saved[1])
        for _ in range(2):
            backward(model)
            optimizer.step()
        found = averages_and_masters(optimizer)
        paged.remove()
        return found

    with umem.enable(budget="96MiB", device="soft", policy="auto"):
        model = net(torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        paged = umem.page_optimizer(optimizer, update="host", masters=True)
        backward(model)
        optimizer.step()
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        paged.remove()
        there = trained("host", saved)
        assert {tensor.dtype for tensor in there} == {torch.float32}
        assert same(there, trained("auto", saved))
        del model, optimizer, paged, saved, there
        gc.collect()


def test_the_states_of_masters_stay_with_the_host() -> None:
    """State updated on the device keeps the parameter's type."""
    with umem.enable(budget="96MiB", device="soft", policy="lru"):
        model = net(torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        backward(model)
        optimizer.step()
        umem.page_optimizer(optimizer, update="host", masters=True).remove()  # before any step
        backward(model)
        optimizer.step()
        paged = umem.page_optimizer(optimizer, update="host", masters=True)
        backward(model)
        optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict())
        assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.float32}
        paged.remove()
        paged = umem.page_optimizer(optimizer, update="host", masters=True, share=0.5)
        optimizer.load_state_dict(saved)
        backward(model)
        optimizer.step()
        there = {state["exp_avg"].dtype for state in optimizer.state.values()}
        assert there == {torch.float32, torch.bfloat16}  # of the host, and of the device
        paged.remove()
        del model, optimizer, paged, saved
        gc.collect()
