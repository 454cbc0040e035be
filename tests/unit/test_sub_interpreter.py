"""Imports of umem in a sub-interpreter, where loading the native core would never return."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
try:
    import _interpreters as interpreters  # Python 3.13
    made = interpreters.create("legacy")  # the isolated ones load no such module anyway
except ImportError:
    import _xxsubinterpreters as interpreters
    made = interpreters.create()
failure = interpreters.run_string(made, sys.argv[1])
sys.exit(failure and str(failure))
"""


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, code],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import umem._core", "SubInterpreterError"),
        ("import umem.base.native", "NotSupportedError"),
        ("import umem; umem.stats()", "NotSupportedError"),
    ],
)
def test_the_native_core_is_refused_at_once(code: str, error: str) -> None:
    shown = run(code)
    assert error in shown
    assert "sub-interpreter" in shown
    assert "main interpreter" in shown


def test_the_refusal_is_an_import_error() -> None:
    code = """if True:
        try:
            import umem._core
        except ImportError as error:
            print("refused:", error, flush=True)
    """
    assert "refused: umem works in the main interpreter only" in run(code)


def test_what_needs_no_native_core_works() -> None:
    assert "ConfigError" in run("import umem; print(umem.ConfigError.__name__, flush=True)")
