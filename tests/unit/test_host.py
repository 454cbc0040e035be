"""Host information, from files laid out as the kernel does."""

from __future__ import annotations

from pathlib import Path

import pytest

from umem.base import host


def test_meminfo(tmp_path: Path) -> None:
    path = tmp_path / "meminfo"
    path.write_text("MemTotal:       100 kB\nMemAvailable:    40 kB\nHugePages_Total:   0\n")
    assert host.meminfo("MemAvailable", path) == 40 * 1024
    assert host.meminfo("Nothing", path) is None
    assert host.meminfo("MemTotal", tmp_path / "absent") is None


def test_a_control_group_bounds_what_is_available(tmp_path: Path) -> None:
    memory = tmp_path / "meminfo"  # the machine's own changes between two reads
    memory.write_text("MemAvailable:  2500 kB\n")
    assert host.available_memory(tmp_path, memory) == 2500 * 1024
    (tmp_path / "memory.max").write_text("3000000\n")
    (tmp_path / "memory.current").write_text("1000000\n")
    assert host.cgroup_limit(tmp_path) == 3_000_000
    assert host.available_memory(tmp_path, memory) == 2_000_000
    assert host.available_memory(tmp_path, tmp_path / "absent") == 2_000_000
    (tmp_path / "memory.current").write_text("4000000\n")
    assert host.available_memory(tmp_path, memory) == 0
    (tmp_path / "memory.current").write_text("100000\n")
    assert host.available_memory(tmp_path, memory) == 2500 * 1024


