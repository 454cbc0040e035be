"""Traces: what a program allocates, reads, writes and frees. docs/trace_format.md has the format."""
