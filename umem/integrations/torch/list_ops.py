"""Ops on lists of tensors, split into parts of which several fit into the budget together.

The foreach and fused forms of optimizers, torch's default on a GPU, gradient clipping, weight
averaging and the gradient scaler pass all tensors of a device and dtype to one op, which needs
them on the device simultaneously. Each tensor's result depends only on its own row of the lists,
so results are bit-identical; lists whose rows share memory are not split. Adafactor joins the parts
into one list again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...base.native import core
from ...base.replaced import Replaced
from ...capture import grouping
from ...capture.list_parts import Groups, have_shared_rows, in_parts, parts

# Parts per budget: one is computed while the next one arrives and the last one leaves.
_SHARE = 8


class ListOps:
    """Splits torch's lists between its construction and `remove`, once not all memory fits.

    Args:
        device: torch's type of umem's devices: "cpu" or "cuda".
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._split: set[int] = set()  # devices on which more was live than fits
        grouping.add(self._grouped)
        self._replaced = Replaced(
            torch, "_amp_foreach_non_finite_check_and_unscale_", self._unscaled
        )

    def remove(self) -> None:
        """Restore torch's functions."""
        grouping.remove(self._grouped)
        self._replaced.remove()

    def _grouped(self, groups: Groups) -> Groups:
        split = in_parts(groups, self._most)
        return groups if split is not groups and have_shared_rows(groups) else split

    def _unscaled(
        self, unscale: Any, grads: list[Tensor], found_inf: Tensor, scale: Tensor
    ) -> None:
        whole = torch.compiler.is_compiling() or not grads
        most = 0 if whole else self._most(grads[0].device)
        for (part,), _ in parts(([[*grads]], []), most):
            unscale(part, found_inf, scale)

    def _most(self, device: torch.device) -> int:
        """Return the bytes of a part on this device; 0: lists are not split."""
        if device.type != self._device:
            return 0
        index = device.index or 0
        figures = core.stats(index)
        budget = figures["budget_bytes"]
        if index not in self._split and figures["peak_live_bytes"] > budget > 0:
            self._split.add(index)  # permanent: every step should run the same ops
        return budget // _SHARE if index in self._split else 0
