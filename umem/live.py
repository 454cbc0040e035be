"""A running process's figures for `umem top`: a local socket that answers, and who asks it.

The server's thread only reads figures, each with one short call of the native core. Who connects
gets one line of JSON. Nobody but the same user is let in: the directory is 0700, the socket 0600,
and the other side's user is checked.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import socket
import stat
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import __version__, config
from .errors import ConfigError, StateError
from .options import BY_NAME

_log = logging.getLogger("umem")

_SUFFIX = ".sock"
_LONGEST = 107  # bytes of a socket's path, by the kernel
_PATIENCE_S = 2.0  # with a peer that says nothing
_TRIES = 100

_server: Server | None = None


def directory() -> Path:
    """Where sockets are that were given no path."""
    home = config.runtime_directory()
    return home / "umem" if home else Path(tempfile.gettempdir()) / f"umem-{os.getuid()}"


def start(top: bool | Path, about: Callable[[], dict[str, str]]) -> None:
    """Serve, if the option `top` says so, until `stop`.

    Args:
        about: words on the session that stand in each answer.

    Raises:
        ConfigError: a path that is in use or cannot be had, or a directory that others can enter.
    """
    global _server
    if top is False:
        return
    try:
        _server = Server(None if top is True else top, about)
    except OSError as error:
        raise _refusal(f"{error.filename or top}: {error.strerror or error}") from None
    atexit.register(stop)
    _log.info("umem top %d shows this process (%s)", os.getpid(), _server.path)


def stop() -> None:
    """Answer no more, and take the socket away."""
    global _server
    server, _server = _server, None
    if server is not None:
        server.close()


def _leave_to_parent() -> None:
    """A forked child has no thread that answers, and must not keep its parent's socket open."""
    global _server
    server, _server = _server, None
    if server is not None:
        server.leave()


os.register_at_fork(after_in_child=_leave_to_parent)


class Server:
    """A socket and the daemon thread behind it."""

    def __init__(self, path: Path | None, about: Callable[[], dict[str, str]]) -> None:
        self._about = about
        if path is None:
            _make_private(directory())
            remove_stale(directory())
            self._socket, self.path = _bind_free(directory() / str(os.getpid()))
        else:
            _check_private(path.parent)
            _remove_if_stale(path)
            self._socket, self.path = _bind(path)
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="umem-top", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wakes the thread, and waits for it."""
        self._closing = True
        with contextlib.suppress(OSError):
            self.path.unlink()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # a close alone leaves `accept` waiting
        if threading.current_thread() is not self._thread:
            self._thread.join(_PATIENCE_S)
        self._socket.close()

    def leave(self) -> None:
        """In a forked child: the path and the thread are the parent's."""
        self._socket.close()

    def _serve(self) -> None:
        while not self._closing:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                return
            with peer, contextlib.suppress(OSError):
                peer.settimeout(_PATIENCE_S)
                if _user(peer) in (os.getuid(), 0):
                    peer.sendall(self._answer())

    def _answer(self) -> bytes:
        try:
            figures = {**snapshot(), **self._about()}
        except Exception as error:  # noqa: BLE001 - whoever asks is told, and the program goes on
            figures = {"error": f"{type(error).__name__}: {error}"}
        return json.dumps(figures).encode() + b"\n"


def snapshot() -> dict[str, Any]:
    """This process's figures now; `time` is in seconds, by a clock that only goes forward."""
    from .native import core

    return {
        "umem": __version__,
        "pid": os.getpid(),
        "program": " ".join(sys.argv)[:200],
        "time": time.monotonic(),
        "stats": core.stats(),
        "tags": {
            name: {"blocks": blocks, "bytes": total, "resident_bytes": resident}
            for name, (blocks, total, resident) in core.bytes_by_tag().items()
        },
    }


