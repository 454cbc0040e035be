"""The "cuda" section of `umem doctor`: each fact with its meaning and umem's use of it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ..base import host

if TYPE_CHECKING:
    from ..base.native import core

Facts = dict[str, Any]  # JSON values by name

# Names of vGPU profiles as NVIDIA writes them: "GRID V100D-16Q", "NVIDIA A10-8Q". A guess.
_VGPU = re.compile(r"^GRID\b|-\d+[ABCQ](ME)?$")
_DISCARD_VERSION = 13000


def is_vgpu(name: str) -> bool:
    """Return whether a device's name looks like a share of a GPU from a hypervisor."""
    return _VGPU.search(name) is not None


def is_mig(name: str) -> bool:
    """Return whether the name is a MIG instance's, as "NVIDIA H100 80GB HBM3 MIG 1g.10gb"."""
    return re.search(r"\bMIG\b", name) is not None


def facts(probe: core.CudaProbe) -> Facts:
    """Return all facts about the driver and its devices; without a driver only the first."""
    report: Facts = {"available": _available(probe)}
    if probe["driver_version"] == 0:
        return report
    report["driver_version"] = _driver_version(probe)
    if probe["devices"]:
        report["concurrent_managed_access"] = _concurrent_managed_access(probe)
    report["wsl"] = _wsl()
    details = {**_entry_points(probe), "host_memory_bytes": _host_memory(),
               "max_mappings": _max_mappings()}  # fmt: skip
    devices = [_device(device) for device in probe["devices"]]
    if not probe["available"]:
        details = _unused(details)
        devices = [_unused(device) for device in devices]
    return {**report, **details, "devices": devices}


def _unused(details: Facts) -> Facts:
    rest = details.keys() - {"total_bytes", "integrated"}
    return details | {name: {**details[name], "umem": "does not use it here"} for name in rest}


def version_text(version: int) -> str:
    """Format 13000 as 13.0."""
    return f"{version // 1000}.{version % 1000 // 10}"


def _fact(value: object, meaning: str, umem: str) -> Facts:
    return {"value": value, "meaning": meaning, "umem": umem}


def _yes_no(value: bool, yes: tuple[str, str], no: tuple[str, str]) -> Facts:
    return _fact(value, *(yes if value else no))


def _available(probe: core.CudaProbe) -> Facts:
    if probe["available"]:
        return _fact(
            True, "managed memory can exceed device memory", "can be torch's allocator on the GPU"
        )
    if probe["devices"]:
        return _fact(
            False, probe["reason"], "uses plain device memory: torch works, but nothing is evicted"
        )
    return _fact(False, probe["reason"], "offers only the software device")


def _driver_version(probe: core.CudaProbe) -> Facts:
    version = probe["driver_version"]
    older = version < _DISCARD_VERSION
    umem = "works without the entry points of CUDA 13.0" if older else "uses the entry points below"
    return _fact(version, "the CUDA version that the driver supports", umem)


def _concurrent_managed_access(probe: core.CudaProbe) -> Facts:
    return _yes_no(
        probe["concurrent_managed_access"],
        ("host and device may share managed memory, and it may exceed the device's",
         "takes memory from cuMemAllocManaged" if probe["available"] else "does not use it here"),
        ("a device cannot page managed memory in and out: WSL, some vGPU, devices before Pascal",
         "uses plain device memory on all devices, so no memory is gained"),
    )  # fmt: skip


