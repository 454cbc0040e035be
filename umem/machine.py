"""Facts about this machine, read from the kernel's files. Nothing here is a setting."""

from __future__ import annotations

from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def meminfo(name: str, path: Path = Path("/proc/meminfo")) -> int | None:
    """Bytes of one field of /proc/meminfo, such as `MemAvailable`; None where there is none."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        key, _, rest = line.partition(":")
        if key == name:
            return int(rest.split()[0]) * 1024
    return None


def cgroup_limit(root: Path = _CGROUP) -> int | None:
    """Bytes that the control group of this process may use; None when it is unbounded.

    Only the group that is visible as the root is read, which is a container's own.
    """
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        value = _number(root / name)
        if value is not None and value < 1 << 60:  # version 1 writes "unbounded" as a huge number
            return value
    return None


def total_memory(root: Path = _CGROUP) -> int | None:
    """Bytes of memory that this process can ever have; None when nobody tells."""
    known = [size for size in (meminfo("MemTotal"), cgroup_limit(root)) if size is not None]
    return min(known, default=None)


def available_memory(root: Path = _CGROUP) -> int | None:
    """Bytes that this process can still take without swapping; None when nobody tells."""
    free = meminfo("MemAvailable")
    limit = cgroup_limit(root)
    if limit is None:
        return free
    used = _number(root / "memory.current") or _number(root / "memory/memory.usage_in_bytes") or 0
    left = max(limit - used, 0)
    return left if free is None else min(free, left)


def transparent_huge_pages(
    path: Path = Path("/sys/kernel/mm/transparent_hugepage/enabled"),
) -> str | None:
    """The kernel's choice: `always`, `madvise` or `never`; None without the feature."""
    try:
        words = path.read_text(encoding="ascii").split()
    except OSError:
        return None
    chosen = [word.strip("[]") for word in words if word.startswith("[")]
    return chosen[0] if chosen else None


def _number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
