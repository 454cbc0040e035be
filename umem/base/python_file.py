"""A module of the user that is named by its file."""

from __future__ import annotations

import sys
from importlib import util
from pathlib import Path
from types import ModuleType


def load(path: Path) -> ModuleType:
    """Run the file as a module, once, and return it.

    Its name hides no other module. It is kept, so that two objects of a file share its globals.

    Raises:
        FileNotFoundError: there is no such file.
        Exception: what the file raises.
    """
    path = path.expanduser().resolve(strict=True)
    name = f"umem_file_{path.stem}_{abs(hash(str(path))):x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = util.spec_from_file_location(name, path)
    assert spec is not None, "Python knows files that end in .py"
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
