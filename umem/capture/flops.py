"""The cost of an op on any device: floating-point operations and bytes moved.

The formulas of matrix products, convolutions and attention are those of torch.utils.flop_counter,
with additions here. All other ops count as bound by memory, with no operations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import flop_counter

aten = torch.ops.aten
_attention: Any = flop_counter.sdpa_flop_count
_attention_backward: Any = flop_counter.sdpa_backward_flop_count

# Ops that read some rows of a table, as many bytes as they write.
_GATHERS = {"embedding", "index_select", "gather", "index", "take_along_dim"}
# Ops that read the rows of a table that the second operand names.
_BAGS = {"_embedding_bag", "_embedding_bag_forward_only"}
# Ops that write some elements of a large tensor: the new values are read, and written to them.
_SCATTERS = {"index_add_", "index_copy_", "scatter_", "scatter_add_", "index_put_", "index_fill_"}
_PRODUCTS = {"conv", "linear", "attention"}


def flops_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> float:
    """Return the floating-point operations of a call; a product and a sum count as two."""
    packet = getattr(func, "_overloadpacket", func)
    formula = _FORMULAS.get(packet)
    if formula is None:
        formula = flop_counter.flop_registry.get(packet)
        if formula is None:
            return 0.0
        return float(formula(*args, **kwargs, out_val=out))
    return float(formula(args, out))


def bytes_of(name: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> int:
    """Return the bytes that an op moves between memory and cores: each operand once.

    Args:
        name: the op's name without namespace.
        reads, writes: its operands, of any view; an operand in both is read and written.
    """
    read, written = [*map(_touched, reads)], sum(map(_touched, writes))
    if name in _GATHERS:
        return 2 * written
    if name in _BAGS:
        table, rows = reads[:2]
        row = read[0] // len(table)
        return int(rows.numel()) * row + sum(read[1:]) + written
    if name in _SCATTERS:
        return 2 * (sum(read) - max(read, default=0))
    return sum(read) + written


def precision_of(family: str, tensors: Sequence[torch.Tensor]) -> str:
    """Return the peak of the device that applies to the op: half, tf32, fp32 or fp64.

    As in torch, `torch.backends.cudnn.conv.fp32_precision` (on by default) selects TF32 for
    convolutions, and `torch.backends.cuda.matmul.fp32_precision` (off by default) for matrix
    products, as do the older `allow_tf32` and `torch.set_float32_matmul_precision`.
    """
    dtype = next((t.dtype for t in tensors if t.dtype.is_floating_point), torch.float32)
    if dtype.itemsize <= 2:
        return "half"
    if dtype == torch.float64:
        return "fp64"
    if family not in _PRODUCTS:
        return "fp32"
    # The older queries raise once a program has used the newer settings.
    chosen = torch._C._get_fp32_precision_getter("cuda", "conv" if family == "conv" else "matmul")
    return "fp32" if chosen in ("none", "ieee") else "tf32"


def _touched(tensor: torch.Tensor) -> int:
    """Return the tensor's bytes in memory, where an expanded dimension counts once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(size for size, stride in sizes if stride) * tensor.itemsize


def _flash(args: Sequence[Any], _out: Any) -> int:
    q, k, v = (tensor.shape for tensor in args[:3])
    return int(_attention(q, _repeated(q, k), _repeated(q, v)))


def _flash_backward(args: Sequence[Any], _out: Any) -> int:
    grad, q, k, v = (tensor.shape for tensor in args[:4])
    return int(_attention_backward(grad, q, _repeated(q, k), _repeated(q, v)))


def _repeated(q: torch.Size, shared: torch.Size) -> torch.Size:
    """Return the shape of keys or values as if no group of query heads shared them."""
    return torch.Size((*q[:2], *shared[2:]))


def _rnn_layer(args: Sequence[Any], _out: Any) -> int:
    steps = args[0].shape[0] * args[0].shape[1]
    weights: int = args[1].numel() + args[2].numel()
    return 2 * int(steps) * weights


def _rnn_layer_backward(args: Sequence[Any], out: Any) -> int:
    return 2 * _rnn_layer(args, out)


def _grouped(args: Sequence[Any], out: Any) -> int:
    """Return those of a mixture of experts: each row is multiplied by one expert's matrix."""
    left, right = args[:2]
    if left.dim() == 3 and right.dim() == 2:  # each column, by one expert's matrix
        return 2 * int(out.numel()) * int(left.shape[-1])
    return 2 * int(left.numel()) * int(out.shape[-1])


def _convolution_backward(args: Sequence[Any], _out: Any) -> int:
    """Return those of the gradients of input and weight; torch's formula ignores groups."""
    out, given, weight = (tensor.shape for tensor in args[:3])
    transposed, wanted = args[7], args[-1]
    one = flop_counter.conv_flop_count(given, weight, out, transposed)
    return int(one * sum(wanted[:2]))


_FORMULAS = {
    aten.convolution_backward: _convolution_backward,
    aten._grouped_mm: _grouped,
    aten._scaled_dot_product_flash_attention_for_cpu: _flash,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _flash_backward,
    aten.mkldnn_rnn_layer: _rnn_layer,
    aten.mkldnn_rnn_layer_backward: _rnn_layer_backward,
}
