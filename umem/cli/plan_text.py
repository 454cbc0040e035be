"""The answer of ``umem plan`` as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..base.units import format_bytes

if TYPE_CHECKING:
    from ..analysis.summary import Memory
    from ..base.device_profiles import DeviceProfile
    from ..capture.recording import Recording
    from ..simulation.replay import Result
    from ..trace.schema import Event
    from ..trace.step_trace import StepTrace
    from . import plan_model, plan_optimizer, plan_ranks, plan_recompute

_BARS = " ▁▂▃▄▅▆▇█"
_WIDTH = 14  # width of the first column
_GIB = 1 << 30


class PlanAnswer(NamedTuple):
    """The answer of ``umem plan``."""

    program: str
    recording: Recording
    events: list[Event]
    step: StepTrace
    device: DeviceProfile
    memory: Memory
    resident: int  # bytes that the step takes if nothing moves, `replay.resident_budget`
    asked: int  # bytes
    budget: int  # of the replay: at least what the largest op needs
    floor: dict[str, Any]
    results: list[Result]  # the fastest first
    hidden_from: int | None
    advice: list[str]
    seconds: float
    recomputed: plan_recompute.Table | None = None
    updated: plan_optimizer.Answer | None = None
    ranks: plan_ranks.Answer | None = None
    model: plan_model.ModelAnswer | None = None


def render(outcome: PlanAnswer) -> str:
    """Format the whole answer, some lines per topic."""
    parts = (
        _program, _model, _memory, _budget, _policies, _recomputed, _updated, _ranks, _budgets,
        _advice,
    )  # fmt: skip
    return "\n".join(line for part in parts for line in part(outcome))


def _program(outcome: PlanAnswer) -> Iterator[str]:
    step, device = outcome.step, outcome.device
    yield _row(
        "program",
        f"{outcome.program}: {step.n_ops} ops and {step.n_tensors} tensors a step, "
        f"{outcome.recording.steps} steps without data in {outcome.seconds:.1f} s",
    )
    link = f"{device.bytes_per_us_in / 1e3:g} GB/s in, {device.bytes_per_us_out / 1e3:g} out"
    yield _row("device", f"{device.name}, {format_bytes(device.memory_bytes)}, link {link}")
    source = device.compute.source if device.compute is not None else device.source
    yield _row("compute", f"{_ms(step.compute_us)} a step, roofline ({source})")
    for remark in outcome.recording.remarks:
        yield _row("note", remark)


def _model(outcome: PlanAnswer) -> Iterator[str]:
    if outcome.model is None:
        return
    for name, text in outcome.model.rows():
        yield _row(name, text)
    if not outcome.model.point.fits and outcome.budget > outcome.asked:
        yield _row("umem run", f"{outcome.memory.largest_op} alone needs more memory")
    elif not outcome.model.point.fits and outcome.results:
        best = outcome.results[0]
        ratio = best.step_us / best.compute_us if best.compute_us else 1.0
        yield _row("umem run", f"{_ms(best.step_us)} a step, {ratio:.2f} x compute, same training")


def _memory(outcome: PlanAnswer) -> Iterator[str]:
    found = outcome.memory
    yield _row("peak", f"{format_bytes(found.peak_bytes)} at {found.peak}")
    top = max((max(values) for values in found.over_time.values()), default=0)
    for tag, size in found.by_tag.items():
        yield _row(f"  {tag}", f"{_bars(found.over_time[tag], top)} {format_bytes(size)}")
    for holder in found.largest:
        made = f" of {holder.module}" if holder.module else ""
        kind = f"{holder.tag}, {holder.family}" if holder.family else holder.tag
        yield _row("  large tensor", f"{format_bytes(holder.bytes)} {kind}{made}")


def _budget(outcome: PlanAnswer) -> Iterator[str]:
    found = outcome.memory
    fits = "everything fits"
    if outcome.asked < found.peak_bytes:
        fits = f"{outcome.asked / found.peak_bytes:.0%} of the peak: does not fit"
    elif outcome.asked < outcome.resident:
        fits = f"the peak, whose pages take {format_bytes(outcome.resident)}: does not fit"
    yield _row("budget", f"{format_bytes(outcome.asked)}, {fits}")
    if outcome.budget > outcome.asked:
        yield _row(
            "",
            f"raised to {format_bytes(outcome.budget)}, 1.05 times the needs of {found.largest_op} "
            "alone; with less, the op itself would page",
        )
    floor = outcome.floor
    where = f" at {floor['op']}" if floor["op"] else ""
    ratio = floor["us"] / outcome.step.compute_us if outcome.step.compute_us else 1.0
    yield _row(
        "floor",
        f"{_ms(floor['us'])} a step ({ratio:.2f} times compute), set by {floor['bound']}{where}: "
        "no swapping schedule is faster",
    )


def _policies(outcome: PlanAnswer) -> Iterator[str]:
    for index, result in enumerate(outcome.results):
        ratio = result.step_us / result.compute_us if result.compute_us else 1.0
        moved = f"{result.bytes_in / _GIB:.2f} GiB in, {result.bytes_out / _GIB:.2f} GiB out"
        best = "  <- best" if index == 0 and len(outcome.results) > 1 else ""
        yield _row(
            "policies" if index == 0 else "",
            f"{result.policy:<16} {_ms(result.step_us):>11} {ratio:>6.2f} x compute, {moved}{best}",
        )


def _recomputed(outcome: PlanAnswer) -> Iterator[str]:
    table = outcome.recomputed
    if table is None:
        return
    titles = ("step", "÷ compute", "again", "peak", "GiB in", "floor")
    widths = (11, 9, 7, 7, 8, 6)
    yield _row("recompute", f"{'':<10} {_cells(titles, widths)}")
    for row in table.rows:
        if row.result is None:
            yield _row("", f"{row.mode:<10} no plan found that fits without swapping")
            continue
        values = (
            _ms(row.result.step_us),
            f"{row.result.step_us / table.compute_us:.2f}",
            f"{row.again_us / table.compute_us:.1%}",
            f"{row.peak_bytes / outcome.memory.peak_bytes:.0%}",
            f"{row.result.bytes_in / _GIB:.2f}",
            f"{row.result.floor_us / table.compute_us:.2f}",
        )
        yield _row("", f"{row.mode:<10} {_cells(values, widths)}")
    yield _row("", f"lower bound {table.bound.text(table.compute_us)}")


def _updated(outcome: PlanAnswer) -> Iterator[str]:
    found = outcome.updated
    if found is None:
        return
    if not found.bytes:
        yield _row("optimizer", "no update that the host can do: see docs/optimizer_state.md")
        return
    times = found.step_us / found.compute_us
    yield _row(
        "optimizer",
        f"{found.share:.0%} of {format_bytes(found.bytes)} of parameters updated on the host: "
        f"{_ms(found.step_us)} a step, {times:.2f} x compute",
    )
    again = f", {found.again_us / found.compute_us:.1%} of compute run again"
    yield _row(
        "",
        f"{_ms(found.host_us)} on the host, {found.bytes_in / _GIB:.2f} GiB in, "
        f"{found.bytes_out / _GIB:.2f} GiB out{again if found.again_us else ''}",
    )
    share = "" if found.bound.us is None else " (any share)"
    yield _row("", f"lower bound {found.bound.text(found.compute_us)}{share}")


def _ranks(outcome: PlanAnswer) -> Iterator[str]:
    found = outcome.ranks
    if found is None:
        return
    yield _row(
        "ranks",
        f"{found.ranks} on {found.nodes} x {found.node}, {found.busy} busy on each: every link has "
        f"{found.link_gb_s_in:g} GB/s in and {found.link_gb_s_out:g} out "
        f"({found.own_gb_s_in:g} and {found.own_gb_s_out:g} alone)",
    )
    yield _row(
        "",
        f"collectives: {found.exchanged_bytes / _GIB:.2f} GiB over the links of each rank, "
        f"{_ms(found.exchange_us)}, of which compute waits for {_ms(found.exposed_us)}"
        if found.exchanged_bytes
        else "collectives: none, the ranks exchange nothing in a step",
    )
    if found.step_us is not None and found.alone_us is not None:
        ratio = found.step_us / found.alone_us if found.alone_us else 1.0
        yield _row(
            "", f"{_ms(found.step_us)} a step, {ratio:.2f} times that of a device with its own link"
        )
    needed = "a larger host is needed"
    if found.nodes_needed is not None:
        needed = f"{found.nodes_needed} nodes needed"
    yield _row(
        "host",
        f"{format_bytes(found.host_bytes_rank)} a rank, {format_bytes(found.host_bytes_node)} a "
        f"node of {format_bytes(found.host_memory_bytes)}"
        + ("" if found.host_fits else f": does not fit; {needed}"),
    )


def _cells(values: Sequence[str], widths: Sequence[int]) -> str:
    return " ".join(f"{value:>{width}}" for value, width in zip(values, widths, strict=True))


def _budgets(outcome: PlanAnswer) -> Iterator[str]:
    least, most = outcome.memory.largest_op_bytes, outcome.resident
    yield _row("budgets", f"{format_bytes(most)}: nothing moves")
    if outcome.hidden_from is not None and outcome.hidden_from < most:
        text = "the smallest at which the floor is compute: transfers can overlap with it"
        yield _row("", f"{format_bytes(outcome.hidden_from)}: {text}")
    yield _row("", f"{format_bytes(least)}: {outcome.memory.largest_op} alone")


def _advice(outcome: PlanAnswer) -> Iterator[str]:
    for index, text in enumerate(outcome.advice):
        yield _row("would help" if index == 0 else "", text)


def _row(name: str, text: str) -> str:
    return f"{name:<{_WIDTH}} {text}".rstrip()


def _ms(us: float) -> str:
    return f"{us / 1e3:.2f} ms"


def _bars(values: Sequence[int], top: int) -> str:
    """Draw one character per value; the highest bar is `top`."""
    last = len(_BARS) - 1
    return "".join(_BARS[-(-value * last // top) if top else 0] for value in values)
