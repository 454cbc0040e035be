"""Reporting the figures of a running process."""
