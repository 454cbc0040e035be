"""Traces: what a program allocates, reads, writes and frees. See docs/trace_format.md."""
