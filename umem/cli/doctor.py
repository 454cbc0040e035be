"""``umem doctor``: report what works on this machine, and what umem would do."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..base import host
from ..base.units import format_bytes
from ..base.version import __version__
from ..config.options import BY_NAME, OPTIONS
from ..config.parsers import Budget, Device, parse_path
from ..config.settings import load
from ..errors import ConfigError, NotSupportedError, UmemError
from . import doctor_cuda, doctor_disk, doctor_link
from .base import Subparsers
from .doctor_cuda import Facts

if TYPE_CHECKING:
    from ..base.native import core
    from ..config.settings import Settings

EXTENSION = "_torch_ext-*.so"  # torch/build.py adds a key of torch and the sources
_SIZES = {option.name for option in OPTIONS if option.kind == "size"}
# Text for absent values; JSON has null, or an empty list.
_WHEN_NONE = {
    "problem": "none",
    "warning": "none",
    "version": "not installed",
    "built_for_cuda": "no: a CPU build",
    "c++": "none: install g++ to build the torch extension",
    "built": "not yet: it is built once, at first use",
    "cgroup_limit_bytes": "unlimited",
    "budget_bytes": "determined at first use",
}


def add_parser(subparsers: Subparsers) -> None:
    """Add `umem doctor`."""
    parser = subparsers.add_parser(
        "doctor",
        help="check this machine and installation",
        description="Report what works here and what umem would do; exit code 1 if it cannot work.",
    )
    text = "measure the host's memory, and the link of a GPU (needs torch; seconds)"
    parser.add_argument("--measure", action="store_true", help=text)
    text = "with --measure: also the rates of the disk of this folder, for the option disk"
    parser.add_argument("--disk", metavar="DIR", help=text)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def main(args: argparse.Namespace) -> int:
    """Print the report; return 0 if umem can be enabled here, else 1.

    Raises:
        ConfigError: `--disk` without `--measure`, or without a folder.
    """
    if args.disk is not None and not args.measure:
        raise ConfigError("--disk without --measure; allowed: umem doctor --measure --disk DIR")
    report = examine(measure=args.measure, disk=_folder(args.disk))
    print(json.dumps(report, indent=2) if args.json else render(report))
    return 0 if report["verdict"].get("works") else 1


def _folder(text: str | None) -> Path | None:
    try:
        return None if text is None else parse_path(text)
    except ValueError as error:
        raise ConfigError(f"--disk: {error}; allowed: a folder on a disk") from None


def examine(*, measure: bool = False, disk: Path | None = None) -> dict[str, Facts]:
    """Collect all facts by section. No section raises: a failure is a fact too."""
    sections: dict[str, Callable[[], Facts]] = {
        "python": _python,
        "torch": _torch,
        "compiler": _compiler,
        "native core": _native,
        "torch extension": _extension,
        "kernel": _kernel,
        "memory": _memory,
        **({"host": _host} if measure else {}),
        **({"disk": functools.partial(doctor_disk.measure, disk)} if disk is not None else {}),
        **({"link": doctor_link.measure} if measure else {}),
        "cuda": _cuda,
        "options": _options,
        "verdict": _verdict,
    }
    report: dict[str, Facts] = {}
    for name, look in sections.items():
        try:
            report[name] = look()
        except (UmemError, ImportError, OSError) as error:
            report[name] = {"problem": str(error)}
    return report


def render(report: dict[str, Facts]) -> str:
    """Format the report, one line per fact, followed by its meaning."""
    return "\n".join(
        f"{section if index == 0 else '':<16} {line}"
        for section, facts in report.items()
        for index, line in enumerate(_lines(facts))
    )


def _lines(facts: Facts, of: str = "") -> Iterator[str]:
    for name, value in facts.items():
        if name == "devices":
            for ordinal, device in enumerate(value):
                yield from _lines(device, of=f"{ordinal}: ")
            continue
        explained = isinstance(value, dict)
        shown = _shown(name, value["value"] if explained else value)
        origin = f"  [{value['origin']}]" if explained and "origin" in value else ""
        yield f"{of + name.replace('_', ' '):<28} {shown}{origin}"
        if explained and "umem" in value:
            yield f"    {value['meaning']}; umem {value['umem']}"


def _shown(name: str, value: object) -> str:
    if value is None or value == []:
        return _WHEN_NONE.get(name, "unknown")
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name == "driver_version" and isinstance(value, int):
        return doctor_cuda.version_text(value)
    if isinstance(value, int) and name == "disk_writes":
        return f"{value / 1e12:g}TB/day"
    if isinstance(value, int) and (name.endswith("_bytes") or name in _SIZES):
        return format_bytes(value)
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _python() -> Facts:
    return {
        "version": platform.python_version(),
        "executable": sys.executable,
        "umem": __version__,
    }


def _torch_version() -> str | None:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch() -> Facts:
    from ..integrations.torch.version import torch_problem

    version = _torch_version()
    return {
        "version": version,
        "built_for_cuda": _torch_cuda(),
        "problem": torch_problem(version),
    }


def _torch_cuda() -> str | None:
    """Return the CUDA version of torch's build, read from its files: importing takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"^cuda\b[^=]*= *['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return None if match is None else match[1]


