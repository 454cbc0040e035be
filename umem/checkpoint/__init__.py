"""Checkpoints: their files, and loading them tensor by tensor."""
