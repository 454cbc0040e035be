"""Recomputation: activations are dropped in forward passes and rebuilt in backward passes."""
