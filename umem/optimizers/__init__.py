"""Optimizers whose state, and gradients, take less of the device: docs/optimizer_state.md."""
