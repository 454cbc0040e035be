"""umem: train with more memory than the device has, without changing the program.

`umem.enable()` before the program makes tensors, or `UMEM=1 python train.py`, or
`umem run train.py`. Importing this package is cheap: torch and the native core are loaded on use.
"""

from __future__ import annotations

import pkgutil
from typing import TYPE_CHECKING

# A checkout's package has no native core: this finds the one of the installed package.
__path__ = pkgutil.extend_path(__path__, __name__)


def _is_main_interpreter() -> bool:
    import _thread

    ask = getattr(_thread, "_is_main_interpreter", None)
    if ask is not None:  # since Python 3.12
        return bool(ask())
    try:
        import _xxsubinterpreters as interpreters  # type: ignore[import-not-found]
    except ImportError:  # a Python without sub-interpreters
        return True
    return bool(interpreters.get_current() == interpreters.get_main())


if not _is_main_interpreter():
    from .base import interpreter as _interpreter

    _interpreter.refuse(f"{__name__}._core")

if TYPE_CHECKING:  # for type checkers, which cannot follow the table below; a test compares them
    from pathlib import Path

    from . import errors as errors
    from . import policies as policies
    from .base.stats import Stats as Stats
    from .base.version import __version__ as __version__
    from .errors import CheckpointError as CheckpointError
    from .errors import ConfigError as ConfigError
    from .errors import DriverError as DriverError
    from .errors import NotSupportedError as NotSupportedError
    from .errors import OutOfMemoryError as OutOfMemoryError
    from .errors import PlanError as PlanError
    from .errors import StateError as StateError
    from .errors import TraceError as TraceError
    from .errors import UmemError as UmemError
    from .integrations import cuda_core as cuda_core
    from .integrations.buffer import Buffer as Buffer
    from .integrations.dlpack import export as export
    from .monitor import lightning as lightning
    from .monitor import transformers as transformers
    from .monitor.scalars import Scalars as Scalars
    from .offload.checkpoint.load import Loaded as Loaded
    from .offload.checkpoint.load import load_checkpoint as load_checkpoint
    from .offload.optimizer.paging import PagedOptimizer as PagedOptimizer
    from .offload.optimizer.paging import page_optimizer as page_optimizer
    from .policies.base import PlanFunction, Policy
    from .recompute.optimize import deoptimize as deoptimize
    from .recompute.optimize import optimize as optimize
    from .residency.hints import PinHandle as PinHandle
    from .residency.hints import advise as advise
    from .residency.hints import discard as discard
    from .residency.hints import empty_cache as empty_cache
    from .residency.hints import evict as evict
    from .residency.hints import exclude as exclude
    from .residency.hints import keep as keep
    from .residency.hints import pin as pin
    from .residency.hints import prefetch as prefetch
    from .residency.hints import tag as tag
    from .residency.hints import unpin as unpin
    from .residency.operators import uses as uses
    from .residency.placement import TensorPlacement as TensorPlacement
    from .residency.placement import scope as scope
    from .residency.placement import tensors as tensors
    from .residency.placement import where as where
    from .residency.sleep import Sleep as Sleep
    from .residency.sleep import sleep as sleep
    from .residency.sleep import wake as wake
    from .session import cupy as cupy
    from .session.live_view import LiveView as LiveView
    from .session.live_view import watch as watch
    from .session.session import Session as Session
    from .session.session import disable as disable
    from .session.session import is_enabled as is_enabled
    from .session.session import set_budget as set_budget
    from .session.session import step as step
    from .session.session import summary as summary
    from .session.statistics import reset_peak_stats as reset_peak_stats
    from .session.statistics import stats as stats
    from .simulation.simulate import simulate as simulate

