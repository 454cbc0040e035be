"""Execution of recompute plans in live models."""
