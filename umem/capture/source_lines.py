"""The line of the user's program that is running, and the errors that name it."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from ..errors import PlanError

_TORCH = f"{Path(torch.__file__).parent}{os.sep}"  # not torchvision beside it
# Packages between the user's program and its ops; networks of the demo count as programs.
_OURS = tuple(f"{Path(__file__).parents[1] / room}{os.sep}" for room in ("capture", "lint"))


def is_torchs(depth: int = 1) -> bool:
    """Return whether the nearest frame, without ours and torch's entry points, is torch's."""
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None and _is_passage(frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_TORCH)


def here() -> str:
    """Return `file:line` of the innermost frame outside of torch and of umem's tracing."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return "?" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def is_direct(frame: FrameType | None, func: Any) -> bool:
    """Return whether a frame, above torch's entry points and `func` itself, is the user's."""
    own = getattr(func, "__code__", None)
    while frame is not None and (frame.f_code is own or _is_passage(frame.f_code.co_filename)):
        frame = frame.f_back
    return frame is not None and _is_users(frame.f_code.co_filename)


def of(error: BaseException) -> str:
    """Return `file:line` of the user's innermost frame in a traceback; empty if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if _is_users(frame.filename)]
    return f"{users[-1].filename}:{users[-1].lineno}" if users else ""


def reads_data(what: str) -> PlanError:
    """Return the error for a program that asks for a value, which a fake tensor lacks."""
    return PlanError(
        f"{here()}: {what} needs the data of a tensor, and planning has shapes only; leave it out "
        "of the step that is planned (log the loss elsewhere), or use torch.where in place of a "
        "branch on data"
    )


def _is_users(path: str) -> bool:
    return not path.startswith((_TORCH, *_OURS, "<"))


# Files of torch with frames between the caller and the op that tell nothing about either.
_PASSAGES = ("overrides.py", "_python_dispatch.py", "_stats.py", "_tensor.py", "_ops.py",
             "fake_tensor.py", "fake_impls.py", "_compile.py", "eval_frame.py")  # fmt: skip


def _is_passage(path: str) -> bool:
    return path.startswith(_OURS) or (path.startswith(_TORCH) and path.endswith(_PASSAGES))