def ask(path: Path) -> dict[str, Any]:
    """What the process behind the socket answers.

    Raises:
        StateError: nobody answers, or the socket is another user's.
    """
    try:
        with socket.socket(socket.AF_UNIX) as mine:
            mine.settimeout(_PATIENCE_S)
            mine.connect(str(path))
            if _user(mine) not in (os.getuid(), 0) and os.getuid() != 0:
                raise StateError(f"{path} is served by another user; umem top shows one's own")
            with mine.makefile("rb") as answer:
                line = answer.readline()
        figures = json.loads(line) if line.endswith(b"\n") else None
    except (OSError, ValueError) as error:
        raise StateError(f"{path}: no answer ({error}); is the process still running?") from None
    if not isinstance(figures, dict) or "error" in figures:
        what = figures.get("error") if isinstance(figures, dict) else "it was cut off"
        raise StateError(f"{path}: no figures: {what}")
    return figures


def running() -> list[Path]:
    """The sockets of this user's processes that answer, the oldest first; others are removed."""
    folder = directory()
    if not folder.is_dir():
        return []
    _check_private(folder)
    remove_stale(folder)
    return sorted(folder.glob(f"*{_SUFFIX}"), key=lambda path: path.stat().st_mtime)


def find(pid: int) -> Path:
    """The socket of the process.

    Raises:
        StateError: it has none.
    """
    # Another one with the same number, of a container that shares the directory, has a suffix.
    for path in running():
        if path.stem.split("-")[0] == str(pid):
            return path
    known = ", ".join(path.stem for path in running()) or "none"
    raise StateError(
        f"process {pid} answers nobody; start it with UMEM_TOP=1. Of this user's processes these "
        f"do: {known}"
    )


def remove_stale(folder: Path) -> None:
    """Remove the sockets that processes left behind which ended without a goodbye."""
    for path in folder.glob(f"*{_SUFFIX}"):
        _remove_if_stale(path)


def _remove_if_stale(path: Path) -> None:
    """By whether somebody listens: a number of a process means nothing across containers."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return
        with socket.socket(socket.AF_UNIX) as mine:
            mine.settimeout(_PATIENCE_S)
            mine.connect(str(path))
    except ConnectionRefusedError:
        with contextlib.suppress(OSError):
            path.unlink()
    except OSError:
        return  # gone, or somebody is too busy to answer


def _bind_free(stem: Path) -> tuple[socket.socket, Path]:
    for i in range(1, _TRIES):
        path = stem.with_name(stem.name + (f"-{i}" if i > 1 else "") + _SUFFIX)
        with contextlib.suppress(FileExistsError):
            return _bind(path)
    raise FileExistsError(17, "in use, as are the next names", str(stem) + _SUFFIX)


def _bind(path: Path) -> tuple[socket.socket, Path]:
    """A socket that listens before it has its name, so that nobody takes it for a stale one."""
    unnamed = path.with_name(f".{path.name}.{os.getpid()}")
    if len(os.fsencode(unnamed)) > _LONGEST:
        raise OSError(36, f"longer than the {_LONGEST} bytes of a socket's path", str(path))
    made = socket.socket(socket.AF_UNIX)
    try:
        os.fchmod(made.fileno(), 0o600)  # before it is bound: at no time can others open it
        unnamed.unlink(missing_ok=True)
        made.bind(str(unnamed))
        try:
            made.listen(8)
            os.link(unnamed, path)  # fails where the name is taken
        finally:
            unnamed.unlink()
    except BaseException:
        made.close()
        raise
    return made, path


def _make_private(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_private(folder)


def _check_private(folder: Path) -> None:
    """The socket's directory is this user's, and nobody else enters it.

    Raises:
        ConfigError: it is not so.
    """
    try:
        found = folder.lstat()
    except OSError as error:
        raise _refusal(f"{folder}: {error.strerror}") from None
    mine = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if not mine or stat.S_IMODE(found.st_mode) & 0o077:
        raise _refusal(f"{folder} is not a directory that only this user can enter (chmod 700)")


def _refusal(reason: str) -> ConfigError:
    return config.refusal(BY_NAME["top"], "the socket of the option top (UMEM_TOP)", reason)


def _user(peer: socket.socket) -> int:
    """Who is on the other side, by the kernel."""
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(user)
