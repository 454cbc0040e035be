"""Automatic layouts: large blocks of a recorded step share addresses in the steps after it."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, NamedTuple

from ..base.native import core
from ..errors import StateError, UmemError

if TYPE_CHECKING:
    from ..layout.layout import Layout
    from ..trace.step_trace import StepTrace

_log = logging.getLogger("umem")


class _Made(NamedTuple):
    layout: Layout
    step: StepTrace
    guessed: bool  # the ends of some lifetimes are guesses


class Layouts:
    """The layouts of a device's plans, of which one is installed: that of the present kind of step.

    The layout of the first planned step is installed immediately, another one after two consecutive
    steps that followed its plan, so that an epoch's last, smaller batch changes nothing. If such a
    step leaves its layout, a new layout without guesses replaces it.

    Args:
        mode: the value of the option `layout`: auto, on or off.
        device: the device's number.
    """

    def __init__(self, mode: str, device: int = 0) -> None:
        self._mode, self._device = mode, device
        self._made: dict[int, _Made] = {}  # by plan number
        self._installed = self._last = 0  # numbers of plans; 0: none
        self._gone, self._patience = 0, 1  # steps without the installed one, and until it returns

    def planned(self, number: int, step: StepTrace, budget: int) -> None:
        """Make the layout of plan `number` and of its step; `budget` is in bytes.

        Mode auto makes one only if the step fits the budget: then the layout saves all driver
        calls.
        """
        if self._mode == "off" or (self._mode == "auto" and step.peak_bytes > budget):
            return
        self._make(number, step, guess=True)
        if not self._installed:
            self._install(number)

    def step_ended(self, complete: int) -> None:
        """Install or renew layouts after a step that followed plan `complete`; 0: no plan."""
        if complete and complete == self._last:
            if complete != self._installed:
                self._install(complete)
            elif not core.layout_status(self._device)["entries"]:
                self._reinstall(complete)
            elif (made := self._made.get(complete)) and made.guessed and self._left():
                self._installed = 0
                self._make(complete, made.step, guess=False)
                self._install(complete)
        self._last = complete

    def stop(self) -> None:
        """Use no layouts from now on; blocks in a layout stay until they are freed."""
        self._mode = "off"
        self._made.clear()
        core.clear_layout(self._device)

    def _make(self, number: int, step: StepTrace, *, guess: bool) -> None:
        from ..layout.layout import NO_PLACE, layout

        begin = time.perf_counter()
        made = layout(step, guess=guess)
        self._made.pop(number, None)
        if not (made.offsets != NO_PLACE).any():
            return
        _log.info(
            "plan %d has a layout of %d blocks in %d bytes (lower bound %d), made in %.0f ms",
            number, len(made.sizes), made.bytes, made.load, (time.perf_counter() - begin) * 1e3,
        )  # fmt: skip
        self._made[number] = _Made(made, step, guess)
        if len(self._made) > core.MAX_PLANS:
            del self._made[next(iter(self._made))]

    def _install(self, number: int) -> None:
        if number not in self._made:
            return
        made = self._made[number].layout
        try:
            core.install_layout(made.sizes, made.offsets, made.bytes, self._device)
        except StateError:
            return  # blocks of the previous layout are alive; a later step retries
        except UmemError as error:
            _log.info("plan %d is used without its layout: %s", number, error)
            del self._made[number]
            return
        self._installed = number

    def _reinstall(self, number: int) -> None:
        """Install a layout again that others had needed the memory of, each time a step later."""
        self._gone += 1
        if self._gone >= self._patience:
            self._gone, self._patience = 0, 2 * self._patience
            self._install(number)

    def _left(self) -> bool:
        """Return whether a layout is installed that the last step did not follow."""
        status = core.layout_status(self._device)
        return status["entries"] > 0 and not status["followed"]
