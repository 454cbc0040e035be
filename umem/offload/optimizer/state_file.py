"""Optimizer state in a file: mapped for the program, and in memory only while it is updated.

The update of a chunk of parameters runs beside the read of the next chunk's states and the write of
the previous one's. Source: Rajbhandari et al., "ZeRO-Infinity: Breaking the GPU Memory Wall for
Extreme Scale Deep Learning", SC 2021, section 6.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...base.scratch_file import open_unnamed
from ...base.units import format_bytes
from ...errors import plain
from ...session import session
from .host_memory import copy_of, layout_of

SMALLEST = 64 << 10  # bytes of a state; smaller ones stay in memory
_BLOCK = 4096  # alignment of reads and writes past the page cache
_EXTENT = 256 << 20  # bytes of the file that are mapped at a time
_FILL = 4 << 20  # bytes that a new state is written in
_LOANS = 4  # chunks in memory: two are read, one is updated, one is written
_log = logging.getLogger("umem")


class _Range(NamedTuple):
    """Bytes of the file, and of a mapped part of it."""

    extent: mmap.mmap
    at: int  # in the extent
    offset: int  # in the file
    nbytes: int  # of the tensor

    @property
    def padded(self) -> int:
        return _padded(self.nbytes)


class StateFile:
    """States in a file without a name.

    A kept tensor is an ordinary CPU tensor whose bytes are those of the mapped file, so programs
    and checkpoints read and write it like any other.

    Args:
        folder: on a disk.
        limit: size of the file in bytes; None: no limit.

    Raises:
        OSError: the folder cannot hold the file.
    """

    def __init__(self, folder: Path, limit: int | None = None) -> None:
        self.folder = folder
        self._limit = limit
        self._mapped, self._direct = open_unnamed(folder)
        for descriptor in (self._mapped, self._direct):
            # Not at the interpreter's exit, where the program's own handlers may still step.
            weakref.finalize(self, os.close, descriptor).atexit = False
        self._lock = threading.Lock()
        self._ranges: dict[int, _Range] = {}  # by the address of a kept tensor
        self._spare: defaultdict[int, list[_Range]] = defaultdict(list)  # by padded size
        self._extent: mmap.mmap | None = None  # the last one
        self._used = self._end = self._reserved = 0  # bytes of the last extent; of the file
        self._failed = False  # takes no more states
        self._told = False  # that the limit is reached
        self._writes: dict[int, Future[None]] = {}  # under way or done, by offset
        self._loans = threading.Semaphore(_LOANS)
        self._stagings: list[mmap.mmap] = []
        self._reader = ThreadPoolExecutor(1, "umem-state-read")
        self._writer = ThreadPoolExecutor(1, "umem-state-write")

    def holds(self, tensor: Tensor) -> bool:
        """Return whether the tensor's memory is a range of this file."""
        return tensor.layout == torch.strided and tensor.data_ptr() in self._ranges

    def takes(self, tensor: Tensor) -> bool:
        """Return whether `keep` would move the tensor into the file."""
        return not self.holds(tensor) and self._has_room(tensor.nbytes)

    @property
    def works(self) -> bool:
        """The disk has not failed and is not full, so that the file takes states."""
        return not self._failed

    def keep(self, tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
        """Return a copy with these dense strides: in the file, or in memory.

        It is in memory if it is small, or if the disk is full or failed, which is logged once.
        """
        if self.holds(tensor):
            self.settle()  # the copy is made from the map
        source = copy_of(tensor, strides)
        if not self._has_room(source.nbytes):
            return source
        block = mmap.mmap(-1, min(_padded(source.nbytes), _FILL))
        found: _Range | None = None
        try:
            found = self._take(source.nbytes)
            self._fill(found, source.as_strided((source.numel(),), (1,)).view(torch.uint8), block)
        except BaseException as error:
            if found is not None:
                self._spare[found.padded].append(found)
            if not isinstance(error, OSError):
                raise
            self._fail(error, "they stay in memory")
            return source
        return self._tensor(found, source)

    def lend(self, tensors: Iterable[Tensor]) -> Loan:
        """Read those of the tensors that are in the file into memory, beside the caller's work."""
        return Loan(self, [t for t in tensors if self.holds(t)])

    def room(self) -> int:
        """Return how many bytes the file can still take, as far as the disk has space now."""
        disk = os.fstatvfs(self._mapped)  # the folder may be gone
        free = disk.f_bavail * disk.f_frsize
        if self._limit is not None:
            free = min(free, self._limit - self._reserved)
        return free + sum(size * len(spare) for size, spare in list(self._spare.items()))

    def settle(self) -> None:
        """Wait until all states that were given back are written."""
        submitted(self._writer, lambda: None).result()
        for offset, written in list(self._writes.items()):
            done = written.done() and written.exception() is None
            if done and self._writes.get(offset) is written:
                del self._writes[offset]

    def await_writes(self) -> None:
        """Wait for the writes under way, also of a closed file, or of a fork's parent."""
        wait(list(self._writes.values()))

    def close(self) -> None:
        """End the threads once they have nothing to do; kept tensors remain valid."""
        self._reader.shutdown(wait=False)
        self._writer.shutdown(wait=False)

    def _has_room(self, nbytes: int) -> bool:
        if self._failed or nbytes < SMALLEST:
            return False
        size = _padded(nbytes)
        if self._limit is None or self._spare_for(size) or self._reserved + size <= self._limit:
            return True
        if not self._told:
            _log.warning(
                "optimizer states in %s: the limit of %s is reached; the others stay in memory",
                plain(str(self.folder)), format_bytes(self._limit),
            )  # fmt: skip
        self._told = True
        return False

    def _spare_for(self, size: int) -> int:
        """Return the size of the smallest spare ranges with room for `size`; 0: there is none."""
        sizes = [spare for spare, ranges in list(self._spare.items()) if spare >= size and ranges]
        return min(sizes, default=0)

    def _take(self, nbytes: int) -> _Range:
        """Take a range of the file whose blocks are reserved."""
        with self._lock:
            size = _padded(nbytes)
            if spare := self._spare_for(size):
                found = self._spare[spare].pop()
                if spare > size:  # the program has smaller states now
                    rest = found._replace(
                        at=found.at + size, offset=found.offset + size, nbytes=spare - size
                    )
                    self._spare[rest.padded].append(rest)
                return found._replace(nbytes=nbytes)
            if self._extent is None or self._used + size > len(self._extent):
                # Each extent takes a descriptor, so there are few.
                length = -(-max(_EXTENT, size, self._end) // _EXTENT) * _EXTENT
                os.ftruncate(self._mapped, self._end + length)
                self._extent = mmap.mmap(self._mapped, length, offset=self._end)
                self._used, self._end = 0, self._end + length
            offset = self._end - len(self._extent) + self._used
            os.posix_fallocate(self._mapped, offset, size)
            self._used, self._reserved = self._used + size, self._reserved + size
            return _Range(self._extent, self._used - size, offset, nbytes)

    def _tensor(self, found: _Range, like: Tensor) -> Tensor:
        view = memoryview(found.extent)[found.at : found.at + found.nbytes]
        flat = torch.frombuffer(view, dtype=torch.uint8)
        self._ranges[flat.data_ptr()] = found
        _owners[flat.data_ptr()] = self
        # The storage keeps the view.
        weakref.finalize(view, self._give, flat.data_ptr()).atexit = False
        return _like(flat, like)

    def _give(self, address: int) -> None:
        found = self._ranges.pop(address)  # no lock: the collector may call this on its holder
        _owners.pop(address, None)
        self._spare[found.padded].append(found)

    def _fill(self, found: _Range, source: Tensor, block: mmap.mmap) -> None:
        """Write a range's first bytes, through aligned memory."""
        staged = torch.frombuffer(block, dtype=torch.uint8)
        for at in range(0, found.nbytes, len(block)):
            part = source[at : at + len(block)]
            staged[: len(part)].copy_(part)
            filled = memoryview(block)[: _padded(len(part))]
            transfer(os.pwritev, self._direct, filled, found.offset + at)

    def _fail(self, error: OSError, then: str) -> None:
        if not self._failed:
            _log.warning(
                "optimizer states in %s: %s; %s, and no more are moved there",
                plain(str(self.folder)), error.strerror or error, then,
            )  # fmt: skip
        self._failed = True

    def _staging(self, nbytes: int) -> mmap.mmap:
        with self._lock:
            fits = [s for s in self._stagings if len(s) >= nbytes]
            if fits:
                self._stagings.remove(fits[0])
                return fits[0]
            self._stagings.clear()  # grown out of
        return mmap.mmap(-1, max(nbytes, _BLOCK))


@dataclass(eq=False)
class _Lent:
    """A kept tensor, the private one that stands for it in an update, and its bytes in memory."""

    tensor: Tensor
    private: Tensor
    address: int
    range: _Range
    block: memoryview | None = None
    staged: Tensor | None = None


class Loan:
    """The states of one chunk for one update. Made by `StateFile.lend`.

    While its context is entered, the tensors that `of` returned are in memory. They are written
    when it is left without an error, beside the caller's work. The program's tensors never change.
    A loan that is not entered has to be ended.
    """

    def __init__(self, file: StateFile, tensors: list[Tensor]) -> None:
        self._file = file
        ranges = [(t, file._ranges[t.data_ptr()]) for t in tensors]
        self._lent = [_Lent(t, t.data, t.data_ptr(), found) for t, found in ranges]
        self._private = {id(each.tensor): each.private for each in self._lent}
        self._kept = {id(each.private): each.tensor for each in self._lent}
        self._staging: mmap.mmap | None = None
        self._ended = False
        before = [w for _, found in ranges if (w := file._writes.get(found.offset))]
        self._read = submitted(file._reader, lambda: self._fetch(before))

    def of(self, value: Any) -> Any:
        """Return the tensor to update in place of a kept one, and anything else as it is."""
        return self._private.get(id(value), value)

    def kept(self, value: Any) -> Any:
        """Return the kept tensor for one that `of` returned, and anything else as it is."""
        return self._kept.get(id(value), value)

    def __enter__(self) -> None:
        """Wait until the states are in memory.

        Raises:
            OSError: the disk could not read them.
        """
        try:
            self._read.result()
        except BaseException:
            self.end(write=False)
            raise
        for each in self._lent:
            assert each.staged is not None
            each.private.data = each.staged

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for each in self._lent:
            each.private.data = each.tensor.data
        self.end(write=kind is None)

    def end(self, *, write: bool) -> None:
        """Write the states, or forget them, beside the caller's work; once."""
        if self._ended:
            return
        self._ended = True
        if not write:
            # Not by the writer: this loan's read may wait for others, which the writer has to end.
            self._read.cancel()
            self._read.add_done_callback(self._forget)
            return
        written = submitted(self._file._writer, self._store)
        self._file._writes.update((each.range.offset, written) for each in self._lent)

    def _fetch(self, before: list[Future[None]]) -> None:
        for written in before:
            if (error := written.exception()) is not None:  # another one: it keeps no frames alive
                raise OSError(
                    errno.EIO,
                    f"states of {plain(str(self._file.folder))} could be written nowhere: {error}",
                )
        self._file._loans.acquire()
        self._staging = self._file._staging(sum(each.range.padded for each in self._lent))
        at = 0
        for each in self._lent:
            if each.tensor.data_ptr() != each.address:  # its last write failed
                each.staged = each.tensor.data
                continue
            each.block = memoryview(self._staging)[at : at + each.range.padded]
            at += each.range.padded
            self._transfer(os.preadv, "read", each.block, each.range)
            flat = torch.frombuffer(each.block[: each.range.nbytes], dtype=torch.uint8)
            each.staged = _like(flat, each.tensor)

    def _forget(self, read: Future[None]) -> None:
        if not read.cancelled():
            self._give_back()

    def _store(self) -> None:
        try:
            self._write()
        finally:
            self._give_back()

    def _write(self) -> None:
        file = self._file
        for each in self._lent:
            if each.block is None:
                continue
            try:
                self._transfer(os.pwritev, "write", each.block, each.range)
            except OSError as error:
                file._fail(error, "states that cannot be written are in memory instead")
                assert each.staged is not None
                each.tensor.data = copy_of(each.staged, layout_of(each.staged))

    def _give_back(self) -> None:
        file = self._file
        for each in self._lent:
            each.block = each.staged = None
        with file._lock:
            if self._staging is not None:
                file._stagings.append(self._staging)
        file._loans.release()

    def _transfer(
        self, call: Callable[[int, Any, int], int], what: str, block: memoryview, at: _Range
    ) -> None:
        try:
            transfer(call, self._file._direct, block, at.offset)
        except OSError as error:
            raise OSError(
                error.errno,
                f"{what} of {at.nbytes} bytes at {at.offset} of the file of optimizer states in "
                f"{plain(str(self._file.folder))}: {error.strerror or error}",
            ) from error


def transfer(call: Callable[[int, Any, int], int], file: int, block: memoryview, at: int) -> None:
    """Read or write a whole block at an offset, by `os.preadv` or `os.pwritev`.

    Raises:
        OSError: the disk failed, or the file is shorter.
    """
    while block:
        done = call(file, [block], at)
        if done <= 0 or done % _BLOCK:
            raise OSError(errno.EIO, f"{done} of {len(block)} bytes were transferred")
        block, at = block[done:], at + done


def submitted(pool: ThreadPoolExecutor, call: Callable[[], None]) -> Future[None]:
    """Call a function on the pool's thread; while the interpreter ends, on this one."""
    try:
        return pool.submit(call)
    except RuntimeError:
        done: Future[None] = Future()
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - as of the thread
            done.set_exception(error)
        else:
            done.set_result(None)
        return done


def _like(memory: Tensor, tensor: Tensor) -> Tensor:
    """Return all bytes of a storage as a tensor of the other one's type, shape and strides.

    It is no view, which would keep the storage when its data is replaced.
    """
    made = torch.empty(0, dtype=tensor.dtype, device="cpu")
    return made.set_(memory.untyped_storage(), 0, tensor.shape, tensor.stride())


def _padded(nbytes: int) -> int:
    return -(-nbytes // _BLOCK) * _BLOCK


_owners: dict[int, StateFile] = {}  # by the address of a kept tensor
_opening = threading.Lock()
_current: StateFile | None = None
_of: object = None  # the option that it was opened for


def current() -> StateFile | None:
    """Return the file of the session's option `disk`, which is opened if need be.

    Raises:
        ConfigError: the folder cannot hold it.
    """
    global _current, _of
    settings = session.current_settings()
    if settings is None or settings.disk == _of:
        return _current
    with _opening:
        if settings.disk == _of:
            return _current
        end_shared()
        disk = settings.disk
        try:
            _current = StateFile(disk.folder, disk.bytes) if disk else None
        except OSError as error:
            reason = error.strerror or str(error)
            raise settings.refusal("disk", reason, "a folder on a disk") from error
        _of = disk
        return _current


def is_of_another(tensor: Tensor, file: StateFile | None) -> bool:
    """Return whether another file than this one has it, such as that of a fork's parent.

    Its writes have ended then: the tensor can be copied.
    """
    owner = _owners.get(tensor.data_ptr(), file)
    if owner is not file and owner is not None:
        owner.await_writes()
    return owner is not file


def settle() -> None:
    """Wait until the file has all states that were given back."""
    if _current is not None:
        _current.settle()


def end_shared() -> None:
    """End the threads of the file; kept tensors remain valid, and are copied at the next update."""
    global _current, _of
    file, _current, _of = _current, None, None
    if file is not None:
        file.close()


def _forked() -> None:
    global _current, _of, _opening
    _current = _of = None  # the file is the parent's, and so are its threads
    _opening = threading.Lock()


def _let_writes_end() -> None:
    """Wait for the threads, which the child of a fork does not have."""
    for file in set(_owners.values()):
        file.await_writes()


os.register_at_fork(before=_let_writes_end, after_in_child=_forked)
