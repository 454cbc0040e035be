"""Functions of another package, replaced while umem is on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class Replaced:
    """A function that calls `around(original, *args, **kwargs)` instead, until `remove`.

    A wrapper that the program puts around it meanwhile remains, and calls the original afterwards.

    Args:
        owner: the class or module whose function it is.
        name: the function's name there.
        around: what to call instead.
    """

    def __init__(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        self._owner, self._name, self._original, self._on = owner, name, original, True

        @functools.wraps(original)
        def instead(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs) if self._on else original(*args, **kwargs)

        self._instead = instead
        setattr(owner, name, instead)

    def remove(self) -> None:
        """Restore the original."""
        self._on = False
        if getattr(self._owner, self._name) is self._instead:
            setattr(self._owner, self._name, self._original)
