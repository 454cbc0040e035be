"""Builds the native part with CMake; everything else is in pyproject.toml."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


class CMakeBuild(build_ext):
    """Runs CMake into the package directory of the wheel."""

    def run(self) -> None:
        if self.editable_mode:
            raise SystemExit("umem is not built in place; install it without -e: pip install .")
        try:
            import pybind11
        except ImportError:
            needs = "'setuptools>=77' 'pybind11>=3' 'cmake>=3.24' ninja"
            raise SystemExit(f"--no-build-isolation needs: pip install {needs}") from None
        out = Path(self.build_lib).resolve()
        tree = ROOT / "build" / f"cmake-{sys.implementation.cache_tag}"
        settings = {
            # Not from the cache: the tools of an isolated build are gone at the next one.
            "CMAKE_MAKE_PROGRAM": shutil.which("ninja") or "ninja",
            "CMAKE_BUILD_TYPE": "Debug" if self.debug else "Release",
            "Python_EXECUTABLE": sys.executable,
            "pybind11_DIR": pybind11.get_cmake_dir(),
            "UMEM_VERSION": self.distribution.get_version(),
        }
        cache = tree / "CMakeCache.txt"
        if cache.exists() and f"CMAKE_HOME_DIRECTORY:INTERNAL={ROOT}\n" not in cache.read_text():
            shutil.rmtree(tree)  # the folder was moved or copied, and CMake would refuse it
        flags = [f"-D{name}={value}" for name, value in settings.items()]
        subprocess.run(["cmake", "-GNinja", f"-S{ROOT}", f"-B{tree}", *flags], check=True)
        subprocess.run(["cmake", "--build", str(tree), "-j", str(os.cpu_count())], check=True)
        subprocess.run(["cmake", "--install", str(tree), "--prefix", str(out)], check=True)
        if importlib.util.find_spec("torch") is not None:
            self.build_torch_extension(out / "umem")

    def build_torch_extension(self, package: Path) -> None:
        """Build for the torch of this environment; at first use umem builds for any other."""
        path = ROOT / "umem" / "integrations" / "torch" / "build.py"  # umem is not installed yet
        spec = importlib.util.spec_from_file_location("umem_torch_build", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        try:
            spec.loader.exec_module(module)
            module.build(package, package_dirs=[package], sources=ROOT / "src")
        except Exception as error:  # the core works without it
            self.warn(f"the torch extension is left for the first use: {error}")


setup(ext_modules=[Extension("umem._core", [])], cmdclass={"build_ext": CMakeBuild})
