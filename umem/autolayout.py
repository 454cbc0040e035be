"""Static layouts made while the program runs: the recorded step's large blocks share addresses."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, NamedTuple

from .errors import StateError, UmemError
from .native import core

if TYPE_CHECKING:
    from .plan.layout import Layout
    from .trace.step import StepTrace

_log = logging.getLogger("umem")

_MOST = 8  # layouts that are kept, as plans are


class _Made(NamedTuple):
    layout: Layout
    step: StepTrace
    guessed: bool  # it may have the ends of some tensors wrong


class Layouts:
    """Has one layout installed: that of the steps that the program makes now.

    The first planned step's is installed at once, another one when two steps in a row went by its
    plan: an epoch's last, smaller batch changes nothing. One that such a step does not follow is
    made anew without guesses. `mode`: auto, on or off, as the option.
    """

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self._made: dict[int, _Made] = {}  # by the plan's number
        self._installed = self._last = 0  # numbers of plans; 0: none

    def planned(self, number: int, step: StepTrace, budget: int) -> None:
        """Plan `number` is of this step, and the next one begins; `budget` is in bytes.

        By auto there is a layout where the step fits: then nothing is asked of the driver any more.
        """
        if self._mode == "off" or (self._mode == "auto" and step.peak_bytes > budget):
            return
        self._make(number, step, guess=True)
        if not self._installed:
            self._install(number)

    def step_ended(self, complete: int) -> None:
        """A step went by the plan of this number; 0: by none."""
        if complete and complete == self._last:
            if complete != self._installed or not core.layout_status()["entries"]:
                self._install(complete)  # the installed one went back with what was cached
            elif (made := self._made.get(complete)) and made.guessed and _left():
                self._installed = 0
                self._make(complete, made.step, guess=False)
                self._install(complete)
        self._last = complete

    def stop(self) -> None:
        """No layouts from here on; blocks that lie in one stay until they are freed."""
        self._mode = "off"
        self._made.clear()
        core.clear_layout()

    def _make(self, number: int, step: StepTrace, *, guess: bool) -> None:
        from .plan.layout import NO_PLACE, layout

        begin = time.perf_counter()
        made = layout(step, guess=guess)
        self._made.pop(number, None)
        if not (made.offsets != NO_PLACE).any():
            return
        _log.info(
            "plan %d has a layout of %d blocks in %d bytes, for a load of %d; it took %.0f ms",
            number, len(made.sizes), made.bytes, made.load, (time.perf_counter() - begin) * 1e3,
        )  # fmt: skip
        self._made[number] = _Made(made, step, guess)
        if len(self._made) > _MOST:
            del self._made[next(iter(self._made))]

    def _install(self, number: int) -> None:
        if number not in self._made:
            return
        made = self._made[number].layout
        try:
            core.install_layout(made.sizes, made.offsets, made.bytes)
        except StateError:
            return  # blocks of the one before are alive: when a further step went by the plan
        except UmemError as error:
            _log.info("plan %d goes without its layout: %s", number, error)
            del self._made[number]
            return
        self._installed = number


def _left() -> bool:
    """There is a layout, and the step that ended left it."""
    status = core.layout_status()
    return status["entries"] > 0 and not status["followed"]
