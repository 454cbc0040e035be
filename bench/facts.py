"""The machine and the versions that a figure belongs to."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from umem import machine
from umem.units import GIB

ROOT = Path(__file__).resolve().parent.parent


def machine_facts() -> dict[str, Any]:
    """What of this machine bears on the figures."""
    memory = machine.meminfo("MemTotal")
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": None if memory is None else round(memory / GIB, 1),
        "kernel": platform.release(),
        "thp": machine.transparent_huge_pages(),
    }


def version_facts() -> dict[str, str]:
    """The versions of what was measured; the commit ends in ``+`` where files differ from it."""
    facts = {"python": sys.version.split()[0]}
    for package in ("torch", "umem", "numpy", "scikit-learn"):
        try:
            facts[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            facts[package] = "not installed"
    commit = _git("rev-parse", "HEAD") or "unknown"
    facts["commit"] = commit + ("+" if _git("status", "--porcelain") else "")
    return facts


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def _git(*words: str) -> str:
    """What git says about this tree; empty outside a checkout or without git."""
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
