"""Updates of parameters in a step's trace, and the step in which the host does some of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...base.device_profiles import DeviceProfile
from ...policies.published.phases import phases
from ...trace.step_trace import Bools, HostUpdates, Ints, Kind, StepTrace

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # shares of the parameters' bytes updated on the host


@dataclass(frozen=True)
class Update:
    """The ops that update a parameter, and the tensors that they access."""

    ops: tuple[int, ...]
    parts: tuple[float, ...]  # share of each op's time; below 1 if it updates other parameters too
    pairs: tuple[tuple[int, int], ...]  # the parameter and its gradient
    inside: tuple[int, ...]  # states, and other tensors that nothing else accesses
    accesses: tuple[int, ...]  # these ops', as indices into the step's accesses
    bytes: int  # read and written by the host
    carriers: tuple[int, ...] = ()  # the gradients' tensors in the next step


@dataclass(frozen=True)
class Candidates:
    """The updates of a step that the host can do; those with the most time come first."""

    step: StepTrace
    updates: tuple[Update, ...]

    @property
    def bytes(self) -> int:
        """Bytes of the parameters."""
        return sum(self._size(update) for update in self.updates)

    def _size(self, update: Update) -> int:
        return sum(int(self.step.bytes[parameter]) for parameter, _ in update.pairs)

    def share_of(self, updates: Iterable[Update]) -> float:
        """Return the share of the parameters' bytes in these updates; 0 without any."""
        return sum(map(self._size, updates)) / max(self.bytes, 1)

    def first(self, share: float) -> tuple[Update, ...]:
        """Return the first updates, up to this share of the parameters' bytes (0 to 1)."""
        sizes = [self._size(update) for update in self.updates]
        total = sum(sizes)
        middle = np.cumsum([0, *sizes])[:-1] + np.array(sizes) / 2
        return tuple(u for u, at in zip(self.updates, middle, strict=True) if at < share * total)


def candidates(step: StepTrace) -> Candidates:
    """Return the updates that the host can do.

    These are groups of ops that share tensors only with each other, except for parameters, which
    they write, and gradients. The step makes the gradient, and frees it or leaves that to the start
    of the next one. Tensors are 2 MiB and more. An op on lists of tensors (`_foreach_`, `_fused_`)
    counts as one op per list position.
    """
    ops = _update_ops(step)
    found = [_update(step, accesses, ops) for accesses in _groups(step, ops)]
    updates = [update for update in found if update is not None]
    return Candidates(step, tuple(sorted(updates, key=lambda u: -_time_away(step, u))))


