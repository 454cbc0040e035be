"""Functions of `torch.cuda` beside those on tensors, as a planned program calls them."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from .scope import Scope

_NOTHING = (
    "empty_cache", "init", "ipc_collect", "reset_accumulated_memory_stats",
    "reset_max_memory_allocated", "reset_max_memory_cached", "reset_peak_memory_stats",
    "set_device", "set_per_process_memory_fraction", "set_stream", "synchronize",
)  # fmt: skip
_BYTES = ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved")
_torch_generator: Any = torch.Generator


class _Event(contextlib.nullcontext[None]):
    """An event, or a stream or device as a context: all work is done when it is asked for."""

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        super().__init__()
        self.device, self.stream_id, self.cuda_stream = torch.device("cpu"), 0, 0

    def _nothing(self, *_args: object, **_kwargs: object) -> None:
        pass

    record = synchronize = wait = wait_event = wait_stream = _nothing

    def query(self) -> bool:
        return True

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()

    def elapsed_time(self, _end: object) -> float:
        return 1.0  # ms; programs divide by it


class _GeneratorType(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _torch_generator)


class _Generator(metaclass=_GeneratorType):
    """`torch.Generator` for a program on a GPU: its numbers are drawn on fake tensors."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return _torch_generator("cpu" if is_cuda(device) else device)


def replacements(scope: Scope) -> list[tuple[Any, str, Any]]:
    """Return owners, names and values of what answers without a GPU."""
    gpu = scope.gpu
    major, minor = gpu.capability
    properties = SimpleNamespace(
        name=gpu.name, major=major, minor=minor, total_memory=gpu.memory_bytes,
        multi_processor_count=gpu.processors, warp_size=32, is_integrated=0, is_multi_gpu_board=0,
    )  # fmt: skip
    answers: dict[str, Any] = dict.fromkeys(_BYTES, 0) | {
        "current_device": 0,
        **dict.fromkeys(("current_stream", "default_stream"), _Event()),
        "get_device_capability": gpu.capability,
        "get_device_name": gpu.name,
        "get_device_properties": properties,
        "is_bf16_supported": True,
        "memory_summary": "",
        "mem_get_info": (gpu.memory_bytes, gpu.memory_bytes),
        "stream": contextlib.nullcontext(),
        **dict.fromkeys(_NOTHING),
    }
    calls = [(torch.cuda, name, _answer(value)) for name, value in answers.items()]
    classes = [(torch.cuda, name, _Event) for name in ("Event", "Stream", "device")]

    def set_default_device(device: Any) -> None:
        scope.default_cuda = is_cuda(device)
        if not scope.default_cuda:
            before(device)

    before = torch.set_default_device
    ranges = ("mark", "range_end", "range_pop", "range_push", "range_start")
    return [
        *calls,
        *classes,
        *((torch.cuda.nvtx, name, _answer(0)) for name in ranges),
        (torch, "set_default_device", set_default_device),
        (torch, "Generator", _Generator),
        (torch.Tensor, "record_stream", _answer(None)),
        (nn.Module, "cuda", lambda self, *_args, **_kwargs: self._apply(lambda t: t.cuda())),
    ]


def present() -> list[tuple[Any, str, Any]]:
    """Return what says that there is a GPU, for programs that would use the CPU otherwise."""
    return [
        (torch.cuda, "is_available", _answer(True)),
        (torch.cuda, "device_count", _answer(1)),
    ]


def is_cuda(device: object) -> bool:
    """Return whether a device is a GPU, by torch's names of it; a number is that of a GPU."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.partition(":")[0] == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def _answer(value: Any) -> Any:
    return lambda *_args, **_kwargs: value
