"""Helpers for tests of frameworks and libraries other than torch."""

from __future__ import annotations

import importlib.util
import os

import pytest


def needs(*names: str) -> pytest.MarkDecorator:
    """Skips where one is not installed."""
    # Not find_spec("cuda.core"): it would import `cuda`, and fail where that is absent.
    missing = [name for name in names if importlib.util.find_spec(name.split(".")[0]) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


real_gpu = pytest.mark.skipif(
    bool(os.environ.get("SOFTCUDA_LIB")),
    reason="CuPy's and Numba's own CUDA runtimes refuse the software driver",
)

# Before the code of a program that runs behind the preamble of support.gpu.
TOOLS = """
    from umem.integrations import blocks as held
    from umem.base.native import core
    def raises(kind, words, act):
        try:
            act()
        except kind as error:
            assert words in str(error), error
        else:
            raise AssertionError(f"no {kind.__name__}")
"""
CUPY = (
    TOOLS
    + """
    import cupy
    current = type("Stream", (), {"ptr": 0})()
    if soft is not None:
        cupy.cuda.runtime.getDevice = lambda: 0
        cupy.cuda.get_current_stream = lambda: current
"""
)
CORE = (
    TOOLS
    + """
    import cuda.core
    dev = cuda.core.Device(0)
    dev.set_current()
    s = dev.create_stream()
"""
)
