"""Reader of the safetensors format: 8 bytes of length, a header in JSON, and the values.

The format is that of https://github.com/huggingface/safetensors (README, "Format"), whose library
creates new tensors; here values are read into existing memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, shown
from .file_tensor import FileTensor, contiguous

MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own reader
_LENGTH_BYTES = 8
_MAX_DIMENSIONS, _MAX_COUNT = 64, (1 << 63) - 1  # torch's own; more digits cannot be shown
# Dtypes with a name in every torch; those of less than a byte per element have none.
_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16",
    "U32": "uint32", "I32": "int32", "U64": "uint64", "I64": "int64",
    "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64", "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip


def read_header(path: Path) -> dict[str, FileTensor]:
    """Return the tensors of a file by name, without reading their values.

    Raises:
        CheckpointError: the file cannot be read, has another format, is truncated, differs in
            length from the sum of its tensors, or contradicts itself.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            limit = min(size - _LENGTH_BYTES, MAX_HEADER_BYTES)
            if size < _LENGTH_BYTES or length > limit:
                raise CheckpointError(
                    f"{path}: not a safetensors file, or cut off inside its header: the header "
                    f"would have {length} bytes, the file has {size}"
                )
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    first = _LENGTH_BYTES + length
    rows = _parse(path, text)
    found, ends = {}, []
    for name, row in rows.items():
        found[name], begin, end = _tensor(path, name, row, first)
        ends.append((begin, end, name))
    _check_layout(path, sorted(ends), size - first)
    return found


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for name, value in pairs:
            if name in made:
                raise CheckpointError(f"{path}: {name!r} is in the header twice")
            made[name] = value
        return made

    try:
        # An object: files.py has seen its first byte.
        rows: dict[str, Any] = json.loads(text.decode(), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: not a safetensors file: its header is not JSON ({error})"
        ) from error
    rows.pop("__metadata__", None)
    return rows


def _tensor(path: Path, name: str, row: object, first: int) -> tuple[FileTensor, int, int]:
    """Return the tensor, and its start and end after the header."""
    import torch

    where = f"{path}: {name!r}"
    if not isinstance(row, Mapping) or not {"dtype", "shape", "data_offsets"} <= row.keys():
        raise CheckpointError(f"{where} needs dtype, shape and data_offsets in the header")
    dtype = getattr(torch, _DTYPES.get(str(row["dtype"]), ""), None)
    if dtype is None:
        raise CheckpointError(
            f"{where} has dtype {shown(row['dtype'])}; allowed: {', '.join(_DTYPES)}"
        )
    shape, offsets = row["shape"], row["data_offsets"]
    if not _counts(shape) or not _counts(offsets) or len(offsets) != 2:
        raise CheckpointError(
            f"{where} has shape {shown(shape)} and data_offsets {shown(offsets)}; allowed: whole "
            f"numbers from 0 to {_MAX_COUNT}, at most {_MAX_DIMENSIONS}, two of them as offsets"
        )
    begin, end = offsets
    needed = math.prod(shape) * dtype.itemsize
    if end - begin != needed:
        raise CheckpointError(
            f"{where} of {row['dtype']} {shape} needs {needed} bytes, but the header gives it "
            f"{end - begin}"
        )
    made = FileTensor(path, first + begin, dtype, tuple(shape), contiguous(tuple(shape)))
    return made, begin, end


def _counts(values: object) -> bool:
    if not isinstance(values, list) or len(values) > _MAX_DIMENSIONS:
        return False
    return all(type(n) is int and 0 <= n <= _MAX_COUNT for n in values)


def _check_layout(path: Path, ends: list[tuple[int, int, str]], held: int) -> None:
    """Check that the tensors are adjacent, from the header to the file's end."""
    at = 0
    for begin, end, name in ends:
        if begin != at:
            what = "overlaps the one before" if begin < at else "begins after a gap"
            raise CheckpointError(f"{path}: {name!r} {what}: at {begin}, expected at {at}")
        at = end
    if at != held:
        what = "cut off" if at > held else "more data in the file than the header lists"
        raise CheckpointError(f"{path}: {what}: the tensors have {at} bytes, the file {held}")
