"""The socket of `umem top`: its permissions, its name, and its removal."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import logging
import os
import re
import signal
import socket
import stat
import struct
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import schemas

from umem.base.stats import Stats
from umem.cli import main
from umem.cli import top as top_command
from umem.errors import ConfigError, StateError
from umem.monitor import server


def about() -> dict[str, str]:
    return {"device": "soft:a100-pcie4", "policy": "lru", "allocator": ""}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of sockets; serving stops at the end."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    yield tmp_path / "umem"
    server.stop()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_off_is_off(home: Path) -> None:
    server.start(False, about)
    assert not home.exists()
    assert server.running() == []


def test_it_answers_with_figures(home: Path) -> None:
    server.start(True, about)
    (path,) = server.running()
    assert path == home / f"{os.getpid()}.sock"
    answer = server.ask(path)
    assert answer["pid"] == os.getpid()
    assert answer["policy"] == "lru"
    assert {"budget_bytes", "plan_hits", "asleep_bytes"} <= answer["stats"].keys()
    assert {"param", "grad", "cached"} <= answer["tags"].keys()
    assert server.ask(path)["time"] >= answer["time"]
    server.stop()
    assert list(home.iterdir()) == []
    with pytest.raises(StateError, match="no answer"):
        server.ask(path)


def test_only_this_user_can_open_it(home: Path) -> None:
    old = os.umask(0)
    try:
        server.start(True, about)
    finally:
        os.umask(old)
    (path,) = server.running()
    assert (mode(home), mode(path)) == (0o700, 0o600)


def test_a_peer_of_another_user_gets_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.start(True, about)
    (path,) = server.running()
    monkeypatch.setattr(server, "_user", lambda peer: os.getuid() + 1)
    with socket.socket(socket.AF_UNIX) as mine:
        mine.settimeout(5)
        mine.connect(str(path))
        assert mine.recv(100) == b""
    monkeypatch.undo()


def test_the_kernel_says_who_the_peer_is() -> None:
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        raw = one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        assert server._user(one) == struct.unpack("3i", raw)[1] == os.getuid()


def squat(home: Path, how: str) -> None:
    if how == "file":
        home.write_text("")
    elif how == "link":
        real = home.parent / "real"
        real.mkdir(0o700)
        home.symlink_to(real)
    elif how == "mode":
        home.mkdir()
        home.chmod(0o750)
    else:
        home.mkdir(0o700)
        os.chown(home, 12345, -1)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
SQUATS = ["mode", "link", "file", pytest.param("owner", marks=needs_root)]


@pytest.mark.parametrize("how", SQUATS)
def test_a_directory_that_others_enter_turns_only_the_socket_off(
    home: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    squat(home, how)
    server.start(True, about)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    for words in ("umem top", "off", str(home)):
        assert words in record.getMessage()
    assert server._server is None


@pytest.mark.parametrize("how", SQUATS)
def test_a_path_in_a_directory_that_others_enter_is_refused(home: Path, how: str) -> None:
    squat(home, how)
    with pytest.raises(ConfigError, match="UMEM_TOP"):
        server.start(home / "x.sock", about)


@pytest.mark.parametrize("how", SQUATS)
def test_top_finds_nothing_in_a_directory_that_others_enter(
    home: Path, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    squat(home, how)
    assert main(["top"]) == 2
    assert str(home) in capsys.readouterr().err


def test_a_stale_socket_is_replaced_and_a_live_one_is_not(home: Path) -> None:
    home.mkdir(0o700)
    for name in ("12345678.sock", f"{os.getpid()}.sock"):
        with socket.socket(socket.AF_UNIX) as gone:
            gone.bind(str(home / name))
    server.start(True, about)
    assert [path.name for path in home.iterdir()] == [f"{os.getpid()}.sock"]
    second = server.Server(None, about)  # for example of a container that shares the directory
    assert second.path.name == f"{os.getpid()}-2.sock"
    assert len(server.running()) == 2
    second.close()


def test_two_containers_that_start_at_once_get_a_socket_each(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their processes may have the same ID."""
    listen = socket.socket.listen
    others: list[server.Server] = []

    def between(self: socket.socket, backlog: int) -> None:
        listen(self, backlog)
        monkeypatch.setattr(socket.socket, "listen", listen)
        others.append(server.Server(None, about))

    monkeypatch.setattr(socket.socket, "listen", between)
    server.start(True, about)
    assert sorted(path.stem for path in server.running()) == [
        str(os.getpid()), f"{os.getpid()}-2"
    ]  # fmt: skip
    assert {server.ask(path)["pid"] for path in server.running()} == {os.getpid()}
    others[0].close()


