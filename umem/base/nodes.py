"""Figures of a node: several devices in one host that share its links and its memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError, did_you_mean
from . import device_profiles
from .device_profiles import DeviceProfile, Table, read_table

ALLOWED = "a node's name, such as h200x8, or a file that ends in .toml or .json"


@dataclass(frozen=True)
class SharedLink:
    """A link that neighbouring devices share; both directions work at the same time."""

    devices: int  # on one such link; the node has as many links as its devices need
    bytes_per_us_in: float  # host to all devices of the link
    bytes_per_us_out: float


@dataclass(frozen=True)
class Node:
    """A host with equal devices."""

    name: str
    device: DeviceProfile
    devices: int
    memory_bytes: int  # of the host
    shared: tuple[SharedLink, ...]
    peer_bytes_per_us: float  # from one device to the others of the node, each way
    network_bytes_per_us: float  # from all adapters of the node to other nodes, each way
    source: str

    def link(self, active: int) -> tuple[float, float]:
        """Return the bytes per µs into and out of a device while `active` devices move bytes.

        The result is min(own link, shared link / busy devices on it). The devices become busy in
        order, so neighbours share a link first.

        Raises:
            ConfigError: `active` is below 1 or above the number of devices.
        """
        if not 1 <= active <= self.devices:
            raise ConfigError(
                f"{active} devices of {self.name}, which has {self.devices}; allowed: 1 to "
                f"{self.devices}"
            )
        into, out = self.device.bytes_per_us_in, self.device.bytes_per_us_out
        for link in self.shared:
            busy = min(active, link.devices)
            into = min(into, link.bytes_per_us_in / busy)
            out = min(out, link.bytes_per_us_out / busy)
        return into, out

    def profile(self, active: int) -> DeviceProfile:
        """Return a device's profile while `active` devices share the links and the host's cores.

        Raises:
            ConfigError: as for `link`.
        """
        into, out = self.link(active)
        return dataclasses.replace(
            self.device,
            name=self.device.name if active == 1 else f"{self.name}/{active}",
            bytes_per_us_in=into,
            bytes_per_us_out=out,
            host_bytes_per_us=self.device.host_bytes_per_us / active,
            source=f"{self.device.source}; link as one of {active} busy devices of {self.name}",
        )

    def nodes_of(self, ranks: int) -> int:
        """Return the number of nodes that `ranks` ranks need, with one device each."""
        return -(-ranks // self.devices)

    def ring_bytes_per_us(self, ranks: int, nodes: int) -> float:
        """Return the bandwidth per rank of a ring of `ranks` over `nodes` nodes.

        All devices of a node run such rings at the same time, so the rings share the network. The
        links between the devices of a node limit each ring inside the node.
        """
        if nodes <= 1:
            return self.peer_bytes_per_us
        here = -(-ranks // nodes)
        of_network = self.network_bytes_per_us * min(here, self.devices) / self.devices
        return of_network if here == 1 else min(self.peer_bytes_per_us, of_network)


# Rates of nodes are nominal, in GB/s (1e9), each way. Each direction gets half of the host memory's
# bandwidth, because every transferred byte is read or written there once.
# DGX H100/H200 (NVIDIA's data sheet): 2 TB, two Xeon 8480C with 8 channels of DDR5-4800 each
# (614.4 GB/s), NVLink 4 with 900 GB/s both ways, 8 adapters of 400 Gb/s. One PCIe 5 x16 uplink for
# two GPUs is an assumption, taken from HGX servers with four switches.
# A100 PCIe: one socket with 8 channels of DDR4-3200 (204.8 GB/s), pairs behind a switch with a
# PCIe 4 x16 uplink, no NVLink bridges, one adapter of 200 Gb/s: an assumed server.
_HOPPER = "nominal, DGX data sheet; two GPUs on a PCIe 5 x16 uplink assumed"
_A100 = "nominal, data sheets of the parts; an assumed server of one socket"


def _hopper(name: str, device: DeviceProfile) -> Node:
    return Node(
        name=name,
        device=device,
        devices=8,
        memory_bytes=2 * 10**12,
        shared=(SharedLink(2, 55e3, 55e3), SharedLink(8, 307.2e3, 307.2e3)),
        peer_bytes_per_us=450e3,
        network_bytes_per_us=400e3,
        source=_HOPPER,
    )


def _h200() -> Node:
    return _hopper("h200x8", device_profiles.find("h200-pcie5"))


def _h100() -> Node:
    h200 = device_profiles.find("h200-pcie5")
    assert h200.compute is not None
    source = h200.compute.source.replace("H200", "H100")
    device = dataclasses.replace(
        h200,
        name="h100-pcie5",
        memory_bytes=79 << 30,  # as the driver reports it
        compute=dataclasses.replace(h200.compute, bytes_per_us=3350e3, source=source),
        source="nominal, H100 SXM data sheet; link and faults as h200-pcie5",
    )
    return _hopper("h100x8", device)


def _a100() -> Node:
    return Node(
        name="a100-pcie4x4",
        device=device_profiles.find("a100-pcie4"),
        devices=4,
        memory_bytes=512 << 30,
        shared=(SharedLink(2, 25e3, 25e3), SharedLink(4, 102.4e3, 102.4e3)),
        peer_bytes_per_us=25e3,
        network_bytes_per_us=25e3,
        source=_A100,
    )


_BUILT_IN = {"h200x8": _h200, "h100x8": _h100, "a100-pcie4x4": _a100}
NAMES = tuple(_BUILT_IN)


def find(name: str) -> Node:
    """Return the built-in node of that name, or load the file of that name.

    Raises:
        ConfigError: there is no such node; the message lists the known ones.
    """
    text = name.strip()
    if text.endswith((".toml", ".json")):
        return load(text)
    make = _BUILT_IN.get(text.lower())
    if make is None:
        raise ConfigError(
            f"there is no node {name!r}{did_you_mean(text.lower(), NAMES)}; allowed: "
            f"{', '.join(NAMES)}, or a file that ends in .toml or .json"
        )
    return make()


def find_device(name: str) -> DeviceProfile:
    """Return the device profile of that name; for a node, one device while all are busy.

    Raises:
        ConfigError: neither a profile nor a node has this name.
    """
    if (make := _BUILT_IN.get(name.strip().lower())) is not None:
        node = make()
        return node.profile(node.devices)
    return device_profiles.find(name)


def load(path: Path | str) -> Node:
    """Read the node in a TOML or JSON file; a name that ends in `.json` is JSON.

    Keys: `name`, `device` (a built-in profile or the path of a profile's file), `devices`, `memory`
    (the host's), `peer_gb_s`, `network_gb_s`, `source`, and `shared`: a list of tables with
    `devices`, `gb_per_s_in`, `gb_per_s_out`. GB are powers of ten.

    Raises:
        ConfigError: the file cannot be read, or a key is missing, unknown or out of bounds.
    """
    path = Path(path)
    table = Table(read_table(path), f"{path}", f"{__name__}.load")
    device = table.text("device")
    is_file = device.endswith((".toml", ".json"))
    node = Node(
        name=table.text("name"),
        device=device_profiles.load(path.parent / device)
        if is_file
        else device_profiles.find(device),
        devices=table.count("devices"),
        memory_bytes=table.size("memory"),
        shared=_shared(table.optional("shared"), path),
        peer_bytes_per_us=table.rate("peer_gb_s") * 1e3,
        network_bytes_per_us=table.rate("network_gb_s") * 1e3,
        source=table.text("source"),
    )
    table.end()
    return node


def _shared(given: object, path: Path) -> tuple[SharedLink, ...]:
    if given is None:
        return ()
    if not isinstance(given, list) or not all(isinstance(each, Mapping) for each in given):
        raise ConfigError(
            f"{path}: shared={given!r}; allowed: a list of tables, [[shared]] in TOML"
        )
    links = []
    for row in given:
        table = Table(row, f"{path}: shared", f"{__name__}.load")
        links.append(
            SharedLink(
                devices=table.count("devices"),
                bytes_per_us_in=table.rate("gb_per_s_in") * 1e3,
                bytes_per_us_out=table.rate("gb_per_s_out") * 1e3,
            )
        )
        table.end()
    return tuple(links)
