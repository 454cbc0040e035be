"""Transformers: a callback of the Trainer that adds umem's figures to what it logs."""

from __future__ import annotations

from typing import Any

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError("umem.transformers needs transformers: pip install transformers") from error

from .scalars import Scalars


class StatsCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Adds the figures of `umem.Scalars` to each entry that the Trainer logs in training.

    ``umem.transformers.StatsCallback.add_to(trainer)``. The Trainer calls the callbacks given to
    its constructor after those that report, so they would add figures too late.
    """

    def __init__(self, prefix: str = "umem/") -> None:
        """Start counting.

        Args:
            prefix: the prefix of each figure's name.
        """
        self._scalars = Scalars(prefix)

    @classmethod
    def add_to(cls, trainer: Any, prefix: str = "umem/") -> None:
        """Add one to a `transformers.Trainer`, before the callbacks that report."""
        trainer.callback_handler.callbacks.insert(0, cls(prefix))

    def on_log(
        self,
        args: Any,  # noqa: ARG002 - the Trainer's own names
        state: Any,
        control: Any,  # noqa: ARG002
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Add the figures to an entry about training; the Trainer's history has them too."""
        if logs is None or "loss" not in logs:  # an evaluation, or the summary at the end
            return
        figures = self._scalars()
        logs.update(figures)
        if state.log_history:
            state.log_history[-1].update(figures)
