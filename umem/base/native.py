"""The native core, or an error that explains how to install it."""

from __future__ import annotations

from ..errors import NotSupportedError
from .interpreter import SubInterpreterError
from .version import __version__

try:
    from .. import _core as core
except SubInterpreterError as error:
    raise NotSupportedError(str(error)) from error
except ImportError as error:
    raise NotSupportedError(
        f"umem's native core cannot be loaded ({error}); install the package with "
        "`pip install .` in its source tree"
    ) from error

if core.__version__ != __version__:
    raise NotSupportedError(
        f"umem {__version__} found the native core of version {core.__version__}; install umem "
        "again with `pip install .`"
    )

__all__ = ["core"]
