"""Reader of `torch.save` files: torch reads everything but the tensors' values."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...errors import CheckpointError, kind_of, plain
from .file_tensor import FileTensor

if TYPE_CHECKING:
    import torch

MAGIC = b"PK\x03\x04"  # first bytes of a zip archive, which torch.save has written since 1.6


def read_places(path: Path) -> dict[str, FileTensor]:
    """Return the tensors of a state_dict that `torch.save` wrote, by name.

    Only tensors and plain containers are unpickled (`weights_only`). The file is mapped meanwhile,
    and a tensor's place in the mapping is its place in the file: no value is read.

    Raises:
        CheckpointError: the file cannot be read, or has anything other than names and tensors.
    """
    import torch

    try:
        _check_archive(path)
        held = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except Exception as error:  # pickles and archives can fail with nearly any exception
        reason = plain(str(error).splitlines()[0]) if str(error) else type(error).__name__
        raise CheckpointError(
            f"{path}: torch.load(weights_only=True) cannot read it: it is damaged, or not a "
            f"state_dict (save one with torch.save(model.state_dict(), ...)): {reason}"
        ) from error
    tensors, mappings, size = _checked(path, held), _mappings(), path.stat().st_size
    return {name: _place(path, size, mappings, name, tensor) for name, tensor in tensors.items()}


def _check_archive(path: Path) -> None:
    """Check that the bytes of values are in the archive as in memory.

    Raises:
        CheckpointError: they are not. A mapping by torch would have other values.
    """
    with zipfile.ZipFile(path) as archive:
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
            raise CheckpointError(
                f"{path}: it is compressed; write it again by torch.save(torch.load(path), path)"
            )
        names = [name for name in archive.namelist() if name.endswith("/byteorder")]
        if any(archive.read(name) == b"big" for name in names):
            raise CheckpointError(f"{path}: it was written on a big-endian machine")


def _checked(path: Path, held: Any) -> Mapping[str, torch.Tensor]:
    import torch

    if not isinstance(held, Mapping):
        raise CheckpointError(
            f"{path}: it holds {kind_of(held)}; allowed: a state_dict of names and tensors"
        )
    for name, value in held.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"{path}: {name!r} is {kind_of(value)}; allowed: only a state_dict of "
                "names and tensors; save that with torch.save(model.state_dict(), ...)"
            )
        if value.layout != torch.strided or value.is_nested or value.is_quantized:
            kind = "quantized" if value.is_quantized else f"of layout {value.layout}"
            kind = "nested" if value.is_nested else kind
            raise CheckpointError(f"{path}: {name!r} is {kind}; allowed: strided, not quantized")
        if value.is_conj() or value.is_neg():
            raise CheckpointError(
                f"{path}: {name!r} is stored as its conjugate or its negative; save what "
                "resolve_conj().resolve_neg() returns"
            )
    return held


class _Mapping(NamedTuple):
    begin: int  # addresses
    end: int
    offset: int  # of `begin` in the file


def _mappings() -> list[_Mapping]:
    """Return the file mappings of this process (proc(5), /proc/pid/maps)."""
    found = []
    # Names may have any bytes, and what other encodings take for the end of a line.
    for line in Path("/proc/self/maps").read_bytes().splitlines():
        span, _, offset, _, inode = line.split(maxsplit=5)[:5]
        if inode != b"0":
            begin, end = (int(address, 16) for address in span.split(b"-"))
            found.append(_Mapping(begin, end, int(offset, 16)))
    return found


def _place(
    path: Path, size: int, mappings: list[_Mapping], name: str, tensor: torch.Tensor
) -> FileTensor:
    shape, address = tuple(tensor.shape), tensor.data_ptr()
    if not tensor.numel():
        return FileTensor(path, 0, tensor.dtype, shape, tensor.stride())
    for begin, end, offset in mappings:
        if begin <= address < end:
            made = FileTensor(path, offset + address - begin, tensor.dtype, shape, tensor.stride())
            if address + made.extent <= end and made.offset + made.extent <= size:
                return made
    raise CheckpointError(f"{path}: {name!r} is not stored in one piece")