def _entry_points(probe: core.CudaProbe) -> Facts:
    return {
        "batch_prefetch": _yes_no(
            probe["batch_prefetch"],
            ("one driver call moves many ranges", "moves all ranges of an operator in one call"),
            ("the driver moves one range per call", "moves range by range"),
        ),
        "discard": _yes_no(
            probe["discard"],
            ("bytes can be declared dead", "discards freed blocks when memory is short"),
            ("dead bytes are copied like live ones", "sends them to the host when memory is short"),
        ),
        "discard_and_prefetch": _yes_no(
            probe["discard_and_prefetch"],
            ("dead ranges get device memory without a copy", "uses this for blocks that it reuses"),
            ("dead ranges return with their old bytes", "copies them in with reused blocks"),
        ),
        "location_info": _yes_no(
            probe["location_info"],
            ("the driver can report where bytes are", "keeps its own residency table instead"),
            ("the driver cannot report where bytes are", "keeps its own residency table"),
        ),
    }


def _wsl() -> Facts:
    return _yes_no(
        host.is_wsl(),
        ("Windows does the paging for the driver", "depends on concurrent managed access"),
        ("not the Windows Subsystem for Linux", "does not depend on it"),
    )


def _host_memory() -> Facts:
    return _fact(
        host.total_memory(),
        "memory of this machine or its control group, if smaller; it holds evicted bytes "
        "until they are freed",
        "evicts no more than the host budget (UMEM_HOST_BUDGET)",
    )


def _max_mappings() -> Facts:
    return _fact(
        host.max_mappings(),
        "how many mappings a process may have (vm.max_map_count)",
        "takes one for each tensor of 2 MiB and more, and one for 2 MiB of smaller ones",
    )


def _device(device: core.CudaDevice) -> Facts:
    return {
        "name": _kind_of_device(device["name"]),
        "total_bytes": _fact(
            device["total_bytes"],
            "the memory of the device",
            "uses at most the budget (UMEM_BUDGET)",
        ),
        "compute_capability": _fact(
            device["compute_capability"], "the GPU generation", "does not depend on it"
        ),
        "concurrent_managed_access": _yes_no(
            device["concurrent_managed_access"],
            ("the device pages managed memory", "needs this of every device"),
            ("the device cannot page managed memory", "uses plain device memory on all devices"),
        ),
        "pageable_memory_access": _pageable(device),
        "integrated": _yes_no(
            device["integrated"],
            (
                "device memory is the host's memory",
                "counts the host's available memory as free; evicts nothing if all devices are so",
            ),
            ("device memory is its own", "evicts to the host's memory"),
        ),
        **_link(device["pci_bus_id"]),
    }


def _kind_of_device(name: str) -> Facts:
    if is_mig(name):
        return _fact(name, "a MIG instance", "treats it as a device; CUDA IPC does not work on it")
    if is_vgpu(name):
        return _fact(
            name,
            "a virtual GPU, judged by its name: some profiles have no managed memory",
            "depends on concurrent managed access",
        )
    return _fact(name, "a whole GPU, judged by its name", "does not depend on it")


def _pageable(device: core.CudaDevice) -> Facts:
    if device["pageable_uses_host_page_tables"]:
        meaning = "kernels can use memory from malloc, through the host's page tables (ATS)"
    elif device["pageable_memory_access"]:
        meaning = "kernels can use memory from malloc, by page faults (HMM)"
    else:
        meaning = "kernels cannot use memory from malloc"
    return _fact(device["pageable_memory_access"], meaning, "uses managed memory anyway")


def _link(bus_id: str) -> Facts:
    now, most = host.pcie_link_now(bus_id), host.pcie_link_max(bus_id)
    return {
        "pci_bus_id": _fact(
            bus_id or None, "address of the device", "reads the link's speed there"
        ),
        "link_gb_per_s": _fact(
            _rounded(most),
            "max GB/s each way of the PCIe link, before packet headers: the limit of eviction and "
            "prefetch, unless the device has another link to the host",
            "only reports it",
        ),
        "link_gb_per_s_now": _fact(
            _rounded(now),
            "current GB/s of the link; an idle device may have slowed it down",
            "only reports it",
        ),
    }


def _rounded(link: host.PcieLink | None) -> float | None:
    speed = None if link is None else link.gb_per_s
    return None if speed is None else round(speed, 2)
