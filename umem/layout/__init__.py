"""Packing a step's blocks into one range of addresses."""
