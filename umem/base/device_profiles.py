"""Figures of a device and its link, which planning and replay use."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError, did_you_mean
from .units import BYTES_ALLOWED, FLOOR_PAGES, PAGE_BYTES, parse_bytes

DEFAULT = "a100-pcie4"
FILE_LIMIT = 1 << 20  # bytes; a profile is a few lines


# An assumed bandwidth of all cores of a server in the host's memory, the same for all built-in
# profiles. `umem doctor --measure` measures this machine's.
HOST_BYTES_PER_US = 100e3


@dataclass(frozen=True)
class Compute:
    """Peak compute rates of the device, for the roofline model; no program fully reaches them."""

    half_flops_per_us: float  # fp16 and bf16 matrix products, dense
    tf32_flops_per_us: float  # fp32 matrix products where TF32 is allowed
    fp32_flops_per_us: float
    fp64_flops_per_us: float
    bytes_per_us: float  # the device's own memory
    launch_us: float  # the minimum duration of an op, however small it is
    source: str


@dataclass(frozen=True)
class DeviceProfile:
    """The figures of a device for planners; both directions of the link work at the same time.

    If `hides_transfers` is false, transfers cannot overlap compute, so the best plan moves the
    fewest bytes.
    """

    name: str
    bytes_per_us_in: float  # host to device
    bytes_per_us_out: float  # device to host
    fault_us: float  # one group of page faults
    memory_bytes: int
    source: str  # where the figures come from
    compute: Compute | None = None  # None: enough for replay, not for planning
    hides_transfers: bool = True
    host_bytes_per_us: float = HOST_BYTES_PER_US  # that all cores of the host read and write


# An assumed fixed cost of an op: the order of magnitude of a kernel launch in eager PyTorch.
_LAUNCH_US = 3.0


# The profile of a machine without a GPU, with the option `disk`.
DISK = "cpu-disk"


def _sheet(
    of: str, *, half: float, tf32: float, fp32: float, fp64: float, gb_per_s: float
) -> Compute:
    """Build the rates from a vendor's data sheet: TFLOP/s (1e12) and GB/s (1e9)."""
    return Compute(
        half_flops_per_us=half * 1e6,
        tf32_flops_per_us=tf32 * 1e6,
        fp32_flops_per_us=fp32 * 1e6,
        fp64_flops_per_us=fp64 * 1e6,
        bytes_per_us=gb_per_s * 1e3,
        launch_us=_LAUNCH_US,
        source=f"nominal, {of} data sheet; {_LAUNCH_US:g} µs an op assumed",
    )


# Dense peaks without sparsity. src/soft/profiles.cpp has the links, memory sizes and fault costs.
_COMPUTE = {
    "a100-pcie4": _sheet("A100 40 GB PCIe", half=312, tf32=156, fp32=19.5, fp64=9.7, gb_per_s=1555),
    "rtx4090-pcie4": _sheet("RTX 4090", half=165.2, tf32=82.6, fp32=82.6, fp64=1.29, gb_per_s=1008),
    "h200-pcie5": _sheet("H200 SXM", half=989, tf32=494, fp32=67, fp64=34, gb_per_s=4800),
    DISK: Compute(
        half_flops_per_us=0.5e6,
        tf32_flops_per_us=0.5e6,
        fp32_flops_per_us=0.5e6,
        fp64_flops_per_us=0.25e6,
        bytes_per_us=40e3,
        launch_us=5.0,
        source="assumed, a CPU of 0.5 TFLOP/s and 40 GB/s: --profile takes another one's figures",
    ),
    "gh200-c2c": _sheet("GH200 96 GB HBM3", half=990, tf32=494, fp32=67, fp64=34, gb_per_s=4000),
}


def names() -> tuple[str, ...]:
    """Return the names of the profiles that come with umem."""
    from .native import core

    return tuple(profile["name"] for profile in core.profiles())


def find(name: str) -> DeviceProfile:
    """Return the profile of that name, with or without `soft:` before it.

    Raises:
        ConfigError: no such profile; the message lists the known ones.
    """
    from .native import core

    wanted = name.strip().removeprefix("soft:").lower()
    for row in core.profiles():
        if row["name"] == wanted:
            return DeviceProfile(
                name=row["name"],
                bytes_per_us_in=row["gb_per_s_in"] * 1e3,
                bytes_per_us_out=row["gb_per_s_out"] * 1e3,
                fault_us=row["fault_us"],
                memory_bytes=row["memory_bytes"],
                source=row["source"],
                compute=_COMPUTE.get(row["name"]),
            )
    known = names()
    raise ConfigError(
        f"there is no device profile {name!r}{did_you_mean(wanted, known)}; allowed: "
        f"{', '.join(known)}, or a file by --profile"
    )


def with_link(profile: DeviceProfile, gb_in: float, gb_out: float | None = None) -> DeviceProfile:
    """Return the same device on another link.

    Args:
        profile: the device.
        gb_in: GB/s (1e9) to the device.
        gb_out: GB/s from the device; None: the same.

    Raises:
        ConfigError: not numbers above 0.
    """
    rates = [gb_in] if gb_out is None else [gb_in, gb_out]
    for rate in rates:
        if (_number(rate) or 0.0) <= 0:
            raise ConfigError(f"link of {rate!r} GB/s; allowed: a number above 0, such as 25")
    text = ",".join(f"{rate:g}" for rate in rates)
    return dataclasses.replace(
        profile,
        name=f"{profile.name}+{text}GB/s",
        bytes_per_us_in=rates[0] * 1e3,
        bytes_per_us_out=rates[-1] * 1e3,
        source=f"{profile.source}; link given as {text} GB/s",
    )


