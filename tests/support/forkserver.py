"""Python programs that start in milliseconds: forks of a process that has imported torch and umem.

A program is given by the arguments of `python`. It has an environment, a folder, streams, a session
and a `__main__` of its own, and ends as a fresh Python does: atexit functions run, and the
interpreter is finalized. A test of imports, of the interpreter's flags, or of variables that are
read when a library is loaded (`LOADED`) needs a fresh Python.

The server forks a watcher for each program, and the watcher forks the program and reports its end.
The server has a single thread and only waits for requests, so a fork never copies a lock that
another thread holds.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, TextIO

# The server executes this before the first fork. Optimizers import torch._dynamo, which takes 3 s.
PREPARE = "import numpy, torch, torch._dynamo, umem.session.session, umem.trace.step_builder"
# Prefixes of variables that Python, torch or OpenMP read while they are loaded; `UMEM` itself turns
# umem on inside `import torch`.
LOADED = ("PYTHON", "LD_", "OMP_", "KMP_", "MKL_", "MALLOC_", "TORCH_", "PYTORCH_", "UMEM=")
_REQUEST_BYTES = 1 << 17
_WORD = 4  # bytes of a process id and of a wait status


class Request(NamedTuple):
    """A program that the server has to start."""

    arguments: list[str]
    environ: dict[str, str]
    folder: str


class Process:
    """A started program, with the interface of `subprocess.Popen` and text in its pipes."""

    def __init__(self, report: int, stdout: int, stderr: int) -> None:
        self._report = os.fdopen(report, "rb", buffering=0)
        self.pid = self._word()
        self.returncode: int | None = None
        self.stdout: TextIO = os.fdopen(stdout, encoding="utf-8")
        self.stderr: TextIO = os.fdopen(stderr, encoding="utf-8")
        self._printed = ["", ""]
        self._readers: list[threading.Thread] = []

    def _word(self) -> int:
        found = self._report.read(_WORD)
        assert len(found) == _WORD, "the fork server died"
        return int.from_bytes(found, "little")

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, negative for a signal; raises `subprocess.TimeoutExpired`."""
        if self.returncode is None:
            if not select.select([self._report], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"program {self.pid}", timeout or 0)
            self.returncode = os.waitstatus_to_exitcode(self._word())
            self._report.close()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """All that it prints until both streams are closed; raises `subprocess.TimeoutExpired`."""
        if not self._readers:
            self._readers = [threading.Thread(target=self._read, args=(i,)) for i in range(2)]
            for reader in self._readers:
                reader.start()
        for reader in self._readers:
            reader.join(timeout)
            if reader.is_alive():
                raise subprocess.TimeoutExpired(f"program {self.pid}", timeout or 0)
        self.wait(timeout)
        out, err = self._printed
        return out, err

    def _read(self, i: int) -> None:
        with (self.stdout, self.stderr)[i] as stream:
            self._printed[i] = stream.read()

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)


