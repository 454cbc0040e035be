"""The machine and the versions that a figure belongs to, and where such figures may be kept."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import umem
from umem.base import host
from umem.base.native import core
from umem.base.units import GIB

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"


def machine_facts() -> dict[str, Any]:
    """Return the facts about this machine that affect the figures."""
    memory = host.meminfo("MemTotal")
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": None if memory is None else round(memory / GIB, 1),
        "kernel": platform.release(),
        "thp": host.transparent_huge_pages(),
    }


def version_facts() -> dict[str, str]:
    """Return the measured versions; the commit ends in ``+`` if files differ from it.

    Later calls return the first result: a commit may be made while a bench runs.
    """
    return dict(_first_versions())


@functools.cache
def _first_versions() -> dict[str, str]:
    facts = {"python": sys.version.split()[0]}
    for package in ("torch", "umem", "numpy", "scikit-learn"):
        try:
            facts[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            facts[package] = "not installed"
    facts["commit"] = _commit()
    return facts


def refusal(folder: Path) -> str | None:
    """Return why no report may be written to `folder`; None if it may.

    Results under bench/results are reproducible: they name a commit with all of the measured code.
    Any other folder is the caller's business.
    """
    measured = version_facts()["commit"]
    if not folder.resolve().is_relative_to(RESULTS):
        return None
    now, other = _commit(), _other_umem()
    if measured == "unknown":
        why = f"{ROOT} is no git checkout with a commit"
    elif changed := changed_files():
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        why = f"the tree differs from its commit: {changed[0]}{more}. Commit first"
    elif measured != now:
        why = f"the tree was at {measured} at the start and is at {now} now. Measure again"
    elif other is not None:
        why = f"the umem that Python imports is not this tree's: {other}. Install first"
    else:
        return None
    return (
        f"a report in bench/results names the commit that it was measured at, but {why}, or "
        "name another folder: --out FOLDER"
    )


def changed_files() -> list[str]:
    """Files that differ from the commit, except reports: a run of several benches writes many."""
    lines = _git("status", "--porcelain", "--", ".", f":(exclude){RESULTS.relative_to(ROOT)}")
    return [line[3:] for line in lines.splitlines()]


def _commit() -> str:
    commit = _git("rev-parse", "--verify", "HEAD")
    return commit + ("+" if changed_files() else "") if commit else "unknown"


def _other_umem() -> str | None:
    """Return the first file of the imported umem that differs from this tree's, or None.

    The native core counts as another one if a source has changed since it was installed.
    """
    imported = Path(umem.__file__).parent
    for path in sorted((ROOT / "umem").rglob("*.py")):
        twin = imported / path.relative_to(ROOT / "umem")
        if not twin.is_file() or twin.read_bytes() != path.read_bytes():
            return str(twin)
    library = Path(core.__file__)
    changed = [path.stat().st_mtime for path in (ROOT / "src").rglob("*.*")]
    return str(library) if max(changed, default=0.0) > library.stat().st_mtime else None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def _git(*words: str) -> str:
    """Return git's output for this tree; empty outside a checkout or without git."""
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.rstrip()
