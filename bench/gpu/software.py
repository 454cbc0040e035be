"""The software driver of tests/softcuda in place of a GPU, where SOFTCUDA_LIB names it."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAME = "softcuda"  # what its devices are called
NOT_COMPARABLE = "not comparable on the software driver: its kernels compute nothing"


def asked_for() -> bool:
    """Return whether the environment asks for the software driver."""
    return bool(os.environ.get("SOFTCUDA_LIB"))


def load_if_asked() -> None:
    """Load it; call this before torch is imported."""
    if not asked_for():
        return
    spec = importlib.util.spec_from_file_location("load", ROOT / "tests" / "softcuda" / "load.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.load()


def is_software(device_name: str) -> bool:
    """Return whether a device of that name belongs to the software driver."""
    return NAME in device_name
