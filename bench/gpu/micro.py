"""What the microbenchmarks have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpu.config import Config
from gpu.deadline import Deadline
from gpu.device import Gpu
from gpu.record import Record
from gpu.software import NOT_COMPARABLE


class Micro:
    """Measurements on one GPU into one record, until the deadline."""

    def __init__(self, gpu: Gpu, record: Record, config: Config, deadline: Deadline) -> None:
        self._gpu, self._record, self._config, self._deadline = gpu, record, config, deadline

    def _decide(self, item: str, question: str, outcome: str) -> None:
        """Keep what follows from times, which mean nothing on the software driver."""
        self._record.decide(item, question, NOT_COMPARABLE if self._gpu.software else outcome)

    def _rounds(self, measure: Callable[[], float]) -> list[float]:
        """Return the values of all rounds but the first, which warms up."""
        values = [measure() for _ in self._deadline.rounds(self._config.rounds + 1)]
        return values[1:] or values

    def _add_ms(self, label: str, seconds: Sequence[float]) -> float:
        """Keep times under a label; return their median in milliseconds."""
        return self._record.add(label, [1e3 * value for value in seconds], "ms").median

    def _add_us(self, label: str, seconds: Sequence[float]) -> float:
        """Keep short times under a label; return their median in microseconds."""
        return self._record.add(label, [1e6 * value for value in seconds], "us").median

    def _milliseconds(
        self,
        label: str,
        action: Callable[[], object],
        before: Callable[[], object] | None = None,
    ) -> float:
        """Time an action until the device is idle again; `before` prepares each round."""
        values = self._gpu.repeat(self._deadline, self._config.rounds, action, before)
        return self._add_ms(label, values)
