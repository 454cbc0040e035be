"""Facts about this machine, read from the kernel's files. Nothing here is a setting."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")
_MAX_MAPPINGS = Path("/proc/sys/vm/max_map_count")
_PCI = Path("/sys/bus/pci/devices")
_PCIE_UNKNOWN_WIDTH = 255  # the kernel's value for a link without a width
# Payload per transferred bit, by GT/s per lane: 8b/10b, then 128b/130b, then flits of 256 bytes.
_PCIE_PAYLOAD = {2.5: 8 / 10, 5.0: 8 / 10, 8.0: 128 / 130, 16.0: 128 / 130, 32.0: 128 / 130,
                 64.0: 236 / 256}  # fmt: skip


@dataclass(frozen=True)
class PcieLink:
    """A link: transfers of a lane in GT/s, and the number of lanes."""

    gt_per_s: float
    width: int

    @property
    def gb_per_s(self) -> float | None:
        """Bandwidth in GB/s each way before packet headers; None for an unknown generation."""
        payload = _PCIE_PAYLOAD.get(self.gt_per_s)
        return None if payload is None else self.gt_per_s * self.width * payload / 8


def for_evicted(available: int) -> int:
    """Return how many of the host's `available` bytes evicted tensors may take by default."""
    return available * 9 // 10


def meminfo(name: str, path: Path = _MEMINFO) -> int | None:
    """Return the bytes of one field of /proc/meminfo, such as `MemAvailable`, or None."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        key, _, rest = line.partition(":")
        if key == name:
            return int(rest.split()[0]) * 1024
    return None


def memory_groups(root: Path = _CGROUP, own: Path = _OWN_CGROUP) -> list[Path]:
    """Return the folders of the control groups that may limit this process's memory.

    These are the process's own group and its parents. In a container the kernel may report paths
    outside the container: paths that do not exist here are left out, and the container's root
    stands in for them.
    """
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    # Version 2 has one hierarchy, with number 0; version 1 has one for each controller.
    top = [Path()]
    paths = {root: top, root / "unified": top, root / "memory": top}
    for number, controllers, path in (line.split(":", 2) for line in lines):
        inside = Path(path.lstrip("/"))
        if ".." in inside.parts:
            continue  # not visible in this container
        around = [inside, *inside.parents]
        if number == "0":
            paths[root] = paths[root / "unified"] = around
        elif "memory" in controllers.split(","):
            paths[root / "memory"] = around
    folders = (mount / inner for mount, around in paths.items() for inner in around)
    return [folder for folder in folders if os.path.isdir(folder)]


def _limits(root: Path, own: Path) -> dict[Path, int]:
    """Return the limit in bytes of each group that has one."""
    found = {}
    for folder in memory_groups(root, own):
        for name in ("memory.max", "memory.limit_in_bytes"):
            value = _number(folder / name)
            if value is not None and value < 1 << 60:  # version 1: a huge number means no limit
                found[folder] = value
    return found


def _used(group: Path) -> int:
    """Return the bytes that a group uses, without file pages that the kernel can drop."""
    used = _number(group / "memory.current") or _number(group / "memory.usage_in_bytes") or 0
    try:
        lines = (group / "memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return used
    fields = dict(line.split(" ", 1) for line in lines if " " in line)
    # In version 1, the name without `total_` does not count child groups.
    dropped = fields.get("total_inactive_file") or fields.get("inactive_file") or "0"
    return max(used - int(dropped), 0)


def cgroup_limit(root: Path = _CGROUP, own: Path = _OWN_CGROUP) -> int | None:
    """Return the smallest limit of this process's control groups in bytes; None without one."""
    return min(_limits(root, own).values(), default=None)


def max_mappings(path: Path = _MAX_MAPPINGS) -> int | None:
    """Return how many mappings a process may have; None if unknown."""
    return _number(path)


def total_memory() -> int | None:
    """Return the maximum memory of this process in bytes; None if unknown."""
    known = [size for size in (meminfo("MemTotal"), cgroup_limit()) if size is not None]
    return min(known, default=None)


def available_memory(
    root: Path = _CGROUP, memory: Path = _MEMINFO, own: Path = _OWN_CGROUP
) -> int | None:
    """Return the bytes that this process can still take without swapping; None if unknown."""
    left = [max(limit - _used(group), 0) for group, limit in _limits(root, own).items()]
    free = meminfo("MemAvailable", memory)
    return min(left if free is None else [*left, free], default=None)


def transparent_huge_pages(
    path: Path = Path("/sys/kernel/mm/transparent_hugepage/enabled"),
) -> str | None:
    """Return the kernel's setting: `always`, `madvise` or `never`; None without the feature."""
    try:
        words = path.read_text(encoding="ascii").split()
    except OSError:
        return None
    chosen = [word.strip("[]") for word in words if word.startswith("[")]
    return chosen[0] if chosen else None


def is_wsl(path: Path = Path("/proc/sys/kernel/osrelease")) -> bool:
    """Return whether the kernel's name says Windows Subsystem for Linux."""
    try:
        return "microsoft" in path.read_text(encoding="ascii").lower()
    except OSError:
        return False


def pcie_link_now(bus_id: str, root: Path = _PCI) -> PcieLink | None:
    """Return the present link of a PCI device, which may be slower while the device is idle."""
    return _pcie_link(root / bus_id.lower(), "current") if bus_id else None


def pcie_link_max(bus_id: str, root: Path = _PCI) -> PcieLink | None:
    """Return the best link that both the device and the port above it support."""
    if not bus_id:
        return None
    device = (root / bus_id.lower()).resolve()
    ends = [_pcie_link(folder, "max") for folder in (device, device.parent)]
    known = [link for link in ends if link is not None]
    if not known or ends[0] is None:
        return None
    return PcieLink(min(e.gt_per_s for e in known), min(e.width for e in known))


def cpus_near(bus_id: str, root: Path = _PCI) -> frozenset[int]:
    """Return the CPUs on the NUMA node of a PCI device; empty if the kernel knows none."""
    try:
        text = (root / bus_id.lower() / "local_cpulist").read_text(encoding="ascii").strip()
        ends = [list(map(int, part.split("-"))) for part in text.split(",") if part]
    except (OSError, ValueError):
        return frozenset()
    return frozenset(cpu for span in ends for cpu in range(span[0], span[-1] + 1))


def _pcie_link(folder: Path, which: str) -> PcieLink | None:
    try:
        speed = (folder / f"{which}_link_speed").read_text(encoding="ascii").split()
    except OSError:
        return None
    width = _number(folder / f"{which}_link_width")
    try:
        rate = float(speed[0])
    except (IndexError, ValueError):  # "Unknown"
        return None
    return PcieLink(rate, width) if width and width < _PCIE_UNKNOWN_WIDTH else None


def _number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
