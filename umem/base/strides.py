"""Strided layouts, in elements."""

from __future__ import annotations

from collections.abc import Sequence


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether the elements fill the memory from first to last, and each is there once.

    After `expand` or `unfold` some are there twice.
    """
    inner = 1  # elements of the dimensions with smaller strides
    for step, n in sorted(zip(stride, shape, strict=True)):
        if n != 1:
            if step != inner:
                return False
            inner *= n
    return True
