"""A tensor in a file, and reading its values into memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from ...base.strides import is_dense
from ...errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    import torch

Version = tuple[int, ...]
CHUNK_BYTES = 16 << 20  # bytes per read: a load needs this much in addition to the tensors


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a checkpoint, before its values are read."""

    path: Path
    offset: int  # byte offset of its first element in the file
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # in elements, as in torch
    version: Version | None = None  # of the file that has it; None: any

    @property
    def extent(self) -> int:
        """Bytes in the file from the first element to the end of the last."""
        if 0 in self.shape:
            return 0
        last = sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize

    def copy_to(self, target: torch.Tensor) -> None:
        """Read the values into `target`, which has the same shape and dtype.

        Reads in chunks if the layouts in file and memory are equal and without holes; else the
        whole span of the tensor in the file is in memory.

        Raises:
            CheckpointError: the file cannot be read, was truncated, or is another one by now.
        """
        import torch

        if not self.extent:
            return
        alike = self._is_laid_out_as(target)
        staging = bytearray(min(self.extent, CHUNK_BYTES) if alike else self.extent)
        values = torch.frombuffer(staging, dtype=torch.uint8)
        if alike:
            flat = torch.as_strided(target, (target.numel(),), (1,)).view(torch.uint8)
            for first, count in self._chunks(memoryview(staging)):
                flat[first : first + count].copy_(values[:count])
            return
        for _ in self._chunks(memoryview(staging)):
            target.copy_(torch.as_strided(values.view(self.dtype), self.shape, self.stride))

    def place(self, target: torch.Tensor) -> bool:
        """Make the file the home of `target`'s memory; nothing is read.

        False, and nothing happens, if its layout in memory differs, it shares pages with others,
        or its memory cannot leave now: it was made before umem was enabled, or is pinned.

        Raises:
            CheckpointError: the file cannot be read in this way.
        """
        from ...base.native import core

        if not self.extent or not self._is_laid_out_as(target):
            return False
        try:
            path = self.path.resolve()
            self._check(path.stat())
            return core.place_in_file(target.data_ptr(), self.extent, str(path), self.offset)
        except OSError as error:
            raise CheckpointError(f"{self.path}: {error.strerror or error}") from error
        except ConfigError as error:
            raise CheckpointError(f"{error}; load without keep_in_file") from error

    def _is_laid_out_as(self, target: torch.Tensor) -> bool:
        """Return whether the bytes are in the file as in memory, without holes."""
        if target.is_conj() or target.is_neg() or not is_dense(self.shape, self.stride):
            return False
        return _strides(target) == _strides_of(self.shape, self.stride)

    def _chunks(self, staging: memoryview) -> Iterator[tuple[int, int]]:
        """Yield (first byte, bytes) of each chunk after reading it into `staging`."""
        try:
            with self.path.open("rb", buffering=0) as file:
                self._check(os.fstat(file.fileno()))
                file.seek(self.offset)
                for first in range(0, self.extent, len(staging)):
                    count = min(len(staging), self.extent - first)
                    self._fill(file, staging[:count])
                    self._check(os.fstat(file.fileno()))  # nor written while it was read
                    yield first, count
        except OSError as error:
            raise CheckpointError(f"{self.path}: {error.strerror or error}") from error

    def _check(self, now: os.stat_result) -> None:
        if self.version is not None and version_of(now) != self.version:
            raise CheckpointError(
                f"{self.path}: the file was replaced or written while it was read; load it again"
            )

    def _fill(self, file: BinaryIO, view: memoryview) -> None:
        while view:
            count = cast("Any", file).readinto(view)
            if not count:
                raise CheckpointError(f"{self.path}: the file was truncated while it was read")
            view = view[count:]


def version_of(file: os.stat_result) -> Version:
    """Return numbers that another file at the same path, or later contents, would not have."""
    return file.st_dev, file.st_ino, file.st_size, file.st_mtime_ns


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, in elements."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    return _strides_of(tuple(tensor.shape), tensor.stride())


def _strides_of(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """Drop the strides of dimensions of one element, which have no meaning."""
    return tuple(step for n, step in zip(shape, stride, strict=True) if n != 1)
