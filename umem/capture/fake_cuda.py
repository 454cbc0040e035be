"""The torch that a planned program sees: fake tensors that behave as those of a GPU.

Fake tensors are on the CPU device, the only one whose backward pass works without a GPU. If
torch uses memory differently on a GPU (attention, dropout, optimizers that work on lists), it does
so here too. Calls for `cuda` get fake tensors.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeGuard

import torch
import torch._VF
import torch.utils._foreach_utils
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.amp import autocast_mode
from torch.nn import functional
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.overrides import _get_current_function_mode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import _disable_current_modes

from ..trace.schema import Op
from . import autocast, cuda_calls, grouping, list_parts, module_moves, source_lines
from .cuda_calls import is_cuda
from .dispatch import FunctionMode
from .list_parts import Groups
from .scope import Scope

_Tensor = torch.Tensor
_attention: Any = functional.scaled_dot_product_attention
_dropped: Any = torch.dropout
_normed: Any = torch.rms_norm
_autograd: Any = torch.autograd
_Optimizer, _LOADED = torch.optim.Optimizer, "_process_value_according_to_param_policy"
_SavedHooks: Any = torch.autograd.graph.saved_tensors_hooks
# A list's parts take an eighth of the budget in a session: here, of a quarter of the lists.
_PARTS, _LEAST_PART = 32, 16 << 20
# Its package has a function of that name.
_DATA_PARALLEL = sys.modules[nn.DataParallel.__module__]
# Functions of modules that are imported late, and return None in a plan.
_LIBRARIES = (
    ("torch.nn.attention.flex_attention", "_validate_device"),  # the CPU has no backward pass
    ("torch.nn.attention.flex_attention", "_warn_once"),  # of eager ops
    # With fake tensors it assumes several texts in a row, which need a mask of all pairs of tokens.
    ("transformers.masking_utils", "find_packed_sequence_indices"),
)
# Functions that read data without an op, or need a plain tensor; all others call one.
_READERS: dict[Any, str] = {
    _Tensor.numpy: "numpy()",
    _Tensor.__array__: "__array__()",
    _Tensor.__format__: "format()",
}


@contextlib.contextmanager
def like_cuda(scope: Scope) -> Iterator[FakeTensorMode]:
    """Enter a fake tensor mode, with torch behaving as on a machine with a GPU."""
    with contextlib.ExitStack() as stack:
        ways = _LikeCuda(scope)
        autocast_init = stack.enter_context(autocast.of_cuda(scope))
        for owner, name, value in (
            *_replacements(ways),
            *cuda_calls.replacements(scope),
            (autocast_mode.autocast, "__init__", autocast_init),
            _resizing(scope),
        ):
            stack.enter_context(replaced(owner, name, value))
        grouping.add(_in_parts)
        stack.callback(grouping.remove, _in_parts)
        mode = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(ways)
        stack.callback(modules.register_module_forward_pre_hook(_of_libraries(stack)).remove)
        yield mode


def _replacements(ways: _LikeCuda) -> list[tuple[Any, str, Any]]:
    lists = torch.utils._foreach_utils
    types = [*optimizers._foreach_supported_types, FakeTensor]
    devices = [*lists._get_foreach_kernels_supported_devices(), "cpu"]
    return [
        (optimizers, "_foreach_supported_types", types),
        (optimizers, "_get_foreach_kernels_supported_devices", lambda: devices),
        (lists, "_foreach_supported_types", types),
        # Calls from torch's own functions do not pass the function mode a second time.
        (functional, "scaled_dot_product_attention", ways.attention),
        (torch._VF, "dropout", _dropout),
        (torch, "rms_norm", ways.rms_norm),
        # Nor do those of the program that torch calls back.
        (_autograd, "_engine_run_backward", ways.seen(_autograd._engine_run_backward)),
        (_Optimizer, _LOADED, ways.loaded(getattr(_Optimizer, _LOADED))),
        (_SavedHooks, "__init__", _seeing(_SavedHooks.__init__, ways)),
        (nn.Module, "_apply", module_moves.apply()),
        (nn.Module, "to", _to_host_first(nn.Module.to)),
        (torch, "save", ways.save),
        (nn.Module, "compile", lambda _self, *_args, **_kwargs: None),
        (torch, "compile", _uncompiled),
        # It asks for values, which fake tensors make up.
        (torch.distributions.Distribution, "_validate_args", False),
        # It calls its model directly, as with one GPU; parameters report the CPU.
        (_DATA_PARALLEL, "_get_available_device_type", _nothing),
    ]


def _of_libraries(stack: contextlib.ExitStack) -> Callable[[object, object], None]:
    """Return a hook that replaces what the program has imported since, before it is used."""
    left = list(_LIBRARIES)

    def look(_module: object, _args: object) -> None:
        for library, name in [each for each in left if each[0] in sys.modules]:
            left.remove((library, name))
            if hasattr(owner := sys.modules[library], name):
                stack.enter_context(replaced(owner, name, _nothing))

    return look


def _nothing(*_args: object, **_kwargs: object) -> None:
    pass


def _resizing(scope: Scope) -> tuple[Any, str, Any]:
    """Return a `resize_` of storages that tells the tracer: FSDP frees memory so, without an op."""
    resize: Any = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, *args: Any) -> Any:
        result = resize(storage, *args)
        scope.tracer.resized(storage)
        return result

    return torch.UntypedStorage, "resize_", resized


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Change the value of an attribute within the context."""
    # vars() gives a class method itself; getattr would bind it to this class.
    before = vars(owner)[name] if name in vars(owner) else getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _in_parts(groups: Groups) -> Groups:
    """Return lists in parts, as in a session whose memory does not fit the budget.

    Their size depends on the budget, and a plan may be for several.
    """
    whole = sum(sum(list_parts.row_bytes(lists)) for lists, _ in groups.values())
    most = max(whole // _PARTS, _LEAST_PART)
    return list_parts.in_parts(groups, lambda _: most)


def _has_place(value: object) -> TypeGuard[_Tensor]:
    """Return whether it is a tensor of one storage."""
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and not is_functorch_wrapped_tensor(value)
    )


