"""The local socket that serves a process's statistics to `umem top`, and its client.

The server's thread only reads statistics, each with one short call of the native core. A client
gets one line of JSON. Only the same user gets access: the directory has mode 0700, the socket
0600, and the peer's user id is checked.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
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

from ..base.version import __version__
from ..config import ranks, settings
from ..config.options import BY_NAME
from ..errors import ConfigError, StateError
from . import answer

_log = logging.getLogger("umem")

_SUFFIX = ".sock"
_LONGEST = 107  # bytes of a socket's path: the kernel's limit
_PATIENCE_S = 2.0  # wait for a silent peer
_PAUSE_S = 0.1  # after an error
_TRIES = 100

_server: Server | None = None


class EndedError(StateError):
    """No process serves the socket."""


def directory() -> Path:
    """Return the directory of sockets that were given no path."""
    home = settings.runtime_directory()
    return home / "umem" if home else _temporary()


def _temporary() -> Path:
    return Path(tempfile.gettempdir()) / f"umem-{os.getuid()}"


def start(top: bool | Path, about: Callable[[], dict[str, str]]) -> None:
    """Start serving, if the option `top` is set, until `stop`.

    Without a path, a directory that another user made or can enter is only a warning: it must not
    prevent umem from starting.

    Args:
        about: returns facts about the session that each answer contains.

    Raises:
        ConfigError: the path that was given is in use or cannot be created, or others can enter its
            directory.
    """
    global _server
    if top is False:
        return
    try:
        _server = _make(None if top is True else ranks.placed(top, create=False), about)
    except ConfigError as error:
        if top is not True:
            raise
        _log.warning("umem top is off for this process: %s", error)
        return
    _log.info("umem top %d shows this process (%s)", os.getpid(), _server.path)


def stop() -> None:
    """Stop serving, and remove the socket."""
    global _server
    server, _server = _server, None
    if server is not None:
        server.close()


def _leave_to_parent() -> None:
    """Drop the server in a forked child, which has no thread to answer with."""
    global _server
    server, _server = _server, None
    if server is not None:
        server.leave()


os.register_at_fork(after_in_child=_leave_to_parent)


def _make(path: Path | None, about: Callable[[], dict[str, str]]) -> Server:
    try:
        return Server(path, about)
    except OSError as error:
        name = error.filename2 or error.filename or path
        raise _refusal(f"{name}: {error.strerror or error}") from None


class Server:
    """A socket and the daemon thread that serves it."""

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
        """Wake the thread, and wait for its end."""
        self._closing = True
        with contextlib.suppress(OSError):
            self.path.unlink()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # closing alone would leave `accept` waiting
        if threading.current_thread() is not self._thread:
            self._thread.join(_PATIENCE_S)
        self._socket.close()

    def leave(self) -> None:
        """Close the socket in a forked child; its path and the thread belong to the parent."""
        self._socket.close()

    def _serve(self) -> None:
        while not self._closing:
            try:
                peer, _ = self._socket.accept()
            except OSError:  # such as too many open files
                if not self._closing:
                    time.sleep(_PAUSE_S)
                continue
            with peer, contextlib.suppress(OSError):
                peer.settimeout(_PATIENCE_S)
                if _user(peer) in (os.getuid(), 0):
                    # No signal if it has gone: the program may have restored SIGPIPE's default.
                    peer.sendall(self._answer(), socket.MSG_NOSIGNAL)

    def _answer(self) -> bytes:
        try:
            figures = {**snapshot(), **self._about()}
        except Exception as error:  # noqa: BLE001 - report it to the client; must not end the program
            figures = {"error": f"{type(error).__name__}: {error}"}
        return json.dumps(figures).encode() + b"\n"


def _rank() -> list[str]:
    mine = ranks.rank()
    return [] if mine is None else [f"[rank {mine.rank} of {mine.world}]"]


def snapshot() -> dict[str, Any]:
    """Return this process's statistics; `time` is in seconds of a monotonic clock."""
    from ..base.native import core

    return {
        "umem": __version__,
        "pid": os.getpid(),
        "program": " ".join([*_rank(), *sys.argv])[:200],
        "time": time.monotonic(),
        "stats": core.stats(),
        "tags": {
            name: {"blocks": blocks, "bytes": total, "resident_bytes": resident}
            for name, (blocks, total, resident) in core.bytes_by_tag().items()
        },
    }


