"""Facts about the machine, from files laid out as the kernel does."""

from __future__ import annotations

from pathlib import Path

from umem import machine


def test_meminfo(tmp_path: Path) -> None:
    path = tmp_path / "meminfo"
    path.write_text("MemTotal:       100 kB\nMemAvailable:    40 kB\nHugePages_Total:   0\n")
    assert machine.meminfo("MemAvailable", path) == 40 * 1024
    assert machine.meminfo("Nothing", path) is None
    assert machine.meminfo("MemTotal", tmp_path / "absent") is None


def test_a_control_group_bounds_what_is_available(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("3000000\n")
    (tmp_path / "memory.current").write_text("1000000\n")
    assert machine.cgroup_limit(tmp_path) == 3_000_000
    assert machine.available_memory(tmp_path) == 2_000_000
    (tmp_path / "memory.current").write_text("4000000\n")
    assert machine.available_memory(tmp_path) == 0


def test_unbounded_control_groups(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.cgroup_limit(tmp_path) is None
    old = tmp_path / "memory"
    old.mkdir()
    (old / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert machine.cgroup_limit(tmp_path) is None
    (old / "memory.limit_in_bytes").write_text("4096\n")
    assert machine.cgroup_limit(tmp_path) == 4096
    assert machine.available_memory(tmp_path / "absent") == machine.meminfo("MemAvailable")


def test_huge_pages(tmp_path: Path) -> None:
    path = tmp_path / "enabled"
    path.write_text("always [madvise] never\n")
    assert machine.transparent_huge_pages(path) == "madvise"
    assert machine.transparent_huge_pages(tmp_path / "absent") is None
