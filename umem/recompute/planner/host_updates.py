"""Updates of parameters in a step's trace, and the step in which the host does some of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...base.device_profiles import DeviceProfile
from ...policies.published.phases import phases
from ...trace.step_trace import Bools, HostUpdates, Kind, StepTrace


@dataclass(frozen=True)
class Update:
    """The ops that update a parameter, and what they access. Tensors of a step.

    More than one parameter is updated together where ops take them all and do not tell which
    tensor belongs to which.
    """

    ops: tuple[int, ...]
    parts: tuple[float, ...]  # of each op's time; below 1 where it updates other parameters too
    pairs: tuple[tuple[int, int], ...]  # parameters and their gradients
    inside: tuple[int, ...]  # states, and other tensors that nothing else accesses
    accesses: tuple[int, ...]  # of these ops, as indices into the step's accesses
    bytes: int  # that the host reads and writes
    carriers: tuple[int, ...] = ()  # the gradients as the next step would know them


@dataclass(frozen=True)
class Candidates:
    """The updates of a step that the host can do, those with the most time for it first."""

    step: StepTrace
    updates: tuple[Update, ...]

    @property
    def bytes(self) -> int:
        """Bytes of the parameters."""
        return sum(self._size(update) for update in self.updates)

    def _size(self, update: Update) -> int:
        return sum(int(self.step.bytes[parameter]) for parameter, _ in update.pairs)

    def share_of(self, updates: Iterable[Update]) -> float:
        """Return the share of the parameters' bytes that these updates have; 0 of none."""
        return sum(map(self._size, updates)) / max(self.bytes, 1)

    def first(self, share: float) -> tuple[Update, ...]:
        """Return the first of them, of this share of the parameters' bytes (0 to 1)."""
        sizes = [self._size(update) for update in self.updates]
        total = sum(sizes)
        middle = np.cumsum([0, *sizes])[:-1] + np.array(sizes) / 2
        return tuple(u for u, at in zip(self.updates, middle, strict=True) if at < share * total)


def candidates(step: StepTrace) -> Candidates:
    """Return the updates that the host can do.

    These are groups of ops after backward that share tensors with each other and nothing else with
    the rest of the step but parameters, which they write, and gradients. The gradient is made by
    the step, and freed in it or at the begin of the next one. Tensors are 2 MiB and more. An op on
    lists of tensors (`_foreach_`, `_fused_`) counts as one op for each place in the lists.
    """
    begin = _begin(step)
    if begin >= step.n_ops:
        return Candidates(step, ())
    found = [_update(step, accesses, begin) for accesses in _groups(step, begin)]
    updates = [update for update in found if update is not None]
    return Candidates(step, tuple(sorted(updates, key=lambda u: -_time_away(step, u))))


def on_host(step: StepTrace, updates: Iterable[Update], device: DeviceProfile) -> StepTrace:
    """Return the step in which the host does these updates. Ops and tensors keep their indices.

    The updates' ops take no time and access nothing, and what only they access has no bytes.
    """
    updates = tuple(updates)
    if not updates:
        return step
    left = np.ones(step.n_ops)
    access: Bools = np.ones(len(step.access_op), bool)
    for update in updates:
        np.subtract.at(left, list(update.ops), update.parts)
        access[list(update.accesses)] = False
    inside = [t for update in updates for t in (*update.inside, *update.carriers)]
    gradients = [gradient for update in updates for _, gradient in update.pairs]
    size, large, kind = step.bytes.copy(), step.large.copy(), step.kind.copy()
    first, last, alias = step.first.copy(), step.last.copy(), step.next_alias.copy()
    size[inside], large[inside] = 0, False
    carriers = [t for update in updates for t in update.carriers]
    kind[carriers], alias[carriers] = Kind.TRANSIENT, -1
    first[carriers] = last[carriers] = 0
    kind[gradients] = Kind.TRANSIENT
    last_use = np.full(step.n_tensors, -1)
    np.maximum.at(last_use, step.access_tensor[access], step.access_op[access])
    last[gradients] = last_use[gradients]
    counts = np.bincount(step.access_op[access], minlength=step.n_ops)
    rows = [
        (parameter, gradient, us)
        for update in updates
        for (parameter, gradient), us in zip(
            update.pairs, host_us(step, update, device), strict=True
        )
    ]
    parameter, gradient, us = zip(*rows, strict=True)
    return replace(
        step,
        op_us=step.op_us * np.where(left > 1e-9, left, 0.0),  # up to rounding
        bytes=size,
        large=large,
        kind=kind,
        first=first,
        last=last,
        next_alias=alias,
        access_start=np.concatenate(([0], np.cumsum(counts))),
        access_tensor=step.access_tensor[access],
        access_write=step.access_write[access],
        access_read=None if step.access_read is None else step.access_read[access],
        updates=HostUpdates(
            np.array(parameter, np.int64), np.array(gradient, np.int64), np.array(us, np.float64)
        ),
    )


def host_us(step: StepTrace, update: Update, device: DeviceProfile) -> list[float]:
    """Return the time of each pair: its share of the bytes, at the rate of the host's memory."""
    sizes = [int(step.bytes[parameter]) for parameter, _ in update.pairs]
    whole = update.bytes / device.host_bytes_per_us
    return [whole * size / sum(sizes) for size in sizes]


def _time_away(step: StepTrace, update: Update) -> float:
    """Return the least time from a complete gradient to the first use in the next step, in µs."""
    begin = step.begin_us
    return min(
        step.compute_us + float(begin[step.uses(p)[0]] - begin[_last_before(step, g, update) + 1])
        for p, g in update.pairs
    )


