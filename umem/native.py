"""The native core, or a clear error: `from umem.native import core`."""

from __future__ import annotations

from . import __version__
from .errors import NotSupportedError

try:
    from . import _core as core
except ImportError as error:
    raise NotSupportedError(
        f"umem's native core cannot be loaded ({error}); install the package with "
        "`pip install .` in its source tree"
    ) from error

if core.__version__ != __version__:
    raise NotSupportedError(
        f"umem {__version__} found the native core of {core.__version__}; install the package "
        "again with `pip install .`"
    )

__all__ = ["core"]