def on_host(step: StepTrace, updates: Iterable[Update], device: DeviceProfile) -> StepTrace:
    """Return the step in which the host does these updates. Ops and tensors keep their indices.

    The updates' ops take no time and access nothing, and tensors that only they access are empty.
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
        access_part=None if step.access_part is None else step.access_part[access],
        updates=_more(step.updates, rows),
    )


def _more(before: HostUpdates | None, rows: Sequence[tuple[int, int, float]]) -> HostUpdates:
    parameter, gradient, us = zip(*rows, strict=True)
    made = HostUpdates(
        np.array(parameter, np.int64), np.array(gradient, np.int64), np.array(us, np.float64)
    )
    if before is None:
        return made
    return HostUpdates(
        np.concatenate((before.parameter, made.parameter)),
        np.concatenate((before.gradient, made.gradient)),
        np.concatenate((before.us, made.us)),
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
        step.compute_us
        + float(begin[step.uses(p)[0]] - begin[uses_beside(step, g, update.ops)[-1] + 1])
        for p, g in update.pairs
    )


def uses_beside(step: StepTrace, tensor: int, ops: Sequence[int]) -> Ints:
    """Return the other ops that access a tensor, ascending."""
    return np.setdiff1d(step.uses(tensor), ops)


def _update_ops(step: StepTrace) -> Bools:
    """Return whether each op is an optimizer's, [n].

    Such an op accesses a state, writes a parameter, accesses a tensor that such an op made, or
    makes one for them from gradients alone. It is neither before backward nor on activations.
    """
    tags = np.array(step.tags)
    param = (tags == "param") & (step.kind == Kind.PERSISTENT)
    other = np.isin(tags, ("activation", "input"))
    tensor, op = step.access_tensor, step.access_op
    found: Bools = np.zeros(step.n_ops, bool)
    found[op[(tags == "optimizer")[tensor] | (param[tensor] & step.access_write)]] = True
    found[: phases(step).backward] = False
    barred: Bools = np.zeros(step.n_ops, bool)
    barred[op[other[tensor]]] = True
    found &= ~barred
    made = (step.kind == Kind.TRANSIENT) & ~other & (tags != "grad")
    theirs: Bools = np.zeros(step.n_tensors, bool)
    starts = step.access_start.tolist()
    for at in range(step.n_ops):
        accessed = tensor[starts[at] : starts[at + 1]]
        if not found[at] and not barred[at] and theirs[accessed].any():
            found[at] = True
        if found[at]:
            theirs[accessed[made[accessed] & (step.first[accessed] == at)]] = True
    wanted: Bools = np.zeros(step.n_tensors, bool)
    wanted[tensor[found[op]]] = True
    for at in range(step.n_ops - 1, -1, -1):
        accessed = tensor[starts[at] : starts[at + 1]]
        mine = made[accessed] & (step.first[accessed] == at)
        if not found[at] and (mine & wanted[accessed]).any():
            found[at] = bool((mine | (tags[accessed] == "grad")).all())
    return found


def _groups(step: StepTrace, ops: Bools) -> list[list[int]]:
    """Return the accesses of large tensors by these ops, in groups with no tensor in common.

    Small ones, such as a learning rate, are read by all, and are left out.
    """
    parent = list(range(step.n_tensors))

    def root(tensor: int) -> int:
        while parent[tensor] != tensor:
            parent[tensor] = parent[parent[tensor]]
            tensor = parent[tensor]
        return tensor

    tensors, large = step.access_tensor.tolist(), step.large.tolist()
    for op in np.flatnonzero(ops).tolist():
        for row in _together(step, op):
            mine = [at for at in row if large[tensors[at]]]
            for at in mine[1:]:
                parent[root(tensors[at])] = root(tensors[mine[0]])
    groups: dict[int, list[int]] = {}
    for at in np.flatnonzero(ops[step.access_op] & step.large[step.access_tensor]).tolist():
        groups.setdefault(root(tensors[at]), []).append(at)
    return list(groups.values())


def _together(step: StepTrace, op: int) -> list[range]:
    """Return an op's accesses in rows that belong together.

    An op on lists accesses the first list, then the next one, and single tensors at the end.
    `_foreach_` ops write one list; `_fused_` ones have a list of parameters, or else of gradients.
    """
    start, end = int(step.access_start[op]), int(step.access_start[op + 1])
    whole, name = range(start, end), step.op_names[op]
    if "_foreach_" in name:
        length = int(step.access_write[start:end].sum())
    elif "_fused_" in name:
        tags = [step.tags[tensor] for tensor in step.access_tensor[start:end].tolist()]
        length = tags.count("param") or tags.count("grad")
    else:
        length = 0
    if not length:
        return [whole]
    lists = whole[: len(whole) - len(whole) % length]
    return [lists[i::length] for i in range(length)]


def _update(step: StepTrace, accesses: Sequence[int], ops: Bools) -> Update | None:
    """Return the update with these accesses; None if the host cannot do it."""
    tensors = dict.fromkeys(step.access_tensor[accesses].tolist())
    written = {int(step.access_tensor[at]) for at in accesses if step.access_write[at]}
    parameters, gradients, inside = [], [], []
    for tensor in tensors:
        persists = step.kind[tensor] == Kind.PERSISTENT
        shared = not ops[step.uses(tensor)].all()
        if persists and shared and tensor in written:
            parameters.append(tensor)
        elif shared and step.kind[tensor] in (Kind.TRANSIENT, Kind.MADE):
            gradients.append(tensor)
        elif shared or step.kind[tensor] not in (Kind.PERSISTENT, Kind.TRANSIENT):
            return None  # such as a tensor that other parts of the step read
        else:
            inside.append(tensor)
    return _checked(step, accesses, (parameters, gradients, inside))


def _checked(
    step: StepTrace, accesses: Sequence[int], found: tuple[list[int], ...]
) -> Update | None:
    parameters, gradients, inside = found
    alike = [int(step.bytes[p]) for p in parameters] == [int(step.bytes[g]) for g in gradients]
    # Ops on several parameters without lists do not show which accesses belong together.
    if len(parameters) != 1 or not alike:
        return None
    if not step.movable[[*parameters, *gradients]].all():
        return None
    if any(step.tags[tensor] in ("activation", "input") for tensor in (*gradients, *inside)):
        return None  # it is the forward pass of another network
    ops = sorted({int(step.access_op[at]) for at in accesses})
    if any(uses_beside(step, tensor, ops)[-1] > ops[0] for tensor in (*parameters, *gradients)):
        return None  # another network uses the new value in this step
    carriers: list[int] = np.flatnonzero(np.isin(step.next_alias, gradients)).tolist()
    if any(len(step.uses(t)) for t in carriers):
        return None  # the next step reads the gradient again
    return Update(
        ops=tuple(ops),
        parts=tuple(_part(step, op, accesses) for op in ops),
        pairs=tuple(zip(parameters, gradients, strict=True)),
        inside=tuple(inside),
        accesses=tuple(accesses),
        bytes=_moved_bytes(step, accesses, inside, gradients),
        carriers=tuple(carriers),
    )


def _part(step: StepTrace, op: int, accesses: Sequence[int]) -> float:
    """Return these accesses' share of an op's bytes in large tensors."""
    start, end = int(step.access_start[op]), int(step.access_start[op + 1])
    mine = step.access_tensor[[at for at in accesses if start <= at < end]]
    every = step.access_tensor[start:end]
    total = int(step.bytes[every[step.large[every]]].sum())
    return int(step.bytes[mine].sum()) / total


def _moved_bytes(
    step: StepTrace, accesses: Sequence[int], inside: Sequence[int], gradients: Sequence[int]
) -> int:
    """Return the bytes to read and to write, once for each tensor except those made inside.

    A gradient is only read: fused ops declare a write, but need it only for scaled ones.
    """
    temporary = {t for t in inside if step.kind[t] != Kind.PERSISTENT}
    once: dict[tuple[int, str], int] = {}
    for at in accesses:
        tensor = int(step.access_tensor[at])
        if tensor in temporary:
            continue
        if step.access_read is None or step.access_read[at]:
            once[tensor, "read"] = int(step.bytes[tensor])
        if step.access_write[at] and tensor not in gradients:
            once[tensor, "write"] = int(step.bytes[tensor])
    return sum(once.values())
