"""A model of weights in 4 bits: the bytes that bitsandbytes' NF4 layers hold and move.

bitsandbytes has no kernels for fake tensors. Each weight here is one buffer of bytes: half a byte
a number, and the scales of each 64 numbers, themselves in 8 bits ("double quantization"). A layer
expands its weight to bfloat16 before the product, and again in backward, and returns the precision
of its input.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

_BLOCK = 64  # numbers with one scale of a byte
_SCALES = 256  # scales with one scale of 4 bytes


class _Product(torch.autograd.Function):
    """A product with a weight that exists while it is used only."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, shape: tuple[int, int]
    ) -> torch.Tensor:
        ctx.save_for_backward(weight)
        ctx.shape = shape
        return functional.linear(x, _expanded(weight, shape))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return grad @ _expanded(weight, ctx.shape), None, None


class NF4Linear(nn.Linear):
    """A linear layer whose weight takes about half a byte a number."""

    bias: nn.Parameter | None  # type: ignore[assignment]

    def __init__(self, inputs: int, outputs: int, bias: nn.Parameter | None) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = inputs, outputs
        count = inputs * outputs
        scales = -(-count // _BLOCK)
        size = -(-count // 2) + scales + 4 * -(-scales // _SCALES)
        self.weight = nn.Parameter(torch.empty(size, dtype=torch.uint8), requires_grad=False)
        self.bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product, with the bias added."""
        shape = self.out_features, self.in_features
        product: Any = _Product.apply
        out: torch.Tensor = product(x.bfloat16(), self.weight, shape)
        return (out if self.bias is None else out + self.bias.bfloat16()).to(x.dtype)


def quantize(model: nn.Module, name: str) -> None:
    """Replace a linear layer of the model by one in 4 bits."""
    part: Any = model.get_submodule(name)
    inputs, outputs = part.weight.shape[::-1]
    if type(part).__name__ == "Conv1D":  # of transformers, whose weight is transposed
        inputs, outputs = outputs, inputs
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, NF4Linear(inputs, outputs, part.bias))


def _expanded(weight: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Return the weight in full; one op, as the kernel that does it."""
    half = -(-shape[0] * shape[1] // 2)
    full = weight.new_empty((half, 2), dtype=torch.bfloat16)
    full.copy_(weight[:half].unsqueeze(1).expand(half, 2))
    return full.view(-1)[: shape[0] * shape[1]].view(shape)
