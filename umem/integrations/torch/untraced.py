"""Functions that compiled code calls and that torch.compile must not compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])
_frames: Any = torch._C._dynamo.eval_frame


def untraced(function: _Function) -> _Function:
    """Let Dynamo run the function, and all that it calls, as plain Python; return the function.

    A compiled `optimizer.step` runs hooks, and the end of a step runs umem's planner. Dynamo would
    compile each of their frames, which takes minutes, and fails where NumPy is not torch's.
    """
    skip = _frames._FrameAction.SKIP
    _frames.set_code_exec_strategy(function.__code__, _frames._FrameExecStrategy(skip, skip))
    return function