def _to_host_first(move: Any) -> Callable[..., Any]:
    """Return a `Module.to` that knows "cpu" and a GPU's number; torch makes devices of both."""

    def to(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        place = kwargs.get("device", args[0] if args else None)
        if isinstance(place, int) and not isinstance(place, bool):
            return move(module, *_with_device(args, kwargs, f"cuda:{place}"), **kwargs)
        if isinstance(place, str) and place.partition(":")[0] == "cpu":
            module.cpu()
            return move(module, *_with_device(args, kwargs, None), **kwargs)
        return move(module, *args, **kwargs)

    return to


def _with_device(
    args: tuple[Any, ...], kwargs: dict[str, Any], device: str | None
) -> tuple[Any, ...]:
    """Replace the device in the arguments of a `to`; those with names are changed themselves."""
    if "device" in kwargs:
        kwargs["device"] = device
        return args
    return (device, *args[1:])


def _seeing(init: Any, ways: _LikeCuda) -> Callable[..., None]:
    def seeing(hooks: Any, pack_hook: Any, unpack_hook: Any) -> None:
        init(hooks, ways.seen(pack_hook), ways.seen(unpack_hook))

    return seeing


def _uncompiled(model: Any = None, **_options: Any) -> Any:
    """Return the model as it is: fused kernels cannot be seen, so eager ops are planned."""
    return (lambda function: function) if model is None else model


class _LikeCuda(FunctionMode):
    """A mode that calls what a GPU would run, and answers `cuda` with the fake tensors."""

    def __init__(self, scope: Scope) -> None:
        super().__init__()
        self._scope = scope
        self._to_host = False  # where a tensor's `device` is
        self._ways: dict[Any, Callable[..., Any]] = {
            _dropped: _dropout,
            _attention: self.attention,
            _normed: self.rms_norm,
            _Tensor.cuda: self._cuda,
            _Tensor.cpu: self._cpu,
            _Tensor.to: self._to,
            _Tensor.type_as: lambda tensor, other: self._to(tensor, other),
            _Tensor.pin_memory: lambda tensor, *_args, **_kwargs: tensor,
            **{reader: self._reader(reader, name) for reader, name in _READERS.items()},
        }

    def call(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Call `func`, or what runs in its place on a GPU."""
        way = self._ways.get(func) if callable(func) else None
        if way is not None:
            return way(*args, **named)
        device, constructs = named.get("device"), func in _device_constructors()
        if device is None and self._scope.default_cuda and constructs:
            device = "cuda"
        self._scope.asked_for_cuda |= is_cuda(device)
        # A fake tensor reports the CPU, so `device=x.device` means the place of x.
        on_device = self._scope.asked_for_cuda and (
            is_cuda(device) or isinstance(device, torch.device)
        )
        if on_device:
            named["device"] = torch.device("cpu")
        elif not constructs:
            return func(*args, **named)
        with self._scope.tracer.making(on_device):
            return func(*args, **named)

    def seen(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose own calls are seen, where torch has left the mode."""

        def called(*args: Any, **kwargs: Any) -> Any:
            inside = contextlib.nullcontext() if _get_current_function_mode() is self else self
            with inside:
                return function(*args, **kwargs)

        return called

    def _cuda(self, tensor: _Tensor, *_args: Any, **_kwargs: Any) -> _Tensor:
        self._scope.asked_for_cuda = True
        return self._moved(tensor, on_host=False)

    def _cpu(self, tensor: _Tensor, *_args: Any, **_kwargs: Any) -> _Tensor:
        return self._moved(tensor, on_host=True) if self._scope.asked_for_cuda else tensor

    def _to(self, tensor: _Tensor, *args: Any, **kwargs: Any) -> _Tensor:
        place = kwargs.get("device", args[0] if args else None)
        if is_cuda(place):
            moved = self._cuda(tensor)
        elif isinstance(place, str):
            moved = self._cpu(tensor)
        else:  # a dtype, another tensor, or its `device`, which is the CPU's in any case
            if self._scope.asked_for_cuda and isinstance(place, torch.device):
                tensor = self._moved(tensor, on_host=self._to_host)
            elif self._scope.asked_for_cuda and _has_place(place):
                tensor = self._moved(tensor, on_host=self._is_on_host(place))
            return tensor.to(*args, **kwargs)
        rest = args if "device" in kwargs else args[1:]
        kwargs = {key: value for key, value in kwargs.items() if key != "device"}
        return moved.to(torch.device("cpu"), *rest, **kwargs)

    def _moved(self, tensor: _Tensor, on_host: bool) -> _Tensor:
        """Return a copy on the other side; the tensor itself if it is there already."""
        if is_functorch_wrapped_tensor(tensor):
            return tensor
        if tensor.layout is torch.sparse_coo:
            return self._sparse_moved(tensor, on_host)
        if self._is_on_host(tensor) == on_host:
            return tensor
        tracer = self._scope.tracer
        copy = tensor.clone()
        tracer.on_host(copy, on_host)
        tracer.tag(copy, tracer.recording.blocks[tracer.block(tensor)].tag)
        return copy

    def _is_on_host(self, tensor: _Tensor) -> bool:
        tracer = self._scope.tracer
        return tracer.recording.blocks[tracer.block(tensor)].on_host

    def _sparse_moved(self, tensor: _Tensor, on_host: bool) -> _Tensor:
        before = tensor._indices(), tensor._values()
        places, values = (self._moved(part, on_host) for part in before)
        if tensor.requires_grad or (places is before[0] and values is before[1]):
            return tensor  # its parts have no gradients
        return torch.sparse_coo_tensor(
            places, values, tensor.shape, is_coalesced=tensor.is_coalesced(),
            check_invariants=False,
        )  # fmt: skip

    def loaded(self, process: Any) -> Any:
        """Return the function that takes an optimizer's loaded state: to its parameter's side."""

        def processed(parameter: _Tensor, *args: Any, **kwargs: Any) -> Any:
            before = self._to_host
            self._to_host = self._is_on_host(parameter)
            try:
                return process(parameter, *args, **kwargs)
            finally:
                self._to_host = before

        return staticmethod(processed)

    def attention(self, *args: Any, **kwargs: Any) -> _Tensor:
        """Run a kernel that writes no scores: kernels of GPUs apply dropout and masks inside."""
        names = ("query", "key", "value", "attn_mask", "dropout_p")
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        for name, value in zip(("is_causal",), args[5:], strict=False):
            named[name] = value
        named["dropout_p"] = 0.0
        bias = named.get("attn_mask")
        if isinstance(bias, torch.Tensor):
            named["attn_mask"] = bias.detach()
            if bias.requires_grad and torch.is_grad_enabled():
                query, key = named["query"], named["key"]
                scores = (*query.shape[:-1], key.shape[-2])
                named["query"] = _biased(query, bias, scores)
        events = self._scope.tracer.recording.events
        begin = len(events)
        with _one_kernel():
            out: _Tensor = _attention(**named)
        ops = (event for event in events[begin:] if isinstance(event, Op))
        if not any("attention" in op.name for op in ops):
            self._scope.tracer.remark(
                f"{source_lines.here()}: attention writes all its scores; a GPU may have a kernel "
                "for these shapes that does not"
            )
        return out

    def save(self, *_args: object, **_kwargs: object) -> None:
        """Write nothing: a checkpoint would have no data, in the place of one that has."""
        self._scope.tracer.remark("torch.save wrote nothing: the tensors of a plan have no data")

    def rms_norm(self, *args: Any, **kwargs: Any) -> _Tensor:
        """Run the separate ops: a GPU has one kernel for them, which fake tensors lack."""
        self._scope.tracer.remark(
            "RMSNorm is planned as its separate ops; on a GPU one kernel keeps fewer activations"
        )
        out: _Tensor = _normed(*args, **kwargs)
        return out

    def _reader(self, reader: Callable[..., Any], name: str) -> Callable[..., Any]:
        def read(tensor: _Tensor, *args: Any, **kwargs: Any) -> Any:
            if isinstance(tensor, FakeTensor) and args != ("",):  # that is `str`, of any tensor
                if not self._scope.tracer.constants:
                    raise source_lines.reads_data(f"tensor.{name}")
                with _disable_current_modes():
                    return reader(torch.zeros(tensor.shape, dtype=tensor.dtype), *args, **kwargs)
            return reader(tensor, *args, **kwargs)

        return read


@contextlib.contextmanager
def _one_kernel() -> Iterator[None]:
    """Let the CPU's only fused kernel stand for those of a GPU that the program allows."""
    cuda = torch.backends.cuda
    before = cuda.flash_sdp_enabled()
    cuda.enable_flash_sdp(before or cuda.mem_efficient_sdp_enabled() or cuda.cudnn_sdp_enabled())
    try:
        yield
    finally:
        cuda.enable_flash_sdp(before)


class _Biased(torch.autograd.Function):
    """Gives a trained mask of attention its gradient, which a GPU writes for all scores."""

    @staticmethod
    def forward(ctx: Any, query: _Tensor, bias: _Tensor, scores: tuple[int, ...]) -> _Tensor:
        ctx.bias, ctx.scores, ctx.dtype = bias.shape, scores, bias.dtype
        return query.view_as(query)

    @staticmethod
    def backward(ctx: Any, *grads: _Tensor) -> Any:
        of_scores = grads[0].new_empty(ctx.scores, dtype=ctx.dtype)
        return grads[0], of_scores.sum_to_size(ctx.bias), None


_biased: Any = _Biased.apply


def _dropout(input: _Tensor, p: float, train: bool) -> _Tensor:  # noqa: A002 - torch's names
    """Run dropout with a mask of one byte per element."""
    if not train or not 0 < p < 1:
        dropped: _Tensor = _dropped(input, p, train)
        return dropped
    return torch.native_dropout(input, p, train)[0]