def test_a_path_in_use_is_an_error_and_a_stale_one_is_not(home: Path) -> None:
    home.mkdir(0o700)
    path = home / "mine.sock"
    with socket.socket(socket.AF_UNIX) as held:
        held.bind(str(path))
        held.listen()
        with pytest.raises(ConfigError, match=r"mine\.sock.*File exists"):
            server.start(path, about)
    server.start(path, about)
    assert server.ask(path)["pid"] == os.getpid()
    assert mode(path) == 0o600


def test_a_file_at_the_path_stays(home: Path) -> None:
    home.mkdir(0o700)
    path = home / "notes"
    path.write_text("precious")
    with pytest.raises(ConfigError, match="File exists"):
        server.start(path, about)
    assert path.read_text() == "precious"


def test_paths_that_cannot_be(home: Path, tmp_path: Path) -> None:
    home.mkdir(0o700)
    with pytest.raises(ConfigError, match="longer than the 107 bytes"):
        server.start(home / ("x" * (107 - len(str(home)))), about)
    with pytest.raises(ConfigError, match="No such file"):
        server.start(tmp_path / "none" / "x.sock", about)
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        server.start(tmp_path / "x.sock", about)


def test_a_process_without_a_runtime_directory_is_found_too(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as cron:
        cron.delenv("XDG_RUNTIME_DIR")
        server.start(True, about)
    found = tmp_path / f"umem-{os.getuid()}" / f"{os.getpid()}.sock"
    assert server.running() == [found]
    home.mkdir(0o700)
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(home / found.name))
        other.listen()
        with pytest.raises(StateError, match="has 2 sockets; name one: umem top --socket"):
            server.find(str(os.getpid()))
    found.parent.chmod(0o755)
    assert server.running() == []


def test_the_longest_path_is_taken(home: Path) -> None:
    home.mkdir(0o700)
    path = home / ("x" * (106 - len(str(home))))
    server.start(path, about)
    assert server.ask(path)["pid"] == os.getpid()


def test_a_client_that_says_nothing_and_one_that_leaves(home: Path) -> None:
    server.start(True, about)
    (path,) = server.running()
    idle = socket.socket(socket.AF_UNIX)
    idle.connect(str(path))
    gone = socket.socket(socket.AF_UNIX)
    gone.connect(str(path))
    gone.close()
    assert server.ask(path)["pid"] == os.getpid()
    idle.close()


