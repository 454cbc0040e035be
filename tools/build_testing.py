"""Builds `_core_testing`, the native module that tests and benches use beside umem's core.

Run it in the source tree that umem was installed from, with the same Python: the module is linked
with that build's libumem.so, and copied beside the installed package, or into the folder given.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAME = "_core_testing"


def main(argv: list[str] | None = None) -> int:
    """Build the module and copy it.

    Raises:
        SystemExit: umem was not built in this tree, or pybind11 is missing.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    usual = sysconfig.get_path("platlib")
    parser.add_argument("--into", type=Path, default=usual, help=f"default: {usual}")
    args = parser.parse_args(argv)
    tree = ROOT / "build" / f"cmake-{sys.implementation.cache_tag}"
    if not (tree / "libumem.so").is_file():
        raise SystemExit(f"{tree} holds no libumem.so; first run `pip install .` in {ROOT}")
    try:
        import pybind11
    except ImportError:
        raise SystemExit("pip install 'pybind11>=3' 'cmake>=3.24' ninja") from None
    settings = [
        f"-DCMAKE_MAKE_PROGRAM={shutil.which('ninja') or 'ninja'}",  # an isolated build's is gone
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
    ]
    subprocess.run(["cmake", *settings, str(tree)], check=True)
    subprocess.run(["cmake", "--build", str(tree), "--target", NAME], check=True)
    (built,) = tree.glob(f"{NAME}*.so")
    shutil.copy(built, args.into)
    return 0


if __name__ == "__main__":
    sys.exit(main())
