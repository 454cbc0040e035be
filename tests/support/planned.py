"""Small programs in steps on the software device, and plans for them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import _core_testing
import numpy as np

from umem import _core

MIB = 1 << 20
PAGE = 2 * MIB
KINDS = {"persistent": 0, "transient": 1, "made": 2, "carried": 3}
ORDERS = {"lru": 0, "fifo": 1, "furthest": 2}


def options(budget: int = 16 * MIB, **changes: object) -> _core.Options:
    made = _core.Options()
    made.budget_bytes = budget
    made.floor_bytes = 4 * MIB
    made.min_swap_bytes = PAGE
    made.profile = "a100-pcie4"
    made.policy = "planned"
    for name, value in changes.items():
        setattr(made, name, value)
    return made


class Tensor(NamedTuple):
    """A tensor of a plan. A carried one's `next_alias` is the index of the made one."""

    mib: int = 4
    kind: str = "persistent"
    address: int = 0
    next_alias: int = -1


def weights(program: Program, names: str) -> list[Tensor]:
    """Tensors of blocks that the program takes now."""
    return [Tensor(address=program.take(name)) for name in names]


def _allocated(made: Sequence[int], ops: Sequence[Sequence[int]]) -> list[int]:
    """The op before which each is allocated: no later than its first use, and in their order."""
    first = [min((i for i, op in enumerate(ops) if t in op), default=len(ops) - 1) for t in made]
    return np.minimum.accumulate(first[::-1])[::-1].tolist() if made else []


def columns(
    tensors: Sequence[Tensor], ops: Sequence[Sequence[int]], **changes: object
) -> dict[str, Any]:
    """A plan: `ops` are the tensors of each. Moves are lists of rows: evict, cold, fetch, copy."""
    made = [t for t, tensor in enumerate(tensors) if tensor.kind in ("transient", "made")]
    moves: dict[str, Any] = {}
    for name, fields in (
        ("evict", ("after", "tensor")),
        ("cold", ("after", "tensor")),
        ("fetch", ("after", "by", "tensor")),
        ("copy", ("after", "until", "tensor")),
    ):
        rows = np.array(changes.pop(name, []), np.int64).reshape(-1, len(fields))
        moves |= {f"{name}_{field}": rows[:, i] for i, field in enumerate(fields)}
    plan = {
        "n_ops": len(ops),
        "bytes": [tensor.mib * MIB for tensor in tensors],
        "kind": [KINDS[tensor.kind] for tensor in tensors],
        "next_alias": [tensor.next_alias for tensor in tensors],
        "address": [tensor.address for tensor in tensors],
        "segment": [0] * len(tensors),
        "allocations": made,
        "allocated": _allocated(made, ops),
        "access_start": np.cumsum([0, *map(len, ops)]),
        "access_tensor": [t for op in ops for t in op],
        "op": [_core.number_of_op("")] * len(ops),  # as `Program.op` is called
        **moves,
        "keep": [],
        "waits": [],
        "read_mostly": [],
        "cut": [],
        "occupancy": [0] * len(ops) if changes.get("gated") else [],
        "gated": 0,
        "capacity": 0,
        "order": 0,
        "window": 0,
        "headroom": 0,
    }
    plan |= changes
    return {
        name: value if isinstance(value, int) else np.array(value, np.int64)
        for name, value in plan.items()
    }


class Program:
    """Blocks by name. Each holds a value in its first and last byte, checked when it is freed."""

    def __init__(self) -> None:
        self.at: dict[str, int] = {}
        self.bytes: dict[str, int] = {}
        self.values: dict[str, bytes] = {}
        self._written = itertools.count()

    def take(self, name: str, mib: int = 4) -> int:
        ptr = _core.allocate(mib * MIB)
        self.at[name], self.bytes[name] = ptr, mib * MIB
        self.fill(name)
        return ptr

    def fill(self, name: str) -> None:
        value = self.values[name] = bytes([next(self._written) % 255 + 1])  # another each time
        _core_testing.store(self.at[name], value)
        _core_testing.store(self.at[name] + self.bytes[name] - 1, value)

    def check(self, name: str) -> None:
        ends = (self.at[name], self.at[name] + self.bytes[name] - 1)
        assert [_core_testing.load(ptr, 1) for ptr in ends] == [self.values[name]] * 2

    def drop(self, name: str) -> None:
        self.check(name)
        del self.values[name]
        assert _core.release(self.at.pop(name))

    def rename(self, old: str, new: str) -> None:
        self.at[new] = self.at.pop(old)
        self.bytes[new] = self.bytes.pop(old)
        self.values[new] = self.values.pop(old)

    def op(self, *names: str) -> None:
        token = _core.op_begin([self.at[name] for name in names], "", "forward")
        for name in names:
            _core_testing.load(self.at[name], 1)
        _core.op_end(token, "")

    def clear(self) -> None:
        for name in list(self.at):
            self.drop(name)
        _core.stop()

    def state(self, name: str) -> str:
        for row in _core_testing.blocks():
            if row["base"] == self.at[name]:
                return str(row["state"])
        raise AssertionError(f"{name} is no block")

    def away(self) -> set[str]:
        """The names of what is not on the device."""
        return {name for name in self.at if self.state(name) != "device"}


@contextlib.contextmanager
def running(wanted: _core.Options) -> Iterator[Program]:
    """A program on the device meanwhile; its blocks are checked and freed at the end."""
    _core.start(wanted)
    made = Program()
    try:
        yield made
    except BaseException:  # the blocks' contents no longer matter
        for ptr in made.at.values():
            _core.release(ptr)
        _core.stop()
        raise
    made.clear()
