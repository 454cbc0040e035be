"""Recording of a whole program's trace to a file while the program runs."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import stat
import threading
import weakref
import zlib
from collections.abc import Callable
from io import FileIO
from pathlib import Path

from .schema import KIND, Header

_log = logging.getLogger("umem")

# With this many events the writer does not wait for the end of the step, until which the tags of
# its blocks can still become known.
_EVENTS_AT_ONCE = 200_000
_EVENTS_TOO_MANY = 1_000_000  # with this many the program waits for the writer
_LOOK_S = 0.5
_PAUSE_S = 0.01
_GZIP = 31  # wbits of zlib: a header and a sum of gzip, and the largest window
_FIRST_OWN = 3  # a lower descriptor is a stream that was closed, into which libraries still print


class TraceFile:
    """Recorder of this process from now on, until `close`; a forked child writes nothing.

    At each end of a step (`step_ended`) a thread writes the events since the last one. Native code
    formats the lines, so that the program loses little time.

    Args:
        path: replaced if it exists; compressed if the name ends in .gz.
        header: called when the first events are written.
        most: end the file after so many bytes, and what is recorded then; 0: at `close`.

    Raises:
        OSError: the file cannot be written, or is a pipe that no program reads; EBUSY: another
            process is writing it.
        StateError: umem is off.
    """

    def __init__(self, path: Path, header: Callable[[], Header], most: int = 0) -> None:
        from ..base.native import core

        self._core = core
        self.path = path
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closed = False
        self._dropped = 0
        self._most, self._written = most, 0
        self._looks = 0  # of the thread, for events to write
        self._process = os.getpid()
        self._ended = False  # by an error, or by `most`
        # No gzip.GzipFile: on a full disk its finalizer would write once more, and print the error.
        self._packer = zlib.compressobj(3, wbits=_GZIP) if path.suffix == ".gz" else None
        self._file = _open(path)
        self._header: Callable[[], Header] | None = header
        core.record_start("file")
        _recorders.add(self)
        self._thread = threading.Thread(target=self._run, name="umem-trace", daemon=True)
        self._thread.start()

    def step_ended(self) -> None:
        """Let the thread write the step's events soon."""
        looks = self._looks
        self._wake.set()
        # Not written here: a signal's handler may close the file, or raise, in between. The thread
        # cannot take what comes after an op that has not ended.
        while (
            self._core.record_waiting("file") > _EVENTS_TOO_MANY
            and self._looks == looks
            and not self._closed
            and self._thread.is_alive()
        ):
            self._thread.join(_PAUSE_S)

    def close(self) -> None:
        """Write the rest and finish the file; a no-op if that is done, or in a forked child."""
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        self._wake.set()
        self._thread.join()
        self._write(last=True)
        self._core.record_stop("file")
        try:
            self._file.close()
        except OSError as error:  # of what the system wrote late, as over a network
            self._end(error)

    def _run(self) -> None:
        while not self._closed:
            at_a_step = self._wake.wait(_LOOK_S)
            self._wake.clear()
            if self._closed or self._ended:
                return
            if at_a_step or self._core.record_waiting("file") > _EVENTS_AT_ONCE:
                self._write(last=False)
                self._looks += 1

    def _write(self, last: bool) -> None:
        with self._lock:
            if self._ended:
                return
            lines, dropped = self._core.record_lines("file", last)
            if dropped and not self._dropped:
                _log.warning(
                    "the trace %s ends early: events came faster than the writer", self.path
                )
            self._dropped = dropped
            if not lines and not last:
                return
            full = 0 < self._most <= self._written
            try:
                self._put(self._first_line() + lines, last or full)
            except OSError as error:
                self._end(error)
            else:
                if full:
                    self._ended = True
                    self._core.record_stop("file")
                    _log.info("the trace %s ends here, after %d bytes", self.path, self._written)

    def _put(self, text: bytes, last: bool) -> None:
        if self._packer:
            how = zlib.Z_FINISH if last else zlib.Z_SYNC_FLUSH
            text = self._packer.compress(text) + self._packer.flush(how)
        left = memoryview(text)
        self._written += len(left)
        while left:  # a write may take a part only: the last bytes of a disk
            left = left[self._file.write(left) :]

    def _end(self, error: OSError) -> None:
        """Stop recording, because the file can no longer be written; log it once."""
        if not self._ended:
            self._ended = True
            self._core.record_stop("file")
            _log.warning("the trace %s ends here: %s", self.path, error)

    def _first_line(self) -> bytes:
        if self._header is None:
            return b""
        header, self._header = self._header(), None
        fields = {"v": header.v, "device": header.device, "source": header.source}
        line = {"kind": KIND, **fields, **(header.extra or {})}
        return json.dumps(line, separators=(",", ":")).encode() + b"\n"

    def _let_go(self) -> None:
        """Drop the inherited events in a forked child, so that they are not written twice."""
        if self._closed:
            return
        self._closed = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._file.fileno())
        os.close(nowhere)


_recorders: weakref.WeakSet[TraceFile] = weakref.WeakSet()


def _let_go_of_all() -> None:
    for recorder in list(_recorders):
        recorder._let_go()


os.register_at_fork(after_in_child=_let_go_of_all)


def _open(path: Path) -> FileIO:
    """Open the file for writing, without waiting for the reader of a pipe, and empty it."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        file = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise OSError(errno.ENXIO, "no program reads this pipe", str(path)) from None
        raise
    if file < _FIRST_OWN:
        low, file = file, fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, _FIRST_OWN)
        os.close(low)
    try:
        if stat.S_ISREG(os.fstat(file).st_mode):
            _lock(file, path)
            os.truncate(file, 0)
        os.set_blocking(file, True)
    except BaseException:
        os.close(file)
        raise
    return FileIO(file, "wb")


def _lock(file: int, path: Path) -> None:
    """Keep other processes from writing the file until it is closed, where the system can."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        why = "another process is writing it; %p in the name gives each process its own file"
        raise OSError(errno.EBUSY, why, str(path)) from None
    except OSError as error:
        _log.debug("the trace %s is not locked: %s", path, error.strerror)
