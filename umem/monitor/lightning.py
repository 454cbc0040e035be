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

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Log, unless the trainer does not at this step; a step has one or several batches."""
        # As the trainer does for what modules log. It has no public name for its number of a step:
        # `global_step` counts each optimizer's.
        logs = trainer._logger_connector.should_update_logs
        if trainer.fit_loop._should_accumulate() or not logs:
            return
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
        figures = self._scalars()
        for logger in trainer.loggers:
            logger.log_metrics(figures, step=step)
