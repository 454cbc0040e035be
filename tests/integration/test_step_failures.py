"""Exceptions at every place of a step: nothing remains pinned, later steps are bit-identical."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import _core_testing  # noqa: E402

import umem  # noqa: E402

MIB = 1 << 20


class OopsError(Exception):
    """The exception of the broken parts."""


def fail(*_: Any) -> Any:
    raise OopsError


class BrokenForward(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        x.sin().sum()
        raise OopsError

    @staticmethod
    def backward(_: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class BrokenBackward(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, grad: torch.Tensor) -> torch.Tensor:
        grad.sin().sum()
        raise OopsError


Net = Any  # torch.nn.Sequential's, but torch is Any here


def in_forward_hook(net: Net, x: torch.Tensor, _: Any) -> None:
    handle = net[4].register_forward_hook(fail)
    try:
        net(x)
    finally:
        handle.remove()


def in_backward_hook(net: Net, x: torch.Tensor, _: Any) -> None:
    handle = net[2].register_full_backward_hook(fail)
    try:
        net(x).sum().backward()
    finally:
        handle.remove()


def in_tensor_hook(net: Net, x: torch.Tensor, _: Any) -> None:
    middle = net[:4](x)
    middle.register_hook(fail)
    net[4:](middle).sum().backward()


def in_function_forward(net: Net, x: torch.Tensor, _: Any) -> None:
    net[4:](BrokenForward.apply(net[:4](x))).sum().backward()


def in_function_backward(net: Net, x: torch.Tensor, _: Any) -> None:
    net[4:](BrokenBackward.apply(net[:4](x))).sum().backward()


def in_closure(net: Net, x: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    def closure() -> float:
        net(x).sum().backward()
        raise OopsError

    optimizer.step(closure)


def in_saved_tensor_hook(net: Net, x: torch.Tensor, _: Any) -> None:
    # Packing a tensor as itself would make a cycle that is never collected.
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), fail):
        out = net(x)
    out.sum().backward()


def in_dispatch_mode(net: Net, x: torch.Tensor, _: Any) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Third(TorchDispatchMode):
        left = 3

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.left -= 1
            if self.left == 0:
                raise OopsError
            return func(*args, **(kwargs or {}))

    with Third():
        net(x)


def in_an_op(net: Net, x: torch.Tensor, _: Any) -> None:
    try:
        net(x[:, :-1])
    except RuntimeError as error:
        raise OopsError from error


def out_of_memory(net: Net, x: torch.Tensor, _: Any) -> None:
    try:
        net(x).repeat(4096, 1).sum().backward()  # 512 MiB
    except torch.OutOfMemoryError as error:
        raise OopsError from error


PLACES: list[Callable[[Net, torch.Tensor, Any], None]] = [
    in_forward_hook, in_backward_hook, in_tensor_hook, in_function_forward, in_function_backward,
    in_closure, in_saved_tensor_hook, in_dispatch_mode, in_an_op, out_of_memory,
]  # fmt: skip


def train(place: Callable[[Net, torch.Tensor, Any], None] | None) -> str:
    torch.manual_seed(0)
    layers = [m for _ in range(5) for m in (torch.nn.Linear(640, 640), torch.nn.Tanh())]
    net = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        x = torch.randn(64, 640)
        if step in (1, 2) and place is not None:
            with pytest.raises(OopsError):
                place(net, x, optimizer)
            if umem.is_enabled():
                assert [row for row in _core_testing.blocks() if row["pins"]] == []
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
    digest = hashlib.sha256()
    for tensor in net.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("observer", ["native", "python"])
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_a_failed_step_changes_nothing_for_the_next(
    place: Callable[[Net, torch.Tensor, Any], None], observer: str
) -> None:
    plain = train(None)
    live = umem.stats().live_bytes
    with umem.enable(budget="8MiB", host_budget="96MiB", device="soft", observer=observer):
        umem.reset_peak_stats()
        assert train(place) == plain
        stats = umem.stats()
        assert stats.bytes_out > 0
        assert stats.peak_resident_bytes <= 8 * MIB
        assert (stats.ooms > 0) == (place is out_of_memory)
        gc.collect()
        assert umem.stats().live_bytes <= live + MIB
