"""The native module of tests and benches, or an error that says how to build it."""

from __future__ import annotations

try:
    import _core_testing as inside
except ImportError as error:
    raise ImportError(f"{error}; build it: python tools/build_testing.py") from error

__all__ = ["inside"]
