"""The native core, or an error that explains how to install it."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

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


def _missing(name: str) -> NoReturn:
    """Explain why a core of the same version lacks what this package calls: a checkout's does."""
    raise AttributeError(
        f"umem's native core {core.__file__} has no {name!r}: it was built from other sources than "
        f"{__package__.partition('.')[0]} in {Path(__file__).parents[2]}; install umem again with "
        "`pip install .` there"
    )


vars(core)["__getattr__"] = _missing

__all__ = ["core"]
