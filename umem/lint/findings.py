"""Tensors that a training step keeps or makes needlessly, with bytes and source lines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..capture import program, script
from ..capture.recording import Recording
from ..errors import PlanError
from ..trace.ids import BlockId
from ..trace.schema import Op
from . import inplace, late
from .inplace import Refused, Site
from .value_numbering import ValueNumber
from .watcher import Watched, Watcher

STEPS = 4  # tensors of the second and of the third that outlive the last one show growth
KINDS = ("in_place", "duplicate", "late", "held", "unused", "no_gradient")
_MIN = 512  # bytes; the minimum of torch's allocators
_STATES = ("optimizer", "grad")
_LASTING = ("param", *_STATES)


@dataclass(frozen=True)
class Finding:
    """One thing that could be done.

    `bytes` are those of a step that are not allocated, or not kept, if it is done. `peak_bytes`
    is by how much the step's peak sinks if it alone is done; None where that was not worked out.
    """

    kind: str  # of KINDS
    bytes: int
    peak_bytes: int | None
    line: str  # file:line
    what: str
    fix: str
    modules: tuple[str, ...] = ()  # what `apply` changes: modules, or buffers that become one
    safe: bool = False  # `apply` does it


@dataclass(frozen=True)
class LintReport:
    """All findings. Sizes are requested bytes."""

    findings: list[Finding]
    refused: list[Refused]  # modules whose `inplace` must not be set
    peak_bytes: int  # of a step
    peak_in_place: int  # with all ops in place that may be in place
    # Buffers and fixed parameters of the program's setup that no step writes, and their lines.
    constants: dict[str, str]
    remarks: list[str]
    unsure: str  # the remark that real values would settle; empty if none


def lint(make: Callable[[], object]) -> LintReport:
    """Run steps of a program on fake tensors and report possible savings.

    Args:
        make: returns the program, as for `capture.program.trace`; it takes no memory.

    Raises:
        PlanError: the program cannot be run without data; the message says where.
    """
    watcher = Watcher()
    with _followed():
        program.trace(make, STEPS, watcher)
    return report(watcher.watched)


def lint_script(path: Path, arguments: list[str]) -> LintReport:
    """Lint a script, see `script.trace`.

    Raises:
        ConfigError: there is no such script.
        PlanError: it ends before `STEPS` steps of its optimizer, or fails; the message says where.
    """
    watcher = Watcher()
    with _followed():
        script.trace(path, arguments, STEPS, watcher, least=STEPS)
    return report(watcher.watched)


@contextmanager
def _followed() -> Iterator[None]:
    """Explain the error of a program that can be planned but not linted."""
    try:
        yield
    except PlanError as error:
        if "saved tensor hooks" not in str(error):
            raise
        raise PlanError(
            f"{error} (advising follows what autograd saves by such hooks; use torch.autograd in "
            "the step that is linted)"
        ) from error


def report(watched: Watched) -> LintReport:
    """Return the findings by kind, those with the largest gain first within a kind."""
    recording = watched.recording
    found = inplace.find(watched)
    peak = inplace.peak(recording)
    held = [*_held(watched)]
    findings = [
        *(_of_site(site, found.refused, recording, peak) for site in found.sites),
        *_duplicates(watched),
        *_late(watched, {finding.line for finding in held}),
        *held,
        *_unused(watched),
        *_without_gradient(watched),
    ]
    remarks = list(recording.remarks)
    if not watched.gradients and any(held.trainable for held in watched.held.values()):
        remarks.append("no parameter's .grad was written: unused parameters were not searched for")
    constants = _constants(watched)
    unsure = _unsure(watched, constants)
    remarks += [unsure] if unsure else []
    together = inplace.peak(recording, [pair for site in found.sites for pair in site.pairs])
    return LintReport(
        findings=ordered(findings),
        refused=found.refused,
        peak_bytes=peak,
        peak_in_place=together,
        constants=constants,
        remarks=remarks,
        unsure=unsure,
    )


def ordered(findings: list[Finding]) -> list[Finding]:
    """Sort findings by kind, those with the largest gain first within a kind."""

    def place(finding: Finding) -> tuple[int, int, int, str]:
        gain = finding.bytes if finding.peak_bytes is None else finding.peak_bytes
        return (KINDS.index(finding.kind), -gain, -finding.bytes, finding.line)

    return sorted(findings, key=place)


def _constants(watched: Watched) -> dict[str, str]:
    recording = watched.recording
    written = _blocks(recording, 0, recording.span()[1], writes=True) | watched.updated
    return {
        path: watched.lines[held.block]
        for path, held in watched.held.items()
        if held.block in watched.built and not held.trainable
        and held.block not in written and held.bytes >= _MIN
    }  # fmt: skip


def _unsure(watched: Watched, constants: Iterable[str]) -> str:
    """Return the remark on constants that might be equal to another; empty if there are none."""
    values: dict[str, set[ValueNumber]] = defaultdict(set)
    for path in constants:
        values[watched.held[path].kind].add(watched.values.of(watched.held[path].block))
    alike = sum(len(numbers) for numbers in values.values() if len(numbers) > 1)
    if not alike:
        return ""
    return (
        f"{alike} buffers or fixed parameters have the shape of another one; whether their values "
        "are equal cannot be told without data (--values compares them)"
    )


def _of_site(site: Site, refused: list[Refused], recording: Recording, peak: int) -> Finding:
    size = sum(recording.blocks[source].bytes for source, _ in site.pairs)
    what = f"{site.op} may write over its input"
    if site.switch:
        fix = f"inplace=True in {site.module_type} {site.module}"
        if site.built:
            fix += f", made at {site.built}"
        others = [stays.module for stays in refused if stays.built == site.built != ""]
        if others:
            fix += f" (not in {', '.join(others)}, made there too)"
    elif site.module:
        fix = f"torch.{site.op}_(x) in place of {site.module_type} {site.module}"
    else:
        fix = site.write or f"{site.op}_()"
        if site.position == 1:
            fix += " of the second operand with the first one"
    return Finding(
        kind="in_place",
        bytes=size,
        peak_bytes=peak - inplace.peak(recording, site.pairs),
        line=site.line,
        what=what,
        fix=fix,
        modules=(site.module,) if site.switch else (),
        safe=site.switch,
    )


def _duplicates(watched: Watched) -> Iterator[Finding]:
    recording = watched.recording
    begin, end = recording.span()
    life = recording.lifetimes()
    written = _rewritten(watched, life) | watched.updated
    paths: dict[BlockId, list[str]] = defaultdict(list)
    for path, held in watched.held.items():
        paths[held.block].append(path)
    trainable = {held.block for held in watched.held.values() if held.trainable}
    groups: dict[ValueNumber, list[tuple[int, int, BlockId]]] = defaultdict(list)
    for block, (born, died) in life.items():
        known = recording.blocks[block]
        lasts = born < begin
        if died <= begin or known.bytes < _MIN or known.on_host or block in watched.of_backward:
            continue
        if known.tag in _STATES or block in trainable or (lasts and block in written):
            continue
        since = max(watched.values.since.get(block, born), born)
        groups[watched.values.of(block)].append((max(since, begin), min(died, end), block))
    for group in groups.values():
        blocks = _most_at_once(group)
        if len(blocks) > 1:
            yield _duplicate(watched, blocks, [p for b in blocks for p in paths.get(b, ())])


def _rewritten(watched: Watched, life: dict[BlockId, tuple[int, int]]) -> set[BlockId]:
    """Return the blocks that a step writes which is not the one that made them."""
    recording, found, begin = watched.recording, set[BlockId](), 0
    for end in recording.step_ends():
        blocks = _blocks(recording, begin, end, writes=True)
        found |= {b for b in blocks if b in watched.built or life[b][0] < begin}
        begin = end + 1
    return found


def _duplicate(watched: Watched, blocks: list[BlockId], paths: list[str]) -> Finding:
    recording = watched.recording
    sizes = [recording.blocks[block].bytes for block in blocks]
    buffers = [path for path in paths if watched.held[path].buffer]
    lines = list(dict.fromkeys(watched.lines[block] for block in blocks))
    what = f"{len(blocks)} tensors of equal values"
    if paths:
        what += f": {some_of(paths)}"
    elif len(lines) > 1:
        what += f", also made at {some_of(lines[1:])}"
    of_buffers = len({watched.held[path].block for path in buffers}) == len(blocks)
    # One tensor replaces all: views of other places or shapes remain, and those of a first step.
    views = {(watched.held[path].kind, watched.held[path].place) for path in paths}
    of_buffers = of_buffers and len(views) == 1 and watched.built.issuperset(blocks)
    return Finding(
        kind="duplicate",
        bytes=sum(sizes) - max(sizes),
        peak_bytes=None,
        line=lines[0],
        what=what,
        fix="create it once and share it",
        modules=tuple(buffers) if of_buffers else (),
        safe=of_buffers,
    )


def _most_at_once(group: list[tuple[int, int, BlockId]]) -> list[BlockId]:
    """Return the largest set of blocks alive together; all have the same value."""
    best: list[BlockId] = []
    for moment, _, _ in group:
        alive = [block for begin, end, block in group if begin <= moment < end]
        best = max(best, alive, key=len)
    return best


def _late(watched: Watched, held_lines: set[str]) -> Iterator[Finding]:
    for found in late.find(watched):
        if found.line in held_lines or found.peak_bytes < _MIN:
            continue
        them = "them" if len(found.blocks) > 1 else "it"
        yield Finding(
            kind="late",
            bytes=sum(watched.recording.blocks[block].bytes for block in found.blocks),
            peak_bytes=found.peak_bytes,
            line=found.line,
            what=f"{_count(len(found.blocks))}, made here, still alive at the step's peak, though "
            f"no op needs {them} any more",
            fix=f"where no later step does: del what refers to {them}, or return from the function "
            f"that has {them}, before backward()",
        )


def _held(watched: Watched) -> Iterator[Finding]:
    recording = watched.recording
    ends = recording.step_ends()
    life = recording.lifetimes()
    lasting = {held.block for held in watched.held.values()}
    growth: list[dict[str, list[int]]] = []
    for step in (1, 2):  # not the first, which may make what all others use
        by_line: dict[str, list[int]] = defaultdict(list)
        for block, (born, died) in life.items():
            known = recording.blocks[block]
            if known.on_host or known.tag in _LASTING or block in lasting:
                continue
            # A batch that was prefetched lives for two steps.
            if ends[step - 1] < born < ends[step] and died > ends[-1]:
                by_line[watched.lines[block]].append(known.bytes)
        growth.append(by_line)
    for line in growth[0].keys() & growth[1].keys():
        sizes = growth[1][line]
        yield Finding(
            kind="held",
            bytes=sum(sizes),
            peak_bytes=None,
            line=line,
            what=f"{_count(len(sizes))} of each step, made here, "
            "still alive at the end of the last recorded step",
            fix="keep .item() or .detach().cpu() of it, or release it before the step ends",
        )


def _unused(watched: Watched) -> Iterator[Finding]:
    recording = watched.recording
    end = recording.span()[1]
    read = _blocks(recording, 0, end, writes=False) | watched.asked
    paths = {held.block: path for path, held in watched.held.items()}
    begin = recording.span()[0]
    for block, (born, died) in recording.lifetimes().items():
        known = recording.blocks[block]
        if block in read or block in watched.of_backward or died <= begin:
            continue
        if born >= begin and died > end:
            continue  # a later step may read it
        if known.on_host or not known.bytes:
            continue
        path = paths.get(block)
        if path is not None and watched.held[path].buffer:
            what = f"buffer {path} is never read"
        elif path is None and known.tag == "input" and born < end:
            what = "an input that no op of the recorded steps reads"
        else:
            continue
        yield Finding(
            kind="unused",
            bytes=known.bytes,
            peak_bytes=None,
            line=watched.lines[block],
            what=what,
            fix="do not make it, or bring it to the device only where it is read",
        )


def _without_gradient(watched: Watched) -> Iterator[Finding]:
    if not watched.gradients:
        return
    recording = watched.recording
    read = _blocks(recording, 0, recording.span()[1], writes=False)
    reached = {watched.held[path].block for path in watched.gradients if path in watched.held}
    seen = set(reached)
    by_module: dict[tuple[str, bool], list[str]] = defaultdict(list)
    for path, held in watched.held.items():
        if held.trainable and held.block not in seen:
            seen.add(held.block)
            by_module[path.rpartition(".")[0], held.block in read].append(path)
    for (_, used), names in by_module.items():
        one = len(names) == 1
        verb = ("is" if one else "are"), ("gets" if one else "get")
        yield Finding(
            kind="no_gradient",
            bytes=sum(watched.held[name].bytes for name in names),
            peak_bytes=None,
            line=watched.lines[watched.held[names[0]].block],
            what=f"{'parameter' if one else 'parameters'} {some_of(names)} {verb[0]} "
            + (f"read, yet never {verb[1]} a gradient" if used else "never read"),
            fix="requires_grad_(False) if it is meant to be fixed, else leave it out",
        )


def _blocks(recording: Recording, begin: int, end: int, writes: bool) -> set[BlockId]:
    ops = (event for event in recording.events[begin:end] if isinstance(event, Op))
    return {block for op in ops for block in (op.writes if writes else op.reads)}


def _count(tensors: int) -> str:
    return f"{tensors} tensors" if tensors > 1 else "a tensor"


def some_of(names: list[str]) -> str:
    """Return the first four names, and how many there are beside them."""
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