def load(path: Path | str) -> DeviceProfile:
    """Read the profile in a TOML or JSON file; a name that ends in `.json` is JSON.

    Keys: `name`, `gb_per_s_in`, `gb_per_s_out`, `fault_us`, `memory` (bytes, or text as 40GiB),
    `source`; optional `host_gb_s`, the rate at which the host's cores read and write, and the table
    `compute` with `tflops_half`, `tflops_tf32`, `tflops_fp32`, `tflops_fp64`, `gb_per_s`,
    `launch_us`, `source`. GB and TFLOP are powers of ten.

    Raises:
        ConfigError: the file cannot be read, or a key is missing, unknown or out of bounds.
    """
    path = Path(path)
    table = Table(read_table(path), f"{path}")
    compute = table.optional("compute")
    profile = DeviceProfile(
        name=table.text("name"),
        bytes_per_us_in=table.rate("gb_per_s_in") * 1e3,
        bytes_per_us_out=table.rate("gb_per_s_out") * 1e3,
        fault_us=table.rate("fault_us", least=0.0),
        memory_bytes=table.size("memory"),
        source=table.text("source"),
        compute=None if compute is None else _compute(Table(compute, f"{path}: compute")),
        host_bytes_per_us=table.rate("host_gb_s", default=HOST_BYTES_PER_US / 1e3) * 1e3,
    )
    table.end()
    return profile


def _compute(table: Table) -> Compute:
    compute = Compute(
        half_flops_per_us=table.rate("tflops_half") * 1e6,
        tf32_flops_per_us=table.rate("tflops_tf32") * 1e6,
        fp32_flops_per_us=table.rate("tflops_fp32") * 1e6,
        fp64_flops_per_us=table.rate("tflops_fp64") * 1e6,
        bytes_per_us=table.rate("gb_per_s") * 1e3,
        launch_us=table.rate("launch_us", least=0.0),
        source=table.text("source"),
    )
    table.end()
    return compute


class Table:
    """A table of a file whose keys are taken one by one; the keys left at the end are unknown."""

    def __init__(self, values: object, where: str, keys: str = f"{__name__}.load") -> None:
        if not isinstance(values, Mapping):
            raise ConfigError(f"{where} is not a table of keys; see {keys} for the keys")
        self.values = dict(values)
        self.where = where
        self.known: list[str] = []

    def _take(self, key: str) -> object:
        self.known.append(key)
        if key not in self.values:
            raise ConfigError(f"{self.where} has no {key!r}, which a device profile needs")
        return self.values.pop(key)

    def optional(self, key: str) -> object:
        """Take a key of any value; return None if it is missing."""
        self.known.append(key)
        return self.values.pop(key, None)

    def text(self, key: str) -> str:
        """Take a text that is not empty."""
        value = self._take(key)
        if not isinstance(value, str) or not value.strip():
            raise ConfigError(f"{self.where}: {key}={value!r}; allowed: a non-empty text")
        return value

    def rate(self, key: str, least: float | None = None, default: float | None = None) -> float:
        """Take a number above 0, or of at least `least`; return `default` if it is missing."""
        if default is not None and key not in self.values:
            self.known.append(key)
            return default
        given = self._take(key)
        value = _number(given)
        if value is not None and (value > 0 or (least is not None and value >= least)):
            return value
        bound = "above 0" if least is None else f"of at least {least:g}"
        raise ConfigError(f"{self.where}: {key}={given!r}; allowed: a finite number {bound}")

    def size(self, key: str) -> int:
        """Take a size of at least the smallest budget, as a number or as text such as 40GiB."""
        value = self._take(key)
        least = FLOOR_PAGES * PAGE_BYTES
        try:
            count = parse_bytes(str(value)) if isinstance(value, (int, str)) else -1
        except ValueError:
            count = -1
        if isinstance(value, bool) or count < least:
            raise ConfigError(
                f"{self.where}: {key}={value!r}; allowed: {BYTES_ALLOWED}, at least {least} B"
            )
        return count

    def count(self, key: str) -> int:
        """Take a whole number of things, at least one."""
        value = self._take(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{self.where}: {key}={value!r}; allowed: a whole number, 1 and up")
        return value

    def end(self) -> None:
        """Refuse the keys that are left."""
        for key in self.values:
            hint = did_you_mean(str(key), self.known)
            raise ConfigError(
                f"{self.where}: no such key {key!r}{hint}; allowed: {', '.join(self.known)}"
            )


def _number(value: object) -> float | None:
    """Return `value` as a float if it is a finite number; True and False are not numbers."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) < 1e300 else None  # NaN fails the comparison


def read_table(path: Path) -> object:
    """Read a TOML file, or a JSON file if its name ends in `.json`.

    Raises:
        ConfigError: the file cannot be read, or is too large for a profile.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        with path.open("rb") as file:
            data = file.read(FILE_LIMIT + 1)
        if len(data) > FILE_LIMIT:
            raise ConfigError(f"{path} is not a device profile: it is larger than {FILE_LIMIT} B")
        text = data.decode("utf-8")
        return json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} cannot be read as a device profile: {error}") from None
