"""Builds the software libcuda, libcudart and the stubs for the CUDA torch of one environment.

python tests/softcuda/build.py --python VENV/bin/python --build-dir DIR

The libraries are written to DIR/lib; tests/softcuda/load.py loads them. CUDA's headers are taken
from --cuda-include, else from the environment's nvidia-cuda-runtime and nvidia-cuda-crt packages,
else from CUDA_HOME or next to nvcc.

libcuda and libcudart are the same for every torch. `--without-torch` builds only these two, and
`--driver DIR/lib` copies them from there for one more torch.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import stubs

DRIVER = ("libcuda.so.1", "libcudart.so.13", "nvml/libnvidia-ml.so.1")
HERE = Path(__file__).resolve().parent
DEFAULT_BUILD = Path(tempfile.gettempdir()) / f"umem-softcuda-{os.getuid()}"


def torch_libraries(python: str) -> list[Path]:
    """The shared libraries of that Python's torch. Raises SystemExit if it is not a CUDA build."""
    # Not by import: a CUDA torch does not import before its libraries exist.
    code = "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    folder = Path(found.stdout.strip() or "/nonexistent") / "lib"
    if found.returncode != 0 or not (folder / "libtorch_cuda.so").exists():
        raise SystemExit(
            f"{python} has no CUDA build of torch; "
            "install one: pip install --no-deps torch, and torch's pure-Python packages"
        )
    return sorted(folder.glob("*.so"))


def cuda_include(python: str, chosen: str | None) -> Path:
    """Return the folder of cuda_runtime_api.h. Raises SystemExit if there is none."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout
    nvcc = shutil.which("nvcc")
    candidates = [Path(chosen)] if chosen else [Path(site.strip()) / "nvidia/cu13/include"]
    if not chosen:
        candidates += [Path(p) / "include" for p in [os.environ.get("CUDA_HOME")] if p]
        candidates += [Path(nvcc).resolve().parent.parent / "include"] if nvcc else []
        candidates.append(Path("/usr/local/cuda/include"))
    for folder in candidates:
        if (folder / "cuda_runtime_api.h").exists() and (folder / "crt/host_defines.h").exists():
            return folder
    raise SystemExit(
        f"cuda_runtime_api.h is not in {', '.join(map(str, candidates))}; "
        "pip install 'nvidia-cuda-runtime==13.0.*' 'nvidia-cuda-crt==13.0.*', "
        "or give --cuda-include"
    )


def build_driver(python: str, folder: Path, include: str | None = None) -> Path:
    """Builds libcuda and libcudart into `folder`; the folder of the finished libraries."""
    return _cmake(folder, SOFTCUDA_CUDA_INCLUDE=cuda_include(python, include))


def build_for_torch(python: str, folder: Path, driver: Path, include: str | None = None) -> Path:
    """Like `build_driver`, for that Python's torch, with copies from `driver`."""
    libraries = torch_libraries(python)
    stubs.write(libraries, folder / "stubs")
    lib = _cmake(
        folder,
        SOFTCUDA_CUDA_INCLUDE=cuda_include(python, include),
        SOFTCUDA_DRIVER=driver,
        SOFTCUDA_STUBS=folder / "stubs",
        SOFTCUDA_TORCH=libraries[0].parents[1],
    )
    for name in DRIVER:
        (lib / name).parent.mkdir(exist_ok=True)
        (lib / name).unlink(missing_ok=True)  # not overwritten: a process may have it loaded
        shutil.copy2(driver / name, lib / name)
    return lib


def _cmake(folder: Path, **settings: Path) -> Path:
    lib = folder / "lib"
    tree = str(folder / "cmake")
    configure = [
        *("cmake", "-S", str(HERE), "-B", tree),
        *(["-G", "Ninja"] if shutil.which("ninja") else []),
        *(f"-D{name}={value}" for name, value in settings.items()),
        f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={lib}",
    ]
    for command in (configure, ["cmake", "--build", tree, "--parallel", "2"]):
        subprocess.run(command, check=True, stdout=sys.stderr)
    return lib


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--python", default=sys.executable, help="a Python with the CUDA torch")
    parser.add_argument("--build-dir", type=Path, default=DEFAULT_BUILD, help="(%(default)s)")
    parser.add_argument("--cuda-include", help="folder of cuda_runtime_api.h")
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument("--without-torch", action="store_true", help="libcuda and libcudart only")
    parts.add_argument("--driver", type=Path, help="folder that has libcuda and libcudart already")
    options = parser.parse_args()
    place = (options.python, options.build_dir.resolve())
    if options.without_torch:
        print(build_driver(*place, options.cuda_include))
        return
    driver = options.driver or build_driver(
        options.python, place[1] / "driver", options.cuda_include
    )
    print(build_for_torch(*place, driver.resolve(), options.cuda_include))


if __name__ == "__main__":
    main()