# The public names by the module that has them.
_NAMES = {
    "base.stats": "Stats",
    "base.version": "__version__",
    "errors": "CheckpointError ConfigError DriverError NotSupportedError OutOfMemoryError "
    "PlanError StateError TraceError UmemError",
    "integrations.buffer": "Buffer",
    "integrations.dlpack": "export",
    "monitor.scalars": "Scalars",
    "offload.checkpoint.load": "Loaded load_checkpoint",
    "offload.optimizer.paging": "PagedOptimizer page_optimizer",
    "recompute.optimize": "deoptimize optimize",
    "residency.hints": "PinHandle advise discard empty_cache evict exclude keep pin prefetch tag "
    "unpin",
    "residency.operators": "uses",
    "residency.placement": "TensorPlacement scope tensors where",
    "residency.sleep": "Sleep sleep wake",
    "session.live_view": "LiveView watch",
    "session.session": "Session disable is_enabled set_budget step summary",
    "session.statistics": "reset_peak_stats stats",
    "simulation.simulate": "simulate",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
# Public modules. Those of frameworks cannot be imported without theirs.
_MODULES = {
    "errors": "errors",
    "cuda_core": "integrations.cuda_core",
    "cupy": "session.cupy",
    "lightning": "monitor.lightning",
    "policies": "policies",
    "transformers": "monitor.transformers",
}

__all__ = sorted([*_HOMES, "enable"])  # noqa: PLE0605 - one table, not two


def enable(
    *,
    budget: str | int | None = None,
    host_budget: str | int | None = None,
    disk: str | Path | None = None,
    disk_writes: str | None = None,
    policy: Policy | PlanFunction | str | None = None,
    min_swap: str | int | None = None,
    device: str | None = None,
    backing: str | None = None,
    allocator: str | None = None,
    log: str | None = None,
    guard: bool | None = None,
    observer: str | None = None,
    recompute: str | None = None,
    optimizer: str | None = None,
    optimizer_threads: int | None = None,
    optimizer_buffers: str | int | None = None,
    torch_ext_cache: str | Path | None = None,
    trace: str | Path | None = None,
    summary: bool | None = None,
    layout: str | None = None,
    top: str | Path | bool | None = None,
    watchdog: str | float | None = None,
) -> Session:
    """Make umem torch's allocator; existing tensors stay where they are.

    An option that is not given comes from the environment, pyproject.toml or the default:
    docs/options.md. Sizes are in bytes or text such as "8GiB". A policy is a name,
    `module:attribute`, `file.py:attribute`, an object with a method `plan(trace, device, budget)`,
    or such a function (docs/policies.md). A second call with equal options changes nothing.

    Raises:
        ConfigError: an unknown option or a bad value, from any source.
        NotSupportedError: torch is absent or too old, or this machine cannot do it.
        StateError: umem is on with other options, or CUDA is initialised already.
    """
    given = dict(locals())  # all options by name
    from .config.settings import load
    from .session.session import start

    return start(load(given), _add_optimizers)


def _enable_at_import() -> None:
    """Enable umem inside `import torch`, for `UMEM=1`, with the options of the environment.

    A launcher such as torchrun stays as it is; the ranks that it starts have umem.

    Raises:
        UmemError: as in `enable`.
        ConfigError: the allocator is `pool`, which serves the block of a session only.
    """
    from .config import ranks
    from .config.settings import load
    from .errors import ConfigError

    if ranks.is_launcher():
        return
    if load().allocator == "pool":
        raise ConfigError(
            "UMEM_ALLOCATOR=pool serves a part of a program; write `with umem.enable():` around it "
            "instead of setting UMEM=1"
        )
    enable()


def _add_optimizers(session: Session) -> None:
    """Let the host update the program's optimizers, according to the option `optimizer`."""
    share = session.settings.optimizer.value
    if share == 0:
        return
    from .offload.optimizer.automatic import Automatic

    automatic = Automatic(share)
    session.at_end(lambda: automatic.remove(give_back=not session.leaving), automatic.check)


def __getattr__(name: str) -> object:
    """Public names load their module at first use, so that autoload costs nothing when off."""
    import importlib

    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{_MODULES[name]}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
