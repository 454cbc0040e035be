"""Check a plan for entries that cannot be carried out or have no effect."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ..base.units import format_bytes
from ..errors import PlanError, kind_of
from ..trace.step_trace import Kind, StepTrace
from .base import ENTRIES, Fetch, Move, Plan, Policy, WriteBack

_LARGE = "only tensors of 2 MiB or more move alone"
_SHOWN = 3  # of the problems that a policy's plan has
_BYTES = np.iinfo(np.int64).max // 4
_MOST = {"window": 1 << 30, "headroom": _BYTES, "capacity": _BYTES}  # that native code takes


def check(plan: Plan) -> list[str]:
    """Return every problem of a plan, each with its entry; empty for a sound plan.

    The whole plan is refused with `PlanError` if an op, a tensor or a number is out of range
    (`by` and `until` included), or if `occupancy` has not one value per op. Every other problem is
    an entry without effect, or with an unintended one: the engine leaves it out, and fetches bytes
    that are needed on demand. Call it while you write a policy. In a program and in a
    simulation, plans of policies that are not umem's own are checked, and problems are logged.
    """
    return list(_problems(plan))


def summary(policy: Policy, problems: Sequence[str]) -> str:
    """Return the warning for the problems of a policy's plan: how many, and the first of them."""
    rest = len(problems) - _SHOWN
    lines = [*problems[:_SHOWN], *([f"and {rest} more"] if rest > 0 else [])]
    listed = "".join(f"\n  {line}" for line in lines)
    return (
        f"the plan of policy {policy.name} has {len(problems)} problem(s); "
        f"umem.policies.check(plan) lists them:{listed}"
    )


def _problems(plan: Plan) -> Iterator[str]:
    trace = plan.trace
    checks: tuple[tuple[str, Iterable[Any], Callable[[StepTrace, Any], str]], ...] = (
        ("evict", plan.evict, _of_move),
        ("evict_first", plan.evict_first, _of_move),
        ("fetch", plan.fetch, _of_fetch),
        ("write_back", plan.write_back, _of_write_back),
        ("retain", plan.retain, _large),
        ("read_mostly", plan.read_mostly, _of_read_mostly),
        ("barriers", plan.barriers, _op),
    )
    for field, entries, problem_of in checks:
        for entry in entries:
            if problem := problem_of(trace, entry):
                yield f"{field}: {entry!r}: {problem}"
    if len(set(plan.barriers)) != len(plan.barriers):
        yield "barriers: an op is listed more than once"
    yield from _of_fields(plan)


def as_plan(policy: Policy, returned: object) -> Plan | None:
    """Return the answer of a policy's `plan` or `second`.

    Raises:
        PlanError: it is neither a plan nor None.
    """
    if returned is None or isinstance(returned, Plan):
        return returned
    raise PlanError(
        f"policy {policy.name} returned {kind_of(returned)}; allowed: a umem.policies.Plan, or None"
    )


def _of_move(trace: StepTrace, move: Move) -> str:
    return _op(trace, move.after) or _movable(trace, move.tensor, move.after)


def _of_read_mostly(trace: StepTrace, tensor: int) -> str:
    problem = _large(trace, tensor)
    if not problem and not trace.clean[tensor]:
        problem = "the step writes the tensor, or it is not alive all the time"
    return problem


def _of_fetch(trace: StepTrace, fetch: Fetch) -> str:
    problem = _op(trace, fetch.after)
    if not problem and not fetch.after < fetch.by < 2 * trace.n_ops:
        problem = f"`by` must be above `after` and below {2 * trace.n_ops}, twice the number of ops"
    problem = problem or _movable(trace, fetch.tensor, fetch.after)
    if not problem and not _alive(trace, fetch.tensor, fetch.by):
        problem = f"the tensor is not alive in op {fetch.by}"
    return problem