def _last_before(step: StepTrace, tensor: int, update: Update) -> int:
    return int(np.setdiff1d(step.uses(tensor), update.ops)[-1])


def _begin(step: StepTrace) -> int:
    """Return the first op of the optimizer; conversions of gradients before it belong to it."""
    begin = phases(step).optimizer
    while 0 < begin < step.n_ops:
        accessed = range(int(step.access_start[begin - 1]), int(step.access_start[begin]))
        for at in accessed:
            tensor = int(step.access_tensor[at])
            made = step.access_write[at] and step.first[tensor] == begin - 1
            if not made and (step.access_write[at] or step.tags[tensor] != "grad"):
                return begin
        begin -= 1
    return begin


def _groups(step: StepTrace, begin: int) -> list[list[int]]:
    """Return the accesses from op `begin` on, in groups that have no tensor in common."""
    parent = list(range(step.n_tensors))

    def root(tensor: int) -> int:
        while parent[tensor] != tensor:
            parent[tensor] = parent[parent[tensor]]
            tensor = parent[tensor]
        return tensor

    tensors = step.access_tensor.tolist()
    for op in range(begin, step.n_ops):
        for row in _together(step, op):
            for at in row[1:]:
                parent[root(tensors[at])] = root(tensors[row[0]])
    groups: dict[int, list[int]] = {}
    for at in range(int(step.access_start[begin]), len(tensors)):
        groups.setdefault(root(tensors[at]), []).append(at)
    return list(groups.values())


def _together(step: StepTrace, op: int) -> list[range]:
    """Return an op's accesses in rows that belong together.

    An op on lists has those of the first list, then those of the next one. The lists are as long as
    there are parameters, or else gradients, or else states.
    """
    start, end = int(step.access_start[op]), int(step.access_start[op + 1])
    whole, name = range(start, end), step.op_names[op]
    if "_foreach_" not in name and "_fused_" not in name:
        return [whole]
    tags = [step.tags[tensor] for tensor in step.access_tensor[start:end].tolist()]
    counts = (tags.count(tag) for tag in ("param", "grad", "optimizer"))
    length = next((count for count in counts if count), len(tags))
    if len(tags) % length:
        return [whole]
    return [whole[i::length] for i in range(length)]


def _update(step: StepTrace, accesses: Sequence[int], begin: int) -> Update | None:
    """Return the update that these accesses are; None if the host cannot do it."""
    tensors = dict.fromkeys(step.access_tensor[accesses].tolist())
    written = {int(step.access_tensor[at]) for at in accesses if step.access_write[at]}
    parameters, gradients, inside = [], [], []
    for tensor in tensors:
        persists = step.kind[tensor] == Kind.PERSISTENT
        before = bool(step.uses(tensor)[0] < begin)
        if persists and before and tensor in written:
            parameters.append(tensor)
        elif before and step.kind[tensor] in (Kind.TRANSIENT, Kind.MADE):
            gradients.append(tensor)
        elif before or step.kind[tensor] not in (Kind.PERSISTENT, Kind.TRANSIENT):
            return None  # such as a tensor that other parts of the step read
        else:
            inside.append(tensor)
    return _checked(step, accesses, (parameters, gradients, inside))


def _checked(
    step: StepTrace, accesses: Sequence[int], found: tuple[list[int], ...]
) -> Update | None:
    parameters, gradients, inside = found
    alike = [int(step.bytes[p]) for p in parameters] == [int(step.bytes[g]) for g in gradients]
    if not parameters or not alike or not step.large[parameters].all():
        return None
    if any(step.tags[tensor] in ("activation", "input") for tensor in (*gradients, *inside)):
        return None  # it is the forward pass of another network
    carriers: list[int] = np.flatnonzero(np.isin(step.next_alias, gradients)).tolist()
    if any(len(step.uses(t)) for t in carriers):
        return None  # the next step reads the gradient again
    ops = sorted({int(step.access_op[at]) for at in accesses})
    return Update(
        ops=tuple(ops),
        parts=tuple(_part(step, op, accesses) for op in ops),
        pairs=tuple(zip(parameters, gradients, strict=True)),
        inside=tuple(inside),
        accesses=tuple(accesses),
        bytes=_moved_bytes(step, accesses, inside),
        carriers=tuple(carriers),
    )


def _part(step: StepTrace, op: int, accesses: Sequence[int]) -> float:
    """Return the share of an op's bytes that these accesses have."""
    start, end = int(step.access_start[op]), int(step.access_start[op + 1])
    mine = [at for at in accesses if start <= at < end]
    if len(mine) == end - start:
        return 1.0
    total = int(step.bytes[step.access_tensor[start:end]].sum())
    return int(step.bytes[step.access_tensor[mine]].sum()) / max(total, 1)


def _moved_bytes(step: StepTrace, accesses: Sequence[int], inside: Sequence[int]) -> int:
    """Return the bytes to read and to write, once for each tensor but those made inside."""
    temporary = {t for t in inside if step.kind[t] != Kind.PERSISTENT}
    once: dict[tuple[int, str], int] = {}
    for at in accesses:
        tensor = int(step.access_tensor[at])
        if tensor in temporary:
            continue
        if step.access_read is None or step.access_read[at]:
            once[tensor, "read"] = int(step.bytes[tensor])
        if step.access_write[at]:
            once[tensor, "write"] = int(step.bytes[tensor])
    return sum(once.values())
