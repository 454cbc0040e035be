"""``umem doctor --measure`` with a GPU: the rates of its link."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..base.units import MIB
from ..errors import NotSupportedError
from ..integrations.torch.version import require_torch
from ..session import session

BYTES = 256 * MIB  # of a copy
_COPIES = 8  # each way
_IN, _OUT = 0, 1  # to the device, from it


def measure() -> dict[str, Any]:
    """Measure how fast torch's current GPU exchanges bytes with pinned host memory.

    The backing `mapped` moves memory at these rates; managed memory leaves a GPU more slowly. Takes
    256 MiB of the GPU for each direction, as much of the host, and less than a second on PCIe 4.

    Returns:
        The GPU's name, the rates in GB/s (1e9) alone and of both directions at the same time, and
        the option `--link` for that.

    Raises:
        NotSupportedError: torch cannot use a GPU, memory for the copies is short, or umem is on.
    """
    require_torch()
    import torch

    if not torch.cuda.is_available():
        raise NotSupportedError("the link is not measured: this torch cannot use a GPU")
    if session.is_enabled():  # the copies would be of its memory
        raise NotSupportedError("the link is not measured: umem is on; unset UMEM")
    try:
        buffers = [
            (torch.empty(BYTES, dtype=torch.uint8, pin_memory=True),
             torch.empty(BYTES, dtype=torch.uint8, device="cuda"))
            for _ in (_IN, _OUT)
        ]  # fmt: skip
        _rates(buffers, [_IN, _OUT])  # the first ones are slower
        alone = [_rates(buffers, [way])[0] for way in (_IN, _OUT)]
        both = _rates(buffers, [_IN, _OUT])
    except RuntimeError as error:  # torch's out of memory, of the device or of pinned memory
        reason = str(error).splitlines()[0]
        raise NotSupportedError(f"the link is not measured: {reason}") from error
    return {
        "gpu": torch.cuda.get_device_name(),
        "in_gb_s": float(f"{alone[_IN]:.3g}"),
        "out_gb_s": float(f"{alone[_OUT]:.3g}"),
        "in_beside_out_gb_s": float(f"{both[_IN]:.3g}"),
        "out_beside_in_gb_s": float(f"{both[_OUT]:.3g}"),
        "link": f"--link {both[_IN]:.3g},{both[_OUT]:.3g}",
    }


def _rates(buffers: Sequence[Any], ways: Sequence[int]) -> list[float]:
    """Return the GB/s of copies in these directions at the same time, by events after each.

    Copies that end once one of the directions has no more do not count.
    """
    import torch

    cuda: Any = torch.cuda  # parts of it have no types
    streams = [cuda.Stream() for _ in ways]
    events = [[cuda.Event(enable_timing=True) for _ in range(_COPIES + 1)] for _ in ways]
    cuda.synchronize()
    for number in range(_COPIES + 1):
        for way, stream, ends in zip(ways, streams, events, strict=True):
            host, device = buffers[way]
            with cuda.stream(stream):
                if number > 0 and way == _IN:
                    device.copy_(host, non_blocking=True)
                elif number > 0:
                    host.copy_(device, non_blocking=True)
            ends[number].record(stream)
    cuda.synchronize()
    ends_ms = [[ends[0].elapsed_time(end) for end in ends[1:]] for ends in events]
    until = min(ends[-1] for ends in ends_ms)
    rates = []
    for ends in ends_ms:
        copies = max(sum(end <= until for end in ends), 1)
        rates.append(copies * BYTES / ends[copies - 1] / 1e6)
    return rates
