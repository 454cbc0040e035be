"""Checkpoints loaded tensor by tensor."""
