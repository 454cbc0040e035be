"""Puts the software libcuda and libcudart into this process, in place of NVIDIA's.

Call `load()` before `import torch`: torch then finds its CUDA libraries loaded already. The
environment at that moment configures the device (driver/config.h): SOFTCUDA_DEVICES,
SOFTCUDA_BYTES, SOFTCUDA_SEED, SOFTCUDA_FAIL, SOFTCUDA_VERSION, SOFTCUDA_MISSING, SOFTCUDA_NO_CMA,
SOFTCUDA_INTEGRATED, SOFTCUDA_PAGE_CACHE, SOFTCUDA_RACES, SOFTCUDA_LOG. With SOFTCUDA_NVML the
library with which torch counts devices is loaded too.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

LIBRARY_VARIABLE = "SOFTCUDA_LIB"
# Apart from the others, for programs that count devices: torch asks a driver beside it for entry
# points that this one lacks.
MANAGEMENT = "nvml/libnvidia-ml.so.1"
_loaded: list[ctypes.CDLL] = []  # kept: closing a driver that others use ends badly


class Softcuda:
    """The driver's controls for tests."""

    def __init__(self, driver: ctypes.CDLL) -> None:
        self.driver = driver
        for name in ("softcuda_inject", "softcuda_lose", "softcuda_tear"):
            getattr(driver, name).argtypes = [ctypes.c_char_p, ctypes.c_uint64, ctypes.c_int]
        driver.softcuda_skip.argtypes = [ctypes.c_char_p]
        driver.softcuda_calls.argtypes = [ctypes.c_char_p]
        driver.softcuda_seed.argtypes = [ctypes.c_uint64]
        driver.softcuda_seed.restype = driver.softcuda_reset.restype = None
        driver.softcuda_races.restype = ctypes.c_char_p
        driver.softcuda_race_segments.restype = ctypes.c_size_t
        for name in ("calls", "pending", "async_errors", "faults", "slow_moves"):
            getattr(driver, f"softcuda_{name}").restype = ctypes.c_uint64

    def inject(self, entry: str, nth: int, error: int) -> None:
        """Make the nth call of `entry` from now (1 = next) fail with `error` and do nothing.

        Raises ValueError for nth < 1 or error 0.
        """
        if nth < 1 or self.driver.softcuda_inject(entry.encode(), nth, error) != 0:
            raise ValueError(f"inject({entry!r}, {nth}, {error}): nth from 1, and a real error")

    def skip(self, entry: str) -> None:
        """Make calls of `entry` do nothing and report success until a reset."""
        self.driver.softcuda_skip(entry.encode())

    def lose(self, entry: str, nth: int, error: int) -> None:
        """Like `inject`; afterwards all calls that need the device fail with `error`.

        A reset restores the device. Raises ValueError as `inject` does.
        """
        if nth < 1 or self.driver.softcuda_lose(entry.encode(), nth, error) != 0:
            raise ValueError(f"lose({entry!r}, {nth}, {error}): nth from 1, and a real error")

    def tear(self, entry: str, nth: int, error: int) -> None:
        """Like `inject`, for a batch whose first half is executed.

        Raises ValueError as `inject` does, and for other calls than batches.
        """
        if nth < 1 or self.driver.softcuda_tear(entry.encode(), nth, error) != 0:
            raise ValueError(f"tear({entry!r}, {nth}, {error}): a batch, nth from 1, a real error")

    def calls(self, entry: str) -> int:
        """Return the number of the program's calls of `entry` (no version suffix) since the last
        reset.

        Calls between entry points (cudaMalloc to cuMemAlloc) are not counted.
        """
        return int(self.driver.softcuda_calls(entry.encode()))

    def reset(self) -> None:
        """Forgets counted calls and planned failures; a lost device is there again."""
        self.driver.softcuda_reset()

    def seed(self, seed: int) -> None:
        """Defer work under `seed`; 0 runs it when it is enqueued."""
        self.driver.softcuda_seed(seed)

    def pending(self) -> int:
        """Enqueued operations that have not run."""
        return int(self.driver.softcuda_pending())

    def faults(self) -> int:
        """Page faults that the device took since the start."""
        return int(self.driver.softcuda_faults())

    def async_errors(self) -> int:
        """Deferred operations that failed after their call had returned success."""
        return int(self.driver.softcuda_async_errors())

    def races(self) -> list[str]:
        """Return unordered pairs of accesses found since the last call (driver/races.h).

        A process that ends without requesting those found exits with 70.
        """
        return str(self.driver.softcuda_races().decode()).splitlines()

    def slow_moves(self) -> int:
        """Return the number of prefetches not ordered with an access: those page-fault."""
        return int(self.driver.softcuda_slow_moves())


def load(folder: str | os.PathLike[str] | None = None) -> Softcuda:
    """Loads the libraries in `folder` (default: the environment's SOFTCUDA_LIB) for all to see.

    Raises RuntimeError when the folder lacks them, or when torch or another libcuda came first.
    """
    place = Path(folder or os.environ.get(LIBRARY_VARIABLE, ""))
    if not (place / "libcudart.so.13").exists():
        raise RuntimeError(
            f"there is no libcudart.so.13 in {str(place)!r}; build it with tests/softcuda/build.py "
            f"and give the folder that it prints as {LIBRARY_VARIABLE}"
        )
    if not _loaded:
        if "torch" in sys.modules:
            raise RuntimeError("torch is imported already; load() must come before it")
        first = ["libcuda.so.1", "libcudart.so.13"]
        others = sorted(p.name for p in place.glob("lib*.so.*") if p.name not in first)
        if os.environ.get("SOFTCUDA_NVML"):
            others.append(MANAGEMENT)
        for name in first + others:
            _loaded.append(ctypes.CDLL(str(place / name), mode=ctypes.RTLD_GLOBAL))
        _check_first(place)
    return Softcuda(_loaded[0])


def _check_first(place: Path) -> None:
    """Refuse a libcuda.so.1 loaded before ours: all libraries would use it."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    mapped = {line.split()[-1] for line in maps.splitlines() if "/libcuda" in line}
    names = ("libcuda.so", "libcudart.so")
    foreign = [path for path in mapped if not _inside(path, place)]
    foreign = [path for path in foreign if Path(path).name.startswith(names)]
    if foreign:
        raise RuntimeError(f"other CUDA libraries are loaded: {', '.join(sorted(foreign))}")


def _inside(path: str, place: Path) -> bool:
    return Path(path).resolve().parent == place.resolve()


def compute() -> int:
    """Make the CUDA operators of the imported torch compute with their CPU kernels; return their
    number.

    Flags that choose a kernel without one on the CPU are set so that another is chosen. For equal
    bits in any order of work the program must run with OMP_NUM_THREADS=1.

    Raises RuntimeError before `load()` or `import torch`, or if the library was not built.
    """
    if not _loaded or "torch" not in sys.modules:
        raise RuntimeError("compute() comes after load() and `import torch`")
    import torch
    import torch._meta_registrations  # shapes of what has no meta kernel in C++

    library = Path(_loaded[0]._name).parent / "compute.so"
    if not library.exists():
        raise RuntimeError(f"there is no {library}; build it with tests/softcuda/build.py")
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    _loaded.append(ctypes.CDLL(str(library)))
    count = _loaded[-1].softcuda_compute
    count.restype = ctypes.c_size_t
    return int(count())
