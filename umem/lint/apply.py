"""Application of findings: modules in place, equal buffers as one; and proof of equal results.

The proof is a run with real tensors: losses, gradients and the model's final tensors are
bit-identical with and without the changes.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree

from ..capture import program
from ..errors import ConfigError, PlanError
from . import inplace
from .findings import Finding, LintReport, ordered, some_of

_STEPS = 2  # in each run that is compared
_SEED = 1


@dataclass(frozen=True)
class Checked:
    """The changes made, and the result of a run with them."""

    done: list[str]
    compared: int  # losses, gradients, parameters and buffers
    differing: list[str]  # their names; empty if all are bit-identical
    peak_before: int  # bytes of a step, traced
    peak_after: int


def apply(model: nn.Module, findings: Iterable[Finding]) -> list[str]:
    """Apply what is safe, to a model that is built as the one that was linted.

    Modules are switched to `inplace=True`; buffers of equal values become one tensor. Returns what
    was done, a line each.

    Raises:
        ConfigError: the model has no such module or buffer.
    """
    parts = _parts(model)
    done = []
    for finding in findings:
        if not finding.safe:
            continue
        if finding.kind == "in_place":
            for name in finding.modules:
                part: Any = _part(parts, name)
                part.inplace = True
        else:
            _share(parts, finding.modules)
        done.append(f"{finding.line}: {finding.fix}")
    return done


def equal_buffers(model: nn.Module, constants: Mapping[str, str]) -> list[Finding]:
    """Return findings for constants of a real model that have equal bytes and are not shared.

    Args:
        model: of real tensors.
        constants: their names and lines, see `LintReport.constants`.
    """
    parts = _parts(model)
    # By their values: names, and bytes, by storage. Expanded tensors have more elements than it.
    groups: dict[Any, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    sizes: dict[int, int] = {}
    for name in constants:
        owner, _, attribute = name.rpartition(".")
        tensor: torch.Tensor = getattr(_part(parts, owner), attribute)
        key = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, _digest(tensor))
        storage = tensor.untyped_storage()
        groups[key][storage.data_ptr()].append(name)
        sizes[storage.data_ptr()] = min(tensor.numel() * tensor.itemsize, storage.nbytes())
    found = []
    for group in groups.values():
        names = [name for held in group.values() for name in held]
        if len(group) > 1:
            buffers = all(_is_buffer(parts, name) for name in names)
            found.append(
                Finding(
                    kind="duplicate",
                    bytes=sum(sizes[storage] for storage in [*group][1:]),
                    peak_bytes=None,
                    line=constants[names[0]],
                    what=f"{len(group)} tensors of equal values: {some_of(names)}",
                    fix="create it once and share it",
                    modules=tuple(names) if buffers else (),
                    safe=buffers,
                )
            )
    return found


def check(make: Callable[[], object], findings: Sequence[Finding]) -> Checked:
    """Run a program with real tensors, unchanged and with the safe changes; compare all bits.

    Args:
        make: returns the program with its model, see `capture.program.program`; it is called again
            for each run and must give the same program each time, for a fixed seed.
        findings: of this program.

    Raises:
        PlanError: the program fails, has no model, or differs between two runs.
    """
    _, before = _run(make, ())
    _, again = _run(make, ())
    moved = _differing(before, again)
    if moved:
        raise PlanError(
            f"two runs of the unchanged program with equal seeds differ, first in {moved[0]}, so "
            "--apply cannot be checked: make the function rebuild everything, and seed all random "
            "numbers"
        )
    done, after = _run(make, findings)
    return Checked(
        done=done,
        compared=len(before.of),
        differing=_differing(before, after),
        peak_before=_traced(make, ()),
        peak_after=_traced(make, findings),
    )


def with_values(make: Callable[[], object], report: LintReport) -> LintReport:
    """Return the report with those duplicates that only real values show.

    Raises:
        PlanError: the program cannot be set up with real tensors, or has no model.
    """
    setting_up = program.explained("setting the program up with real tensors")
    with _seeded(), setting_up, program.without_arguments():
        model = model_of(make())
        parts = _parts(model)
        inside = {name: line for name, line in report.constants.items() if _owner(name) in parts}
        found = equal_buffers(model, inside)
    told = {name for finding in found for name in finding.modules}
    kept = [f for f in report.findings if f.kind != "duplicate" or not told >= {*f.modules}
            or not f.modules]  # fmt: skip
    # Known already, together with tensors outside of the model.
    known = [f for f in kept if f.kind == "duplicate"]
    found = [f for f in found if not any(_includes(each, f) for each in known)]
    remarks = [remark for remark in report.remarks if remark != report.unsure]
    if report.unsure and (others := len(report.constants) - len(inside)):
        remarks.append(
            f"{others} buffers or fixed parameters are of modules outside of the model that the "
            "function returned; their values were not compared"
        )
    return replace(report, findings=ordered([*kept, *found]), remarks=remarks)


def _includes(known: Finding, other: Finding) -> bool:
    """Return whether one duplicate is of all tensors of the other."""
    if not other.modules:  # of fixed parameters, which are named in the text alone
        return known.what == other.what
    return {*known.modules} >= {*other.modules}


def model_of(made: object) -> nn.Module:
    """Return the model of a program.

    Raises:
        PlanError: it has none that is known.
    """
    model, _ = program.parts(made)
    if model is None:
        raise PlanError(
            "the function returned a step alone, so that its model is not known; return "
            "(model, step) to apply what was found"
        )
    return model


def _run(make: Callable[[], object], findings: Sequence[Finding]) -> tuple[list[str], _Prints]:
    prints = _Prints()
    running = program.explained("a run with real tensors")
    with _seeded(), running, program.without_arguments():
        made = make()
        model, done = _apply_inside(made, findings)
        if isinstance(made, tuple) and len(made) == 4:
            made = (*made[:3], prints.watching(made[3]))
        _, step = program.parts(made)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.is_leaf:
                hooked: Any = parameter
                hooked.register_post_accumulate_grad_hook(prints.gradient(name))
        for _ in range(_STEPS):
            prints.add("what the step returns", step())
        buffers = dict(model.named_buffers(remove_duplicate=False))  # also those not saved
        for name, tensor in {**buffers, **model.state_dict()}.items():
            prints.add(f"{name} afterwards", tensor)
    return done, prints


class _Prints:
    """Digests of tensors by name, in the order of their arrival."""

    def __init__(self) -> None:
        self.of: dict[str, bytes] = {}
        self._counts: dict[str, int] = defaultdict(int)

    def add(self, name: str, value: object) -> None:
        for leaf in _pytree.tree_leaves(value):
            if isinstance(leaf, (torch.Tensor, int, float, complex)):
                self._counts[name] += 1
                digest = _digest(leaf) if isinstance(leaf, torch.Tensor) else repr(leaf).encode()
                self.of[f"{name} ({self._counts[name]})"] = digest

    def gradient(self, name: str) -> Callable[[torch.Tensor], None]:
        return lambda parameter: self.add(f"the gradient of {name}", parameter.grad)

    def watching(self, loss_fn: Callable[..., Any]) -> Callable[..., Any]:
        def watched(model: nn.Module, batch: object) -> Any:
            loss = loss_fn(model, batch)
            self.add("the loss", loss)
            return loss

        return watched


def _differing(some: _Prints, others: _Prints) -> list[str]:
    names = list(dict.fromkeys([*some.of, *others.of]))
    return [name for name in names if some.of.get(name) != others.of.get(name)]


def _traced(make: Callable[[], object], findings: Sequence[Finding]) -> int:
    def applied() -> object:
        made = make()
        _apply_inside(made, findings)
        return made

    return inplace.peak(program.trace(applied))


def _apply_inside(made: object, findings: Iterable[Finding]) -> tuple[nn.Module, list[str]]:
    """Apply the findings as far as they are in a program's model; a step may use other modules.

    Returns the model, and what was done.
    """
    model = model_of(made)
    parts = _parts(model)
    inside = []
    for finding in findings:
        if finding.kind == "in_place":
            names = [name for name in finding.modules if name in parts]
        else:
            names = [name for name in finding.modules if _owner(name) in parts]
        if len(names) == len(finding.modules) or (finding.kind == "duplicate" and len(names) > 1):
            inside.append(replace(finding, modules=tuple(names)))
    return model, apply(model, inside)


def _owner(name: str) -> str:
    """Return the path of the module that holds a parameter or buffer."""
    return name.rpartition(".")[0]


def _share(parts: dict[str, nn.Module], names: Sequence[str]) -> None:
    shared: torch.Tensor | None = None
    for name in names:
        owner, _, attribute = name.rpartition(".")
        part = _part(parts, owner)
        if not _is_buffer(parts, name):
            raise ConfigError(
                f"the model has no buffer {name!r}; allowed: the model that was linted"
            )
        if shared is None:
            shared = part._buffers[attribute]
        part._buffers[attribute] = shared


def _is_buffer(parts: dict[str, nn.Module], name: str) -> bool:
    owner, _, attribute = name.rpartition(".")
    return attribute in _part(parts, owner)._buffers


def _parts(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules by a Scope's names; a compiled model is planned as the one inside."""
    model = getattr(model, "_orig_mod", model)
    return {name or type(model).__name__: part for name, part in model.named_modules()}


def _part(parts: dict[str, nn.Module], name: str) -> nn.Module:
    if name not in parts:
        raise ConfigError(f"the model has no module {name!r}; allowed: the model that was linted")
    return parts[name]


def _digest(tensor: torch.Tensor) -> bytes:
    dense = tensor.detach().cpu()
    dense = dense if dense.layout == torch.strided else dense.to_dense()
    flat = (torch.view_as_real(dense) if dense.is_complex() else dense).contiguous().reshape(-1)
    content: Any = flat.view(torch.uint8).numpy()
    digest = hashlib.blake2b(content, digest_size=16)
    digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    return digest.digest()


@contextlib.contextmanager
def _seeded() -> Iterator[None]:
    """Draw equal random numbers in each run, and leave the caller's generators untouched."""
    pythons, numpys = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        torch.manual_seed(_SEED)
        random.seed(_SEED)
        np.random.seed(_SEED)
        try:
            yield
        finally:
            random.setstate(pythons)
            np.random.set_state(numpys)
