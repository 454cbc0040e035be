"""Streams of CUDA, as frameworks describe them."""

from __future__ import annotations

from typing import Any

from ..errors import NotSupportedError

_LEGACY, _PER_THREAD = 1, 2  # CUDA's two special handles, which are not pointers


def stream_handle(stream: object) -> int:
    """Return the handle of any framework's stream; 0 for None and the legacy default stream.

    Raises:
        NotSupportedError: the per-thread default stream, which is a different stream on each
            thread, so that other threads cannot wait for it.
        TypeError: `stream` is not a stream.
    """
    handle = _handle(stream)
    if handle == _PER_THREAD:
        raise NotSupportedError(
            "umem does not support the per-thread default stream, which is a different one on each "
            "thread; use a stream of your own, or the legacy default stream (unset "
            "CUPY_CUDA_PER_THREAD_DEFAULT_STREAM, CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM)"
        )
    return 0 if handle == _LEGACY else handle


def _handle(stream: object) -> int:
    if stream is None:
        return 0
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        return int((protocol() if callable(protocol) else protocol)[1])
    for name in ("cuda_stream", "ptr"):  # torch, CuPy
        if hasattr(stream, name):
            return int(getattr(stream, name))
    if hasattr(stream, "stream"):  # cuda.core's GraphBuilder
        return _handle(stream.stream)
    handle: Any = getattr(stream, "handle", stream)  # Numba's is a ctypes pointer
    handle = getattr(handle, "value", handle)
    if handle is None:
        return 0
    if hasattr(handle, "__int__") and not isinstance(handle, (bool, float)) and int(handle) >= 0:
        return int(handle)
    raise TypeError(
        f"{stream!r} is not a CUDA stream; allowed: None, a handle, an object with "
        "__cuda_stream__, a stream of torch, CuPy, cuda.core or Numba"
    )
