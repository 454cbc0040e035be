"""`umem.load_checkpoint`: reads files into a module's memory, tensor by tensor."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ...base.progress import progress
from ...base.wrappers import is_wrapper
from ...errors import CheckpointError, ConfigError, kind_of, plain
from ...residency.spans import is_module
from ...session import session
from .file_tensor import FileTensor, contiguous
from .files import tensors_of

if TYPE_CHECKING:
    import torch

_NAMED = 5  # names per kind that a message lists


class Loaded(NamedTuple):
    """Result of `load_checkpoint`; the lists are empty unless `strict` is False."""

    missing_keys: list[str]  # in the module, not in the checkpoint
    unexpected_keys: list[str]  # in the checkpoint, not in the module
    bytes: int  # of the values


@dataclass
class _Slot:
    """A parameter or persistent buffer of a module, under all of its names."""

    tensor: torch.Tensor
    names: list[str] = field(default_factory=list)
    owners: list[tuple[torch.nn.Module, str]] = field(default_factory=list)


def load_checkpoint(
    module: torch.nn.Module,
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    device: str | torch.device | None = None,
    keep_in_file: bool = False,
) -> Loaded:
    """Read a checkpoint into a module; only a part of one tensor is held in addition to the module.

    Values go straight into the module's memory, in the order of the files. Tensors on torch's
    device `meta` are created first, each just before it is read, so a model that was never in
    memory can be larger than the budget. Shared tensors stay shared. All names, shapes and dtypes
    are compared before anything changes.

    Args:
        module: its parameters and persistent buffers are written; hooks of `load_state_dict` are
            not called.
        path: a safetensors file, a file of `torch.save(module.state_dict())`, the index of several
            such files, or the directory of a model by Hugging Face's names.
        strict: require all names in both.
        device: where tensors on `meta` are created; None: the device that umem manages, or torch's
            default while umem is off.
        keep_in_file: leave the values of tensors of 2 MiB and more in the checkpoint until an
            operator needs them; they return there without a write until the program writes them.
            Needs the option `disk`. Nothing may write the files while the module lives: a read of
            a file that was changed ends the program.

    Raises:
        CheckpointError: the checkpoint is malformed, a file of it is missing, or it does not fit
            the module; the module is unchanged. Also raised if a file cannot be read to its end, or
            is replaced meanwhile: then tensors on `meta` remain there, and some of the others may
            have been written.
        ConfigError: not a module, or one with lazy parameters or wrappers such as DTensor;
            `keep_in_file` without a disk; or `device` is meta.
    """
    import torch

    if not is_module(module):
        raise ConfigError(
            f"umem.load_checkpoint(...) was given {kind_of(module)}; allowed: a module"
        )
    if keep_in_file:
        _check_disk()
    where = Path(path)
    slots = _slots(module)
    _check_kinds(slots)
    stored = tensors_of(where)
    missing, unexpected = _compare(where, slots, stored, strict)
    if strict:
        _check_rest(where, module)
    # The last name of a shared tensor wins, as in load_state_dict.
    last = ((slot, [name for name in slot.names if name in stored][-1:]) for slot in slots)
    pairs = [(stored[name], slot) for slot, names in last for name in names]
    pairs.sort(key=lambda pair: (str(pair[0].path), pair[0].offset))
    place = _device(device)
    made: dict[int, torch.Tensor] = {}
    count = sum(source.extent for source, _ in pairs)
    with torch.no_grad(), progress(f"loading {where.name}", count) as advance:
        for source, slot in pairs:
            if slot.tensor.is_meta and id(slot) not in made:
                made[id(slot)] = _made(slot.tensor, place)
            target = made.get(id(slot), slot.tensor).detach()
            if not (keep_in_file and source.place(target)):
                source.copy_to(target)
            elif not target.is_inference():
                torch.autograd.graph.increment_version(target)  # as a copy would
            advance(source.extent)
    for slot in slots:
        if id(slot) in made:
            _put(slot, made[id(slot)])
    _tag(slot.tensor for slot in slots if isinstance(slot.tensor, torch.nn.Parameter))
    return Loaded(missing, unexpected, count)


def _check_disk() -> None:
    """Check that evicted memory is on a disk.

    Raises:
        ConfigError: it is not.
    """
    from ...base.native import core

    if not session.is_enabled() or not core.current_options().disk:
        raise ConfigError(
            "umem.load_checkpoint(..., keep_in_file=True) needs the option disk, as in "
            'umem.enable(device="soft", disk="/var/tmp"); without it values are read at once'
        )


def _slots(module: torch.nn.Module) -> list[_Slot]:
    """Return the entries of the module's state_dict, each tensor once."""
    found: dict[int, _Slot] = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        transient = owner._non_persistent_buffers_set
        members = [*owner._parameters.items()]
        members += [row for row in owner._buffers.items() if row[0] not in transient]
        for name, tensor in members:
            if tensor is None:
                continue
            slot = found.setdefault(id(tensor), _Slot(tensor))
            slot.names.append(f"{prefix}.{name}" if prefix else name)
            if (owner, name) not in slot.owners:
                slot.owners.append((owner, name))
    return list(found.values())


