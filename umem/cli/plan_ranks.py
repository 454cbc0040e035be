"""``umem plan --ranks``: plan many ranks on multi-device nodes from the trace of one rank."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..base import host, nodes
from ..base.nodes import Node
from ..config import ranks
from ..errors import ConfigError
from .base import node_of

if TYPE_CHECKING:
    from ..base.device_profiles import DeviceProfile
    from ..capture.recording import Clock, Recording
    from ..simulation.replay import Result
    from ..trace.schema import Event
    from ..trace.step_trace import StepTrace


@dataclass(frozen=True)
class Cluster:
    """Ranks on nodes, one device each."""

    node: Node
    ranks: int

    @property
    def busy(self) -> int:
        """Number of devices in use on the fullest node."""
        return min(self.ranks, self.node.devices)

    @property
    def device(self) -> DeviceProfile:
        """A device with its share of the links while all ranks of the fullest node move bytes."""
        return self.node.profile(self.busy)

    def events(self, recording: Recording, clock: Clock) -> list[Event]:
        """Return the events of a rank's device, with collectives concurrent with compute."""
        from ..capture import collectives

        timed = recording.device_events(collectives.with_node(clock, self.node))
        return collectives.beside_compute(timed)


@dataclass(frozen=True)
class Answer:
    """The needs of all ranks together. Sizes in bytes, times in µs; names are stable in JSON."""

    ranks: int
    node: str
    nodes: int  # one rank on each device
    busy: int  # devices on the fullest node
    link_gb_s_in: float  # per device while all are busy
    link_gb_s_out: float
    own_gb_s_in: float  # a device alone
    own_gb_s_out: float
    exchanged_bytes: float  # per rank and step, over each link of the rings
    exchange_us: float  # all collectives of a step, one after the other
    exposed_us: float  # compute's wait for them
    step_us: float | None  # with the best policy; None without one
    alone_us: float | None  # with the same policy and no shared link
    host_bytes_rank: int  # peak under the best policy
    host_bytes_node: int
    host_memory_bytes: int
    host_fits: bool
    nodes_needed: int | None  # for the devices and the hosts' memory; None: a host is too small

    def as_dict(self) -> dict[str, Any]:
        """Return the answer for JSON."""
        return dataclasses.asdict(self)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a program of several ranks."""
    text = f"plan a rank on a node whose devices share links: {nodes.ALLOWED}"
    parser.add_argument("--node", help=text)
    text = "number of ranks, one per device (default: the devices of one node)"
    parser.add_argument("--ranks", type=int, metavar="N", help=text)


def cluster(args: argparse.Namespace) -> Cluster | None:
    """Return the requested ranks; None without `--node`.

    Raises:
        ConfigError: a bad node or number of ranks, or a device in addition to a node.
    """
    if args.node is None:
        if args.ranks is not None:
            raise ConfigError(f"--ranks needs --node; allowed: {nodes.ALLOWED}")
        return None
    node = node_of(args)
    count = node.devices if args.ranks is None else args.ranks
    if count < 1:
        raise ConfigError(f"--ranks {count}; allowed: at least 1")
    return Cluster(node, count)


@contextlib.contextmanager
def as_rank(found: Cluster | None) -> Iterator[None]:
    """Make the program see this many ranks, and itself as the first.

    Raises:
        NotSupportedError: torch is missing.
        PlanError: torch has no process groups.
    """
    if found is None:
        yield
        return
    from .program import need_torch

    need_torch()
    from ..capture import fake_ranks

    with ranks.told_rank_0(found.ranks, found.busy), fake_ranks.as_rank_0(found.ranks):
        yield


def answer(
    found: Cluster,
    recording: Recording,
    clock: Clock,
    step: StepTrace,
    results: Sequence[Result],
) -> Answer:
    """Return the needs of all ranks, from one rank's step and its replays, the best first."""
    from ..simulation import replay

    device, node = found.device, found.node
    exchanges, compute_us = _exchanges(recording, clock, node)
    best = results[0] if results else None
    alone = best
    if best is not None and found.busy > 1:
        alone = replay.replay_step(step, best.policy, node.profile(1), best.budget)
    held = 0 if best is None else best.peak_host
    used, usable = held * found.busy, host.for_evicted(node.memory_bytes)
    beside = usable // held if held else found.ranks  # ranks whose bytes one host holds
    hosts = max(node.nodes_of(found.ranks), -(-found.ranks // beside)) if beside else None
    return Answer(
        ranks=found.ranks,
        node=node.name,
        nodes=node.nodes_of(found.ranks),
        busy=found.busy,
        link_gb_s_in=device.bytes_per_us_in / 1e3,
        link_gb_s_out=device.bytes_per_us_out / 1e3,
        own_gb_s_in=node.device.bytes_per_us_in / 1e3,
        own_gb_s_out=node.device.bytes_per_us_out / 1e3,
        exchanged_bytes=sum(exchange.bytes for exchange in exchanges),
        exchange_us=sum(exchange.us(node) for exchange in exchanges),
        exposed_us=max(0.0, step.compute_us - compute_us) if exchanges else 0.0,
        step_us=None if best is None else best.step_us,
        alone_us=None if alone is None else alone.step_us,
        host_bytes_rank=held,
        host_bytes_node=used,
        host_memory_bytes=node.memory_bytes,
        host_fits=used <= usable,
        nodes_needed=hosts,
    )


def _exchanges(recording: Recording, clock: Clock, node: Node) -> tuple[list[Any], float]:
    """Return the last step's exchanged bytes, and the time that compute waits for collectives."""
    from ..capture.collectives import is_beside, with_node

    timed = with_node(clock, node)
    ops = [(op, cost) for op, cost in recording.last_step() if recording.touches_memory(op)]
    exchanges = [cost.exchange for _, cost in ops if cost.exchange is not None]
    return exchanges, sum(timed(op, cost) for op, cost in ops if not is_beside(op.name))
