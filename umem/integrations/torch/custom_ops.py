"""Custom operators, which torch 2.14 and later call past the observer.

`torch.library.custom_op` calls an operator's Python kernel directly, without the part of the
dispatcher that reports operators, also to torch's profiler.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch._library import custom_ops
from torch._ops import OpOverload

from ...base.replaced import Replaced

_METHOD = "_enable_pyobj_dispatch"  # since torch 2.14


class CustomOps:
    """Sends calls of custom operators through the whole dispatcher until `remove`."""

    def __init__(self) -> None:
        self._direct: weakref.WeakSet[Any] = weakref.WeakSet()  # what is called directly otherwise
        self._enable: Any = getattr(OpOverload, _METHOD, None)
        if self._enable is None:
            return
        for defined in [*custom_ops.OPDEFS.values()]:
            if defined._opoverload._is_pyobj_dispatcher_enabled():
                self._set(self._enable, defined._opoverload)
        self._replaced = Replaced(OpOverload, _METHOD, self._set)

    def remove(self) -> None:
        """Restore direct calls."""
        if self._enable is None:
            return
        self._replaced.remove()
        for overload in [*self._direct]:
            self._enable(overload, True)

    def _set(self, enable: Any, overload: Any, enabled: bool = True) -> None:
        """Note the setting; the operator gets it when umem is off."""
        if enabled:
            self._direct.add(overload)
        else:
            self._direct.discard(overload)
        enable(overload, False)
