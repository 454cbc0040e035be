"""Files of `torch.save`: where their tensors lie. torch reads all but their values."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError
from .file_tensor import FileTensor

if TYPE_CHECKING:
    import torch

MAGIC = b"PK\x03\x04"  # of a zip archive, which torch.save has written since 1.6


def read_places(path: Path) -> dict[str, FileTensor]:
    """The tensors of a state_dict that `torch.save` wrote, by name.

    Only tensors and plain containers are unpickled (`weights_only`). Under fake tensors torch.load
    says where each storage lies (torch's notes on serialization, "Layout control").

    Raises:
        CheckpointError: the file cannot be read, or holds anything else than names and tensors.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        if _is_big_endian(path):
            raise CheckpointError(f"{path}: it was written on a big-endian machine")
        with FakeTensorMode():
            held = torch.load(path, map_location="cpu", weights_only=True)
        size = path.stat().st_size
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except Exception as error:  # pickles and archives fail in as many ways
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{path}: torch.load(weights_only=True) cannot read it, and so it is damaged, or no "
            f"state_dict: {reason}"
        ) from error
    return {name: _place(path, size, name, tensor) for name, tensor in _checked(path, held).items()}


def _is_big_endian(path: Path) -> bool:
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if name.endswith("/byteorder")]
        return any(archive.read(name) == b"big" for name in names)


def _checked(path: Path, held: Any) -> Mapping[str, torch.Tensor]:
    import torch

    if not isinstance(held, Mapping):
        raise CheckpointError(
            f"{path}: it holds a {type(held).__name__}; allowed: a state_dict, of names and tensors"
        )
    for name, value in held.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"{path}: {name!r} is a {type(value).__name__}; allowed: a state_dict alone, of "
                "names and tensors; save that with torch.save(model.state_dict(), ...)"
            )
        if value.layout != torch.strided:
            raise CheckpointError(f"{path}: {name!r} has layout {value.layout}; allowed: strided")
    return held


def _place(path: Path, size: int, name: str, tensor: torch.Tensor) -> FileTensor:
    storage = tensor.untyped_storage()
    begin = getattr(storage, "_checkpoint_offset", None)
    if begin is None and storage.nbytes():
        raise CheckpointError(f"{path}: {name!r} has no place of its own in the file")
    offset = (begin or 0) + int(tensor.storage_offset()) * tensor.itemsize
    made = FileTensor(path, offset, tensor.dtype, tuple(tensor.shape), tensor.stride())
    if offset + made.extent > size:
        raise CheckpointError(f"{path}: {name!r} would end behind the end of the file")
    return made
