"""Autocast of CUDA on CPU tensors: the lists of operators that are cast differ between the devices.

On the CPU, autocast leaves softmax, norms, sums and powers in half precision. A GPU computes them
in float32, and their results and saved inputs take twice the memory. Pools and paddings are the
other way round. The lists are those of `aten/src/ATen/autocast_mode.h` and `autocast_mode.cpp`,
without the operators that both devices treat alike, that are made of others, or that have no half
precision on a GPU.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.amp import autocast_mode
from torch.utils import _pytree as pytree

from .scope import Scope

# Operators whose inputs become float32.
FLOAT32 = (
    "acos", "asin", "cosh", "cosine_similarity", "dist", "erfinv", "exp", "expm1", "group_norm",
    "layer_norm", "log", "log10", "log1p", "log2", "logsumexp", "native_layer_norm", "pdist",
    "pow.Scalar", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "reciprocal", "renorm", "rms_norm",
    "rsqrt", "sinh", "softplus", "tan", "upsample_bicubic2d", "upsample_bilinear2d",
    "upsample_linear1d", "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d",
    "upsample_trilinear3d", "_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa",
    "_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d",
)  # fmt: skip
# Those that compute in float32 by their argument `dtype`, unless the program gives one.
RESULT_FLOAT32 = (
    "cumprod", "cumsum", "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "linalg_vector_norm",
    "log_softmax.int", "softmax.int", "sum", "sum.dim_IntList",
)  # fmt: skip
# Those whose inputs become the widest type among them, and which need equal types.
WIDEST = ("bilinear", "cross", "dot", "index_put", "scatter_add", "tensordot", "vdot")
# Those whose inputs become half precision.
HALF = ("addmv", "addr", "chain_matmul", "gru_cell", "linalg_multi_dot", "lstm_cell", "mv",
        "rnn_relu_cell", "rnn_tanh_cell")  # fmt: skip
# Those that only the CPU computes in float32.
AS_GIVEN = (
    "adaptive_avg_pool3d", "adaptive_max_pool3d", "avg_pool3d", "fractional_max_pool2d",
    "fractional_max_pool3d", "max_pool3d", "max_unpool2d", "max_unpool3d", "reflection_pad1d",
    "reflection_pad2d", "replication_pad1d", "replication_pad2d", "replication_pad3d", "trace",
)  # fmt: skip

_BELOW = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
_Call = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


@contextlib.contextmanager
def of_cuda(scope: Scope) -> Iterator[Callable[..., None]]:
    """Give `torch.autocast` an `__init__` under which CPU tensors are cast as those of a GPU.

    The CPU's lists hold until the program makes a context for "cuda" that casts. In a program that
    has asked for a GPU one for "cpu" is such a context too: tensors report the CPU, so that
    `torch.autocast(x.device.type)` names it. `torch.utils.checkpoint` enters both.
    """
    init: Any = autocast_mode.autocast.__init__
    library: Any = torch.library.Library("aten", "IMPL", "AutocastCPU")
    registered = False

    def register() -> None:
        nonlocal registered
        if registered:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # kernels of AS_GIVEN take the place of the CPU's
            for names, call in _CALLS:
                for name in names:
                    if call is _as_given or _is_cast_on_cuda(name):
                        library.impl(name, _kernel(_overload(name), call))
        registered = True

    def begin(
        self: Any, device_type: str, dtype: torch.dtype | None = None, enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:  # fmt: skip
        is_cuda = device_type == "cuda"
        if enabled and (is_cuda or (device_type == "cpu" and scope.asked_for_cuda)):
            register()
        if is_cuda and dtype is None:
            dtype = torch.get_autocast_dtype("cuda")
        init(self, "cpu" if is_cuda else device_type, dtype, enabled, cache_enabled)

    try:
        yield begin
    finally:
        library._destroy()


def _kernel(op: Any, call: _Call) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_BELOW):
            return call(op, args, kwargs)

    return kernel


def _is_cast_on_cuda(name: str) -> bool:
    """Return whether this torch casts the operator; older ones have shorter lists."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCUDA"))


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _is_cast(value: object) -> bool:
    """Return whether autocast changes the type of a value: floating tensors, but for float64."""
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.dtype != torch.float64
    )


def _cast(values: Any, dtype: torch.dtype) -> Any:
    return pytree.tree_map_only(
        torch.Tensor, lambda tensor: tensor.to(dtype) if _is_cast(tensor) else tensor, values
    )


def _in_float32(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return op(*_cast(args, torch.float32), **_cast(kwargs, torch.float32))


def _to_float32(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = [argument.name for argument in op._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    if _is_cast(args[0]) and given.get("dtype") is None:
        given["dtype"] = torch.float32
    return op(**given)


def _in_widest(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    types = {leaf.dtype for leaf in pytree.tree_leaves((args, kwargs)) if _is_cast(leaf)}
    as_it_is = torch.float32 not in types
    return op(*args, **kwargs) if as_it_is else _in_float32(op, args, kwargs)


def _in_half(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    half = torch.get_autocast_dtype("cpu")  # that of the context
    return op(*_cast(args, half), **_cast(kwargs, half))


def _as_given(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return op(*args, **kwargs)


_CALLS: tuple[tuple[tuple[str, ...], _Call], ...] = (
    (FLOAT32, _in_float32), (RESULT_FLOAT32, _to_float32), (WIDEST, _in_widest), (HALF, _in_half),
    (AS_GIVEN, _as_given),
)  # fmt: skip
