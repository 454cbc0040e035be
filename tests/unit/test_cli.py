"""The command line, run as its users run it."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import schemas

from umem.cli import COMMANDS, doctor, main, run_report
from umem.cli.run import misplaced
from umem.integrations.torch import build
from umem.policies import registry


def umem(
    *args: str, cwd: Path, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "umem", *args],
        cwd=cwd, env={**os.environ, **(env or {})}, capture_output=True, text=True, check=False,
        timeout=120,
    )  # fmt: skip


def completions(line: str, folder: Path) -> set[str]:
    """The completions at the end of a line: argcomplete's protocol, through a file."""
    answer = folder / "answer"
    told = {
        "_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_SUPPRESS_SPACE": "1",
        "COMP_LINE": line, "COMP_POINT": str(len(line)),
        "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
    }  # fmt: skip
    umem(cwd=folder, env=told)
    return {word.strip() for word in answer.read_text().splitlines()}


def test_a_shell_is_offered_commands_options_and_values(tmp_path: Path) -> None:
    assert completions("umem rep", tmp_path) == {"replay", "report"}
    assert {"run", "plan", "top"} <= completions("umem ", tmp_path)
    assert {"--metrics", "--json"} <= completions("umem top --", tmp_path)
    assert completions("umem trace con", tmp_path) == {"convert"}
    (tmp_path / "train.py").touch()
    assert "train.py" in completions("umem run tra", tmp_path)


def one_line_error(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def test_a_bad_budget_in_the_environment_is_one_line(tmp_path: Path) -> None:
    error = one_line_error(umem("run", "x.py", cwd=tmp_path, env={"UMEM_BUDGET": "banana"}))
    assert error.startswith("umem run: UMEM_BUDGET: 'banana' is not a number of bytes; allowed: ")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("run", "missing.py"), "'missing.py' is neither a script nor a command"),
        (("run",), "no program given"),
        (("run", "-m"), "no program given"),
        (("run", "--bugdet", "1GiB", "x.py"), "unexpected '--bugdet' (did you mean --budget?)"),
        (("run", "--pol=lru", "x.py"), "unexpected '--pol=lru' (did you mean --policy?)"),
        (
            ("trace", "info", "--jsn", "f"),
            "info: unexpected '--jsn' (did you mean --json?)",
        ),
        (("top", "1", "2"), "umem top: unexpected '2'; `umem top --help` lists what is allowed"),
        (("run", "--budget", "12 parsecs", "x.py"), "--budget: '12 parsecs'"),
        (("run", "--budget", "1MiB", "x.py"), "below the floor of 8 MiB"),
        (("run", "--policy", "lur", "x.py"), "--policy: there is no 'lur' (did you mean lru?)"),
        (("run", "--device", "soft:a100-pice4", "x.py"), "did you mean a100-pcie4?"),
        (("run", "--device", "cuda:1", "x.py"), "--device: 'cuda:1' is not a device"),
        (("trace", "record", "-o", "t.txt", "x.py"), "umem trace: -o t.txt; allowed: FILE.jsonl"),
        (("trace", "record", "-o", "off", "x.py"), "umem trace: -o off; allowed: FILE.jsonl"),
        (("trace", "record", "-o", "t.jsonl", "x.py"), "'x.py' is neither a script nor a command"),
        (("plan", "train.py"), "'train.py' is a script; write umem plan --script train.py"),
        (("lint", "a/train.py"), "write umem lint --script a/train.py"),
        (("estimate", "train.py"), "write umem estimate --script train.py"),
        (("report", "."), "umem report: . is a folder; allowed: a trace"),
        (("run", "--report", "/proc/r.html", "-m", "this"), "name another folder"),
    ],
)
def test_bad_command_lines_are_one_line(tmp_path: Path, args: tuple[str, ...], words: str) -> None:
    assert words in one_line_error(umem(*args, cwd=tmp_path))


def test_an_unknown_command_or_half_an_option_is_exit_2(tmp_path: Path) -> None:
    for args in (("fly",), ("run", "--budget"), ()):
        done = umem(*args, cwd=tmp_path)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr


