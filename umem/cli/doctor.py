"""``umem doctor``: what this machine and installation can do, and what umem would do here."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import __path__ as package_path
from .. import __version__, config, machine
from ..errors import UmemError
from ..options import OPTIONS, Option
from ..units import format_bytes
from .base import Subparsers

EXTENSION = "_torch_ext-*.so"  # as torch_build names it, with a key of torch and the sources
Facts = dict[str, Any]  # JSON values by name


def add_parser(subparsers: Subparsers) -> None:
    """Add `umem doctor`."""
    parser = subparsers.add_parser(
        "doctor",
        help="say what works on this machine",
        description="Say what works here and what umem would do. Exit code 1 if it cannot work.",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def main(args: argparse.Namespace) -> int:
    """Print the report; 0 when umem can be enabled here, else 1."""
    report = examine()
    print(json.dumps(report, indent=2) if args.json else render(report))
    return 0 if report["verdict"]["works"] else 1


def examine() -> dict[str, Facts]:
    """All facts by section. No section raises: a failure is a fact too."""
    sections: dict[str, Callable[[], Facts]] = {
        "python": _python,
        "torch": _torch,
        "compiler": _compiler,
        "native core": _native,
        "torch extension": _extension,
        "kernel": _kernel,
        "memory": _memory,
        "cuda": _cuda,
        "options": _options,
        "verdict": _verdict,
    }
    report: dict[str, Facts] = {}
    for name, look in sections.items():
        try:
            report[name] = look()
        except UmemError as error:
            report[name] = {"problem": str(error)}
    return report


def render(report: dict[str, Facts]) -> str:
    """The report as text, one line a fact."""
    lines = []
    for section, facts in report.items():
        for index, (name, value) in enumerate(facts.items()):
            head = section if index == 0 else ""
            lines.append(f"{head:<16} {name.replace('_', ' '):<18} {_shown(name, value)}")
    return "\n".join(lines)


def _shown(name: str, value: object) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and name.endswith("_bytes"):
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
    from ..startup import torch_problem

    version = _torch_version()
    return {"version": version or "not installed", "problem": torch_problem(version) or "none"}


def _compiler() -> Facts:
    path = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    return {"c++": path or "none: install g++ to build the torch extension"}


def _native() -> Facts:
    from ..native import core

    return {
        "version": core.__version__,
        "path": core.__file__,
        "policies": core.policies(),
        "profiles": [profile["name"] for profile in core.profiles()],
    }


def _extension() -> Facts:
    cache = config.load().torch_ext_cache
    folders = (*map(Path, package_path), cache)
    built = [path for folder in folders for path in folder.glob(EXTENSION)]
    return {
        "built": [str(path) for path in built] or "none yet: it is built at first use, once",
        "cache": str(cache),
    }


def _kernel() -> Facts:
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "huge_pages": machine.transparent_huge_pages(),
    }


def _memory() -> Facts:
    return {
        "total_bytes": machine.meminfo("MemTotal"),
        "available_bytes": machine.available_memory(),
        "cgroup_limit_bytes": machine.cgroup_limit() or "unlimited",
        "cores": len(os.sched_getaffinity(0)),
    }


def _cuda() -> Facts:
    from ..native import core

    probe = core.probe_cuda()
    facts: Facts = {"available": probe["available"]}
    if not probe["available"]:
        return {**facts, "reason": probe["reason"]}
    names = [
        f"{d['name']} ({format_bytes(d['total_bytes'])}, concurrent managed access "
        f"{_shown('', d['concurrent_managed_access'])})"
        for d in probe["devices"]
    ]
    return {**facts, "driver_version": probe["driver_version"], "devices": names}


def _options() -> Facts:
    settings = config.load()
    return {
        option.name: f"{_written(option, getattr(settings, option.name))}"
        f"  [{settings.origins[option.name].removeprefix(f'{option.name} ')}]"
        for option in OPTIONS
    }


def _written(option: Option, value: object) -> str:
    """A parsed value as a person would write it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if option.name == "host_budget" and value is None:
        return "auto"
    if isinstance(value, int):
        return "unlimited" if option.name == "host_budget" and value == 0 else format_bytes(value)
    return str(value)


def _verdict() -> Facts:
    from ..startup import native_options, torch_problem

    problem = torch_problem(_torch_version())
    if problem is not None:
        return {"works": False, "because": problem}
    try:
        options = native_options(config.load(), threads=1)
    except UmemError as error:
        return {"works": False, "because": str(error)}
    return {
        "works": True,
        "device": f"the software device, profile {options.profile}",
        "budget_bytes": options.budget_bytes,
        "policy": options.policy,
    }