def test_it_answers_again_after_an_error_of_the_system(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.start(True, about)
    (path,) = server.running()
    failures, accept = [OSError(24, "Too many open files")] * 2, socket.socket.accept

    def failing(self: socket.socket) -> tuple[socket.socket, Any]:
        if failures:
            raise failures.pop()
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", failing)
    for _ in range(3):
        assert server.ask(path)["pid"] == os.getpid()
    assert failures == []


def test_the_session_alone_stops_it_at_exit(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[object] = []
    monkeypatch.setattr(atexit, "register", registered.append)
    server.start(True, about)
    assert registered == []


def test_a_socket_that_goes_while_the_others_are_listed_is_left_out(home: Path) -> None:
    server.start(True, about)
    (home / "1.sock").symlink_to("gone")
    assert [path.stem for path in server.running()] == [str(os.getpid())]


def test_what_fails_inside_is_told(home: Path) -> None:
    def broken() -> dict[str, str]:
        raise RuntimeError("half torn down")

    server.start(True, broken)
    (path,) = server.running()
    with pytest.raises(StateError, match="RuntimeError: half torn down"):
        server.ask(path)


@contextlib.contextmanager
def answering(path: Path, answer: bytes) -> Iterator[Path]:
    """A socket whose process answers each client with the same bytes."""

    def serve() -> None:
        with contextlib.suppress(OSError):  # closed at the end, also while it answers
            while True:
                peer, _ = listening.accept()
                with peer:
                    peer.sendall(answer)

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        thread = threading.Thread(target=serve)
        thread.start()
        yield path
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()


GOOD: dict[str, Any] = {
    "umem": "0", "pid": 1, "program": "x", "time": 1.0, "device": "soft", "policy": "lru",
    "allocator": "", "stats": {field.name: 0 for field in dataclasses.fields(Stats)},
    "tags": {"param": {"blocks": 1, "bytes": 1, "resident_bytes": 0}},
}  # fmt: skip
ESCAPES = "\x1b[2J\x9b2J\r\n"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"[" * 200_000 + b"\n", "nested too deeply"),
        (json.dumps(GOOD).encode(), "cut off"),
        (b'{"a": 1\n', "not JSON"),
        (b"x" * (2 << 20) + b"\n", "cut off"),
        (b"[]\n", "not an answer of umem"),
        ({"error": ESCAPES}, r"no statistics: \\x1b\[2J\\x9b2J\\r\\n"),
        ({"error": {"a": ESCAPES}}, r"\\x1b"),
        ({"pid": ESCAPES}, "not an answer of umem"),
        ({"program": 3}, "not an answer of umem"),
        ({"time": float("nan")}, "not an answer of umem"),
        ({"stats": {}}, "not an answer of umem"),
        ({"stats": {**GOOD["stats"], "steps": ESCAPES}}, "not an answer of umem"),
        ({"stats": {**GOOD["stats"], "steps": 10**400}}, "not an answer of umem"),
        ({"tags": {"param": {"blocks": 1}}}, "not an answer of umem"),
        ({"tags": [1]}, "not an answer of umem"),
    ],
)
def test_answers_that_cannot_be_are_told_without_control_characters(
    tmp_path: Path, answer: bytes | dict[str, object], reason: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    if isinstance(answer, dict):
        answer = json.dumps({**GOOD, **answer}).encode() + b"\n"
    with answering(tmp_path / "x.sock", answer) as path:
        assert main(["top", "--once", "--interval", "0.02", "--socket", str(path)]) == 2
    shown = capsys.readouterr().err
    assert re.search(reason, shown), shown
    assert shown.removesuffix("\n").isprintable()


def test_the_texts_of_an_answer_are_shown_without_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evil: dict[str, object] = dict.fromkeys(("program", "device", "policy", "allocator"), ESCAPES)
    evil["tags"] = {ESCAPES: {"blocks": 1, "bytes": 1, "resident_bytes": 0}}
    with answering(tmp_path / "x.sock", json.dumps({**GOOD, **evil}).encode() + b"\n") as path:
        assert main(["top", "--once", "--interval", "0.02", "--socket", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.isprintable() for line in lines)
    assert sum(r"\x1b[2J\x9b2J\r\n" in line for line in lines) == 3


def test_a_client_that_leaves_ends_no_program_that_restored_a_signal(home: Path) -> None:
    code = """
        import signal, socket
        from umem.monitor import server
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        server.start(True, lambda: {"device": "", "policy": "", "allocator": ""})
        (path,) = server.running()
        for _ in range(5):  # more would wait in line
            with socket.socket(socket.AF_UNIX) as gone:
                gone.connect(str(path))
        print(server.ask(path)["umem"])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], check=False, capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_each_rank_has_a_socket_of_its_own(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home.mkdir(mode=0o700)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    for given, made in (("t.sock", "t.rank1.sock"), ("%r-%p.sock", f"1-{os.getpid()}.sock")):
        server.start(home / given, about)
        assert [path.name for path in home.iterdir()] == [made]
        server.stop()


def test_a_child_does_not_keep_its_parents_socket(home: Path) -> None:
    """Nor takes its name away; and a killed parent leaves a socket that is found to be stale."""
    code = """
        import os, signal, sys, time
        from umem.monitor import server
        server.start(True, lambda: {"device": "", "policy": "", "allocator": ""})
        path = server._server.path
        ready, write = os.pipe()
        child = os.fork()
        if child == 0:
            assert server._server is None
            server.stop()
            assert path.exists()
            try:
                server.start(True, lambda: {})  # its own
                print(server._server.path.stem == str(os.getpid()), flush=True)
                server.stop()
                os.close(1), os.close(2)  # who reads them waits for the parent only
                os.close(write)
                time.sleep(30)
            finally:
                os._exit(0)
        os.close(write)
        os.read(ready, 1)
        print(child, server.ask(path)["pid"] == os.getpid(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)], check=False,
        capture_output=True, text=True, timeout=60, start_new_session=True,
    )  # fmt: skip
    answers = done.stdout.split()
    os.kill(int(answers[1]), 9)
    assert answers[0] == answers[2] == "True", done.stderr
    assert len(list(home.iterdir())) == 1
    assert server.running() == []
    assert list(home.iterdir()) == []


@pytest.mark.parametrize("form", ["--json", ""])
def test_top_shows_this_process(home: Path, form: str, capsys: pytest.CaptureFixture[str]) -> None:
    server.start(True, about)
    assert main(["top", "--once", "--interval", "0.02", *form.split(), str(os.getpid())]) == 0
    shown = capsys.readouterr().out
    if form:
        view = schemas.read("top", shown)
        assert view["pid"] == os.getpid()
        assert view["in_bytes_per_s"] == 0
    else:
        assert f"umem top: pid {os.getpid()}" in shown
        assert "\x1b" not in shown
    assert main(["top", "--once", "--interval", "0.02"]) == 0  # the only one


def test_top_shows_all_processes(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server.start(True, about)
    other = server.Server(None, about)
    (home / "123.sock").write_text("not one of them")
    assert main(["top", "--all", "--once", "--interval", "0.02", "--json"]) == 0
    found = schemas.read("top_all", capsys.readouterr().out)
    assert [view["pid"] for view in found["processes"]] == [os.getpid()] * 2
    assert all(view["in_bytes_per_s"] == 0 for view in found["processes"])
    assert main(["top", "--all", "--once", "--interval", "0.02"]) == 0
    assert capsys.readouterr().out.startswith("umem top: 2 processes\n")
    assert [view["socket"] for view in found["processes"]] == [
        str(os.getpid()), f"{os.getpid()}-2"
    ]  # fmt: skip
    assert main(["top", "--once", "--interval", "0.02", "--json", f"{os.getpid()}-2"]) == 0
    assert json.loads(capsys.readouterr().out)["socket"] == f"{os.getpid()}-2"
    other.close()
    assert main(["top", "--all", "1"]) == 2
    assert "only one of them" in capsys.readouterr().err


def test_top_asks_for_one_of_several_processes(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.start(True, about)
    other = server.Server(None, about)
    try:
        assert main(["top", "--once"]) == 2
    finally:
        other.close()
    told = capsys.readouterr().err
    assert f"several processes answer: {os.getpid()}" in told
    assert "--all" in told


def script(monkeypatch: pytest.MonkeyPatch, *answers: str) -> None:
    """Let the process answer, or fail with a reason, in this order, and then end."""
    left, ask = list(answers), server.ask

    def scripted(path: Path) -> dict[str, object]:
        if not left:
            server.stop()
        elif reason := left.pop(0):
            raise StateError(reason)
        return ask(path)

    monkeypatch.setattr(server, "ask", scripted)


@pytest.mark.parametrize("rich", [True, False])
def test_top_on_a_terminal_shows_samples_until_the_process_ends(
    home: Path, rich: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if rich:
        pytest.importorskip("rich")
    else:
        monkeypatch.setitem(sys.modules, "rich.live", None)
    server.start(True, about)
    script(monkeypatch, "", "", "it sleeps", "it sleeps", "")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    assert main(["top", "--interval", "0.01"]) == 0
    shown = capsys.readouterr().out
    assert f"umem top: pid {os.getpid()}" in shown
    assert shown.count("it sleeps") == 1 if not rich else "it sleeps" in shown
    assert shown.count("\x1b[H") == 3 or rich  # once a sample after the first, and the reason


def test_top_on_a_terminal_that_cannot_redraw_shows_lines(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.start(True, about)
    script(monkeypatch, "", "", "")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "dumb")
    assert main(["top", "--interval", "0.01"]) == 0
    shown = capsys.readouterr().out
    assert shown.count(f"umem top: pid {os.getpid()}") == 2
    assert "\x1b" not in shown


def test_the_last_lines_of_all_processes_stay_on_the_screen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    for name, value in (("TERM", "xterm"), ("COLUMNS", "80"), ("LINES", "10")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with top_command._screen(False, cuts=True) as show:
        show("\n".join([*(f"rank {i} " + 200 * "x" for i in range(8)), "slowest: rank 3"]))
    assert "slowest: rank 3" in capsys.readouterr().out


def test_a_terminal_is_restored_by_sigterm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    pytest.importorskip("rich")
    with pytest.raises(SystemExit) as end, top_command._screen(False, cuts=False):
        os.kill(os.getpid(), signal.SIGTERM)
    assert end.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("which", ["", "--all"])
def test_top_goes_on_while_a_process_does_not_answer(
    home: Path, which: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.start(True, about)
    script(monkeypatch, "", "it sleeps", "it sleeps", "", "it sleeps", "")
    assert main(["top", "--json", "--interval", "0.01", *which.split()]) == 0
    shown = capsys.readouterr()
    assert [str(os.getpid()) in line for line in shown.out.splitlines()] == [True, True]
    assert shown.err == "umem top: it sleeps\n" * 2


@pytest.mark.parametrize("which", ["", "--all"])
def test_top_waits_for_the_first_answer_too(
    home: Path, which: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.start(True, about)
    script(monkeypatch, "it sleeps", "it sleeps", "", "")
    assert main(["top", "--json", "--interval", "0.01", *which.split()]) == 0
    shown = capsys.readouterr()
    assert [str(os.getpid()) in line for line in shown.out.splitlines()] == [True]
    assert shown.err == "umem top: it sleeps\n"


def test_top_of_all_says_where_there_are_none(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", "--all"]) == 2
    assert "start one with UMEM_TOP=1" in capsys.readouterr().err
    # A file of metrics is written again, and has no process that has ended.
    assert main(["top", "--all", "--metrics"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines
    assert all(line.startswith("#") for line in lines)


def test_top_says_what_is_wrong(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top"]) == 2
    assert "start one with UMEM_TOP=1" in capsys.readouterr().err
    server.start(True, about)
    assert main(["top", "1"]) == 2
    assert f"have one: {os.getpid()}" in capsys.readouterr().err
    assert main(["top", "1", "--socket", "x"]) == 2
    assert "not both" in capsys.readouterr().err
    other = server.Server(None, about)
    assert main(["top"]) == 2
    assert "several processes answer" in capsys.readouterr().err
    other.close()
