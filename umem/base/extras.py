"""Optional libraries: the core imports with none of them."""

from __future__ import annotations

import importlib
from typing import Any

from ..errors import NotSupportedError

DEMO = "'.[demo]' in umem's source tree"  # what to give to pip, for what the demo uses
_PACKAGES = {"sklearn": "scikit-learn", "IPython": "ipython"}  # whose module has another name


def load(module: str, purpose: str, install: str) -> Any:
    """Import a module of an optional library.

    Args:
        module: its full name.
        purpose: what needs it, as the first words of the error.
        install: what to give to pip.

    Raises:
        NotSupportedError: it is not installed, or a library that it needs is not.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        name = (error.name or module).partition(".")[0]
        missing = _PACKAGES.get(name, name)
        raise NotSupportedError(
            f"{purpose} needs {missing}, not installed here: pip install {install}"
        ) from error
