"""Rank 0 of a program of many ranks, on torch's process group that exchanges nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import PlanError
from .fake_cuda import replaced


@contextlib.contextmanager
def as_rank_0(ranks: int) -> Iterator[None]:
    """Make the program the first of `ranks` processes within the context.

    Process groups exist, and collectives return at once. A program may call `init_process_group`
    itself, with any backend. Variables that launchers set in the environment are not set here.

    Raises:
        PlanError: this torch has no distributed package, or a process group exists already.
    """
    import torch.distributed as dist

    if not dist.is_available():
        raise PlanError("--ranks needs torch.distributed, which this build of torch lacks")
    if dist.is_initialized():
        raise PlanError("a process group exists already; ranks are planned without one")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with contextlib.ExitStack() as stack:
        dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
        stack.callback(dist.destroy_process_group)
        for owner, name, value in _replacements():
            stack.enter_context(replaced(owner, name, value))
        yield


def _replacements() -> Iterator[tuple[Any, str, Any]]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    for owner in (dist, dist.distributed_c10d):
        yield owner, "init_process_group", _done_already
        yield owner, "destroy_process_group", _done_already
    yield torch.cuda, "set_device", _done_already
    # A mesh computes with the numbers of ranks: real tensors.
    yield DeviceMesh, "__init__", _real_mesh(DeviceMesh.__init__)
    for name in ("_flatten", "_unflatten", "__getitem__"):
        if hasattr(DeviceMesh, name):
            yield DeviceMesh, name, _outside_of_modes(getattr(DeviceMesh, name))


def _done_already(*_args: object, **_kwargs: object) -> None:
    """Do nothing: the process group exists already, and stays."""


def _outside_of_modes(method: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return method(*args, **kwargs)

    return called


def _real_mesh(init: Callable[..., None]) -> Callable[..., None]:
    def made(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        with _disable_current_modes():
            ranks = kwargs.get("_rank_map")
            if ranks is not None:  # of init_device_mesh, which made it on fake tensors: all ranks
                kwargs["_rank_map"] = torch.arange(ranks.numel(), dtype=torch.int)
            init(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    return made
