"""Nodes: links that devices share, rings, and files."""

from __future__ import annotations

from pathlib import Path

import pytest

from umem.base import device_profiles, nodes
from umem.base.nodes import Node, SharedLink
from umem.errors import ConfigError

FILE = """
name = "mine"
device = "a100-pcie4"
devices = 4
memory = "256GiB"
peer_gb_s = 20
network_gb_s = 12.5
source = "by hand"

[[shared]]
devices = 2
gb_per_s_in = 30
gb_per_s_out = 24
"""


def _node(*shared: SharedLink) -> Node:
    device = device_profiles.find("a100-pcie4")  # 25 GB/s each way
    return Node("made", device, 4, 1 << 38, shared, 100e3, 40e3, "by hand")


def test_a_device_alone_has_its_own_link() -> None:
    assert _node(SharedLink(2, 25e3, 25e3)).link(1) == (25e3, 25e3)


@pytest.mark.parametrize(
    ("active", "into", "out"), [(1, 25e3, 20e3), (2, 15e3, 10e3), (3, 15e3, 10e3), (4, 12e3, 10e3)]
)
def test_busy_devices_divide_what_they_share(active: int, into: float, out: float) -> None:
    pair, all_four = SharedLink(2, 30e3, 20e3), SharedLink(4, 48e3, 400e3)
    # In: min(25, 30 / 2) of a pair, min(that, 48 / 4) of all. Out: 20 / 2 of a pair.
    assert _node(pair, all_four).link(active) == (into, out)


def test_the_hosts_cores_are_shared_too() -> None:
    node = _node()
    assert node.profile(4).host_bytes_per_us == node.device.host_bytes_per_us / 4
    assert node.profile(1).name == "a100-pcie4"


@pytest.mark.parametrize("active", [0, 5])
def test_a_number_of_devices_that_the_node_has_not(active: int) -> None:
    with pytest.raises(ConfigError, match="allowed: 1 to 4"):
        _node().link(active)


def test_a_ring_within_a_node_and_over_nodes() -> None:
    node = _node()
    assert node.ring_bytes_per_us(4, 1) == 100e3
    assert node.ring_bytes_per_us(8, 2) == 40e3  # all adapters for one ring through each device
    assert node.ring_bytes_per_us(2, 2) == 10e3  # one of four rings
    assert node.ring_bytes_per_us(4, 2) == 20e3  # two devices of each node: one of two rings


def test_nodes_for_a_number_of_ranks() -> None:
    assert [_node().nodes_of(ranks) for ranks in (1, 4, 5, 1024)] == [1, 1, 2, 256]


@pytest.mark.parametrize("name", nodes.NAMES)
def test_built_in_nodes_are_plausible(name: str) -> None:
    node = nodes.find(name.upper())
    assert node.name == name
    assert name.endswith(f"x{node.devices}")
    assert node.link(node.devices) < node.link(1)
    assert node.device.compute is not None


def test_an_unknown_node_names_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match=r"did you mean h200x8\?.*h100x8, a100-pcie4x4, or a file"
    ):
        nodes.find("h20x8")


def test_a_node_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(FILE)
    node = nodes.find(str(path))
    assert (node.name, node.devices, node.memory_bytes) == ("mine", 4, 256 << 30)
    assert node.link(2) == (15e3, 12e3)
    assert node.ring_bytes_per_us(8, 2) == 12.5e3


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("devices = 4", "devices = 0", "devices=0; allowed: a whole number"),
        ("devices = 4", "devices = true", "devices=True; allowed: a whole number"),
        ("peer_gb_s = 20", "", "has no 'peer_gb_s'"),
        ("peer_gb_s = 20", "peer_gb_s = 0", "above 0"),
        ("a100-pcie4", "a100", "no device profile 'a100'"),
        ("[[shared]]", "[shared]", "a list of tables"),
        ("gb_per_s_out", "gb_per_s_ot", "has no 'gb_per_s_out'"),
        ('source = "by hand"', 'source = "by hand"\nracks = 2', "no such key 'racks'"),
    ],
)
def test_a_bad_file(tmp_path: Path, old: str, new: str, says: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(FILE.replace(old, new, 1))
    with pytest.raises(ConfigError, match=says.replace("(", r"\(")):
        nodes.find(str(path))
