"""Operators that umem cannot see, announced by the program that launches them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from ..base.streams import stream_handle
from ..errors import ConfigError
from ..session import session
from .spans import parts, stream_of, tensors_in


@contextlib.contextmanager
def uses(
    tensors: object = (),
    writes: object = (),
    *,
    name: str = "umem::uses",
    stream: object = None,
) -> Iterator[None]:
    """Announce the tensors that a kernel uses: `with umem.uses([x, y], writes=out):`.

    Put it around the launch of a kernel that torch's dispatcher does not see, in CUDA, Triton or
    C++. umem treats the block as one operator: it brings the tensors in before the block, keeps
    them while the block runs, and includes them in recorded steps and plans. Operators of torch
    inside the block are observed as usual. While umem is off, or does not observe operators
    (`observer=off`), this does nothing.

    Args:
        tensors: the tensors that the kernel reads, as for `umem.prefetch`.
        writes: the tensors that it writes, wholly or in part, and may read.
        name: the operator's name in traces and summaries; use the same name for each call.
        stream: the stream that the kernel is launched on, as for `umem.Buffer`; None: torch's
            current one, or the one that an array of the arguments names. Buffers of cuda.core name
            none.

    Raises:
        ConfigError: an argument is not a tensor, or the name is empty or cannot be printed.
        NotSupportedError: the stream is the per-thread default stream.
        TypeError: `stream` is not a stream.
    """
    if not isinstance(name, str) or not name or not name.isprintable():
        raise ConfigError(f"umem.uses(name={name!r}): allowed: a name that can be printed")
    written, read = tensors_in(writes, "uses"), tensors_in(tensors, "uses")
    end = _begin(name, written, read, None if stream is None else stream_handle(stream))
    try:
        yield
    finally:
        end()


def _has_storage(tensor: Any) -> bool:
    """Return whether it is a strided tensor of torch; `parts` handles or refuses the others."""
    return hasattr(tensor, "untyped_storage") and str(tensor.layout) == "torch.strided"


def _begin(
    name: str, written: list[Any], read: list[Any], stream: int | None
) -> Callable[[], object]:
    """Begin the operator; return the function that ends it."""
    observer = session.observer()
    if observer == "off":
        return lambda: None
    if observer == "native" and stream is None and all(map(_has_storage, (*written, *read))):
        region = session.torch_extension().begin_region(name, written, read)
        end: Callable[[], object] = region.end
        return end
    from ..base.native import core

    first = [part.span for part in parts(written, "uses") if part.nbytes]
    spans = [*first, *(part.span for part in parts(read, "uses") if part.nbytes)]
    used = {i: (0, nbytes) for i, (_, nbytes) in enumerate(spans)}
    addresses = [address for address, _ in spans]
    device, current = _current(written + read)
    stream = current if stream is None else stream
    token = core.op_begin(
        addresses, core.family_of(name), "", name, 0, len(first), used, device, stream
    )
    return lambda: core.op_end(token, "")


def _current(given: list[Any]) -> tuple[int, int]:
    """Return the device, and the stream on it that a kernel is launched on: torch's or CuPy's."""

    def on_cuda(one: Any) -> bool:
        return getattr(getattr(one, "device", None), "type", "") == "cuda"

    first = next(filter(on_cuda, given), given[0] if given else None)
    device = getattr(first, "device", getattr(first, "device_id", 0))
    for name in ("index", "id"):  # torch's, CuPy's; cuda.core's is a number
        device = getattr(device, name, device)
    return (device if isinstance(device, int) else 0), stream_of(first)
