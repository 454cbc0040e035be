"""Weights and optimizer state kept off the device."""
