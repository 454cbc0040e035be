"""Functions that compiled code calls and that torch.compile must not compile."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])


def untraced(function: _Function) -> _Function:
    """Let Dynamo run the function, and all that it calls, as plain Python; return the function.

    Operators of compiled code call umem's planner, a policy's `victims` and others, and a compiled
    `optimizer.step` calls hooks. Dynamo would compile each of their frames, which takes minutes and
    fails for some of NumPy's functions, and it would inline a hook into its caller's graph. Without
    torch there is nothing to do.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        frames = torch._C._dynamo.eval_frame
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
        # As torch.compiler.disable does, which would import Dynamo.
        plain: Any = getattr(function, "__func__", function)
        plain._torchdynamo_disable = True
    return function