SHOW = """
import json, os, sys
print(json.dumps({"argv": sys.argv, "pid": os.getpid(), "name": __name__,
                  "env": {k: v for k, v in os.environ.items() if k.startswith("UMEM")}}))
sys.exit(7)
"""


def test_run_passes_arguments_options_and_the_exit_code(tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text(SHOW)
    args = ["--budget", "1GiB", "--policy=none", "show.py", "--budget", "mine", "--", "-m", "x"]
    process = subprocess.Popen(
        [sys.executable, "-m", "umem", "run", *args],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    shown = json.loads(process.communicate(timeout=60)[0])
    assert process.returncode == 7
    assert shown["argv"] == ["show.py", "--budget", "mine", "--", "-m", "x"]
    assert shown["pid"] == process.pid
    assert shown["name"] == "__main__"
    assert shown["env"] == {
        "UMEM": "1",
        "UMEM_STRICT": "1",
        "UMEM_SUMMARY": "1",
        "UMEM_BUDGET": "1GiB",
        "UMEM_POLICY": "none",
    }


def test_options_after_a_script_that_knows_none_are_pointed_out(tmp_path: Path) -> None:
    script = tmp_path / "x.py"
    script.write_text("print(1)")
    done = umem("run", "x.py", "--budget", "1GiB", "--name=value", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout == "1\n"
    assert done.stderr.startswith("umem run: warning: --budget after the script name is passed")
    given = [str(script), "--budget=1GiB", "--host-budget", "1GiB", "--other"]
    assert misplaced(given) == ["--budget", "--host-budget"]
    script.write_text("class Arguments:\n    host_budget: str\n")  # as dataclasses name options
    assert misplaced(given) == []
    script.write_text("parser.add_argument('--budget')")
    assert misplaced(given) == ["--host-budget"]
    assert misplaced(["-m", "x", "--budget"]) == []
    assert misplaced([str(tmp_path), "--budget"]) == []
    os.mkfifo(tmp_path / "pipe")  # to read it would take what the program is to read
    assert misplaced([str(tmp_path / "pipe"), "--budget"]) == []


def test_run_says_that_torch_would_not_find_umem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "x.py"
    script.write_text("")
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: ())
    monkeypatch.setattr(os, "execvpe", lambda *_: pytest.fail("the program was started"))
    assert main(["run", str(script)]) == 2
    assert "umem is not installed, so torch would not find it" in capsys.readouterr().err


class StartError(Exception):
    """The program would run now."""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Gets the command that `umem run` would execute."""
    command: list[str] = []

    def record(_file: str, words: list[str], _environment: object) -> None:
        command.extend(words)
        raise StartError

    monkeypatch.setattr(os, "execvpe", record)
    monkeypatch.chdir(tmp_path)
    return command


@pytest.mark.parametrize(
    ("name", "head", "mode", "by_python"),
    [
        ("train.sh", b"#!/bin/sh\n", 0o755, False),
        ("train", b"#!/home/python/bin/bash\n", 0o755, False),
        ("binary", b"\x7fELF\2\1", 0o755, False),
        ("train", b"#!/usr/bin/env python3\n", 0o755, True),
        ("train", b"#!/usr/bin/python3.12 -u\n", 0o755, True),
        ("train.py", b"#!/bin/sh\n", 0o755, True),
        ("train", b"print(1)\n", 0o755, True),
        ("train.sh", b"#!/bin/sh\n", 0o644, True),  # Python's error is as good as any other
        ("train", b"#!python\n", 0o755, True),  # as in a wheel
        ("train", b"#!/usr/bin/env\tpython3\n", 0o755, True),
        ("train", b"#!/usr/bin/env -S PYTHONHASHSEED=0 python3 -u\n", 0o755, True),
        ("train", b"#!/usr/bin/env python3\r\n", 0o755, True),
        ("train", b"#! /opt/pypy/bin/pypy3", 0o755, True),
        ("train", b"#!/usr/bin/env -S uv run --script\n", 0o755, False),
        ("train", b"#!/usr/bin/env -S micromamba run -n x python\n", 0o755, False),
        ("train", b"#!/bin/sh python \n", 0o755, False),
        ("train", b"#!\n", 0o755, False),
    ],
)
def test_a_program_that_is_not_python_is_executed_itself(
    name: str, head: bytes, mode: int, by_python: bool, tmp_path: Path, started: list[str]
) -> None:
    (tmp_path / name).write_bytes(head)
    (tmp_path / name).chmod(mode)
    with pytest.raises(StartError):
        main(["run", name, "--x"])
    program = [sys.executable, name] if by_python else [str(tmp_path / name)]
    assert started == [*program, "--x"]


@pytest.mark.parametrize("options", [[], ["--report", "r.html"]])
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"#!/no/such/interpreter\n", "No such file or directory"),
        (b"#!/bin/sh\r\necho\n", "No such file or directory"),
        (b"\x7fELF, and no more", "Exec format error"),
    ],
)
def test_a_program_that_the_system_refuses_is_one_line(
    content: bytes, reason: str, options: list[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "train"
    program.write_bytes(content)
    program.chmod(0o755)
    assert main(["run", *options, "train"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"umem run: {program}: cannot be executed: {reason}; ")
    assert printed.err.count("\n") == 1


STARTED = """#!/bin/sh
grep -h SigIgn /proc/$$/status
ls /proc/$$/fd
"""


@pytest.mark.parametrize("options", [(), ("--report", "r.html")])
def test_a_program_has_the_signals_and_descriptors_that_it_was_given(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    """Those of a shell: Python ignores two signals, and would close what `<(...)` opens."""
    script = tmp_path / "train"
    script.write_text(STARTED)
    script.chmod(0o755)
    found = []
    for command in ([str(script)], [sys.executable, "-m", "umem", "run", *options, str(script)]):
        with Path(os.devnull).open() as other:
            done = subprocess.run(
                command, cwd=tmp_path, capture_output=True, text=True, check=False,
                pass_fds=[other.fileno()], timeout=60,
            )  # fmt: skip
        ignored, *descriptors = done.stdout.split()[1:]
        # The C library keeps two of the real-time ones to itself.
        found.append((int(ignored, 16) & (1 << signal.SIGRTMIN - 3) - 1, descriptors))
    assert found[1] == found[0]


def test_a_folder_is_a_program_with_a_main_module_only(tmp_path: Path, started: list[str]) -> None:
    (tmp_path / "sh").mkdir()
    with pytest.raises(StartError):
        main(["run", "sh", "-c", "true"])
    assert started[0].endswith("/bin/sh")
    started.clear()
    (tmp_path / "sh" / "__main__.py").touch()
    with pytest.raises(StartError):
        main(["run", "sh"])
    assert started == [sys.executable, "sh"]


@pytest.mark.parametrize(
    ("words", "variable", "reason"),
    [
        ("run --report r.html", "mine.jsonl", "--report and UMEM_TRACE are both given; allowed"),
        ("trace record -o t.jsonl --trace u.jsonl", "", "-o t.jsonl and --trace u.jsonl both"),
    ],
)
def test_two_traces_of_a_run_are_an_error(
    words: str, variable: str, reason: str, tmp_path: Path, started: list[str],
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "train.py").touch()
    monkeypatch.setenv("UMEM_TRACE", variable)
    assert main([*words.split(), "train.py"]) == 2
    assert reason in capsys.readouterr().err
    assert not started


def test_a_child_killed_by_a_signal_without_a_name_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-c", "import os; os.kill(os.getpid(), 40)"]
    assert run_report.run(command, dict(os.environ), tmp_path / "r.html", {}, command) == 128 + 40
    assert "umem run: the program ended with signal 40\n" in capsys.readouterr().err


def test_a_deleted_working_directory_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["report", "t.jsonl", "--out", "r.html"]) == 2
    assert "the working directory was deleted" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("length", [10, 1 << 20])  # the second is longer than any buffer
def test_output_that_cannot_be_written_is_one_line(
    length: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "main", lambda _: print("x" * length))
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["doctor"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("umem: the output cannot be written: No space left on device; ")
    assert error.count("\n") == 1


@pytest.mark.parametrize("code", [errno.EIO, errno.EPIPE, errno.EACCES])
def test_another_error_of_the_system_adds_nothing_to_the_output(
    code: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fails(_: object) -> int:
        raise OSError(code, "spoilt")

    monkeypatch.setattr(doctor, "main", fails)
    with pytest.raises(OSError, match="spoilt"):
        main(["doctor"])
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(
    ("errors", "written"), [("strict", b"?.py \n"), ("surrogateescape", b"\xff.py \n")]
)
def test_names_of_files_keep_their_bytes_where_python_keeps_them(
    errors: str, written: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "main", lambda _: print("\udcff.py "))
    binary = io.BytesIO()
    stdout = io.TextIOWrapper(binary, encoding="ascii", errors=errors)
    monkeypatch.setattr(sys, "stdout", stdout)
    main(["doctor"])
    assert binary.getvalue() == written


def test_run_a_module(tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text(SHOW)
    done = umem("run", "-m", "show", "--x", "-m", "1", cwd=tmp_path)
    assert done.returncode == 7, done.stderr
    assert json.loads(done.stdout)["argv"][1:] == ["--x", "-m", "1"]
    done = umem("run", "-mshow", "one", "two", cwd=tmp_path)
    assert json.loads(done.stdout)["argv"][1:] == ["one", "two"]


def test_signals_reach_the_program(tmp_path: Path) -> None:
    (tmp_path / "wait.py").write_text(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(42))\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "umem", "run", "wait.py"],
        cwd=tmp_path, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "ready\n"
        begin = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 42
    assert time.monotonic() - begin < 30


def test_doctor_wants_the_extension_of_this_torch_or_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("CXX", "/no/compiler")
    monkeypatch.setenv("UMEM_TORCH_EXT_CACHE", str(tmp_path))
    monkeypatch.setenv("UMEM_DEVICE", "soft")
    built = build.find_or_build(tmp_path)
    assert doctor._verdict()["works"]
    shutil.copy(built, tmp_path / doctor.EXTENSION.replace("*", "-of-another-torch"))
    monkeypatch.setattr(build, "own_dirs", lambda: [tmp_path])
    assert "/no/compiler" in doctor._verdict()["because"]


def test_doctor_says_what_umem_would_do(tmp_path: Path) -> None:
    env = {"UMEM_BUDGET": "64MiB"}
    done = umem("doctor", "--json", cwd=tmp_path, env=env)
    report = schemas.read("doctor", done.stdout)
    assert done.returncode == (0 if report["verdict"]["works"] else 1)
    assert report["native core"]["policies"] == list(registry.names())
    assert report["memory"]["total_bytes"] > 0
    assert report["options"]["budget"] == {"value": 64 << 20, "origin": "UMEM_BUDGET"}
    assert report["options"]["host_budget"] == {"value": "auto", "origin": "default"}
    assert report["options"]["guard"] == {"value": False, "origin": "default"}
    assert isinstance(report["cuda"]["available"]["value"], bool)
    if report["torch"]["problem"] is None:
        assert report["verdict"]["budget_bytes"] == 64 << 20
        assert report["verdict"]["policy"] == report["options"]["policy"]["value"] == "auto"
    text = umem("doctor", cwd=tmp_path, env=env).stdout
    assert "native core" in text
    assert "64 MiB  [UMEM_BUDGET]" in text


def test_doctor_reports_what_is_wrong(tmp_path: Path) -> None:
    done = umem("doctor", "--json", cwd=tmp_path, env={"UMEM_BUDGET": "banana"})
    assert done.returncode == 1
    verdict = schemas.read("doctor", done.stdout)["verdict"]
    assert verdict["works"] is False
    assert "banana" in verdict["because"] or "torch" in verdict["because"]


def test_help_lists_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert all(re.search(rf"^ +{name}\b", text, re.MULTILINE) for name in COMMANDS)


def test_run_help_lists_all_options(capsys: pytest.CaptureFixture[str]) -> None:
    from umem.config.options import SETTABLE

    with pytest.raises(SystemExit) as caught:
        main(["run", "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for option in SETTABLE:
        assert re.search(rf"{option.flag}(?![\w-])", text)
        assert re.search(rf"{option.env}(?!\w)", text)


def test_run_help_has_the_defaults_of_run(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    assert "Default on; UMEM_SUMMARY" in " ".join(capsys.readouterr().out.split())
