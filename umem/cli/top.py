"""``umem top [PID | --all]``: show live statistics of running processes."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

from ..errors import ConfigError, StateError
from .base import Subparsers
from .run_report import handling

_CLEAR = "\x1b[H\x1b[2J"
_NOBODY = "no process answers; start one with UMEM_TOP=1, such as `UMEM_TOP=1 umem run train.py`"


def add_parser(subparsers: Subparsers) -> None:
    """Add `umem top`."""
    parser = subparsers.add_parser(
        "top",
        help="show live statistics of running processes",
        description="Show live statistics of one or all running processes of the same user that "
        "were started with UMEM_TOP=1. With --once or --metrics, or if the output is not a "
        "terminal (without --json): print one sample.",
    )
    parser.add_argument("pid", nargs="?", type=_pid,
                        help="process id, or name of its socket, such as 7-2 for a second process "
                        "with the id 7; default: the only process")  # fmt: skip
    parser.add_argument("--all", action="store_true",
                        help="all that answer, a line each, and their sum")  # fmt: skip
    parser.add_argument("--socket", type=Path, metavar="PATH", help="its socket, if it has its own")
    parser.add_argument("--interval", type=_seconds, default=1.0, metavar="SECONDS",
                        help="time between two samples; default 1")  # fmt: skip
    parser.add_argument("--once", action="store_true", help="print one sample, over one interval")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object per sample")
    form.add_argument("--metrics", action="store_true",
                      help="print one sample in Prometheus's text format")  # fmt: skip


def main(args: argparse.Namespace) -> int:
    """Show samples until the process, or the last of all, ends; or one.

    Raises:
        ConfigError: more than one of a process, a socket and all was requested.
        StateError: no such process answers, or several do and none was named.
    """
    from ..monitor import top

    sample: Callable[[], _Samples]
    if args.all:
        if args.pid is not None or args.socket is not None:
            raise ConfigError("give --all, a process id or --socket, only one of them")
        sample = _of_all
    else:
        sample = functools.partial(_of_one, _socket(args))
    if args.metrics:
        from ..base.native import core
        from ..monitor import server
        from ..monitor.metrics import metrics

        answers: _Samples = {}
        try:
            answers = sample()
        except server.EndedError:
            if not args.all:
                raise
        print(metrics(list(answers.values()), core.stats_docs()), end="", flush=True)
        return 0
    once = args.once or not (args.json or sys.stdout.isatty())
    with _screen(args.json or once, cuts=args.all) as show:
        tell = None if once else _complain if args.json else show
        samples = _follow(sample, args.interval, tell)
        before = next(samples)
        for now in samples:
            views = [top.view(now[path], before.get(path)) for path in now]
            if args.all:
                found = top.overall(views)
                show(json.dumps(found) if args.json else top.render_all(found))
            else:
                show(json.dumps(views[0]) if args.json else top.render(views[0]))
            if once:
                break
            before = now
    return 0


_Samples: TypeAlias = "dict[Path, dict[str, Any]]"  # by socket


def _follow(
    sample: Callable[[], _Samples], seconds: float, tell: Callable[[str], Any] | None
) -> Iterator[_Samples]:
    """Yield samples until the process ends; if it does not answer for a while, tell why, once.

    Raises:
        StateError: there is no answer, and `tell` is None; or the process had ended before.
    """
    from ..monitor import server

    told, some = "", False
    while True:
        try:
            now = sample()
        except StateError as error:
            ended = isinstance(error, server.EndedError)
            if tell is None or (ended and not some):
                raise
            if ended:
                return
            if str(error) != told:
                told = str(error)
                tell(told)
        else:
            told, some = "", True
            yield now
        time.sleep(seconds)


def _complain(reason: str) -> None:
    print(f"umem top: {reason}", file=sys.stderr, flush=True)


def _of_one(path: Path) -> _Samples:
    from ..monitor import server

    return {path: server.ask(path)}


def _of_all() -> _Samples:
    """Query every process; omit those that ended or are too busy to answer.

    Raises:
        EndedError: all ended.
        StateError: those that run are too busy.
    """
    from ..monitor import server

    found = {}
    why: StateError = server.EndedError(_NOBODY)
    for path in server.running():
        try:
            found[path] = server.ask(path)
        except server.EndedError:
            continue
        except StateError as error:
            why = error
    if not found:
        raise why
    return found


def _socket(args: argparse.Namespace) -> Path:
    from ..monitor import server

    if args.socket is not None:
        if args.pid is not None:
            raise ConfigError("give a process id or --socket, not both")
        return Path(args.socket)
    if args.pid is not None:
        return server.find(args.pid)
    sockets = server.running()
    if len(sockets) == 1:
        return sockets[0]
    names = ", ".join(path.stem for path in sockets)
    raise StateError(
        f"several processes answer: {names}; name one, as `umem top {sockets[0].stem}`, or use "
        "--all"
        if sockets
        else _NOBODY
    )


@contextlib.contextmanager
def _screen(plain: bool, *, cuts: bool) -> Iterator[Callable[[str], Any]]:
    """Return a function that shows a sample: in place on a terminal, else as lines.

    Args:
        plain: show lines on a terminal, too.
        cuts: cut long lines of a sample off, so that its last ones stay on the screen.
    """
    if not plain:
        try:
            from rich.console import Console
            from rich.live import Live
            from rich.text import Text
        except ImportError:
            yield lambda text: print(_CLEAR + text, flush=True)
            return
        console = Console()
        plain = console.is_dumb_terminal or not console.is_terminal  # which cannot redraw
    if plain:
        yield lambda text: print(text, flush=True)
        return
    with (
        handling([signal.SIGTERM], lambda *_: sys.exit(128 + signal.SIGTERM)),
        Live(Text("..."), console=console, auto_refresh=False, screen=True) as screen,
    ):
        yield lambda text: screen.update(
            Text(text, no_wrap=cuts, overflow="ellipsis" if cuts else None), refresh=True
        )


def _pid(text: str) -> str:
    number = text.partition("-")[0]
    if not number.isdecimal() or int(number) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a process id")
    return text


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.01 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: seconds from 0.01 to 3600")
    return value
