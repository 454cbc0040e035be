"""Optional libraries: the core imports with none of them."""

from __future__ import annotations

import importlib
from typing import Any

from ..errors import NotSupportedError


def load(module: str, purpose: str, install: str) -> Any:
    """Import a module of an optional library.

    Args:
        module: its full name.
        purpose: what needs it, as the first words of the error.
        install: what to give to pip.

    Raises:
        NotSupportedError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        name = module.partition(".")[0]
        raise NotSupportedError(
            f"{purpose} needs {name}, not installed here: pip install {install}"
        ) from error
