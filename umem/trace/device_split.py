"""Splits the events of a program that uses several devices into a log for each of them."""

from __future__ import annotations

from collections.abc import Iterable

from .ids import BlockId
from .schema import Alloc, Event, Free, Op, Step

EVERY = -1  # instead of a device's number


class DeviceSplit:
    """Takes the events of all devices in order, and says which device each one is for.

    A device gets its blocks, the ops that use some of them, and the end of each step. Devices work
    side by side: an op takes time on the devices whose blocks it uses. An op that uses blocks of
    several begins when the last of these devices is there, and a step ends for all devices when the
    last one is there. What a device waits is an op of its own, without a name and without blocks.
    """

    def __init__(self) -> None:
        self._alone = True  # so far all blocks were of device 0, which needs no table
        self._device: dict[BlockId, int] = {}  # of the live blocks; else it is 0
        self._us: dict[int, float] = {}  # since the step's begin; of devices that had ops in it
        self._last: list[int] = [0]  # devices of the last op
        self.used: frozenset[int] = frozenset()  # devices that had ops in the last complete step

    def take(self, event: Event) -> Iterable[tuple[int, Event]]:
        """Return the events for each device that come from this one; a step's end is for EVERY."""
        kind = type(event)
        if self._alone:
            if kind is Op:
                self._us[0] = self._us.get(0, 0.0) + (event.us or 0.0)  # type: ignore[union-attr]
                return ((0, event),)
            if kind is not Alloc or event.device == 0:  # type: ignore[union-attr]
                return self._step(event) if kind is Step else ((0, event),)
            self._alone = False
        if kind is Op:
            return self._op(event)  # type: ignore[arg-type]
        if kind is Alloc:
            self._device[event.id] = event.device  # type: ignore[union-attr]
            return ((event.device, event),)  # type: ignore[union-attr]
        if kind is Free:
            return ((self._device.pop(event.id, 0), event),)  # type: ignore[union-attr]
        return self._step(event)

    def _op(self, op: Op) -> Iterable[tuple[int, Event]]:
        devices = {self._device.get(block, 0) for block in op.reads}
        devices.update(self._device.get(block, 0) for block in op.writes)
        if devices:
            self._last = sorted(devices)
        begin = max(self._us.get(device, 0.0) for device in self._last)
        result: list[tuple[int, Event]] = []
        for device in self._last:
            if (wait := begin - self._us.get(device, 0.0)) > 0:
                result.append((device, _waiting(wait)))
            self._us[device] = begin + (op.us or 0.0)
            result.append((device, self._part(op, device) if len(devices) > 1 else op))
        return result

    def _part(self, op: Op, device: int) -> Op:
        """Return what the op uses of one device."""
        used = [self._device.get(block, 0) == device for block in op.reads + op.writes]
        place = {old: new for new, old in enumerate(i for i, own in enumerate(used) if own)}
        rows = zip(*[iter(op.parts)] * 3, strict=True)
        return Op(
            op.name,
            tuple(block for block, own in zip(op.reads, used, strict=False) if own),
            tuple(
                block for block, own in zip(op.writes, used[len(op.reads) :], strict=True) if own
            ),
            op.us,
            op.flops,
            op.index,
            op.family,
            tuple(n for i, *part in rows if i in place for n in (place[i], *part)),
        )

    def _step(self, step: Event) -> Iterable[tuple[int, Event]]:
        end = max(self._us.values(), default=0.0)
        waits: list[tuple[int, Event]] = [
            (d, _waiting(end - us)) for d, us in self._us.items() if us < end
        ]
        self.used = frozenset(self._us)
        self._us.clear()
        return [*waits, (EVERY, step)]


def _waiting(us: float) -> Op:
    return Op("", (), (), us)
