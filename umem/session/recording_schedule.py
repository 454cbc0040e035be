"""When steps are recorded, and which of the recorded ones are planned."""

from __future__ import annotations

from collections import deque

from . import plan_judge

# Steps in a row that followed a plan, after which no more are recorded: as many as are tried.
_SETTLED = plan_judge.FIRST_TRIAL + plan_judge.TRIAL
_RARE = 64  # steps in a row up to which recording waits for one that follows no plan
_WAITS = 4  # the last long ones, because several rare kinds may come in turn
_TRIES = 16  # plans before steps in a row followed some, after which only
_EVERY = 100  # one step in so many is planned
_IDLE = 8  # steps in a row that did not use the device, after which no more are recorded for it


class RecordingSchedule:
    """Decides for each step of a device whether it is recorded.

    Steps are recorded until some in a row followed plans, and again when one no longer does: then
    for as many steps as it took until that one, so that a kind of step that comes now and then, as
    one image's among many of its parts, is recorded when it comes again. After long waits only the
    steps are recorded that come after as many again as one of the last few.
    """

    def __init__(self) -> None:
        self.wants_step = False  # the next one is to be recorded
        self.steps = 0  # that used the device
        self._tries = self._settled = self._tried_at = self._idle = self._gap = 0
        self._wait = _SETTLED  # steps in a row that follow plans while steps are recorded
        self._due = deque[int](maxlen=_WAITS)  # steps in a row before one that is recorded
        self._begun = self._begun_at = 0  # how often, and when last, recording began
        self._known = 0  # the newest plan that steps in a row have followed

    def restart(self) -> None:
        """Start over, because all plans were dropped."""
        self._tries = self._settled = self._begun = 0

    def step_passed(self) -> None:
        """Take the end of a step that did not use the device.

        A device that is used at regular, long intervals is recorded where its next use is due.
        """
        self._idle += 1
        if self._idle >= _IDLE:
            self.wants_step = self._idle == self._gap and self._settled < _SETTLED

    def step_used(self) -> None:
        """Take the end of a step that used the device."""
        self._gap, self._idle = self._idle, 0
        self.steps += 1

    def followed(self, plan: int, *, testing: bool) -> None:
        """Take a step that followed a plan.

        Args:
            plan: its number; later plans have higher ones.
            testing: plans are on trial, which needs recorded steps.
        """
        self._settled += 1
        if self._settled >= _SETTLED and plan > self._known:
            self._tries, self._known = 0, plan  # the last ones were of use
        if self._settled >= max(_TRIES if testing else _SETTLED, self._wait):
            self.wants_step = self._settled in self._due and self._may_begin()

    def left(self, *, recorded: bool) -> bool:
        """Take a step that followed no plan; return whether to plan it, if it was recorded."""
        rare = self._settled >= (_RARE if self._tries < _TRIES else _SETTLED)
        self._wait = _SETTLED if rare else self._settled + 1
        if rare:
            self._due.append(self._settled)
        self._settled = 0
        resting = self._tries >= _TRIES and self.steps - self._tried_at < _EVERY
        planned = recorded and not resting
        if planned:
            self._tries += 1
            self._tried_at = self.steps
        # The first step creates what later ones only use, so recording begins with the second.
        wanted = self._tries < _TRIES or self.steps - self._tried_at >= _EVERY - 1
        self.wants_step = wanted and (self.wants_step or self._may_begin())
        return planned

    def _may_begin(self) -> bool:
        """Return whether recording may begin.

        A rare step without a plan, such as a prompt's, begins it each time, and records only the
        step after it, which follows a plan already.
        """
        if self._begun >= _TRIES and self.steps - self._begun_at < _EVERY:
            return False
        self._begun, self._begun_at = self._begun + 1, self.steps
        return True
