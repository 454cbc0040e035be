"""Ops on lists of tensors, given their tensors in parts that fit into the budget side by side.

The foreach and fused forms of optimizers, which torch takes by itself on a GPU, gradient clipping,
the averaging of weights and the gradient scaler pass all tensors of a device and dtype to one op,
which needs them on the device at once. Each tensor's result depends on its own row of the lists
only, so the bits are the same; lists in which rows share memory stay whole. Adafactor makes one
list of the parts again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...base.native import core
from ...capture import grouping
from ...capture.list_parts import Groups, have_shared_rows, in_parts, parts

# Of the budget: a part is computed on, while the next one comes and the last one goes.
_SHARE = 8


class ListOps:
    """Splits torch's lists from its construction until `remove`, once not all memory fits.

    Args:
        device: the type of the devices that umem has, of torch: "cpu" or "cuda".
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._split: set[int] = set()  # the devices on which more was alive than fits
        self._unscale: Any = torch._amp_foreach_non_finite_check_and_unscale_
        grouping.add(self._grouped)
        setattr(torch, self._unscale.__name__, self._unscaled)

    def remove(self) -> None:
        """Give torch its own functions back."""
        grouping.remove(self._grouped)
        setattr(torch, self._unscale.__name__, self._unscale)

    def _grouped(self, groups: Groups) -> Groups:
        split = in_parts(groups, self._most)
        return groups if split is not groups and have_shared_rows(groups) else split

    def _unscaled(self, grads: list[Tensor], found_inf: Tensor, scale: Tensor) -> None:
        whole = torch.compiler.is_compiling() or not grads
        most = 0 if whole else self._most(grads[0].device)
        for (part,), _ in parts(([[*grads]], []), most):
            self._unscale(part, found_inf, scale)

    def _most(self, device: torch.device) -> int:
        """Return the bytes of a part on this device; 0: what is there fits as it is."""
        if device.type != self._device:
            return 0
        index = device.index or 0
        budget = next((m["budget_bytes"] for m in core.device_memory() if m["device"] == index), 0)
        if index not in self._split and core.stats()["peak_live_bytes"] > budget > 0:
            self._split.add(index)  # for good: a step's ops should be those of the last one
        return budget // _SHARE if index in self._split else 0