def _check_kinds(slots: list[_Slot]) -> None:
    """Check that only plain tensors are written to.

    Raises:
        ConfigError: a tensor is a wrapper such as DTensor, is sparse, has no shape yet, or has
            elements in the same memory.
    """
    import torch

    def is_plain(tensor: torch.Tensor) -> bool:
        if torch.nn.parameter.is_lazy(tensor) or is_wrapper(tensor):
            return False
        if tensor.layout is not torch.strided:
            return False
        return tensor.is_meta or not _is_expanded(tensor)

    for slot in slots:
        if not is_plain(slot.tensor):
            raise ConfigError(
                f"umem.load_checkpoint(...): {slot.names[0]} is {kind_of(slot.tensor)}; "
                "allowed: plain tensors, dense and not expanded. Load before the module is sharded "
                "or quantized, and after lazy modules have run once"
            )


def _compare(
    path: Path, slots: list[_Slot], stored: dict[str, FileTensor], strict: bool
) -> tuple[list[str], list[str]]:
    """Return missing and unexpected names. One name of a shared tensor is enough."""
    missing = [slot.names[0] for slot in slots if not any(name in stored for name in slot.names)]
    known = {name for slot in slots for name in slot.names}
    unexpected = [name for name in stored if name not in known]
    differing = [
        f"{name}: {_kind(stored[name])} in the checkpoint, {_kind(slot.tensor)} in the module"
        for slot in slots
        for name in slot.names
        if name in stored and _kind(stored[name]) != _kind(slot.tensor)
    ]
    wrong = [("differs", differing)]
    if strict:
        wrong += [("missing in the checkpoint", missing), ("not in the module", unexpected)]
    reasons = [f"{_listed(names)} ({what})" for what, names in wrong if names]
    if reasons:
        advice = "; strict=False skips tensors without a counterpart" if not differing else ""
        raise CheckpointError(
            f"{path} does not fit the module, which is unchanged: {'; '.join(reasons)}{advice}"
        )
    return missing, unexpected


def _kind(tensor: torch.Tensor | FileTensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return plain(", ".join(names[:_NAMED])) + more


def _check_rest(path: Path, module: torch.nn.Module) -> None:
    """Check for non-persistent buffers on meta: no checkpoint has values for them.

    Raises:
        CheckpointError: there are some.
    """
    rest = [
        f"{prefix}.{name}" if prefix else name
        for prefix, owner in module.named_modules()
        for name in sorted(owner._non_persistent_buffers_set)
        if (buffer := owner._buffers.get(name)) is not None and buffer.is_meta
    ]
    if rest:
        raise CheckpointError(
            f"{path} cannot fill buffers that are not persistent and on meta: {_listed(rest)}; "
            "compute them on a device first, or load with strict=False and compute them afterwards"
        )


def _device(device: str | torch.device | None) -> torch.device:
    import torch

    if device is not None:
        try:
            found = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ConfigError(
                f"device={device!r}: {plain(str(error))}; allowed: cpu, cuda and the like"
            ) from None
        if found.type == "meta":
            raise ConfigError(f"device={device!r} holds no values; allowed: cpu, cuda and the like")
        return found
    if session.is_enabled():
        return torch.device("cuda" if session.description()["device"] == "cuda" else "cpu")
    found = torch.get_default_device()
    return torch.device("cpu") if found.type == "meta" else found


def _is_expanded(tensor: torch.Tensor) -> bool:
    """Return whether elements share memory, so that nothing can be copied to them."""
    return any(n > 1 and step == 0 for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def _made(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    import torch

    shape = tuple(tensor.shape)
    stride = contiguous(shape) if _is_expanded(tensor) else tensor.stride()
    made = torch.empty_strided(shape, stride, dtype=tensor.dtype, device=device)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made


def _put(slot: _Slot, tensor: torch.Tensor) -> None:
    for owner, name in slot.owners:
        setattr(owner, name, tensor)
    slot.tensor = tensor


def _tag(parameters: Iterator[torch.Tensor]) -> None:
    """Tag the parameters, which `Module.to` and `to_empty` create without umem's hook."""
    if not session.is_enabled():
        return
    from ...base.native import core

    for parameter in parameters:
        if not parameter.is_meta and parameter.numel():
            core.tag(parameter.untyped_storage().data_ptr(), "param")