def start(
    arguments: Sequence[str], environ: Mapping[str, str], folder: Path | None = None,
    *, prepare: str = PREPARE, fresh: bool = False, python: str = sys.executable,
) -> Process | subprocess.Popen[str]:  # fmt: skip
    """Starts `python ARGUMENTS` in a session of its own; its output and error are pipes.

    prepare: code whose imports the program finds done. fresh: in a Python that has imported
    nothing. AssertionError where a fork would not see variables of `environ`.
    """
    if fresh:
        return subprocess.Popen(
            [python, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, env=environ, cwd=folder, start_new_session=True,
        )  # fmt: skip
    changed = {
        name
        for name in environ.keys() | os.environ.keys()
        if f"{name}=".startswith(LOADED) and environ.get(name) != os.environ.get(name)
    }
    assert not changed, f"{sorted(changed)}: read while Python starts; the test needs a fresh one"
    out, their_out = os.pipe()
    err, their_err = os.pipe()
    report, their_report = os.pipe()
    request = Request(list(arguments), dict(environ), str(folder or Path.cwd()))
    message, theirs = json.dumps(request).encode(), [their_out, their_err, their_report]
    assert len(message) <= _REQUEST_BYTES, "the program or its environment is too long"
    socket.send_fds(_server(prepare, python), [message], theirs)
    for descriptor in theirs:
        os.close(descriptor)
    return Process(report, out, err)


def run(
    arguments: Sequence[str], environ: Mapping[str, str] | None = None,
    folder: Path | None = None, timeout: float = 120, *, prepare: str = PREPARE,
    fresh: bool = False, python: str = sys.executable,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Runs `python ARGUMENTS` to its end, as `start` starts it; environ: None is this process's.

    AssertionError, with what it has printed, if it does not end in `timeout` seconds.
    """
    environ = os.environ if environ is None else environ
    process = start(arguments, environ, folder, prepare=prepare, fresh=fresh, python=python)
    out, err = finish(process, timeout)
    assert process.returncode is not None
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


def finish(process: Process | subprocess.Popen[str], timeout: float) -> tuple[str, str]:
    """Standard output and error at the process's end; AssertionError, and its end, if it hangs."""
    try:
        return process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its children have the pipes too
        out, err = process.communicate()
        raise AssertionError(f"it hangs; so far: {out}{err}") from None


@functools.cache
def _server(prepare: str, python: str) -> socket.socket:
    """The connection to this process's server, which ends with it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        theirs.set_inheritable(True)
        nothing = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1)]
        words = [python, __file__, str(theirs.fileno()), prepare]
        os.posix_spawn(python, words, os.environ, file_actions=nothing)
    atexit.register(ours.close)
    return ours


def _serve(connection: socket.socket) -> Request | None:
    """Returns in each program with its request, and in the server when no client is left."""
    children = signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # watchers leave no zombies
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, _REQUEST_BYTES, 3)
        if not message:
            return None
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, children)
            connection.close()
            if _is_program(*descriptors):
                return Request(*json.loads(message))
            os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)


def _is_program(out: int, err: int, report: int) -> bool:
    """Forks: true in the program, and in its watcher false, once the program has ended."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.dup2(out, 1)
        os.dup2(err, 2)
    for descriptor in (out, err):
        os.close(descriptor)
    if pid:
        with contextlib.suppress(BrokenPipeError):  # the client has ended
            os.write(report, pid.to_bytes(_WORD, "little"))
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(BrokenPipeError):
            os.write(report, status.to_bytes(_WORD, "little"))
    os.close(report)
    return pid == 0


def _run(request: Request) -> None:
    """Does what `python ARGUMENTS` does, in a `__main__` of its own."""
    for name in os.environ.keys() - request.environ.keys():
        del os.environ[name]
    os.environ.update(request.environ)
    os.chdir(request.folder)
    first, *rest = request.arguments
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    vars(main)["__builtins__"] = __builtins__
    sys.excepthook = _without_frames_of_this_file
    # The server's own has whatever buffer its environment asked for.
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.__stdout__ = sys.stdout  # type: ignore[misc]
    if first == "-m":
        sys.argv, sys.path[0] = rest, request.folder
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
        return
    if first == "-c":
        code, file = rest[0], "<string>"
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
    else:
        file = str(Path(request.folder, first))
        code = Path(file).read_text(encoding="utf-8")
        sys.argv, sys.path[0] = request.arguments, str(Path(file).parent)
        main.__file__ = file
    exec(compile(code, file, "exec"), vars(main))


def _without_frames_of_this_file(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


def _main() -> None:
    exec(sys.argv[2], {})
    gc.collect()
    gc.freeze()  # no program's collections look at all of torch
    request = _serve(socket.socket(fileno=int(sys.argv[1])))
    if request is not None:
        _run(request)


if __name__ == "__main__":
    _main()
