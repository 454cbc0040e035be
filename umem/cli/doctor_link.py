"""``umem doctor --measure`` with a GPU: the rates of its link."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..base.units import MIB
from ..errors import NotSupportedError
from ..integrations.torch.version import require_torch

BYTES = 256 * MIB  # of a copy
_COPIES = 8  # each way
_IN, _OUT = 0, 1  # to the device, from it


def measure() -> dict[str, Any]:
    """Measure how fast torch's current GPU exchanges bytes with pinned host memory.

    The backing `mapped` moves memory so; managed memory leaves a GPU more slowly. Takes 256 MiB of
    the GPU for each direction, as much of the host, and less than a second on a link of PCIe 4.

    Returns:
        The GPU's name, the rates in GB/s (1e9) alone and of both directions at the same time, and
        the option `--link` for that.

    Raises:
        NotSupportedError: torch cannot use a GPU, or memory for the copies is short.
    """
    require_torch()
    import torch

    if not torch.cuda.is_available():
        raise NotSupportedError("the link is not measured: this torch cannot use a GPU")
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
        raise NotSupportedError(
            f"the link is not measured: {reason}; end other programs on the GPU"
        ) from error
    return {
        "gpu": torch.cuda.get_device_name(),
        "in_gb_s": float(f"{alone[_IN]:.3g}"),
        "out_gb_s": float(f"{alone[_OUT]:.3g}"),
        "in_beside_out_gb_s": float(f"{both[_IN]:.3g}"),
        "out_beside_in_gb_s": float(f"{both[_OUT]:.3g}"),
        "link": f"--link {both[_IN]:.3g},{both[_OUT]:.3g}",
    }


def _rates(buffers: Sequence[Any], ways: Sequence[int]) -> list[float]:
    """Return the GB/s of copies in these directions at the same time, by events around them."""
    import torch

    cuda: Any = torch.cuda  # parts of it have no types
    streams = [cuda.Stream() for _ in ways]
    events = [[cuda.Event(enable_timing=True) for _ in range(2)] for _ in ways]
    cuda.synchronize()
    for number in range(_COPIES):
        for way, stream, (begin, end) in zip(ways, streams, events, strict=True):
            host, device = buffers[way]
            if number == 0:
                begin.record(stream)
            with cuda.stream(stream):
                if way == _IN:
                    device.copy_(host, non_blocking=True)
                else:
                    host.copy_(device, non_blocking=True)
            end.record(stream)
    cuda.synchronize()
    return [_COPIES * BYTES / begin.elapsed_time(end) / 1e6 for begin, end in events]
