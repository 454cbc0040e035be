"""Device profiles: look-up, files, links."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from umem.base import device_profiles
from umem.base.native import core
from umem.base.units import GIB
from umem.errors import ConfigError

TABLE: dict[str, Any] = {
    "name": "my-card", "gb_per_s_in": 12.5, "gb_per_s_out": 11, "fault_us": 20, "memory": "16GiB",
    "source": "measured",
}  # fmt: skip
COMPUTE: dict[str, Any] = {
    "tflops_half": 100, "tflops_tf32": 50, "tflops_fp32": 10, "tflops_fp64": 0.3, "gb_per_s": 500,
    "launch_us": 2, "source": "data sheet",
}  # fmt: skip


def _file(folder: Path, table: dict[str, Any]) -> Path:
    path = folder / "card.json"
    path.write_text(json.dumps(table))
    return path


def test_every_native_profile_is_found_and_has_compute() -> None:
    assert {"a100-pcie4", "rtx4090-pcie4", "h200-pcie5", "gh200-c2c"} <= set(
        device_profiles.names()
    )
    for row in core.profiles():
        profile = device_profiles.find(row["name"])
        assert profile.bytes_per_us_in == row["gb_per_s_in"] * 1e3
        assert profile.memory_bytes == row["memory_bytes"]
        assert profile.compute is not None
        assert re.match("nominal|assumed", profile.compute.source)


def test_the_figures_of_the_default() -> None:
    profile = device_profiles.find(device_profiles.DEFAULT)
    assert (profile.bytes_per_us_in, profile.fault_us) == (25e3, 45.0)
    assert profile.compute is not None
    assert profile.compute.half_flops_per_us == 312e6  # 312 TFLOP/s
    assert profile.compute.bytes_per_us == 1555e3


def test_names_are_read_as_options_write_them() -> None:
    assert device_profiles.find(" soft:H200-PCIE5 ") == device_profiles.find("h200-pcie5")
    with pytest.raises(ConfigError, match=r"did you mean a100-pcie4\?.*allowed: .*gh200-c2c"):
        device_profiles.find("a100-pcie")


def test_another_link_is_another_device() -> None:
    profile = device_profiles.find("h200-pcie5")
    slow = device_profiles.with_link(profile, 12.5)
    assert (slow.bytes_per_us_in, slow.bytes_per_us_out) == (12.5e3, 12.5e3)
    assert slow.name == "h200-pcie5+12.5GB/s"
    both = device_profiles.with_link(profile, 3.2, 4.5)
    assert (both.bytes_per_us_in, both.bytes_per_us_out) == (3.2e3, 4.5e3)
    assert both.name == "h200-pcie5+3.2,4.5GB/s"
    same = {"name", "source", "bytes_per_us_in", "bytes_per_us_out"}
    for field in dataclasses.fields(profile):
        if field.name not in same:
            assert getattr(slow, field.name) == getattr(profile, field.name)


@pytest.mark.parametrize("rate", [0, -1, float("nan"), float("inf"), True])
def test_a_link_is_a_number_above_0(rate: float) -> None:
    with pytest.raises(ConfigError, match="allowed: a number above 0"):
        device_profiles.with_link(device_profiles.find("h200-pcie5"), rate)


def test_a_file_in_toml_and_json_is_the_same(tmp_path: Path) -> None:
    lines = [f"{key} = {json.dumps(value)}" for key, value in TABLE.items()]
    lines += ["[compute]", *(f"{key} = {json.dumps(value)}" for key, value in COMPUTE.items())]
    toml = tmp_path / "card.toml"
    toml.write_text("\n".join(lines))
    profile = device_profiles.load(toml)
    assert profile == device_profiles.load(_file(tmp_path, {**TABLE, "compute": COMPUTE}))
    assert (profile.name, profile.memory_bytes) == ("my-card", 16 * GIB)
    assert (profile.bytes_per_us_in, profile.bytes_per_us_out) == (12.5e3, 11e3)
    assert profile.compute is not None
    assert profile.compute.fp64_flops_per_us == 0.3e6
    assert device_profiles.load(_file(tmp_path, TABLE)).compute is None
    assert profile.host_bytes_per_us == device_profiles.HOST_BYTES_PER_US
    measured = device_profiles.load(_file(tmp_path, {**TABLE, "host_gb_s": 51.5}))
    assert measured.host_bytes_per_us == 51.5e3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gb_per_s_in": 0}, "gb_per_s_in=0; allowed: a finite number above 0"),
        ({"gb_per_s_out": "25"}, "gb_per_s_out='25'"),
        ({"host_gb_s": 0}, "host_gb_s=0; allowed: a finite number above 0"),
        ({"fault_us": -1}, "fault_us=-1; allowed: a finite number of at least 0"),
        ({"fault_us": True}, "fault_us=True"),
        ({"memory": "1MiB"}, "memory='1MiB'"),
        ({"memory": 2.5}, "memory=2.5"),
        ({"memory": True}, "memory=True"),
        ({"name": " "}, "name=' '"),
        ({"source": 3}, "source=3"),
        ({"speed": 1}, "no such key 'speed'"),
        ({"computer": {}}, r"no such key 'computer' \(did you mean compute\?\)"),
        ({"compute": 3}, "compute is not a table"),
        ({"compute": {**COMPUTE, "gb_per_s": -5}}, "compute: gb_per_s=-5"),
        ({"compute": {"tflops_half": 1}}, "compute has no 'tflops_tf32'"),
        ({"compute": {**COMPUTE, "watts": 300}}, "compute: no such key 'watts'"),
    ],
)
def test_a_bad_value_is_named(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        device_profiles.load(_file(tmp_path, {**TABLE, **change}))


@pytest.mark.parametrize("key", list(TABLE))
def test_a_missing_key_is_named(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match=f"has no '{key}'"):
        device_profiles.load(_file(tmp_path, {k: v for k, v in TABLE.items() if k != key}))


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.toml", b"name = "), ("a.json", b"[" * 100_000), ("a.json", b"{"), ("a.toml", b"\xff"),
     ("a.json", b"[]"), ("a.toml", b"#" * (device_profiles.FILE_LIMIT + 1))],
)  # fmt: skip
def test_a_file_that_is_no_profile(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=str(path)):
        device_profiles.load(path)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.toml", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read as a device profile"):
            device_profiles.load(path)
