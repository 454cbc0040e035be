"""Automatic layouts: large blocks of a recorded step share addresses in the steps after it."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, NamedTuple

from ..base.native import core
from ..base.units import PAGE_BYTES
from ..errors import StateError, UmemError

if TYPE_CHECKING:
    from ..base.device_profiles import DeviceProfile
    from ..layout.layout import Layout
    from ..trace.step_trace import StepTrace

_log = logging.getLogger("umem")

# A resident layout takes one of these shares of the budget.
_SHARES = (4, 8, 16, 32)
# Mapping a block takes 0.3 ms beside copies out; about half of all blocks take over a dead block
# of their size instead (docs/decisions/0037-brief-blocks-share-memory-that-stays.md).
_SAVED_US = 150.0
_STRAYS = 2  # steps in a row that leave a resident layout until it is dropped


class _Made(NamedTuple):
    layout: Layout
    step: StepTrace
    guessed: bool  # the ends of some lifetimes are guesses
    resident: bool = False  # of a part of a step that does not fit


class Layouts:
    """The layouts of a device's plans, of which one is installed: that of the present kind of step.

    A step that fits has a layout of all its blocks. With mode on, one that does not fit has a
    resident layout under mapped memory, of blocks that live briefly; it is installed after two
    consecutive steps too.

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
        self._stays = False  # the installed layout is a resident one
        self._gone, self._patience = 0, 1  # steps without the installed one, and until it returns
        self._strays = 0  # steps in a row that left the resident layout

    def resident(self, step: StepTrace, budget: int, device: DeviceProfile) -> Layout | None:
        """Return a layout of part of a step that does not fit, whose memory stays mapped.

        Each block of mapped memory costs driver calls. The plan of such a step leaves the layout's
        bytes free. None unless the mode is on and memory is mapped, or if the operators need all of
        the budget.
        """
        room = core.room_ahead(self._device)
        if self._mode != "on" or not room or step.peak_bytes <= budget:
            return None
        from ..layout.layout import resident

        most = budget - room - int(step.working_set.max(initial=0))
        limits = [budget // share // PAGE_BYTES * PAGE_BYTES for share in _SHARES]
        rate = min(device.bytes_per_us_in, device.bytes_per_us_out)
        return resident(step, [limit for limit in limits if limit <= most], _SAVED_US, rate)

    def planned(
        self, number: int, step: StepTrace, budget: int, resident: Layout | None = None
    ) -> None:
        """Make the layout of plan `number` and of its step; `budget` is in bytes.

        Mode auto makes one only if the step fits the budget: then the layout saves all driver
        calls. `resident` is the layout of one that does not fit.
        """
        if self._mode == "off":
            return
        if resident is not None:
            self._keep(number, _Made(resident, step, guessed=False, resident=True))
        elif step.peak_bytes > budget and (self._mode == "auto" or core.room_ahead(self._device)):
            if self._installed and self._installed not in self._made:  # of another budget
                self._clear()
            return
        else:
            self._make(number, step, guess=True)
        if not self._installed and resident is None:
            self._install(number)

    def resident_of(self, number: int) -> Layout | None:
        """Return the layout that was given to `planned`."""
        made = self._made.get(number)
        return made.layout if made and made.resident else None

    def step_ended(self, complete: int) -> bool:
        """Install or renew layouts after a step that followed plan `complete`; 0: no plan.

        Returns:
            True if the plan has to do without its resident layout from now on.
        """
        had = self.resident_of(complete) is not None
        if self._stays:
            self._follow(complete)
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
        return had and self.resident_of(complete) is None

    def settled(self, number: int) -> bool:
        """Return whether the last step had the plan's resident layout, unless it has none."""
        if self.resident_of(number) is None:
            return True
        return number == self._installed and bool(core.layout_status(self._device)["followed"])

    def give_up(self, number: int | None) -> list[int]:
        """Use a plan without its resident layout from now on; return the plans that had one.

        Args:
            number: the plan's; None: all plans.
        """
        lost = [each for each, made in self._made.items()
                if made.resident and number in (None, each)]  # fmt: skip
        for each in lost:
            del self._made[each]
        if self._stays and self._installed in lost:
            self._clear()
        return lost

    def _follow(self, complete: int) -> None:
        """Remove the resident layout if steps leave it, or if others need its memory each time."""
        followed = complete == self._installed and self.settled(complete)
        self._strays = 0 if followed else self._strays + 1
        if self._strays < _STRAYS:
            return
        if complete != self._installed:  # steps of its plan may come back
            self._clear()
        elif self.give_up(complete):
            _log.info("plan %d is used without its layout, which steps left", complete)

    def forget(self) -> None:
        """Forget the layouts of all plans, and remove a resident one."""
        self._made.clear()
        self._last = 0
        if self._stays:
            self._clear()

    def _clear(self) -> None:
        """Use no layout for now; blocks in it stay until they are freed."""
        core.clear_layout(self._device)
        self._installed, self._stays = 0, False

    def stop(self) -> None:
        """Use no layouts from now on; blocks in a layout stay until they are freed."""
        self._mode = "off"
        self._made.clear()
        self._clear()

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
        self._keep(number, _Made(made, step, guess))

    def _keep(self, number: int, made: _Made) -> None:
        present = core.plan_status(self._device)["plans"]
        self._made = {each: known for each, known in self._made.items() if each in present}
        self._made[number] = made

    def _install(self, number: int) -> None:
        if (found := self._made.get(number)) is None:
            if self._stays:  # others leave for it, and its steps may be over
                self._clear()
            return
        made, stays = found.layout, found.resident
        try:
            core.install_layout(made.sizes, made.offsets, made.bytes, self._device, stays)
        except StateError:
            return  # blocks of the previous layout are alive; a later step retries
        except UmemError as error:
            _log.info("plan %d is used without its layout: %s", number, error)
            self._made.pop(number, None)
            return
        if number != self._installed:
            self._strays, self._gone, self._patience = 0, 0, 1
        self._installed, self._stays = number, stays

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
