"""Baselines: policies from the literature, to compare the default policy with."""