def _of_write_back(trace: StepTrace, entry: WriteBack) -> str:
    problem = _op(trace, entry.after)
    if not problem and not entry.after < entry.until <= 2 * trace.n_ops:
        problem = f"`until` must be above `after` and at most {2 * trace.n_ops}"
    problem = problem or _movable(trace, entry.tensor, entry.after)
    if not problem and (ops := _writes(trace, entry)):
        problem = f"op {ops[0]} writes the tensor before `until`"
    return problem


def _of_fields(plan: Plan) -> Iterator[str]:
    """Yield problems of numbers and of the occupancy, each of which makes the plan unusable."""
    for field, most in _MOST.items():
        value = getattr(plan, field)
        if not 0 <= value <= most:
            yield f"{field}: {value}; allowed: 0 to {most}"
    shape, wanted = getattr(plan.occupancy, "shape", None), (plan.trace.n_ops,)
    if shape != wanted and (plan.gated or shape is not None):
        yield f"occupancy: shape {shape}; allowed: one value per op, {wanted}"


def _op(trace: StepTrace, op: int) -> str:
    if -1 <= op < trace.n_ops:
        return ""
    return f"there is no op {op}; allowed: -1, the start of the step, to {trace.n_ops - 1}"


def _large(trace: StepTrace, tensor: int) -> str:
    if not 0 <= tensor < trace.n_tensors:
        return f"there is no tensor {tensor}; tensors are 0 to {trace.n_tensors - 1}"
    if not trace.large[tensor]:
        return f"the tensor has {format_bytes(int(trace.bytes[tensor]))}; {_LARGE}"
    return ""


def _movable(trace: StepTrace, tensor: int, op: int) -> str:
    problem = _large(trace, tensor)
    if not problem and not trace.movable[tensor]:
        problem = "the program pinned or excluded the tensor"
    if not problem and not _alive(trace, tensor, op):
        first, last = int(trace.first[tensor]), int(trace.last[tensor])
        problem = f"the tensor is alive in ops {first} to {last}, not after op {op}"
    return problem


def _alive(trace: StepTrace, tensor: int, op: int) -> bool:
    kind = trace.kind[tensor]
    if kind == Kind.PERSISTENT or (op == -1 and kind == Kind.CARRIED):
        return True
    return bool(trace.first[tensor] <= op <= trace.last[tensor])


def _writes(trace: StepTrace, entry: WriteBack) -> list[int]:
    """Return the ops inside a write-back that write its tensor."""
    uses = trace.uses_of(entry.tensor)
    wrote = trace.access_op[uses[trace.access_write[uses]]].tolist()
    laps = (0, trace.n_ops) if trace.kind[entry.tensor] == Kind.PERSISTENT else (0,)
    ops = (op + lap for lap in laps for op in wrote)
    return [op for op in ops if entry.after < op < entry.until]


def out_of_range(plan: Plan) -> str | None:
    """Return the first problem that makes a plan unusable; None without one.

    Part of lowering: it reads indices only, in time linear in the plan.
    """
    n, m = plan.trace.n_ops, plan.trace.n_tensors
    last = {"by": 2 * n - 1, "until": 2 * n}
    for field, kind in ENTRIES.items():
        entries = getattr(plan, field)
        columns = np.asarray(entries, np.int64).reshape(-1, len(kind._fields)).T
        (after, *_, tensor), allowed = columns, f"ops 0 to {n - 1} and tensors 0 to {m - 1}"
        bad = (after < -1) | (after >= n) | (tensor < 0) | (tensor >= m)
        for end in last.keys() & set(kind._fields):
            bad |= columns[1] > last[end]
            allowed += f", and `{end}` is at most {last[end]}"
        if bad.any():
            return f"{field}: {entries[int(bad.argmax())]!r}: the step has {allowed}"
    for field, tensors in (("retain", plan.retain), ("read_mostly", plan.read_mostly)):
        if beyond := [tensor for tensor in tensors if not 0 <= tensor < m]:
            return f"{field}: tensor {beyond[0]}: the step has tensors 0 to {m - 1}"
    if beyond := [op for op in plan.barriers if not -1 <= op < n]:
        return f"barriers: op {beyond[0]}: the step has ops 0 to {n - 1}"
    return next(_of_fields(plan), None)
