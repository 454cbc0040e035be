"""Hints on tensors, their placement, sleep and wake."""
