"""Optimizer state kept on the host between steps; see docs/optimizer_state.md."""