def ask(path: Path) -> dict[str, Any]:
    """Return the answer of the process that serves the socket; `socket` is the socket's name.

    Raises:
        EndedError: no process serves it.
        StateError: the process does not answer, or the socket belongs to another user.
    """
    try:
        with socket.socket(socket.AF_UNIX) as mine:
            mine.settimeout(_PATIENCE_S)
            mine.connect(str(path))
            if _user(mine) not in (os.getuid(), 0) and os.getuid() != 0:
                raise StateError(f"{path} belongs to another user; umem top shows only your own")
            with mine.makefile("rb") as stream:
                line = stream.readline(answer.MAX_BYTES)
    except OSError as error:
        ended = isinstance(error, (ConnectionRefusedError, FileNotFoundError))
        kind = EndedError if ended else StateError
        raise kind(f"{path}: no answer ({error}); is the process still running?") from None
    try:
        return {**answer.parse(line), "socket": path.stem}
    except ValueError as error:
        raise StateError(f"{path}: no statistics: {error}") from None


def running() -> list[Path]:
    """Return the sockets of this user's processes that answer, oldest first; remove the others."""
    found, own = [], directory()
    # Processes that cron or a batch system started may lack a directory that a login shell has.
    for folder in dict.fromkeys((own, _temporary())):
        if not os.path.lexists(folder):
            continue
        try:
            _check_private(folder)
        except ConfigError:
            if folder == own:
                raise
            continue
        remove_stale(folder)
        for path in folder.glob(f"*{_SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):  # its process has just ended
                found.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(found)]


def find(name: str) -> Path:
    """Return the socket of the name, or else that of the process of this number.

    Raises:
        StateError: there is none, or one in each directory.
    """
    # A process of the same number in a container that shares the directory has a suffix.
    found = running()
    sockets = {path.stem: path for path in found}
    if len(named := [str(path) for path in found if path.stem == name]) > 1:
        raise StateError(f"process {name} has {len(named)} sockets; name one: umem top --socket "
                         f"{' or '.join(named)}")  # fmt: skip
    for stem in (name, *sockets):
        if stem in sockets and name in (stem, stem.split("-")[0]):
            return sockets[stem]
    known = ", ".join(sockets) or "none"
    raise StateError(
        f"process {name} has no socket; start it with UMEM_TOP=1. Processes of this user that have "
        f"one: {known}"
    )


def remove_stale(folder: Path) -> None:
    """Remove the sockets left by processes that were killed."""
    for path in folder.glob(f"*{_SUFFIX}"):
        _remove_if_stale(path)


def _remove_if_stale(path: Path) -> None:
    """Check by connecting: process numbers mean nothing across containers."""
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
        return  # the socket is gone, or its process is too busy to answer


def _bind_free(stem: Path) -> tuple[socket.socket, Path]:
    for i in range(1, _TRIES):
        path = stem.with_name(stem.name + (f"-{i}" if i > 1 else "") + _SUFFIX)
        with contextlib.suppress(FileExistsError):
            return _bind(path)
    raise FileExistsError(17, "in use, as are the next names", str(stem) + _SUFFIX)


def _bind(path: Path) -> tuple[socket.socket, Path]:
    """Listen before the socket gets its name, so that no one takes it for a stale one."""
    unnamed = path.with_name(f".{secrets.token_hex(4)}")
    if max(len(os.fsencode(each)) for each in (path, unnamed)) > _LONGEST:
        raise OSError(36, f"longer than the {_LONGEST} bytes of a socket's path", str(path))
    made = socket.socket(socket.AF_UNIX)
    try:
        os.fchmod(made.fileno(), 0o600)  # before it is bound, so that others can never open it
        made.bind(str(unnamed))
        try:
            made.listen(8)
            os.link(unnamed, path)  # fails if the name is taken
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
    """Check that the socket's directory belongs to this user, and that no one else can enter it.

    Raises:
        ConfigError: it does not, or others can enter it.
    """
    try:
        found = folder.lstat()
    except OSError as error:
        raise _refusal(f"{folder}: {error.strerror}") from None
    mine = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if not mine or stat.S_IMODE(found.st_mode) & 0o077:
        raise _refusal(f"{folder} is not a directory that only this user can enter (chmod 700)")


def _refusal(reason: str) -> ConfigError:
    return settings.refusal(BY_NAME["top"], "the socket of the option top (UMEM_TOP)", reason)


def _user(peer: socket.socket) -> int:
    """Return the user id of the peer, as the kernel reports it."""
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(user)
