"""Autocast of CUDA on CPU tensors: the two devices compute other operators in float32.

On the CPU, autocast leaves softmax, norms, sums and powers in half precision. A GPU computes them
in float32, and their results and saved inputs take twice the memory. The lists are those of
`aten/src/ATen/autocast_mode.h`, without the operators that both devices treat alike and those that
are made of others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.amp import autocast_mode
from torch.utils import _pytree as pytree

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

_KEY = "AutocastCPU"
_BELOW = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
_Kernel = Callable[..., Any]


@contextlib.contextmanager
def of_cuda() -> Iterator[Callable[..., None]]:
    """Give `torch.autocast` an `__init__` that casts CPU tensors, as a GPU's are, for "cuda"."""
    init: Any = autocast_mode.autocast.__init__
    library: Any = torch.library.Library("aten", "IMPL", _KEY)  # type: ignore[no-untyped-call]
    registered = False

    def register() -> None:
        nonlocal registered
        if not registered:
            registered = True
            for names, kernel in (
                (FLOAT32, _in_float32), (RESULT_FLOAT32, _to_float32), (WIDEST, _in_widest),
            ):  # fmt: skip
                for name in names:
                    library.impl(name, kernel(_overload(name)))

    def begin(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            register()
            if not args and kwargs.get("dtype") is None:
                kwargs["dtype"] = torch.get_autocast_dtype("cuda")
            device_type = "cpu"
        init(self, device_type, *args, **kwargs)

    try:
        yield begin
    finally:
        library._destroy()


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


def _in_float32(op: Any) -> _Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_BELOW):
            return op(*_cast(args, torch.float32), **_cast(kwargs, torch.float32))

    return kernel


def _to_float32(op: Any) -> _Kernel:
    names = [argument.name for argument in op._schema.arguments]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        if _is_cast(args[0]) and given.get("dtype") is None:
            given["dtype"] = torch.float32
        with torch._C._ExcludeDispatchKeyGuard(_BELOW):
            return op(**given)

    return kernel


def _in_widest(op: Any) -> _Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        types = {leaf.dtype for leaf in pytree.tree_leaves((args, kwargs)) if _is_cast(leaf)}
        wide = torch.float32 if torch.float32 in types else next(iter(types), torch.float32)
        with torch._C._ExcludeDispatchKeyGuard(_BELOW):
            return op(*_cast(args, wide), **_cast(kwargs, wide))

    return kernel
