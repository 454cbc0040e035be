"""Operators that umem cannot see: a program says what its own kernels use."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from ..errors import ConfigError
from ..session import session
from .spans import parts, tensors_in


@contextlib.contextmanager
def uses(tensors: object = (), writes: object = (), *, name: str = "umem::uses") -> Iterator[None]:
    """Announce the tensors that a kernel uses: `with umem.uses([x, y], writes=out):`.

    Around the launch of a kernel that torch's dispatcher does not see, written in CUDA, Triton or
    C++. To umem the block is one operator: the tensors are brought in before it, stay while it
    runs, and are part of recorded steps and of plans. Operators of torch in the block are seen as
    ever. While umem is off, nothing is announced.

    Args:
        tensors: what the kernel reads: a tensor, or a list, tuple or mapping of tensors, as for
            `umem.prefetch`.
        writes: what it writes, wholly or in part; it may read that too.
        name: of the operator, in traces and summaries; the same at each call.

    Raises:
        ConfigError: something is no tensor, or the name is empty or cannot be printed.
    """
    if not isinstance(name, str) or not name or not name.isprintable():
        raise ConfigError(f"umem.uses(name={name!r}): allowed: a name that can be printed")
    written, read = tensors_in(writes, "uses"), tensors_in(tensors, "uses")
    end = _begin(name, written, read)
    try:
        yield
    finally:
        end()


def _has_storage(tensor: Any) -> bool:
    """Return whether it is a tensor of torch in one piece; of others `parts` knows or complains."""
    return hasattr(tensor, "untyped_storage") and str(tensor.layout) == "torch.strided"


def _begin(name: str, written: list[Any], read: list[Any]) -> Callable[[], object]:
    """Begin the operator; calling what this returns ends it."""
    observer = session.observer()
    if observer == "off":
        return lambda: None
    if observer == "native" and all(map(_has_storage, (*written, *read))):
        region = session.torch_extension().begin_region(name, written, read)
        end: Callable[[], object] = region.end
        return end
    from ..base.native import core

    first = [part.span for part in parts(written, "uses") if part.nbytes]
    spans = [*first, *(part.span for part in parts(read, "uses") if part.nbytes)]
    used = {i: (0, nbytes) for i, (_, nbytes) in enumerate(spans)}
    addresses = [address for address, _ in spans]
    token = core.op_begin(addresses, core.family_of(name), "", name, 0, len(first), used)
    return lambda: core.op_end(token, "")
