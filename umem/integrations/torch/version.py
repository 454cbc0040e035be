"""Checks of the installed torch: its version and its threads."""

from __future__ import annotations

import importlib.util
import re
import sys

from ...errors import NotSupportedError

MIN_TORCH = (2, 11)


def torch_problem(version: str | None) -> str | None:
    """Return why this version of torch (None: not installed) cannot be used; None if it can."""
    least = ".".join(map(str, MIN_TORCH))
    if version is None:
        return f"torch is not installed; install it with `pip install 'torch>={least}'`"
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or (int(match[1]), int(match[2])) < MIN_TORCH:
        return f"torch {version} is older than {least}; run `pip install 'torch>={least}'`"
    return None


def require_torch() -> None:
    """Import torch; raise NotSupportedError if it is missing or too old."""
    # During autoload torch is partly imported and in sys.modules, which is enough.
    version: str | None = None
    try:
        if "torch" in sys.modules or importlib.util.find_spec("torch") is not None:
            import torch

            version = str(torch.__version__)
    except ModuleNotFoundError as error:  # from an import hook, or from torch itself
        if error.name != "torch":
            raise
    problem = torch_problem(version)
    if version is None:
        problem = f'{problem}; CuPy, cuda.core and umem.Buffer work without: allocator="none"'
    if problem is not None:
        raise NotSupportedError(problem)


def torch_threads() -> int:
    """Return the number of threads that torch uses for one operator."""
    import torch

    return int(torch.get_num_threads())
