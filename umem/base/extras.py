"""Optional libraries; `import umem` needs none of them."""

from __future__ import annotations

import importlib
from typing import Any

from ..errors import NotSupportedError, plain

DEMO = "'.[demo]' in umem's source tree"  # the argument of pip for the demo's libraries
_PACKAGES = {"sklearn": "scikit-learn", "IPython": "ipython"}  # by module, if the names differ


def load(module: str, purpose: str, install: str) -> Any:
    """Import a module of an optional library.

    Args:
        module: the full name of the module.
        purpose: the feature that needs it; it begins the error message.
        install: the argument of `pip install`.

    Raises:
        NotSupportedError: the library, or one that it needs, is not installed, or its import fails.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        name = (error.name or module).partition(".")[0]
        missing = _PACKAGES.get(name, name)
        raise NotSupportedError(
            f"{purpose} needs {missing}, not installed here: pip install {install}"
        ) from error
    except Exception as error:  # such as an extension that was built for another torch
        raise NotSupportedError(
            f"{purpose} needs {module}, whose import fails here: {type(error).__name__}: "
            f"{plain(str(error))}; pip install --upgrade {install}"
        ) from error
