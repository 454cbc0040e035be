"""Programs whose standard error is a terminal."""

from __future__ import annotations

import os
import pty
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Shown:
    """The results of a program."""

    code: int
    out: str
    terminal: str  # all that was written there, without control sequences


def on_a_terminal(
    *command: str, env: Mapping[str, str] | None = None, gone_after: str | None = None
) -> Shown:
    """Run the program; `gone_after` closes the terminal once it has received that text."""
    terminal, theirs = pty.openpty()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=theirs, text=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100", **(env or {})},
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(terminal, 1 << 16):
            shown += part
            if gone_after is not None and gone_after.encode() in shown:
                break
    except OSError:  # the other side was closed
        pass
    finally:
        os.close(terminal)
    out, _ = process.communicate(timeout=120)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode(errors="replace"))
    return Shown(process.returncode, out, text)
