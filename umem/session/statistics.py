"""The statistics of the native core, for the program and for one device."""

from __future__ import annotations

from numbers import Integral
from typing import TYPE_CHECKING

from ..base.stats import Stats
from ..errors import ConfigError

if TYPE_CHECKING:
    import torch


def stats(device: int | torch.device | str | None = None) -> Stats:
    """Return umem's present statistics; all zero before the first `enable`.

    Args:
        device: a device as torch names it, such as 1 or "cuda:1"; None: the sum over all devices.
            `steps` and `plans_rolled_back` always count for the whole program.

    Raises:
        ConfigError: umem serves no such device.
        NotSupportedError: the native core is not installed.
    """
    from ..base.native import core

    return Stats(**core.stats(None if device is None else _ordinal(device)))


def _ordinal(device: int | torch.device | str) -> int:
    """Return the number of a device; the software device, torch's cpu, has number 0."""
    from ..base.native import core

    refused = f"umem.stats({device!r}): allowed: a number, or a device as torch names it (cuda:1)"
    if isinstance(device, Integral) and not isinstance(device, bool):
        if not 0 <= (ordinal := int(device)) < 1 << 16:
            raise ConfigError(refused)
        return ordinal
    import torch

    if not isinstance(device, (str, torch.device)):
        raise ConfigError(refused)
    try:
        named = torch.device(device)
    except RuntimeError:
        raise ConfigError(refused) from None
    served = "cpu" if core.current_options().device == "soft" else "cuda"
    if named.type != served:
        raise ConfigError(f"umem.stats({device!r}): umem serves torch's device {served}")
    if named.index is None and served == "cuda":
        return int(torch.cuda.current_device()) if torch.cuda.is_initialized() else 0
    return int(named.index or 0)


def reset_peak_stats() -> None:
    """Reset the `peak_` statistics to the present values."""
    from ..base.native import core

    core.reset_peak_stats()