def test_unbounded_control_groups(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    assert host.cgroup_limit(tmp_path) is None
    old = tmp_path / "memory"
    old.mkdir()
    (old / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert host.cgroup_limit(tmp_path) is None
    (old / "memory.limit_in_bytes").write_text("4096\n")
    assert host.cgroup_limit(tmp_path) == 4096


def test_the_groups_around_a_process_bound_it_too(tmp_path: Path) -> None:
    """As those of a batch system or of systemd are, which are not at the root."""
    own, root = tmp_path / "own", tmp_path / "groups"
    job = root / "slurm/job_7"
    step = job / "step_0"
    step.mkdir(parents=True)
    own.write_text("0::/slurm/job_7/step_0\n")
    (step / "memory.max").write_text("max\n")
    (job / "memory.max").write_text("5000\n")
    (job / "memory.current").write_text("4000\n")
    (job / "memory.stat").write_text("anon 3000\ninactive_file 700\nactive_file 300\n")
    (root / "slurm/memory.max").write_text("9000\n")
    assert host.cgroup_limit(root, own) == 5000
    nothing = tmp_path / "absent"
    assert host.available_memory(root, nothing, own) == 1700
    (root / "slurm/memory.current").write_text("8999\n")
    assert host.available_memory(root, nothing, own) == 1


@pytest.mark.parametrize("path", ["/machine/docker/1f", "/../../elsewhere"])
def test_in_a_container_the_root_is_its_group(tmp_path: Path, path: str) -> None:
    own = tmp_path / "own"
    own.write_text(f"12:cpu,memory:{path}\n0::{path}\n")
    old = tmp_path / "groups/memory"
    old.mkdir(parents=True)
    (old / "memory.limit_in_bytes").write_text("4096\n")
    (old / "memory.usage_in_bytes").write_text("1096\n")
    (old / "memory.stat").write_text("inactive_file 10\ntotal_inactive_file 96\n")
    assert host.cgroup_limit(tmp_path / "groups", own) == 4096
    assert host.available_memory(tmp_path / "groups", tmp_path / "absent", own) == 3096


def test_wsl_is_told_by_the_kernels_name(tmp_path: Path) -> None:
    path = tmp_path / "osrelease"
    path.write_text("5.15.153.1-microsoft-standard-WSL2\n")
    assert host.is_wsl(path)
    path.write_text("6.8.0-45-generic\n")
    assert not host.is_wsl(path)
    assert not host.is_wsl(tmp_path / "absent")


@pytest.mark.parametrize(
    ("gt_per_s", "width", "expected"),
    [(8.0, 16, 15.754), (16.0, 16, 31.508), (32.0, 16, 63.015), (2.5, 1, 0.25), (5.0, 8, 4.0)],
)
def test_bandwidth_of_a_link(gt_per_s: float, width: int, expected: float) -> None:
    assert host.PcieLink(gt_per_s, width).gb_per_s == pytest.approx(expected, abs=1e-3)


def test_a_link_of_an_unknown_generation_has_no_bandwidth() -> None:
    assert host.PcieLink(7.5, 16).gb_per_s is None


def link(folder: Path, which: str, speed: str, width: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{which}_link_speed").write_text(f"{speed}\n")
    (folder / f"{which}_link_width").write_text(f"{width}\n")


@pytest.fixture
def pci(tmp_path: Path) -> tuple[Path, Path, Path]:
    """(folder of all devices, folder of one GPU, folder of the port above it)."""
    port = tmp_path / "devices" / "pci0000:3a" / "0000:3a:00.0"
    gpu = port / "0000:3b:00.0"
    link(port, "max", "8.0 GT/s PCIe", "16")
    link(gpu, "max", "16.0 GT/s PCIe", "16")
    link(gpu, "current", "2.5 GT/s PCIe", "16")
    everyone = tmp_path / "bus"
    everyone.mkdir()
    (everyone / gpu.name).symlink_to(gpu)
    return everyone, gpu, port


def test_a_link_is_as_fast_as_its_slower_end(pci: tuple[Path, Path, Path]) -> None:
    everyone, gpu, port = pci
    assert host.pcie_link_max("0000:3B:00.0", everyone) == host.PcieLink(8.0, 16)
    assert host.pcie_link_now("0000:3B:00.0", everyone) == host.PcieLink(2.5, 16)
    link(port, "max", "32.0 GT/s PCIe", "8")
    assert host.pcie_link_max(gpu.name, everyone) == host.PcieLink(16.0, 8)
    (port / "max_link_speed").unlink()  # a virtual machine shows no port
    assert host.pcie_link_max(gpu.name, everyone) == host.PcieLink(16.0, 16)


@pytest.mark.parametrize(
    ("speed", "width"), [("Unknown", "16"), ("", "16"), ("8.0 GT/s PCIe", "255"), ("8 GT/s", "0")]
)
def test_a_link_that_the_kernel_does_not_know(
    pci: tuple[Path, Path, Path], speed: str, width: str
) -> None:
    everyone, gpu, _ = pci
    link(gpu, "max", speed, width)
    link(gpu, "current", speed, width)
    assert host.pcie_link_max(gpu.name, everyone) is None
    assert host.pcie_link_now(gpu.name, everyone) is None


def test_no_link_of_a_device_that_is_not_there(tmp_path: Path) -> None:
    for bus_id in ("", "0000:3b:00.0"):
        assert host.pcie_link_max(bus_id, tmp_path) is None
        assert host.pcie_link_now(bus_id, tmp_path) is None


def test_huge_pages(tmp_path: Path) -> None:
    path = tmp_path / "enabled"
    path.write_text("always [madvise] never\n")
    assert host.transparent_huge_pages(path) == "madvise"
    assert host.transparent_huge_pages(tmp_path / "absent") is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0-3,8\n", {0, 1, 2, 3, 8}), ("5\n", {5}), ("\n", set()), ("x\n", set()), (None, set())],
)
def test_the_processors_near_a_device(tmp_path: Path, text: str | None, expected: set[int]) -> None:
    (tmp_path / "0000:3b:00.0").mkdir()
    if text is not None:
        (tmp_path / "0000:3b:00.0" / "local_cpulist").write_text(text)
    assert host.cpus_near("0000:3B:00.0", tmp_path) == expected
