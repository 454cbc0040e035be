"""Lightning: a callback that logs umem's figures."""

from __future__ import annotations

from typing import Any

try:
    import lightning
except ImportError as error:
    raise ImportError("umem.lightning needs lightning: pip install lightning") from error

from .scalars import Scalars


class StatsCallback(lightning.Callback):  # type: ignore[misc, unused-ignore]
    """Gives the figures of `umem.Scalars` to the trainer's loggers, as often as the trainer logs.

    ``Trainer(callbacks=[umem.lightning.StatsCallback()], log_every_n_steps=50)``
    """

    def __init__(self, prefix: str = "umem/") -> None:
        """Start counting.

        Args:
            prefix: the prefix of each figure's name.
        """
        self._scalars = Scalars(prefix)
        self._logged = 0

    def on_fit_start(self, *_: Any) -> None:
        """Begin again: a new trainer counts its steps from 0."""
        self._logged = 0

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Log, unless the trainer does not at this step."""
        step, every = trainer.global_step, trainer.log_every_n_steps
        # With 0 the trainer never logs. A step of several batches has the same number for each.
        if not every or step == self._logged or step % every:
            return
        self._logged = step
        figures = self._scalars()
        for logger in trainer.loggers:
            logger.log_metrics(figures, step=step)