def _compiler() -> Facts:
    return {"c++": next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)}


def _native() -> Facts:
    from ..base.native import core
    from ..policies import registry

    return {
        "version": core.__version__,
        "path": core.__file__,
        "policies": list(registry.names()),
        "profiles": [profile["name"] for profile in core.profiles()],
    }


def _extension() -> Facts:
    from ..integrations.torch import build

    cache = load().torch_ext_cache
    folders = (*build.own_dirs(), cache)
    found = [path for folder in folders for path in folder.glob(EXTENSION)]
    built = [path for path in found if build.is_whole(path)]
    return {
        "built": [str(path) for path in built],
        "cache": str(cache),
    }


def _kernel() -> Facts:
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "huge_pages": host.transparent_huge_pages(),
    }


def _memory() -> Facts:
    return {
        "total_bytes": host.meminfo("MemTotal"),
        "available_bytes": host.available_memory(),
        "cgroup_limit_bytes": host.cgroup_limit(),
        "cores": len(os.sched_getaffinity(0)),
    }


def _host() -> Facts:
    from ..integrations.torch.version import require_torch, torch_threads
    from ..session import host_share

    require_torch()
    return {
        "threads": torch_threads(),
        "copy_gb_per_s": round(host_share.copy_rate() / 1e3, 1),
        "host_gb_s": round(host_share.measured_rate() / 1e3, 1),
    }


def _cuda() -> Facts:
    from ..base.native import core

    return doctor_cuda.facts(core.probe_cuda())


def _options() -> Facts:
    settings = load()
    return {
        option.name: {
            "value": _plain(option.name, getattr(settings, option.name)),
            "origin": _origin(option.name, settings.origins[option.name]),
        }
        for option in OPTIONS
    }


def _origin(name: str, origin: str) -> str:
    return "default" if origin == f"{name} (default)" else origin.removeprefix(f"{name} ")


def _plain(name: str, value: object) -> object:
    """Return a value for JSON: a size as bytes, words as they are written in the option."""
    if value is None:  # the option's default: auto, off
        return BY_NAME[name].default
    if name in ("host_budget", "disk_writes") and value == 0:
        return "unlimited"
    if name == "watchdog" and value == 0:
        return "off"
    if isinstance(value, Budget) and value.bytes is not None:
        return value.bytes
    return value if isinstance(value, (bool, int)) else str(value)


def _verdict() -> Facts:
    from ..integrations.torch.version import torch_problem
    from ..session.resolve import check_disk, native_options

    extension: Facts = {}
    try:
        settings = load()
        with_torch = settings.allocator != "none"
        problem = torch_problem(_torch_version())
        if problem is not None and with_torch:
            return _cannot(problem)
        if settings.device.kind == "auto" and with_torch and _torch_cuda() is None:
            # `import torch` would choose it as well.
            settings = dataclasses.replace(settings, device=Device("soft"))
        options = native_options(settings, threads=1)
        check_disk(settings)
        if with_torch:
            extension = _extension_verdict(settings, options.device)
    except UmemError as error:
        return _cannot(str(error))
    facts = _cuda_verdict(settings) if options.device == "cuda" else _soft_verdict(options)
    return {**facts, "policy": settings.policy, **extension} if facts["works"] else facts


def _extension_verdict(settings: Settings, device: str) -> Facts:
    """Return what umem does without the torch extension; no facts where there can be one.

    Raises:
        NotSupportedError: there can be none, and nothing else can do its work.
    """
    from ..integrations.torch import build

    try:
        try:
            build.check_can_build(settings.torch_ext_cache)
        except NotSupportedError:
            if not _extension()["built"]:
                raise
            build.find_or_build(settings.torch_ext_cache)  # finds that for this torch, or says why
    except NotSupportedError as error:
        needed = settings.allocator == "subclass" or settings.observer == "native"
        if device == "soft" or needed or settings.backing == "mapped":
            raise
        return {"slower": f"torch's pluggable allocator and an observer in Python: {error}"}
    return {}


def _cannot(because: str) -> Facts:
    return {"works": False, "because": because}


def _soft_verdict(options: core.Options) -> Facts:
    return {
        "works": True,
        "device": f"soft:{options.profile}",
        "budget_bytes": options.budget_bytes,
    }


def _cuda_verdict(settings: Settings) -> Facts:
    from ..base.native import core

    probe = core.probe_cuda()
    if not probe["devices"]:
        return _cannot(f"{probe['reason']}; use UMEM_DEVICE=soft")
    if settings.allocator != "none" and _torch_cuda() is None:
        return _cannot("torch is built without CUDA; install a CUDA build, or use UMEM_DEVICE=soft")
    memory = "managed" if probe["available"] else "plain device memory: nothing is evicted"
    facts = {"works": True, "device": "cuda", "memory": memory}
    # The free memory of a GPU needs a context, which doctor does not create.
    budget = settings.budget
    if budget.bytes is not None:
        return {**facts, "budget_bytes": budget.bytes}
    share = "free memory, less headroom" if budget.percent is None else f"{budget} of its memory"
    return {**facts, "budget_bytes": None, "budget": f"{share}, at the device's first use"}
